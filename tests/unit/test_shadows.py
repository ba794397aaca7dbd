"""Laws of shadow answers: unseen, in nobody's way, recorded with their probability."""

import time
from typing import Any

import pytest

from serving.experiment_plan import Plan
from serving.settings import ServingSettings
from tests.helpers.serving import (
    BASE,
    CANDIDATE,
    Bench,
    ScriptedEngine,
    StillRouter,
    build_experiment,
    build_experiments,
    build_table,
)


def shadow_bench(share: float = 1.0, traffic: float = 0.0, **overrides: Any) -> Bench:
    """A bench whose candidate answers this share of the prompts unseen, and gets so much of the traffic."""
    experiment = build_experiment(share=traffic, plan=Plan(shadow_share=share))
    return Bench(router=StillRouter(build_table(**build_experiments(experiment))), **overrides)


@pytest.mark.parametrize("streamed", [False, True])
async def a_shadow_answers_the_same_prompt_and_is_recorded_as_unseen(streamed: bool) -> None:
    bench = shadow_bench()
    asked = {"user": "ada", "stream": streamed, "metadata": {"page": "home"}}
    if streamed:
        asked["stream_options"] = {"include_usage": True}
    answer = await bench.ask(**asked)
    assert answer.status_code == 200
    assert CANDIDATE not in answer.text + str(answer.headers)
    await bench.gateway.shadows.settle()
    [live, shadow] = bench.outbox.interactions
    assert (live.checkpoint_id, live.shadow_of, live.experiment_id) == (BASE, None, None)
    assert live.exposed_at is not None
    assert (shadow.checkpoint_id, shadow.shadow_of, shadow.arm) == (CANDIDATE, live.response_id, "candidate")
    assert (shadow.experiment_id, shadow.propensity, shadow.exposed_at) == ("exp-1", 1.0, None)
    assert (shadow.prompt_hash, shadow.user, shadow.tags) == (live.prompt_hash, "ada", {"page": "home"})
    assert (shadow.text, shadow.status) == ("Hello there.", "completed")
    assert bench.engine.requests[1].get("stream") is None


async def a_share_of_the_prompts_is_answered_in_the_shadow() -> None:
    bench = shadow_bench(share=0.3)
    for _ in range(200):
        await bench.ask()
        await bench.gateway.shadows.settle()
    shadows = [record for record in bench.outbox.interactions if record.shadow_of]
    assert 30 <= len(shadows) <= 95
    assert {record.propensity for record in shadows} == {0.3}


async def a_slow_shadow_delays_nobody_and_few_run_at_once() -> None:
    bench = shadow_bench(engine=SlowFor(CANDIDATE), settings=ServingSettings(shadows_at_once=2))
    began = time.monotonic()
    for _ in range(6):
        assert (await bench.ask()).status_code == 200
    assert time.monotonic() - began < 30
    assert dropped(bench) == 4
    bench.gateway.shadows.close()
    await bench.gateway.shadows.settle()
    assert not [record for record in bench.outbox.interactions if record.shadow_of]
    assert dropped(bench) == 6


async def a_shadow_that_fails_is_recorded_and_harms_nobody() -> None:
    bench = shadow_bench(engine=DeadFor(CANDIDATE))
    assert (await bench.ask()).status_code == 200
    await bench.gateway.shadows.settle()
    [live, shadow] = bench.outbox.interactions
    assert (live.status, shadow.status, shadow.shadow_of) == ("completed", "upstream_error", live.response_id)


async def only_what_an_alias_answered_has_a_shadow() -> None:
    pinned = shadow_bench()
    await pinned.ask(model=BASE)
    candidates = shadow_bench(traffic=1.0)
    for number in range(20):
        await candidates.ask(user=f"user-{number}")
    failed = shadow_bench(engine=ScriptedEngine(fail_after=0))
    assert (await failed.ask()).status_code == 502
    for bench in (pinned, candidates, failed):
        await bench.gateway.shadows.settle()
    assert not [record for bench in (pinned, failed) for record in bench.outbox.interactions if record.shadow_of]
    records = candidates.outbox.interactions
    shadowed = {record.shadow_of for record in records if record.shadow_of}
    assert shadowed == {record.response_id for record in records if record.arm == "control"}


def dropped(bench: Bench) -> float:
    """What the metrics say."""
    lines = bench.gateway.recorder.metrics.exposition(0).decode().splitlines()
    [line] = [line for line in lines if line.startswith("flywheel_shadow_answers_total") and '"dropped"' in line]
    return float(line.split()[-1])


class SlowFor(ScriptedEngine):
    """Takes long with one checkpoint."""

    def __init__(self, checkpoint_id: str) -> None:
        super().__init__()
        self._checkpoint_id = checkpoint_id

    def call(self, base_id: str, path: str, headers: list[tuple[str, str]], body: bytes) -> Any:
        self.pause_s = 60.0 if self._checkpoint_id.encode() in body else 0.0
        return super().call(base_id, path, headers, body)


class DeadFor(ScriptedEngine):
    """Fails with one checkpoint."""

    def __init__(self, checkpoint_id: str) -> None:
        super().__init__()
        self._checkpoint_id = checkpoint_id

    def call(self, base_id: str, path: str, headers: list[tuple[str, str]], body: bytes) -> Any:
        fails = self._checkpoint_id.encode() in body
        engine = ScriptedEngine(fail_after=0) if fails else ScriptedEngine()
        return engine.call(base_id, path, headers, body)
