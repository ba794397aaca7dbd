"""Shadow answers: a share of live prompts is answered by an experiment's candidate too, in the background, unseen.

Guarantees: nothing waits for a shadow, and it begins when the live answer is over; few run at once, and one that finds
no room is dropped and counted. It is recorded like any answer, with `shadow_of` and the probability of being asked for.
Shadows that run when the gateway ends are dropped, too.
"""

import asyncio

from serving.assignment import SPACE, point_of
from serving.errors import ApiError
from serving.exchange import EngineClient, Exchange
from serving.experiment_plan import Arm, Experiment
from serving.recorder import Recorder
from serving.routing import Route, RoutingTable

_ANSWERED = ("completed", "length")


class Shadows:
    """Answers again what was answered. at_once: how many may run."""

    def __init__(self, engine: EngineClient, recorder: Recorder, at_once: int, timeout_s: float) -> None:
        self._engine = engine
        self._recorder = recorder
        self._at_once = at_once
        self._timeout_s = timeout_s
        self._running: set[asyncio.Task[None]] = set()

    def consider(self, exchange: Exchange, table: RoutingTable) -> None:
        """A live answer is over: perhaps others should answer its prompt, too."""
        route = exchange.route
        if route.alias is None or route.pinned or exchange.status not in _ANSWERED:
            return
        for experiment in table.shadowing(route.alias):
            if point_of(f"shadow:{experiment.salt}", exchange.response_id) >= experiment.plan.shadow_share * SPACE:
                continue
            for arm in experiment.arms[1:]:
                if arm.checkpoint_id != route.checkpoint_id and arm.checkpoint_id in table.servable:
                    self._begin(exchange, _route(experiment, arm, route, table.servable[arm.checkpoint_id]))

    def _begin(self, exchange: Exchange, route: Route) -> None:
        if len(self._running) >= self._at_once:
            self._recorder.metrics.count_shadow("dropped")
            return
        task = asyncio.create_task(self._answer(exchange.shadow(route, self._timeout_s)))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _answer(self, shadow: Exchange) -> None:
        try:
            await shadow.open(self._engine)
            await shadow.read_whole()
            self._recorder.metrics.count_shadow("answered")
        except ApiError:  # the record tells which
            self._recorder.metrics.count_shadow("failed")
        except asyncio.CancelledError:
            self._recorder.metrics.count_shadow("dropped")
            raise
        finally:
            shadow.cancel()
        self._recorder.record_later([shadow.interaction()])

    async def settle(self) -> None:
        """Wait for those that run."""
        await asyncio.gather(*self._running, return_exceptions=True)

    def close(self) -> None:
        """Drop those that run."""
        for task in self._running:
            task.cancel()


def _route(experiment: Experiment, arm: Arm, live: Route, base_id: str) -> Route:
    return Route(
        arm.checkpoint_id,
        base_id,
        alias=live.alias,
        experiment_id=experiment.experiment_id,
        arm=arm.name,
        unit=live.unit,
        propensity=experiment.plan.shadow_share,
    )
