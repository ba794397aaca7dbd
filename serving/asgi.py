"""Call an ASGI application in process, and yield its answer as it comes.

Guarantees: chunks that wait while the consumer is busy are joined into one; leaving the iteration early tells
the application that its client is gone, so its work (an engine's request) is aborted. To cancel its task alone
would not do: vLLM waits for an answer that is not streamed in a task of its own, which it ends when it hears of
the disconnection. Supports HTTP only.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from serving.errors import UpstreamError

_LEAVES_WITHIN_S = 1.0
Head = tuple[int, list[tuple[str, str]]]


async def call_asgi(
    app: Any, method: str, path: str, headers: list[tuple[str, str]], body: bytes
) -> AsyncIterator[Head | bytes]:
    """First (status, headers), then the body in pieces of at least one byte.

    Raises UpstreamError when the application fails.
    """
    waiting: deque[Head | bytes] = deque()
    news = asyncio.Event()
    left = asyncio.Event()
    sent = False

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if sent:
            await left.wait()
            return {"type": "http.disconnect"}
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            waiting.append(
                (message["status"], [(k.decode("latin-1"), v.decode("latin-1")) for k, v in message["headers"]])
            )
        elif message.get("body"):
            waiting.append(message["body"])
        news.set()

    task = asyncio.create_task(app(_scope(method, path, headers), receive, send))
    task.add_done_callback(lambda _: news.set())
    try:
        while True:
            await news.wait()
            news.clear()
            finished = task.done()
            while waiting:
                yield _take(waiting)
            if finished:
                fault = task.exception()
                if fault is not None:
                    raise UpstreamError("The engine failed while it worked on this request.") from fault
                return
    finally:
        left.set()
        if not task.done():
            await asyncio.wait({task}, timeout=_LEAVES_WITHIN_S)
            task.cancel()


def _take(waiting: deque[Head | bytes]) -> Head | bytes:
    first = waiting.popleft()
    if isinstance(first, tuple):
        return first
    pieces = [first]
    while waiting and isinstance(waiting[0], bytes):
        pieces.append(waiting.popleft())
    return b"".join(pieces)


def _scope(method: str, path: str, headers: list[tuple[str, str]]) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers],
        "client": ("127.0.0.1", 0),
        "server": ("engine", 80),
        "state": {},
    }
