"""Laws of the stream reader: what it makes of chunks, and of streams that are not whole."""

import json

import pytest

from loadtest.stream_reader import Stream, events_of, timing_of


def event(content: str | None = None, tokens: int | None = None) -> bytes:
    choices = [] if content is None else [{"delta": {"content": content}}]
    usage = None if tokens is None else {"completion_tokens": tokens}
    return b"data: " + json.dumps({"choices": choices, "usage": usage}).encode() + b"\n\n"


def stream_of(*chunks: tuple[float, bytes]) -> Stream:
    return Stream(started_s=10.0, status=200, chunks=list(chunks), ended_s=chunks[-1][0])


WHOLE = [event(""), event("a"), event("b"), event("c"), event(tokens=3), b"data: [DONE]\n\n"]


def a_stream_is_timed_by_the_arrival_of_its_tokens() -> None:
    timing = timing_of(stream_of(*((10.5 + number, data) for number, data in enumerate(WHOLE))))
    assert timing.time_to_first_token_s == 1.5
    assert timing.time_per_token_s == 1.0
    assert timing.duration_s == 5.5
    assert timing.tokens == 3


def a_chunk_may_hold_several_events_or_a_part_of_one() -> None:
    data = b"".join(WHOLE)
    whole = [content for _, content in events_of(stream_of((11.0, data)))]
    pieces = [(11.0 + at, data[at : at + 3]) for at in range(0, len(data), 3)]
    assert [content for _, content in events_of(stream_of(*pieces))] == whole
    assert len(whole) == 5


@pytest.mark.parametrize(
    ("chunks", "words"),
    [
        ([(11.0, event("a"))], "without a token or without its usage"),
        ([(11.0, event(tokens=0))], "without a token or without its usage"),
        ([(11.0, b'data: {"error": {"message": "gone"}}\n\n')], "holds an error"),
    ],
)
def a_broken_stream_is_no_timing(chunks: list[tuple[float, bytes]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        timing_of(stream_of(*chunks))


def a_failed_request_is_no_timing() -> None:
    with pytest.raises(ValueError, match="HTTP 503"):
        timing_of(Stream(started_s=0.0, status=503, error="HTTP 503: busy"))
