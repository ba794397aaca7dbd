"""What each state of a round does before it moves on. One function a state, in the order of a turn.

Each step is idempotent: ids and folders derive from the round and from what went in, artifacts are written
whole or not at all, and rows are inserted once. So a step that was killed half-way is simply run again.
A step returns an Outcome, or None when it has to wait.
"""

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from feedback.preferences import count_decided
from feedback.snapshots import create_snapshot
from reward.gate import judge_reward
from reward.report import RewardReport
from reward.settings import RewardSettings
from rounds import tasks
from rounds.evidence import read_arms, read_periods
from rounds.experiments import Decision, decide, tally
from rounds.guardrails import check_guardrails
from rounds.settings import RoundsSettings
from rounds.store import Round
from serving import experiments, registry
from serving.errors import ExperimentConflict
from serving.experiment_plan import Experiment, candidate_start
from storage.artifacts import digest, read_manifest
from storage.postgres import Connection, storable_json

log = logging.getLogger(__name__)
_GUARDRAILS_EVERY_S = 10.0
_CONFLICT_EVERY_S = 60.0


@dataclass(frozen=True)
class Outcome:
    """Where the round goes, why (in words), the numbers behind it, and what later steps need."""

    to_state: str
    reason: str
    report: dict[str, Any] = field(default_factory=dict)
    context: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Workbench:
    """What a step works with.

    run: does heavy work elsewhere and returns its result. due: whether what it names was not done within so many
    seconds.
    """

    connection: Connection
    dsn: str
    rounds: RoundsSettings
    reward: RewardSettings
    artifacts: Path
    base_model: Path
    alias: str
    run: Callable[[Callable[..., Any], dict[str, Any]], Any]
    due: Callable[[str, float], bool] = lambda what, every_s: True


def collecting(bench: Workbench, round_: Round) -> Outcome | None:
    """Wait for enough new decided preferences."""
    decided = count_decided(bench.connection)
    row = bench.connection.execute("select coalesce(max((context->>'decided')::int), 0) as seen from rounds").fetchone()
    fresh = decided - (row["seen"] if row else 0)
    needed = bench.rounds.controller.new_preferences
    if fresh < needed:
        return None
    return Outcome("snapshot", f"{fresh} new decided preferences, {needed} needed", {"decided": decided, "new": fresh})


def snapshot(bench: Workbench, round_: Round) -> Outcome:
    """Freeze the preferences, split by prompt."""
    frozen = create_snapshot(bench.dsn, bench.artifacts, heldout_share=bench.rounds.controller.heldout_share)
    return Outcome(
        "reward_training",
        f"snapshot {frozen.snapshot_id}: {len(frozen.train)} pairs to learn from, {len(frozen.heldout)} held out",
        frozen.manifest,
        {
            "snapshot_id": frozen.snapshot_id,
            "snapshot_path": str(frozen.path),
            "decided": count_decided(bench.connection),
        },
    )


def reward_training(bench: Workbench, round_: Round) -> Outcome:
    """Train a reward model on the snapshot."""
    reward_model_id = f"rm-r{round_.number:04d}-{_short(round_.context['snapshot_id'])}"
    out = bench.artifacts / "reward" / reward_model_id
    previous = _released_reward_model(bench.connection)
    report = bench.run(
        tasks.train_reward,
        {
            "snapshot_path": round_.context["snapshot_path"],
            "base_model": str(bench.base_model),
            "out": str(out),
            "settings": bench.reward.model_dump(mode="json"),
            "previous": previous and previous["path"],
            "progress_file": str(_progress_file(bench, round_)),
        },
    )
    return Outcome(
        "reward_gate",
        f"reward model {reward_model_id}: held-out accuracy {report['held_out_accuracy']:.3f}",
        report,
        {"reward_model_id": reward_model_id, "reward_model_path": str(out), "reward_report": report},
    )


def reward_gate(bench: Workbench, round_: Round) -> Outcome:
    """Release the reward model only if it beats chance and does not fall below the previous one."""
    path = Path(round_.context["reward_model_path"])
    report = round_.context["reward_report"]
    verdict = judge_reward(RewardReport.model_validate(report), bench.reward).model_dump(mode="json")
    bench.connection.execute(
        """
        insert into reward_models (reward_model_id, snapshot_id, path, digest, manifest, report, released)
        values (%s, %s, %s, %s, %s, %s, %s) on conflict (reward_model_id) do nothing
        """,
        (
            round_.context["reward_model_id"],
            round_.context["snapshot_id"],
            str(path),
            digest(path.glob("*.safetensors")),
            storable_json(read_manifest(path)),
            storable_json(report | {"gate": verdict}, unknown_as_null=True),
            verdict["passed"],
        ),
    )
    return Outcome("policy_update" if verdict["passed"] else "rejected", verdict["reason"], verdict)


