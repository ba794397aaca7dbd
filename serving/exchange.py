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
from datetime import UTC, datetime
from typing import Any, Literal, Protocol

from feedback.events import Interaction, event_id_of, new_response_id, prompt_hash
from serving.asgi import Head
from serving.capture import Captured, Status, StreamCapture, capture_body, error_message
from serving.dialects import CHAT, RESPONSE, Dialect, GenerateRequest
from serving.errors import ApiError, InvalidRequest, Overloaded, RequestTimeout, UpstreamError
from serving.keys import ApiKey
from serving.routing import Route, Units


class EngineCall(Protocol):
    """One running call: yields (status, headers), then pieces of the body. Raises UpstreamError."""

    def __aiter__(self) -> AsyncIterator[Head | bytes]: ...

    async def __anext__(self) -> Head | bytes: ...

    def cancel(self) -> None:
        """Abort the engine's work; harmless after the end."""


class EngineClient(Protocol):
    """How a gateway reaches the engines."""

    def call(self, base_id: str, path: str, headers: list[tuple[str, str]], body: bytes | None) -> EngineCall:
        """POST `body` (GET without one) to the application of an engine that runs the model `base_id`."""


@dataclass(frozen=True)
class Caller:
    """Who asks, and in which context."""

    key: ApiKey
    user: str | None
    session_id: str | None
    traceparent: str

    def units(self, response_id: str) -> Units:
        """What an experiment could assign this request by."""
        return Units(self.user, self.session_id, response_id)


class Exchange:
    """One answer in the making. Call `open`, then `next_piece` until None, or `read_whole`; then `interaction`."""

    def __init__(
        self,
        *,
        response_id: str,
        route: Route,
        request: GenerateRequest,
        caller: Caller,
        started: float,
        timeout_s: float,
        dialect: Dialect = CHAT,
        endpoint: str | None = None,
        comparison_id: str | None = None,
        position: Literal[0, 1] | None = None,
        shadow_of: str | None = None,
    ) -> None:
        self.response_id = response_id
        self.route = route
        self.caller = caller
        self._request = request
        self._dialect = dialect
        self._endpoint = endpoint or dialect.path
        self._comparison_id = comparison_id
        self._position = position
        self._shadow_of = shadow_of
        self._exposed_at: datetime | None = None
        self._started = started
        self._deadline = asyncio.get_running_loop().time() + timeout_s
        self._engine_s = 0.0
        self._first_piece_at: float | None = None
        self.streams = bool(request.stream)
        self._capture = StreamCapture(dialect, hide_usage=not request.shows_usage)
        self._captured: Captured | None = None
        self._ended_by: Status | None = "client_abort"  # until it is known to have ended otherwise
        self._error: str | None = None
        self._call: EngineCall | None = None
        self._over = False
        self._held: bytes | None = None  # the first piece, read before the client is told 200

    @property
    def dialect(self) -> Dialect:
        """The API in which the client asked."""
        return self._dialect

    @property
    def status(self) -> Status:
        """How it ended, or would have if it ended now."""
        return self._result().status(self._ended_by)

    @property
    def overhead_s(self) -> float:
        """The gateway's own time so far."""
        return max(0.0, time.perf_counter() - self._started - self._engine_s)

    async def open(self, engine: EngineClient, **overrides: Any) -> None:
        """Send the request and wait until the engine answers well. `overrides` replace fields of the body.

        Raises InvalidRequest for the engine's 4xx, Overloaded, UpstreamError, RequestTimeout.
        """
        body = {**self._request.for_engine, "model": self.route.checkpoint_id, **overrides}
        if self._dialect is RESPONSE:  # the one API in which vLLM takes the id from the body
            body["request_id"] = self.response_id
        headers = [
            ("content-type", "application/json"),
            ("x-request-id", self.response_id.removeprefix(self._dialect.id_prefix)),
        ]
        content = json.dumps(body, ensure_ascii=False).encode()
        self._call = engine.call(self.route.base_id, self._dialect.path, headers, content)
        head = await self._receive()
        if not isinstance(head, tuple):
            raise self._failed(UpstreamError("The engine sent no status."))
        if head[0] != 200:
            raise self._failed(engine_error(head[0], await self._rest()))
        if self.streams:
            self._held = await self._next_piece()
            refusal = self._capture.refusal()
            if refusal is not None:
                raise self._failed(engine_error(_status_in(refusal), refusal))

    async def next_piece(self) -> bytes | None:
        """The client's next bytes (perhaps none yet), or None at the end. Raises UpstreamError, RequestTimeout."""
        piece, self._held = self._held, None
        if piece is None:
            piece = await self._next_piece()
        if piece:
            self._show()
        return piece

    async def pieces(self) -> AsyncIterator[bytes]:
        """All that is left of the answer. Raises UpstreamError, RequestTimeout."""
        while (piece := await self.next_piece()) is not None:
            yield piece

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
        self._captured = capture_body(self._dialect, body)
        if self._captured.error is not None:
            raise self._failed(UpstreamError(f"The engine failed: {self._captured.error}"))
        self._ended_by = None
        self._show()
        return body

    def _show(self) -> None:
        """The client is sent the first of the answer now."""
        if self._exposed_at is None and self._shadow_of is None:
            self._exposed_at = datetime.now(UTC)

    def shadow(self, route: Route, timeout_s: float) -> "Exchange":
        """The same prompt for another checkpoint, to be answered whole and never shown."""
        sent = self._request.model_dump(exclude_unset=True)
        quiet = {name: value for name, value in sent.items() if name not in ("stream", "stream_options")}
        return Exchange(
            response_id=new_response_id(self._dialect.id_prefix),
            route=route,
            request=type(self._request).model_validate(quiet),
            caller=self.caller,
            started=time.perf_counter(),
            timeout_s=timeout_s,
            dialect=self._dialect,
            endpoint=self._endpoint,
            shadow_of=self.response_id,
        )

    def give_up(self, reason: str) -> None:
        """The client is still there, but gets nothing of this answer any more: another one that it needs failed."""
        if self._ended_by == "client_abort":
            self._ended_by, self._error = "upstream_error", reason

    @property
    def tokens_used(self) -> int:
        """Tokens of prompt and answer; for a stream that was cut, about one for each of its events."""
        captured = self._result()
        if captured.prompt_tokens is not None and captured.completion_tokens is not None:
            return captured.prompt_tokens + captured.completion_tokens
        return self._capture.events

    def cancel(self) -> None:
        """Free the engine; nothing is read after this. Harmless when called again."""
        self._over = True
        if self._call is not None:
            self._call.cancel()

    def interaction(self) -> Interaction:
        """The record of this exchange, as it stands now."""
        captured = self._result()
        kept, messages = self._request.kept, self._request.prompt_messages
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
            arm=self.route.arm,
            fallback=self.route.fallback,
            unit=self.route.unit,
            propensity=self.route.propensity,
            exposed_at=self._exposed_at,
            shadow_of=self._shadow_of,
            comparison_id=self._comparison_id,
            position=self._position,
            user=self.caller.user,
            session_id=self.caller.session_id,
            tags=self._request.tags,
            content_kept=kept,
            prompt_hash=prompt_hash(messages),
            messages=messages if kept else None,
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

    def _result(self) -> Captured:
        if self._captured is not None:
            return self._captured
        captured = self._capture.result() if self.streams else Captured()
        if self._over:
            self._captured = captured
        return captured

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


