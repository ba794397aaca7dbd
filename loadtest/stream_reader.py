"""Reads streamed answers cheaply: every chunk is stamped when it arrives and parsed after the stream has ended.

What is measured is the server, not this client's JSON parser. Times are monotonic seconds
(`time.perf_counter`). A chunk is what the socket gave, so it may hold several events or a part of one.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp


@dataclass
class Stream:
    """One streamed answer as it arrived. error: why it is not whole, in words."""

    started_s: float
    status: int = 0
    chunks: list[tuple[float, bytes]] = field(default_factory=list)
    ended_s: float = 0.0
    error: str | None = None


@dataclass(frozen=True)
class Timing:
    """What a whole stream tells. time_per_token_s: mean gap between tokens after the first; None with one token.

    tokens: completion tokens as the server counted them.
    """

    time_to_first_token_s: float
    time_per_token_s: float | None
    duration_s: float
    tokens: int


async def read_stream(
    session: aiohttp.ClientSession, url: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> Stream:
    """POST `body` and read the answer to its end. Never raises for what the server or the network did."""
    stream = Stream(started_s=time.perf_counter())
    try:
        async with session.post(url, json=body, headers=headers) as answer:
            stream.status = answer.status
            async for chunk in answer.content.iter_any():
                stream.chunks.append((time.perf_counter(), chunk))
    except (aiohttp.ClientError, TimeoutError) as error:
        stream.error = f"{type(error).__name__}: {error}"
    stream.ended_s = time.perf_counter()
    if stream.error is None and stream.status != 200:
        stream.error = f"HTTP {stream.status}: {b''.join(data for _, data in stream.chunks)[:300]!r}"
    return stream


def events_of(stream: Stream) -> list[tuple[float, dict[str, Any]]]:
    """(arrival, decoded data) of every server-sent event; an event arrives with the chunk that completes it."""
    found: list[tuple[float, dict[str, Any]]] = []
    rest = b""
    for arrived_s, data in stream.chunks:
        *whole, rest = (rest + data).split(b"\n\n")
        for event in whole:
            payload = event.strip().removeprefix(b"data:").strip()
            if payload and payload != b"[DONE]":
                found.append((arrived_s, json.loads(payload)))
    return found


def timing_of(stream: Stream) -> Timing:
    """The stream's timing. Raises ValueError when it failed, holds an error, or no token or usage came."""
    if stream.error is not None:
        raise ValueError(stream.error)
    arrivals, tokens = [], None
    for arrived_s, event in events_of(stream):
        if "error" in event:
            raise ValueError(f"the stream holds an error: {event['error']}")
        if any((choice.get("delta") or {}).get("content") for choice in event.get("choices") or []):
            arrivals.append(arrived_s)
        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    if not arrivals or not tokens:
        raise ValueError("the stream ended without a token or without its usage")
    first = arrivals[0]
    return Timing(
        time_to_first_token_s=first - stream.started_s,
        time_per_token_s=(arrivals[-1] - first) / (tokens - 1) if tokens > 1 else None,
        duration_s=stream.ended_s - stream.started_s,
        tokens=tokens,
    )
