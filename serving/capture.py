"""What was answered, taken from the bytes that passed: text, finish reason, usage, status.

The gateway hands every piece to `StreamCapture.feed`, which cuts it into whole server-sent events (a piece
may end anywhere) and drops the usage event if the client did not ask for it; parsing waits until the end,
so a chunk costs a copy and a search. Guarantees: unknown usage is None, never 0; a stream without a finish
reason is never `completed`. Keeps the text of choice 0 only.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from serving.dialects import Dialect, Piece

T = TypeVar("T")
Status = Literal["completed", "length", "client_abort", "timeout", "upstream_error"]
_DATA = b"data:"
_DONE = b"[DONE]"


@dataclass(frozen=True)
class Captured:
    """One answer. Counts are tokens. error: the engine's words when it failed."""

    text: str | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    error: str | None = None

    def status(self, ended_by: Status | None = None) -> Status:
        """The finish status; ended_by says what cut the answer short, if anything did."""
        if self.error is not None:
            return "upstream_error"
        if self.finish_reason is not None:
            return "length" if self.finish_reason == "length" else "completed"
        return ended_by or "upstream_error"


class StreamCapture:
    """Cuts a stream into events, keeps them, and passes them on."""

    def __init__(self, dialect: Dialect, *, hide_usage: bool) -> None:
        self._dialect = dialect
        self._hide_usage = hide_usage
        self._rest = b""
        self._events: list[bytes] = []

    def feed(self, piece: bytes) -> bytes:
        """What to send on to the client for this piece: its whole events, perhaps none yet."""
        events, self._rest = split_events(self._rest + piece)
        self._events += events
        if self._hide_usage:
            events = [event for event in events if not _is_usage_event(event)]
        return b"".join(events)

    @property
    def events(self) -> int:
        """How many events have come."""
        return len(self._events)

    def refusal(self) -> bytes | None:
        """The error, if the stream begins with one: vLLM checks some fields only after it has said 200."""
        if self._events and b'"error"' in self._events[0] and "error" in event_payload(self._events[0]):
            return json.dumps(event_payload(self._events[0])).encode()
        return None

    def flush(self) -> bytes:
        """What is left when the stream ended inside an event."""
        rest, self._rest = self._rest, b""
        return rest

    def result(self) -> Captured:
        """Parse what has been kept."""
        pieces, error = [], None
        for event in self._events:
            content = event_payload(event)
            if content.get("error") is not None:
                error = error_message(content)
            pieces.append(self._dialect.read_event(content))
        return _captured(pieces, error)


def capture_body(dialect: Dialect, body: bytes) -> Captured:
    """The same from an answer that came whole."""
    try:
        answer = json.loads(body)
    except ValueError:
        return Captured(error="the engine's answer is not JSON")
    return _captured([dialect.read_answer(answer)], None)


def split_events(data: bytes) -> tuple[list[bytes], bytes]:
    """(whole events with their blank line, what is left over)."""
    *whole, rest = data.split(b"\n\n")
    return [event + b"\n\n" for event in whole], rest


def event_payload(event: bytes) -> dict[str, Any]:
    """The data of a server-sent event; empty for a comment that keeps the connection open, and for the last line."""
    data = next((line[len(_DATA) :].strip() for line in event.splitlines() if line.startswith(_DATA)), _DONE)
    if data == _DONE:
        return {}
    try:
        value = json.loads(data)
    except ValueError:
        return {"error": {"message": "the engine sent an event that is not JSON"}}
    return value if isinstance(value, dict) else {}


def _is_usage_event(event: bytes) -> bool:
    """OpenAI's last chunk: usage, and no choices. The cheap search can't match inside a JSON string."""
    return b'"choices":[]' in event and bool(event_payload(event).get("usage"))


def error_message(answer: Any) -> str:
    """The engine's own words in an error's JSON."""
    error = answer.get("error") if isinstance(answer, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return str(message or "the engine failed without saying why")


def _captured(pieces: Sequence[Piece], error: str | None) -> Captured:
    """All that the pieces say, the last word counting; PostgreSQL stores no NUL in the text."""
    return Captured(
        text="".join(piece.text for piece in pieces).replace("\0", "\ufffd"),
        finish_reason=_last(piece.finish_reason for piece in pieces),
        prompt_tokens=_last(piece.prompt_tokens for piece in pieces),
        completion_tokens=_last(piece.completion_tokens for piece in pieces),
        error=error,
    )


def _last(values: Iterable[T | None]) -> T | None:
    found = None
    for value in values:
        found = found if value is None else value
    return found