async def ask_engine(
    engine: EngineClient, base_id: str, path: str, content: dict[str, Any] | None, timeout_s: float
) -> bytes:
    """POST `content` to the engine (GET without any) and return its whole answer.

    Raises InvalidRequest for the engine's 4xx, Overloaded, UpstreamError, RequestTimeout.
    """
    headers = [("content-type", "application/json")]
    body = None if content is None else json.dumps(content, ensure_ascii=False).encode()
    call = engine.call(base_id, path, headers, body)
    status, pieces = None, []
    try:
        async with asyncio.timeout(timeout_s):
            async for part in call:
                if isinstance(part, tuple):
                    status = part[0]
                else:
                    pieces.append(part)
    except TimeoutError:
        raise RequestTimeout("The answer took too long.") from None
    finally:
        call.cancel()
    if status is None:
        raise UpstreamError("The engine sent no status.")
    if status != 200:
        raise engine_error(status, b"".join(pieces))
    return b"".join(pieces)


def _status_in(refusal: bytes) -> int:
    error = json.loads(refusal)["error"]
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) else 500


def engine_error(status: int, body: bytes) -> ApiError:
    """vLLM's error in our words: a 4xx is the caller's, all else is the engine's."""
    try:
        answer = json.loads(body)
    except ValueError:
        answer = {"error": f"its answer (HTTP {status}) is not JSON"}
    message = error_message(answer)
    error = answer.get("error") if isinstance(answer, dict) else None
    param = error.get("param") if isinstance(error, dict) else None
    if isinstance(param, str):
        param = param.removeprefix("body.")
    if status == 404:  # it was there when the request was routed: it is being retired, or its engine restarts
        return Overloaded(message, param=param, code="model_not_ready", retry_after_s=1)
    if 400 <= status < 500:
        return InvalidRequest(message, param=param)
    return UpstreamError(f"The engine failed: {message}")
