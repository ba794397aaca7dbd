"""The whole wheel on real parts: broker, database, Ray, vLLM, TRL, and users who speak HTTP only.

The tiny model is random, so nobody can prefer its answers for their sense; raters who like short answers
still teach it something, and every joint of the wheel is real. One short turn uses the real model.
"""

import asyncio
import json
from pathlib import Path

import pytest

from flywheel.handle import Platform
from flywheel.model import prepare_tiny_model
from flywheel.wheel import Wheel
from loadtest.raters import prompts_for_votes
from loadtest.users import Sampling, Users

pytestmark = [pytest.mark.real, pytest.mark.engine]

TINY = (
    "serving.max_model_len=512",
    "rounds.controller.new_preferences=150",
    "rounds.policy.max_steps=2",
    "rounds.policy.prompts_per_step=2",
    "rounds.policy.completions_per_prompt=4",
    "rounds.policy.max_new_tokens=16",
    "rounds.checkpoint_gate.prompts=8",
    "rounds.checkpoint_gate.max_new_tokens=16",
    "rounds.experiment.minimum_votes=10",
    "rounds.experiment.maximum_votes=30",
)
# A random model's answers are word salad to begin with: its gates watch for a drift, not for sense.
PERMISSIVE = (
    "rounds.policy.learning_rate=0.05",
    "rounds.policy.kl_budget=1000",
    "rounds.checkpoint_gate.kl_maximum=1000",
    "reward.minimum_accuracy=0",
    "rounds.checkpoint_gate.minimum_reward_gain=-10",
    "rounds.checkpoint_gate.base_nll_margin=10",
    "rounds.checkpoint_gate.degenerate_margin=1",
    "rounds.checkpoint_gate.degenerate_maximum=1",
    "rounds.checkpoint_gate.unfinished_margin=1",
)


async def turn(platform: Platform, wheel: Wheel, sampling: Sampling) -> None:
    """Vote until the round has ended, as the demo's users do."""
    prompts = prompts_for_votes()[:40]
    async with (
        Users(platform.url, platform.key, taste="concise", seed=1, count=30, sampling=sampling) as users,
        wheel.watching(0.5) as watch,
    ):
        async with asyncio.timeout(540):
            while watch.state not in ("promoted", "rejected"):
                voting = watch.state
                if voting in ("collecting", "experiment"):
                    await users.collect_votes(prompts, 400, done=lambda seen=voting: watch.state != seen)
                await asyncio.sleep(0.5)


def the_wheel_turns_on_a_tiny_random_model(tmp_path: Path) -> None:
    model = prepare_tiny_model(tmp_path / "tiny")
    with Platform(tmp_path / "home", f"serving.model={model}", *TINY, *PERMISSIVE) as platform:
        platform.start()
        wheel = Wheel(platform.dsn, platform.artifacts)
        asyncio.run(turn(platform, wheel, Sampling(max_tokens=16)))
        states = [step["to"] for step in wheel.steps()]
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
        lineage = wheel.round().context
        manifest = json.loads((Path(lineage["checkpoint_path"]) / "manifest.json").read_text())
        assert manifest["lineage"]["parent_id"] == lineage["parent_id"]
        assert manifest["lineage"]["snapshot_id"] == lineage["snapshot_id"]
        assert manifest["lineage"]["reward_model_id"] == lineage["reward_model_id"]
        audit = platform.audit_when_drained()
        assert audit["clean"], audit


def the_real_model_makes_a_short_turn(base_model: Path, tmp_path: Path) -> None:
    short = [
        setting.replace("max_new_tokens=16", "max_new_tokens=32").replace("new_preferences=150", "new_preferences=120")
        for setting in TINY
    ]
    with Platform(
        tmp_path / "home",
        f"serving.model={base_model}",
        *short,
        "reward.minimum_accuracy=0",
        "rounds.checkpoint_gate.minimum_reward_gain=-10",
        "rounds.policy.learning_rate=0.001",
        "rounds.policy.kl_budget=100",
        "rounds.checkpoint_gate.kl_maximum=100",
        "rounds.checkpoint_gate.base_nll_margin=10",
    ) as platform:
        platform.start()
        wheel = Wheel(platform.dsn, platform.artifacts)
        asyncio.run(turn(platform, wheel, Sampling(max_tokens=32)))
        reports = wheel.reports()
        assert reports["checkpoint_gate"]["numbers"]["base_nll_old"] < 4
        assert "experiment" in reports, wheel.reason()
        assert platform.audit_when_drained()["clean"]
