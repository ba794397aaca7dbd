"""The demo: starts the platform in a folder of its own, lets simulated users vote, and watches the wheel turn.

The users speak HTTP only. The demo itself reads the controller's tables to know which phase it is in and to
write the report; it moves nothing: the controller turns the wheel. Whatever happens, the platform is shut
down at the end; its logs stay in the demo's home.
"""

import asyncio
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast, get_args

from rich.console import Console

from flywheel import control
from flywheel.errors import AlreadyRunning, DemoFailed, SettingsInvalid
from flywheel.handle import Platform
from flywheel.model import prepare_base_model
from flywheel.report import print_report, write_report
from flywheel.settings import Settings
from flywheel.wheel import Wheel
from loadtest.evaluation import true_win_rate
from loadtest.raters import Taste, answer_tokens, prompts_for_evaluation, prompts_for_votes
from loadtest.users import Acknowledged, Users

VOTES = 350
SAMPLES = 1
TURN_LIMIT_S = 3600.0


@dataclass
class Phases:
    """Wall-clock seconds of each phase, in order; says on the console what begins and what ended."""

    console: Console
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str, text: str) -> Iterator[Callable[[str], None]]:
        """Time a block; the yielded function updates the status line."""
        began = time.monotonic()
        with self.console.status(text) as status:
            if not self.console.is_terminal:
                self.console.print(f"{text} …")
            try:
                yield lambda detail: status.update(f"{text}: {detail}")
            finally:
                self.seconds[name] = round(time.monotonic() - began, 1)
        self.console.print(f"[green]✓[/] {text} [dim]({self.seconds[name]:.0f} s)[/]")


def run(settings: Settings, *, raters: str, seed: int, arguments: Sequence[str]) -> int:
    """Turn the wheel once with simulated raters, print the report and write it; returns the exit code.

    settings: the caller's; the demo has a home of its own below theirs, `<home>/demo`, emptied first, and shares
    the prepared model. raters: their taste; seed: of raters, traffic and training; arguments: `--set` options.
    The code is 0 when the turn ended and the ledger is clean, whatever was decided. Raises SettingsInvalid for an
    unknown taste, AlreadyRunning, DemoFailed when a turn does not end within an hour.
    """
    if raters not in get_args(Taste):
        raise SettingsInvalid(f"--raters {raters}: there are {', '.join(get_args(Taste))}")
    taste = cast(Taste, raters)
    console = Console()
    folder = settings.home / "demo"
    phases = Phases(console)
    with Platform(
        folder / "home",
        f"serving.model={settings.serving.model}",
        f"rounds.controller.new_preferences={VOTES}",
        f"rounds.controller.seed={100 * seed}",
        # Trained and judged on answers as long as those that users see.
        f"rounds.policy.max_new_tokens={answer_tokens(taste)}",
        f"rounds.checkpoint_gate.max_new_tokens={answer_tokens(taste)}",
        *(argument.removeprefix("--set=") for argument in arguments if not argument.startswith("--set=home=")),
    ) as platform:
        with phases.phase("model", "Preparing the base model") as say:
            prepare_base_model(settings, say)
        if control.running_state(platform.settings) is not None:
            raise AlreadyRunning(f"a demo runs in {folder}; wait for its end, or stop it with Ctrl-C where it runs")
        shutil.rmtree(folder, ignore_errors=True)
        with phases.phase("start", "Starting the platform"):
            platform.start()
        wheel = Wheel(platform.dsn, platform.artifacts)
        outcome = asyncio.run(_turn(platform, wheel, phases, raters=taste, seed=seed))
        with phases.phase("audit", "Comparing outbox, log and store"):
            audit = platform.audit_when_drained()
        report = _report(wheel, outcome, audit, raters=taste, seed=seed)
        with phases.phase("shutdown", "Shutting down"):
            platform.stop()
    report["phase_seconds"] = phases.seconds
    report["total_seconds"] = round(sum(phases.seconds.values()), 1)
    paths = write_report(report, folder)
    print_report(report, paths, console)
    return 0 if audit["clean"] else 1


@dataclass
class Outcome:
    """What the users saw: acknowledged ids, and the answers on unused prompts by checkpoint (old, new)."""

    acknowledged: Acknowledged
    evaluation: dict[str, Any] | None