def policy_update(bench: Workbench, round_: Round) -> Outcome:
    """Improve the policy against the reward model; the result is an adapter on the base."""
    parent = _parent(bench)
    seed = bench.rounds.controller.seed + round_.number
    reward_model_id = round_.context["reward_model_id"]
    checkpoint_id = f"flash-r{round_.number:04d}-{_short(reward_model_id, parent.checkpoint_id, seed)}"
    out = bench.artifacts / "checkpoints" / checkpoint_id
    report = bench.run(
        tasks.update_policy,
        {
            "snapshot_path": round_.context["snapshot_path"],
            "base_model": str(bench.base_model),
            "parent_adapter": _adapter_path(parent),
            "reward_model": round_.context["reward_model_path"],
            "out": str(out),
            "settings": bench.rounds.policy.model_dump(mode="json"),
            "seed": seed,
            "lineage": {
                "checkpoint_id": checkpoint_id,
                "parent_id": parent.checkpoint_id,
                "round_id": round_.round_id,
                "round": round_.number,
                "snapshot_id": round_.context["snapshot_id"],
                "reward_model_id": reward_model_id,
            },
            "progress_file": str(_progress_file(bench, round_)),
        },
    )
    return Outcome(
        "checkpoint_gate",
        f"checkpoint {checkpoint_id} trained",
        report,
        {"checkpoint_id": checkpoint_id, "checkpoint_path": str(out), "parent_id": parent.checkpoint_id},
    )


def checkpoint_gate(bench: Workbench, round_: Round) -> Outcome:
    """Let the checkpoint go on only if its answers on held-out prompts stay readable and earn more reward."""
    parent = registry.get_checkpoint(bench.connection, round_.context["parent_id"])
    report = bench.run(
        tasks.judge_checkpoint,
        {
            "snapshot_path": round_.context["snapshot_path"],
            "base_model": str(bench.base_model),
            "parent_adapter": _adapter_path(parent),
            "adapter": round_.context["checkpoint_path"],
            "reward_model": round_.context["reward_model_path"],
            "settings": bench.rounds.checkpoint_gate.model_dump(mode="json"),
            "seed": bench.rounds.controller.seed + round_.number,
            "progress_file": str(_progress_file(bench, round_)),
        },
    )
    return Outcome("registration" if report["passed"] else "rejected", report["reason"], report)


def registration(bench: Workbench, round_: Round) -> Outcome | None:
    """Register the checkpoint and wait until every live engine replica has loaded and proven it."""
    checkpoint_id, path = round_.context["checkpoint_id"], Path(round_.context["checkpoint_path"])
    registry.register_checkpoint(
        bench.connection,
        registry.Checkpoint(
            checkpoint_id=checkpoint_id,
            kind="adapter",
            parent_id=round_.context["parent_id"],
            digest=digest(path.glob("*.safetensors")),
            path=str(path),
            manifest=read_manifest(path),
        ),
    )
    bench.connection.commit()
    proofs = registry.proofs(bench.connection, checkpoint_id)
    report = {"proofs": [{"replica_id": proof.replica_id, "status": proof.status, **proof.proof} for proof in proofs]}
    refusal = _refusal(checkpoint_id, proofs)
    if refusal:
        registry.retire_checkpoint(bench.connection, checkpoint_id)
        return Outcome("rejected", refusal, report)
    live = set(registry.replicas_for(bench.connection, checkpoint_id))
    if not live or live - {proof.replica_id for proof in proofs}:
        return None
    settings = bench.rounds.experiment
    start = candidate_start(
        bench.alias,
        round_.context["parent_id"],
        checkpoint_id,
        settings.candidate_weight,
        alpha=settings.alpha,
        guardrails=settings.guardrails,
    )
    try:
        with bench.connection.transaction():
            started = experiments.start_experiment(bench.connection, start)
    except ExperimentConflict as error:  # somebody else's experiment has the traffic: wait until it ends
        if bench.due("conflict", _CONFLICT_EVERY_S):
            log.info("%s waits for its experiment: %s", checkpoint_id, error)
        return None
    return Outcome(
        "experiment",
        f"{checkpoint_id} is proven on {len(live)} replica(s) and gets {settings.candidate_weight:.0%} of the traffic",
        report,
        {"experiment_id": started.experiment_id},
    )


