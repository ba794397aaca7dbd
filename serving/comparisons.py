"""POST /v1/comparisons: one prompt, two answers side by side, blind, as one object or as one stream with two channels.

Guarantees: neither body nor headers tell which checkpoint wrote which answer (a stream shows how fast each one comes,
which can't be hidden); which one is shown first is drawn by a fair coin and recorded as `position`; both answers are
on the disk before the object, or the stream's [DONE], is sent; one that fails ends both.
With a running experiment on the alias two of its arms answer (a forced pair: the propensity is null), otherwise
the alias's checkpoint answers twice; with a given `seed` the second sample uses seed + 1, or it would repeat
the first.
"""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Coroutine
from typing import TYPE_CHECKING, Any

from feedback.events import Interaction, new_comparison_id, new_response_id
from serving.capture import error_message, event_payload, split_events
from serving.dialects import ComparisonRequest
from serving.errors import ApiError, UpstreamError
from serving.exchange import Caller, Exchange
from serving.routing import Route

if TYPE_CHECKING:
    from serving.gateway import Gateway

ENDPOINT = "/v1/comparisons"
_DATA = b"data: "


class Comparison:
    """Two exchanges on one prompt. Call `whole`; or `open`, then iterate over `events`. Always `end` it."""

    def __init__(self, gateway: "Gateway", request: ComparisonRequest, caller: Caller, started: float) -> None:
        """Draws the routes and the order; the engine has heard nothing yet. Raises NotFound, Overloaded."""
        self._gateway = gateway
        self.caller = caller
        self.comparison_id = new_comparison_id()
        first_shown = secrets.randbelow(2)
        self._exchanges = [
            Exchange(
                response_id=new_response_id(),
                route=route,
                request=request,
                caller=caller,
                started=started,
                timeout_s=gateway.settings.request_timeout_s,
                endpoint=ENDPOINT,
                comparison_id=self.comparison_id,
                position=1 if index ^ first_shown else 0,
            )
            for index, route in enumerate(self._routes(request))
        ]
        self._overrides: list[dict[str, Any]] = [{}, {}]
        if request.seed is not None:
            self._overrides[1]["seed"] = request.seed + 1 if request.seed < 2**63 - 1 else 0
        # In the order in which they are shown.
        self._shown = self._exchanges if first_shown == 0 else self._exchanges[::-1]
        self._recorded = False

    def _routes(self, request: ComparisonRequest) -> tuple[Route, Route]:
        units = self.caller.units(self.comparison_id)
        table = self._gateway.router.table
        if request.checkpoints is None:
            return table.pair(request.model, units)
        first, second = request.checkpoints
        return table.route(first, units), table.route(second, units)

    @property
    def tokens_used(self) -> int:
        """Of both answers and their prompts."""
        return sum(exchange.tokens_used for exchange in self._exchanges)

    async def open(self) -> None:
        """Begin both answers. Raises ApiError when one does not begin; then both are told and recorded."""
        await self._both([self._open(exchange) for exchange in self._exchanges])

    async def whole(self) -> dict[str, Any]:
        """Both answers, the body of the response. Raises ApiError when either failed; then both are recorded."""
        bodies = await self._both([self._answer(exchange) for exchange in self._exchanges])
        await self._record()
        told = {exchange.response_id: body for exchange, body in zip(self._exchanges, bodies, strict=True)}
        answers = [
            _whole_answer(position, exchange, told[exchange.response_id])
            for position, exchange in enumerate(self._shown)
        ]
        return {"id": self.comparison_id, "object": "comparison", "answers": answers}

    async def events(self) -> AsyncIterator[bytes]:
        """The server-sent events of both answers as they come, then [DONE]. Raises ApiError when either fails."""
        answers = [
            {"response_id": exchange.response_id, "position": position} for position, exchange in enumerate(self._shown)
        ]
        yield self._event({"answers": answers})
        pending = {asyncio.ensure_future(exchange.next_piece()): place for place, exchange in enumerate(self._shown)}
        try:
            while pending:
                done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    place = pending.pop(task)
                    piece = task.result()
                    if piece is None:
                        if self._shown[place].status not in ("completed", "length"):
                            raise UpstreamError("The engine ended an answer too early.")
                        continue
                    for content in _chunks(piece):
                        yield self._event({"position": place, **content})
                    pending[asyncio.ensure_future(self._shown[place].next_piece())] = place
        except ApiError as error:
            self._give_up(error)
            raise
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
        await self._record()
        yield _DATA + b"[DONE]\n\n"

    def end(self) -> None:
        """Free the engine, and record what has not been: the client left, or something failed. Harmless when
        repeated.
        """
        for exchange in self._exchanges:
            exchange.cancel()
        if not self._recorded:
            self._recorded = True
            self._gateway.recorder.record_later(self._interactions())

    async def _both(self, work: list[Coroutine[Any, Any, Any]]) -> list[Any]:
        """Both results. Whatever ends one ends the other; a fault of the caller's is not recorded."""
        tasks = [asyncio.ensure_future(one) for one in work]
        try:
            return await asyncio.gather(*tasks)
        except (ApiError, asyncio.CancelledError) as error:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            if isinstance(error, ApiError):
                self._give_up(error)
                self._recorded = error.status < 500
            raise

    async def _open(self, exchange: Exchange) -> None:
        await exchange.open(self._gateway.engine, **self._overrides[self._exchanges.index(exchange)])

    async def _answer(self, exchange: Exchange) -> bytes:
        await self._open(exchange)
        return await exchange.read_whole()

    def _give_up(self, error: ApiError) -> None:
        for exchange in self._exchanges:
            exchange.give_up(f"the other answer of the comparison failed: {error.message}")

    async def _record(self) -> None:
        """Raises Overloaded when the outbox can't take them."""
        self._recorded = True
        await self._gateway.recorder.record(self._interactions())

    def _interactions(self) -> list[Interaction]:
        return [exchange.interaction() for exchange in self._exchanges]

    def _event(self, content: dict[str, Any]) -> bytes:
        told = {"id": self.comparison_id, "object": "comparison.chunk", **content}
        return _DATA + json.dumps(told, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _whole_answer(position: int, exchange: Exchange, body: bytes) -> dict[str, Any]:
    answer = json.loads(body)
    choice = answer["choices"][0]
    return {
        "response_id": exchange.response_id,
        "position": position,
        "message": choice["message"],
        "finish_reason": choice["finish_reason"],
        "usage": answer.get("usage"),
    }


def _chunks(piece: bytes) -> list[dict[str, Any]]:
    """What the engine's events say, without what would tell whose they are: delta, finish_reason, and usage where
    told.
    """
    found = []
    for event in split_events(piece)[0]:
        chunk = event_payload(event)
        if chunk.get("error") is not None:
            raise UpstreamError(f"The engine failed: {error_message(chunk)}")
        told: dict[str, Any] = {}
        for choice in chunk.get("choices", []):
            told |= {"delta": choice.get("delta", {}), "finish_reason": choice.get("finish_reason")}
        if chunk.get("usage") is not None:
            told["usage"] = chunk["usage"]
        if told:
            found.append(told)
    return found
