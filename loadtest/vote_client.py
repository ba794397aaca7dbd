"""Sends votes as fast as the API takes them: one kept-alive connection, request bytes made beforehand.

A general HTTP client costs more per request than the server that is measured. This one speaks just enough HTTP/1.1:
it sends a POST and reads an answer that has a content-length. Times are monotonic seconds (`time.perf_counter`).
"""

import asyncio
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass
class Answers:
    """What came back. seconds: from the first byte sent to the last byte read, of each answered request."""

    statuses: dict[int, int] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)

    def add(self, status: int, seconds: float) -> None:
        self.statuses[status] = self.statuses.get(status, 0) + 1
        self.seconds.append(seconds)


class VoteConnection:
    """One connection; one request at a time. Use as an async context manager."""

    def __init__(self, url: str, key: str, path: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._head = (
            f"POST {path} HTTP/1.1\r\nhost: {parts.netloc}\r\nauthorization: Bearer {key}\r\n"
            "content-type: application/json\r\ncontent-length: "
        ).encode()

    async def __aenter__(self) -> "VoteConnection":
        self._reader, self._writer = await asyncio.open_connection(self._host, self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()
        await self._writer.wait_closed()

    async def post(self, body: bytes) -> tuple[int, float]:
        """(status, seconds). Raises ConnectionError or asyncio.IncompleteReadError when the server hangs up."""
        began = time.perf_counter()
        self._writer.write(b"%b%d\r\n\r\n%b" % (self._head, len(body), body))
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        length = head.split(b"content-length:", 1)[1].split(b"\r\n", 1)[0]
        await self._reader.readexactly(int(length))
        return int(head.split(b" ", 2)[1]), time.perf_counter() - began
