"""The ASGI side of an answer: headers, the event stream to the client, and noticing that the client left.

Guarantees: an exchange is closed exactly once, whatever happens to the client or the task: the engine's
work is aborted and the interaction is recorded.
"""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from feedback.events import new_response_id, uuid7
from serving.errors import ApiError, error_event
from serving.exchange import Exchange

log = logging.getLogger(__name__)
_CANCELLED_WITHIN_S = 1.0
Result = TypeVar("Result")

_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


class ClientGone(Exception):
    """The client closed the connection before its answer was there."""


def traceparent_of(request: Request) -> str:
    """The client's W3C trace context, or a new one."""
    given = request.headers.get("traceparent", "")
    if _TRACEPARENT.fullmatch(given):
        return given
    return f"00-{uuid7().hex}-{uuid7().hex[16:]}-01"


def answer_headers(exchange: Exchange) -> dict[str, str]:
    """Headers of an answer by one checkpoint."""
    headers = {
        "x-flywheel-response-id": exchange.response_id,
        "x-flywheel-checkpoint": exchange.route.checkpoint_id,
        "x-flywheel-overhead-ms": f"{exchange.overhead_s * 1000:.2f}",
        "traceparent": exchange.caller.traceparent,
    }
    if exchange.route.experiment_id is not None:
        headers["x-flywheel-experiment"] = exchange.route.experiment_id
    return headers


def error_response(error: ApiError, response_id: str | None = None) -> JSONResponse:
    """The error in OpenAI's shape, with an id to quote."""
    headers = {**error.headers, "x-flywheel-response-id": response_id or new_response_id()}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(error.body(), status_code=error.status, headers=headers)


async def until_disconnect(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Await `work`, unless the client leaves first: then cancel it and raise ClientGone. The body must be read.

    Work that does not end within a second of its cancellation is left to whoever cancels what it waits for.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=_CANCELLED_WITHIN_S)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Streams pieces to the client. `close` is called once, at the end; named: whether events have names.

    An ApiError that the pieces raise becomes an event, the last one.
    """

    def __init__(
        self, pieces: AsyncIterator[bytes], headers: dict[str, str], close: Callable[[], None], *, named: bool = False
    ) -> None:
        super().__init__(headers=headers, media_type="text/event-stream")
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self._pieces = pieces
        self._close = close
        self._named = named

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the stream ends or the client leaves."""
        pump = asyncio.ensure_future(self._pump(send))
        watcher = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({pump, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
        finally:
            watcher.cancel()
            pump.cancel()
            self._close()

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for piece in self._pieces:
                if piece:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
        except ApiError as error:
            event = error_event(error, named=self._named)
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
