"""The heavy tasks as plain functions of paths and JSON-ready values, so that any worker can run them.

Each reads frozen artifacts, writes an artifact, and returns its report; none touches the database.
Progress goes to a small JSON file that is replaced whole: {"task", "text", "fraction", "time"}.
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Training yields to answers: users wait for those. Each task has a process of its own.
NICENESS = 10


def train_reward(
    *,
    snapshot_path: str,
    base_model: str,
    out: str,
    settings: dict[str, Any],
    previous: str | None,
    progress_file: str,
) -> dict[str, Any]:
    """Train a reward model on the snapshot's training side; the report speaks of its held-out side."""
    from feedback.snapshots import read_snapshot
    from reward.settings import RewardSettings
    from reward.training import train_reward_model

    report = train_reward_model(
        read_snapshot(Path(snapshot_path)),
        base_model=Path(base_model),
        out=Path(out),
        settings=RewardSettings.model_validate(settings),
        previous=Path(previous) if previous else None,
        progress=_progress("reward_training", Path(progress_file)),
    )
    return report.model_dump(mode="json")


def update_policy(
    *,
    snapshot_path: str,
    base_model: str,
    parent_adapter: str | None,
    reward_model: str,
    out: str,
    settings: dict[str, Any],
    seed: int,
    lineage: dict[str, Any],
    progress_file: str,
) -> dict[str, Any]:
    """Train an adapter against the reward model on the snapshot's training prompts."""
    from feedback.snapshots import read_snapshot
    from rounds.policy import update_policy as train
    from rounds.settings import PolicySettings

    report = train(
        base_model=Path(base_model),
        parent_adapter=Path(parent_adapter) if parent_adapter else None,
        reward_model=Path(reward_model),
        prompts=_distinct_prompts(read_snapshot(Path(snapshot_path)).train),
        out=Path(out),
        settings=PolicySettings.model_validate(settings),
        seed=seed,
        lineage=lineage,
        progress=_progress("policy_update", Path(progress_file)),
    )
    return report.model_dump(mode="json")


def judge_checkpoint(
    *,
    snapshot_path: str,
    base_model: str,
    parent_adapter: str | None,
    adapter: str,
    reward_model: str,
    settings: dict[str, Any],
    seed: int,
    progress_file: str,
) -> dict[str, Any]:
    """Compare the checkpoint with its parent on the snapshot's held-out prompts."""
    from feedback.snapshots import read_snapshot
    from rounds.checkpoint_gate import judge_checkpoint as judge
    from rounds.settings import CheckpointGateSettings

    report = judge(
        base_model=Path(base_model),
        parent_adapter=Path(parent_adapter) if parent_adapter else None,
        adapter=Path(adapter),
        reward_model=Path(reward_model),
        prompts=_distinct_prompts(read_snapshot(Path(snapshot_path)).heldout),
        settings=CheckpointGateSettings.model_validate(settings),
        seed=seed,
        progress=_progress("checkpoint_gate", Path(progress_file)),
    )
    return report.model_dump(mode="json")


def _distinct_prompts(pairs: list[Any]) -> list[list[dict[str, Any]]]:
    return list({pair.prompt_hash: pair.prompt for pair in sorted(pairs, key=lambda pair: pair.prompt_hash)}.values())


def _progress(task: str, file: Path) -> Callable[[str, float], None]:
    """The progress callback of `task`; from here on this process yields to the engine."""
    file.parent.mkdir(parents=True, exist_ok=True)

    def report(text: str, fraction: float) -> None:
        temporary = file.with_suffix(".tmp")
        temporary.write_text(
            json.dumps({"task": task, "text": text, "fraction": fraction, "time": time.time()}),
            encoding="utf-8",
        )
        os.replace(temporary, file)

    os.nice(NICENESS)
    report("starting", 0.0)
    return report
