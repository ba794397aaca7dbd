"""One request to the engine, from its start to the Interaction that records it.

Guarantees: whatever way it ends (whole, cut by the client, late, failed) `interaction` tells it truthfully,
and `cancel` frees the engine. Times are monotonic seconds. The overhead is what the gateway itself spent:
all but the waiting for the engine.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from feedback.events import Interaction, event_id_of, prompt_hash
from serving.asgi import Head
from serving.capture import Captured, Status, StreamCapture, capture_body
from serving.errors import ApiError, InvalidRequest, Overloaded, RequestTimeout, UpstreamError
from serving.keys import ApiKey
from serving.requests import ChatRequest
from serving.routing import Route

CHAT_PATH = "/v1/chat/completions"


class EngineCall(Protocol):
    """One running call: yields (status, headers), then pieces of the body. Raises UpstreamError."""

    def __aiter__(self) -> AsyncIterator[Head | bytes]: ...

    async def __anext__(self) -> Head | bytes: ...

    def cancel(self) -> None:
        """Abort the engine's work; harmless after the end."""


class EngineClient(Protocol):
    """How a gateway reaches the engines."""

    def call(self, path: str, headers: list[tuple[str, str]], body: bytes) -> EngineCall:
        """POST `body` to the engine's application."""


@dataclass(frozen=True)
class Caller:
    """Who asks, and in which context."""

    key: ApiKey
    user: str | None
    session_id: str | None
    traceparent: str


