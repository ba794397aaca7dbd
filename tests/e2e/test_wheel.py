"""The whole wheel on real parts: broker, database, Ray, vLLM, TRL, and users who speak HTTP only.

The tiny model is random, so nobody can prefer its answers for their sense; raters who like short answers
still teach it something, and every joint of the wheel is real. One short turn uses the real model.
"""

import asyncio
import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from flywheel.handle import Platform
from flywheel.state import read_state
from flywheel.wheel import Wheel
from loadtest.raters import prompts_for_votes
from loadtest.users import Acknowledged, Sampling, Users
from storage.postgres import connect
from tests.helpers.tiny_model import build_tiny_model

pytestmark = [pytest.mark.real, pytest.mark.engine]

SHORT = (
    "serving.max_model_len=512",
    "rounds.controller.new_preferences=50",
    "rounds.controller.heldout_share=0.4",
    "reward.minimum_heldout_pairs=8",
    "reward.minimum_train_pairs=12",
    "rounds.policy.max_steps=1",
    "rounds.policy.prompts_per_step=2",
    "rounds.policy.completions_per_prompt=4",
    "rounds.policy.max_new_tokens=16",
    "rounds.checkpoint_gate.prompts=6",
    "rounds.checkpoint_gate.max_new_tokens=16",
    "rounds.experiment.minimum_votes=4",
    "rounds.experiment.maximum_votes=10",
    # So little is learned in so short a turn that the gates would end it: here they only watch.
    "reward.minimum_accuracy=0",
    "rounds.checkpoint_gate.minimum_reward_gain=-10",
    "rounds.checkpoint_gate.base_nll_margin=10",
    "rounds.checkpoint_gate.unfinished_margin=1",
)
# A random model's answers are word salad to begin with, and only a large step makes a difference that shows.
WORD_SALAD = (
    "rounds.policy.learning_rate=0.05",
    "rounds.policy.kl_budget=1000",
    "rounds.checkpoint_gate.kl_maximum=1000",
    "rounds.checkpoint_gate.degenerate_margin=1",
    "rounds.checkpoint_gate.degenerate_maximum=1",
)
VICTIMS = ("relay", "ingest", "controller", "serving", "controller", "ingest", "relay", "controller")
PAUSE_S = (2.0, 10.0)
SEED = 11


async def turn(platform: Platform, wheel: Wheel, sampling: Sampling) -> Acknowledged:
    """Vote until the round has ended, as the demo's users do; returns what the platform acknowledged."""
    prompts = prompts_for_votes()[:40]
    async with (
        Users(platform.url, platform.key, taste="concise", seed=1, count=30, sampling=sampling) as users,
        wheel.watching(0.5) as watch,
    ):
        async with asyncio.timeout(480):
            while watch.state not in ("promoted", "rejected"):
                voting = watch.state
                if voting in ("collecting", "experiment"):
                    await users.collect_votes(prompts, 400, done=lambda seen=voting: watch.state != seen)
                await asyncio.sleep(0.5)
        return users.acknowledged


async def turn_while_processes_die(platform: Platform, wheel: Wheel, sampling: Sampling) -> Acknowledged:
    generator = random.Random(SEED)
    turning = asyncio.create_task(turn(platform, wheel, sampling))
    for victim in VICTIMS:
        await asyncio.sleep(generator.uniform(*PAUSE_S))
        os.kill(await asyncio.to_thread(pid_of, platform, victim), signal.SIGKILL)
    return await turning


def pid_of(platform: Platform, component: str) -> int:
    """Of the component that runs; waits when it is on its way back from the last kill."""
    deadline = time.monotonic() + 60
    while (state := read_state(platform.settings.home)) is None or (pid := state.components[component].pid) is None:
        assert time.monotonic() < deadline, f"{component} did not come back"
        time.sleep(0.1)
    return pid


def the_wheel_turns_and_keeps_what_it_acknowledged_while_its_processes_are_killed(tmp_path: Path) -> None:
    model = build_tiny_model(tmp_path / "tiny")
    with Platform(tmp_path / "home", f"serving.model={model}", *SHORT, *WORD_SALAD) as platform:
        platform.start()
        wheel = Wheel(platform.dsn, platform.artifacts)
        acknowledged = asyncio.run(turn_while_processes_die(platform, wheel, Sampling(max_tokens=16)))
        states = [step["to"] for step in wheel.steps()]
        lineage = wheel.round().context
        audit = platform.audit_when_drained()
        with connect(platform.dsn) as connection:
            feedback = [str(row["event_id"]) for row in connection.execute("select event_id from feedback")]
            responses = [row["response_id"] for row in connection.execute("select response_id from interactions")]

    assert states[:7] == [
        "snapshot",
        "reward_training",
        "reward_gate",
        "policy_update",
        "checkpoint_gate",
        "registration",
        "experiment",
    ]
    assert states[7] in ("promoted", "rejected")
    manifest = json.loads((Path(lineage["checkpoint_path"]) / "manifest.json").read_text())
    assert {name: manifest["lineage"][name] for name in ("parent_id", "snapshot_id", "reward_model_id")} == {
        name: lineage[name] for name in ("parent_id", "snapshot_id", "reward_model_id")
    }
    assert len(feedback) == len(set(feedback))
    assert len(responses) == len(set(responses))
    assert set(acknowledged.feedback_ids) <= set(feedback)
    assert set(acknowledged.response_ids) <= set(responses)
    assert audit["clean"], audit
    assert audit["pending"] == 0


def the_real_model_makes_a_short_turn(base_model: Path, tmp_path: Path) -> None:
    with Platform(
        tmp_path / "home",
        f"serving.model={base_model}",
        *SHORT,
        "rounds.policy.learning_rate=0.001",
        "rounds.policy.kl_budget=100",
        "rounds.checkpoint_gate.kl_maximum=100",
    ) as platform:
        platform.start()
        wheel = Wheel(platform.dsn, platform.artifacts)
        asyncio.run(turn(platform, wheel, Sampling(max_tokens=16)))
        reports = wheel.reports()
        assert reports["checkpoint_gate"]["numbers"]["base_nll_old"] < 4
        assert "experiment" in reports, wheel.reason()
        assert platform.audit_when_drained()["clean"]
        restarts = {name: one.restarts for name, one in read_state(platform.settings.home).components.items()}
        assert not any(restarts.values()), restarts