def experiment(bench: Workbench, round_: Round) -> Outcome | None:
    """Let the votes decide; promotion moves the alias while requests run."""
    experiment_id, checkpoint_id = round_.context["experiment_id"], round_.context["checkpoint_id"]
    row = experiments.get_experiment(bench.connection, experiment_id)
    if row.state != "running":  # decided before a kill, or stopped by hand
        state = "promoted" if row.state == "promoted" else "rejected"
        return Outcome(state, f"experiment {experiment_id} ended as {row.state}", row.report or {})
    refusal = _refusal(checkpoint_id, [p for p in registry.proofs(bench.connection, checkpoint_id) if p.live])
    if refusal:
        experiments.stop_experiment(bench.connection, experiment_id, "rejected", {"reason": refusal})
        registry.retire_checkpoint(bench.connection, checkpoint_id)
        return Outcome("rejected", refusal)
    trouble = _breached(bench.connection, row) if bench.due("guardrails", _GUARDRAILS_EVERY_S) else ""
    if trouble:
        experiments.stop_experiment(bench.connection, experiment_id, "rejected", {"reason": trouble})
        registry.retire_checkpoint(bench.connection, checkpoint_id)
        return Outcome("rejected", trouble)
    settings = bench.rounds.experiment
    votes = tally(bench.connection, experiment_id, "candidate")
    decision = decide(votes, settings)
    if decision.state == "running" and _is_overdue(bench.connection, experiment_id, settings.maximum_days):
        reason = f"not decided within {settings.maximum_days:g} days ({decision.reason})"
        decision = Decision("rejected", reason, decision.numbers)
    if decision.state == "running":
        return None
    if decision.state == "promoted":
        registry.move_alias(bench.connection, bench.alias, checkpoint_id, decision.reason)
    experiments.stop_experiment(bench.connection, experiment_id, decision.state, decision.numbers)
    if decision.state == "rejected":
        registry.retire_checkpoint(bench.connection, checkpoint_id)
    return Outcome(decision.state, decision.reason, decision.numbers)


def _breached(connection: Connection, experiment: Experiment) -> str:
    """The guardrails that the candidate breaches beyond chance, in words; empty when none."""
    facts = read_arms(connection, experiment)
    periods = read_periods(connection, experiment, experiments.changes(connection, experiment.experiment_id))
    units = [sum(period.counts[place] for period in periods) for place in (0, 1)]
    control, candidate = experiment.arms
    findings = check_guardrails(
        experiment.plan.guardrails,
        candidate.name,
        (facts[control.name], facts[candidate.name]),
        (units[0], units[1]),
        experiment.plan.alpha,
    )
    told = [
        f"{one.guardrail} went from {one.control:.3g} to {one.candidate:.3g}, beyond the limit of {one.limit:g}"
        for one in findings
        if one.verdict == "breached"
    ]
    return "; ".join(told)


STEPS: dict[str, Callable[[Workbench, Round], Outcome | None]] = {
    "collecting": collecting,
    "snapshot": snapshot,
    "reward_training": reward_training,
    "reward_gate": reward_gate,
    "policy_update": policy_update,
    "checkpoint_gate": checkpoint_gate,
    "registration": registration,
    "experiment": experiment,
}


def _refusal(checkpoint_id: str, proofs: Sequence[registry.ReplicaProof]) -> str:
    """What the first replica that refused the checkpoint says; empty when none did."""
    for proof in proofs:
        if proof.status == "refused":
            why = proof.proof.get("reason", "its canaries differ")
            return f"replica {proof.replica_id} refused {checkpoint_id}: {why}"
    return ""


def _is_overdue(connection: Connection, experiment_id: str, days: float) -> bool:
    row = connection.execute(
        "select started_at < now() - make_interval(secs => %s) as overdue from experiments where experiment_id = %s",
        (days * 86400, experiment_id),
    ).fetchone()
    return bool(row and row["overdue"])


def _parent(bench: Workbench) -> registry.Checkpoint:
    return registry.get_checkpoint(bench.connection, registry.resolve_alias(bench.connection, bench.alias))


def _adapter_path(checkpoint: registry.Checkpoint) -> str | None:
    return checkpoint.path if checkpoint.kind == "adapter" else None


def _released_reward_model(connection: Connection) -> dict[str, Any] | None:
    return connection.execute("select * from reward_model_in_use").fetchone()


def _progress_file(bench: Workbench, round_: Round) -> Path:
    return bench.artifacts / "rounds" / f"{round_.number:04d}" / "progress.json"


def _short(*parts: object) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:6]