class Exchange:
    """One answer in the making. Call `open`, then `next_piece` until None, or `read_whole`; then `interaction`."""

    def __init__(
        self,
        *,
        response_id: str,
        route: Route,
        request: ChatRequest,
        caller: Caller,
        started: float,
        timeout_s: float,
        endpoint: str = CHAT_PATH,
        comparison_id: str | None = None,
        position: Literal[0, 1] | None = None,
    ) -> None:
        self.response_id = response_id
        self.route = route
        self.caller = caller
        self._request = request
        self._endpoint = endpoint
        self._comparison_id = comparison_id
        self._position = position
        self._started = started
        self._deadline = asyncio.get_running_loop().time() + timeout_s
        self._engine_s = 0.0
        self._first_piece_at: float | None = None
        self._stream = bool(request.stream)
        wants_usage = request.stream_options is not None and request.stream_options.include_usage
        self._capture = StreamCapture(hide_usage=not wants_usage)
        self._captured: Captured | None = None
        self._ended_by: Status | None = "client_abort"  # until it is known to have ended otherwise
        self._error: str | None = None
        self._call: EngineCall | None = None
        self._held: bytes | None = None  # the first piece, read before the client is told 200

    @property
    def overhead_s(self) -> float:
        """The gateway's own time so far."""
        return max(0.0, time.perf_counter() - self._started - self._engine_s)

    async def open(self, engine: EngineClient, **overrides: Any) -> None:
        """Send the request and wait until the engine answers well. `overrides` replace fields of the body.

        Raises InvalidRequest for the engine's 4xx, Overloaded, UpstreamError, RequestTimeout.
        """
        body = {**self._request.for_engine, "model": self.route.checkpoint_id, **overrides}
        if self._stream:
            body["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
        headers = [
            ("content-type", "application/json"),
            ("x-request-id", self.response_id.removeprefix("chatcmpl-")),
        ]
        self._call = engine.call(CHAT_PATH, headers, json.dumps(body, ensure_ascii=False).encode())
        head = await self._receive()
        if not isinstance(head, tuple):
            raise self._failed(UpstreamError("The engine sent no status."))
        if head[0] != 200:
            raise self._failed(_engine_error(head[0], await self._rest()))
        if self._stream:
            self._held = await self._next_piece()
            refusal = self._capture.refusal()
            if refusal is not None:
                raise self._failed(_engine_error(_status_in(refusal), refusal))

    async def next_piece(self) -> bytes | None:
        """The client's next bytes (perhaps none yet), or None at the end. Raises UpstreamError, RequestTimeout."""
        if self._held is not None:
            held, self._held = self._held, None
            return held
        return await self._next_piece()

    async def _next_piece(self) -> bytes | None:
        piece = await self._receive()
        if piece is None:
            self._ended_by = None
            return self._capture.flush() or None
        assert isinstance(piece, bytes)
        if self._first_piece_at is None:
            self._first_piece_at = time.perf_counter()
        return self._capture.feed(piece)

    async def read_whole(self) -> bytes:
        """The whole body of an answer that is not streamed. Raises UpstreamError, RequestTimeout."""
        body = await self._rest()
        self._captured = capture_body(200, body)
        if self._captured.error is not None:
            raise self._failed(UpstreamError(f"The engine failed: {self._captured.error}"))
        self._ended_by = None
        return body

    def give_up(self, reason: str) -> None:
        """The client is still there, but gets nothing of this answer any more: another one that it needs failed."""
        if self._ended_by == "client_abort":
            self._ended_by, self._error = "upstream_error", reason

    def cancel(self) -> None:
        """Free the engine; harmless after the end."""
        if self._call is not None:
            self._call.cancel()

    def interaction(self) -> Interaction:
        """The record of this exchange, as it stands now."""
        captured = self._captured or (self._capture.result() if self._stream else Captured())
        kept = self._request.store is not False
        ended = time.perf_counter()
        return Interaction(
            event_id=event_id_of(self.response_id),
            api_key_id=self.caller.key.key_id,
            response_id=self.response_id,
            endpoint=self._endpoint,
            checkpoint_id=self.route.checkpoint_id,
            alias=self.route.alias,
            pinned=self.route.pinned,
            experiment_id=self.route.experiment_id,
            unit=self.route.unit,
            propensity=self.route.propensity,
            comparison_id=self._comparison_id,
            position=self._position,
            user=self.caller.user,
            session_id=self.caller.session_id,
            tags=self._request.metadata or {},
            content_kept=kept,
            prompt_hash=prompt_hash(self._request.messages),
            messages=self._request.messages if kept else None,
            parameters=self._request.parameters,
            text=captured.text if kept else None,
            finish_reason=captured.finish_reason,
            status=captured.status(self._ended_by),
            error=self._error or captured.error,
            prompt_tokens=captured.prompt_tokens,
            completion_tokens=captured.completion_tokens,
            time_to_first_token_s=self._first_piece_at and self._first_piece_at - self._started,
            duration_s=ended - self._started,
            overhead_s=max(0.0, ended - self._started - self._engine_s),
            traceparent=self.caller.traceparent,
        )

    async def _receive(self) -> Head | bytes | None:
        assert self._call is not None
        asked = time.perf_counter()
        try:
            async with asyncio.timeout_at(self._deadline):
                return await anext(self._call)
        except StopAsyncIteration:
            return None
        except TimeoutError:
            self._ended_by = "timeout"
            raise self._failed(RequestTimeout("The answer took too long.")) from None
        except UpstreamError as error:
            raise self._failed(error) from error
        finally:
            self._engine_s += time.perf_counter() - asked

    async def _rest(self) -> bytes:
        pieces = []
        while (piece := await self._receive()) is not None:
            assert isinstance(piece, bytes)
            pieces.append(piece)
        return b"".join(pieces)

    def _failed(self, error: ApiError) -> ApiError:
        if self._ended_by == "client_abort":
            self._ended_by = "upstream_error"
        self._error = error.message
        return error


def _status_in(refusal: bytes) -> int:
    error = json.loads(refusal)["error"]
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) else 500


def _engine_error(status: int, body: bytes) -> ApiError:
    """vLLM's error in our words: a 4xx is the caller's, all else is the engine's."""
    message = capture_body(status, body).error or "no reason given"
    try:
        param = json.loads(body)["error"].get("param")
    except (ValueError, KeyError, TypeError, AttributeError):
        param = None
    if status == 404:  # it was there when the request was routed: it is being retired, or its engine restarts
        return Overloaded(message, param=param, code="model_not_ready", retry_after_s=1)
    if 400 <= status < 500:
        return InvalidRequest(message, param=param)
    return UpstreamError(f"The engine failed: {message}")
