"""POST /v1/comparisons: one prompt, two answers side by side, blind.

Guarantees: neither body nor headers tell which checkpoint wrote which answer; which one is shown first is
drawn by a fair coin and recorded as `position`; both answers are on the disk before they are returned.
With a running experiment on the alias both arms answer (a forced pair: the propensity is null), otherwise
the alias's checkpoint answers twice; with a given `seed` the second sample uses seed + 1, or it would repeat
the first.
"""

import asyncio
import json
import secrets
from typing import TYPE_CHECKING, Any

from feedback.events import new_comparison_id, new_response_id
from serving.dialects import ComparisonRequest
from serving.errors import ApiError
from serving.exchange import Caller, Exchange
from serving.routing import Route

if TYPE_CHECKING:
    from serving.gateway import Gateway

ENDPOINT = "/v1/comparisons"


async def compare(
    gateway: "Gateway", request: ComparisonRequest, caller: Caller, started: float
) -> tuple[dict[str, Any], int]:
    """The answer's body, and the tokens that it took.

    Raises ApiError when either answer failed; both are recorded all the same.
    """
    comparison_id = new_comparison_id()
    routes = _routes(gateway, request, caller, comparison_id)
    first_shown = secrets.randbelow(2)
    exchanges = [
        Exchange(
            response_id=new_response_id(),
            route=route,
            request=request,
            caller=caller,
            started=started,
            timeout_s=gateway.settings.request_timeout_s,
            endpoint=ENDPOINT,
            comparison_id=comparison_id,
            position=1 if index ^ first_shown else 0,
        )
        for index, route in enumerate(routes)
    ]
    overrides: list[dict[str, Any]] = [{}, {}]
    if request.seed is not None:
        overrides[1]["seed"] = request.seed + 1 if request.seed < 2**63 - 1 else 0
    work = [
        asyncio.ensure_future(_answer(gateway, exchange, override))
        for exchange, override in zip(exchanges, overrides, strict=True)
    ]
    try:
        bodies = await asyncio.gather(*work)
    except (ApiError, asyncio.CancelledError) as error:
        for task in work:
            task.cancel()
        await asyncio.wait(work)
        if isinstance(error, ApiError):
            for exchange in exchanges:
                exchange.give_up(f"the other answer of the comparison failed: {error.message}")
        if not isinstance(error, ApiError) or error.status >= 500:
            gateway.recorder.record_later([exchange.interaction() for exchange in exchanges])
        raise
    await gateway.recorder.record([exchange.interaction() for exchange in exchanges])
    answers = [
        _shown(index ^ first_shown, exchange, body)
        for index, (exchange, body) in enumerate(zip(exchanges, bodies, strict=True))
    ]
    content = {
        "id": comparison_id,
        "object": "comparison",
        "answers": sorted(answers, key=lambda answer: answer["position"]),
    }
    return content, sum(exchange.tokens_used for exchange in exchanges)


def _routes(gateway: "Gateway", request: ComparisonRequest, caller: Caller, comparison_id: str) -> tuple[Route, Route]:
    units = caller.units(comparison_id)
    table = gateway.router.table
    if request.checkpoints is None:
        return table.pair(request.model, units)
    first, second = request.checkpoints
    return table.route(first, units), table.route(second, units)


async def _answer(gateway: "Gateway", exchange: Exchange, overrides: dict[str, Any]) -> bytes:
    try:
        await exchange.open(gateway.engine, **overrides)
        return await exchange.read_whole()
    finally:
        exchange.cancel()


def _shown(position: int, exchange: Exchange, body: bytes) -> dict[str, Any]:
    answer = json.loads(body)
    choice = answer["choices"][0]
    return {
        "response_id": exchange.response_id,
        "position": position,
        "message": choice["message"],
        "finish_reason": choice["finish_reason"],
        "usage": answer.get("usage"),
    }