async def _turn(platform: Platform, wheel: Wheel, phases: Phases, *, raters: Taste, seed: int) -> Outcome:
    async with Users(platform.url, platform.key, taste=raters, seed=seed) as users:
        with phases.phase("voting", "Users compare answers and vote") as say:
            await _vote_during("collecting", users, wheel, say)
        for name, text, states in (
            ("reward", "Learning what people like", ("snapshot", "reward_training", "reward_gate")),
            ("policy", "Improving the policy", ("policy_update",)),
            ("checkpoint_gate", "Checking that the answers stay readable", ("checkpoint_gate",)),
            ("registration", "Loading the checkpoint and proving it", ("registration",)),
        ):
            if wheel.round().state in states:
                with phases.phase(name, text) as say:
                    await _follow(wheel, states, say)
        if wheel.round().state == "experiment":
            with phases.phase("experiment", "People decide: old against new, side by side") as say:
                await _vote_during("experiment", users, wheel, say)
        await _until(wheel.ended, lambda: None)
        evaluation = None
        if wheel.round().state == "promoted":
            with phases.phase("evaluation", "True win rate on prompts never used") as say:
                evaluation = await _evaluate(users, wheel, raters, say)
        return Outcome(users.acknowledged, evaluation)


async def _vote_during(state: str, users: Users, wheel: Wheel, say: Callable[[str], None]) -> None:
    """Compare and vote for as long as the round stays in `state`."""
    prompts = prompts_for_votes()
    async with wheel.watching() as watch:
        await users.collect_votes(
            prompts,
            votes=10 * len(prompts),
            done=lambda: watch.state != state,
            progress=lambda cast: say(f"{cast} votes, {watch.decided} decided in the store"),
        )


async def _follow(wheel: Wheel, states: Sequence[str], say: Callable[[str], None]) -> None:
    """Wait while the round is in one of `states`, telling how far its step is."""
    await _until(lambda: wheel.round().state not in states, lambda: say(wheel.progress()))


async def _until(ended: Callable[[], bool], tell: Callable[[], None]) -> None:
    began = time.monotonic()
    while not ended():
        if time.monotonic() - began > TURN_LIMIT_S:
            raise DemoFailed("the turn stands still; the logs in the demo's home say why")
        tell()
        await asyncio.sleep(1.0)


async def _evaluate(users: Users, wheel: Wheel, raters: Taste, say: Callable[[str], None]) -> dict[str, Any]:
    """Ask both checkpoints, pinned, the prompts that nobody voted on, and let the noise-free taste judge."""
    context = wheel.round().context
    old_id, new_id = context["parent_id"], context["checkpoint_id"]
    prompts = prompts_for_evaluation()
    total = 2 * SAMPLES * len(prompts)
    answers = await users.answers_of(
        [old_id, new_id], prompts, SAMPLES, progress=lambda count: say(f"{count} of {total} answers")
    )
    result = true_win_rate(raters, prompts, answers[old_id], answers[new_id])
    return {
        "result": result,
        "pairs": [
            {"prompt": prompt, "old": old[0], "new": new[0]}
            for prompt, old, new in zip(prompts, answers[old_id], answers[new_id], strict=True)
        ],
    }


def _report(wheel: Wheel, outcome: Outcome, audit: dict[str, Any], *, raters: Taste, seed: int) -> dict[str, Any]:
    """The report's content; keys that a rejected turn can't have are null."""
    turned = wheel.round()
    reports = wheel.reports()
    reward, policy, gate = (reports.get(state, {}) for state in ("reward_training", "policy_update", "checkpoint_gate"))
    numbers = gate.get("numbers", {})
    result = outcome.evaluation["result"] if outcome.evaluation else None
    return {
        "verdict": turned.state,
        "reason": wheel.reason(),
        "raters": raters,
        "seed": seed,
        "votes": audit["votes_stored"],
        "votes_acknowledged": len(outcome.acknowledged.feedback_ids),
        "reward_accuracy": reward.get("held_out_accuracy"),
        "true_win_rate": result and result.rate,
        "true_win_rate_low": result and result.low,
        "true_win_rate_high": result and result.high,
        "true_vote_share": result and result.vote_share,
        "mean_words_old": result.mean_words_old if result else numbers.get("mean_words_old"),
        "mean_words_new": result.mean_words_new if result else numbers.get("mean_words_new"),
        **{
            key: numbers.get(key)
            for key in ("base_nll_new", "base_nll_old", "degenerate_share_new", "degenerate_share_old")
        },
        "steps": wheel.steps(),
        "reward": reward,
        "policy": policy,
        "checkpoint_gate": gate,
        "experiment": reports.get("experiment"),
        "experiment_path": wheel.experiment_path(),
        "lineage": turned.context,
        "ledger": audit,
        "pairs": outcome.evaluation["pairs"] if outcome.evaluation else gate.get("answers", []),
    }
