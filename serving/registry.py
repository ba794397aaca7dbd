"""The registry of checkpoints, aliases and proofs, in PostgreSQL (experiments: serving/experiments.py).

Guarantees: a checkpoint id means one content for ever (registering it again with another digest is
refused); an alias moves only to a checkpoint that every live engine replica has proven, and each move is
kept with its reason and told on the topic of checkpoints.
Each function runs in the caller's transaction and does not commit. Gateways and engines poll, so a
change reaches them within poll_interval_s.
"""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from psycopg.types.json import Jsonb
from pydantic import BaseModel, ConfigDict

from feedback.events import CheckpointEvent
from feedback.outgoing import announce
from serving.errors import (
    BaseNotPrepared,
    CheckpointConflict,
    CheckpointNotProven,
    CheckpointUnknown,
    ExperimentConflict,
)
from serving.settings import ServingSettings
from storage.artifacts import digest
from storage.postgres import Connection, storable_text


class Row(BaseModel):
    """A frozen row of the registry."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Checkpoint(Row):
    """Weights under an immutable id. kind: a whole model, or a LoRA adapter on one; path: absolute directory.

    base_id: the model whose engines serve it, itself or the one under it; the registry fills it in.
    """

    checkpoint_id: str
    kind: Literal["model", "adapter"]
    parent_id: str | None
    base_id: str = ""
    digest: str
    path: str
    manifest: dict[str, Any]
    state: Literal["active", "retired"] = "active"
    created_at: datetime | None = None


class ReplicaProof(Row):
    """What one engine replica found when it ran the checkpoint's canaries."""

    checkpoint_id: str
    replica_id: str
    status: Literal["proven", "refused"]
    proof: dict[str, Any]
    proven_at: datetime
    live: bool


def register_checkpoint(connection: Connection, checkpoint: Checkpoint) -> None:
    """Add a checkpoint; harmless when the same one is there. Raises CheckpointConflict, CheckpointUnknown (parent)."""
    if connection.execute("select 1 from aliases where alias = %s", (checkpoint.checkpoint_id,)).fetchone():
        raise CheckpointConflict(f"{checkpoint.checkpoint_id} is the name of an alias")
    base_id = checkpoint.checkpoint_id
    if checkpoint.parent_id is not None:
        parent = _find(connection, checkpoint.parent_id)
        if parent is None:
            raise CheckpointUnknown(f"the parent {checkpoint.parent_id} is not registered")
        base_id = parent.base_id if checkpoint.kind == "adapter" else base_id
    elif checkpoint.kind == "adapter":
        raise CheckpointUnknown(f"the adapter {checkpoint.checkpoint_id} names no parent")
    added = connection.execute(
        "insert into checkpoints (checkpoint_id, kind, parent_id, base_id, digest, path, manifest, state) "
        "values (%s, %s, %s, %s, %s, %s, %s, %s) on conflict (checkpoint_id) do nothing",
        (
            checkpoint.checkpoint_id,
            checkpoint.kind,
            checkpoint.parent_id,
            base_id,
            checkpoint.digest,
            checkpoint.path,
            Jsonb(checkpoint.manifest),
            checkpoint.state,
        ),
    )
    if added.rowcount:
        told = checkpoint.model_dump(include={"checkpoint_id", "parent_id", "digest"})
        announce(connection, CheckpointEvent(kind="registered", **told))
    stored = get_checkpoint(connection, checkpoint.checkpoint_id)
    if (stored.digest, stored.kind, stored.parent_id) != (checkpoint.digest, checkpoint.kind, checkpoint.parent_id):
        raise CheckpointConflict(f"{checkpoint.checkpoint_id} is registered with other weights or another parent")


def get_checkpoint(connection: Connection, checkpoint_id: str) -> Checkpoint:
    """One checkpoint. Raises CheckpointUnknown."""
    found = _find(connection, checkpoint_id)
    if found is None:
        raise CheckpointUnknown(f"no checkpoint is called {checkpoint_id}")
    return found


def _find(connection: Connection, checkpoint_id: str) -> Checkpoint | None:
    row = connection.execute("select * from checkpoints where checkpoint_id = %s", (checkpoint_id,)).fetchone()
    return None if row is None else Checkpoint(**row)


def list_checkpoints(connection: Connection, state: str | None = None) -> list[Checkpoint]:
    """All checkpoints, oldest first; `state` narrows to active or retired ones."""
    rows = connection.execute(
        "select * from checkpoints where %(state)s::text is null or state = %(state)s "
        "order by created_at, checkpoint_id",
        {"state": state},
    )
    return [Checkpoint(**row) for row in rows]


def retire_checkpoint(connection: Connection, checkpoint_id: str) -> None:
    """Take a checkpoint out of service, a model with all its adapters: engines unload it, a model's engine ends.

    Raises CheckpointUnknown, or ExperimentConflict while an alias or a running experiment needs any of them.
    """
    get_checkpoint(connection, checkpoint_id)
    ids = [checkpoint_id] + [
        row["checkpoint_id"]
        for row in connection.execute("select checkpoint_id from checkpoints where base_id = %s", (checkpoint_id,))
    ]
    used = connection.execute(
        "select alias from aliases where checkpoint_id = any(%(ids)s) union select alias from experiments "
        "join experiment_arms using (experiment_id) where state = 'running' and checkpoint_id = any(%(ids)s)",
        {"ids": ids},
    ).fetchall()
    if used:
        raise ExperimentConflict(f"{checkpoint_id} serves the alias {used[0]['alias']}; move that first")
    retired = connection.execute(
        "update checkpoints set state = 'retired' where checkpoint_id = any(%s) and state <> 'retired' "
        "returning checkpoint_id",
        (ids,),
    )
    for row in retired.fetchall():
        announce(connection, CheckpointEvent(kind="retired", checkpoint_id=row["checkpoint_id"]))


def live_replicas(connection: Connection, base_checkpoint_id: str, timeout_s: float = 15.0) -> list[str]:
    """Ids of the engine replicas of this model whose last heartbeat is at most timeout_s seconds old."""
    rows = connection.execute(
        "select replica_id from engine_replicas where base_checkpoint_id = %s "
        "and heartbeat_at > now() - make_interval(secs => %s) order by 1",
        (base_checkpoint_id, timeout_s),
    )
    return [row["replica_id"] for row in rows]


def replicas_for(connection: Connection, checkpoint_id: str, timeout_s: float = 15.0) -> list[str]:
    """Ids of the live engine replicas that should serve the checkpoint: those of the model under it."""
    return live_replicas(connection, get_checkpoint(connection, checkpoint_id).base_id, timeout_s)


def proofs(connection: Connection, checkpoint_id: str, timeout_s: float = 15.0) -> list[ReplicaProof]:
    """What each replica, live or gone, found about the checkpoint; newest first."""
    return _proofs(connection, checkpoint_id, replicas_for(connection, checkpoint_id, timeout_s))


def _proofs(connection: Connection, checkpoint_id: str, live: Sequence[str]) -> list[ReplicaProof]:
    rows = connection.execute(
        "select * from checkpoint_replicas where checkpoint_id = %s order by proven_at desc", (checkpoint_id,)
    )
    return [ReplicaProof(**row, live=row["replica_id"] in live) for row in rows]


def require_proven(connection: Connection, checkpoint_id: str, timeout_s: float = 15.0) -> None:
    """Raises CheckpointNotProven unless a replica lives and every live one has proven the checkpoint."""
    replicas = replicas_for(connection, checkpoint_id, timeout_s)
    found = {proof.replica_id: proof for proof in _proofs(connection, checkpoint_id, replicas) if proof.live}
    if not replicas:
        raise CheckpointNotProven(f"no engine replica is live, so none has proven {checkpoint_id}")
    for replica_id in replicas:
        proof = found.get(replica_id)
        if proof is None:
            raise CheckpointNotProven(f"engine replica {replica_id} has not proven {checkpoint_id} yet")
        if proof.status != "proven":
            reason = proof.proof.get("reason", "no reason given")
            raise CheckpointNotProven(f"engine replica {replica_id} refused {checkpoint_id}: {reason}")


def resolve_alias(connection: Connection, alias: str) -> str:
    """The checkpoint id that the alias names. Raises CheckpointUnknown."""
    row = connection.execute("select checkpoint_id from aliases where alias = %s", (alias,)).fetchone()
    if row is None:
        raise CheckpointUnknown(f"no alias is called {alias}")
    return str(row["checkpoint_id"])


def move_alias(connection: Connection, alias: str, checkpoint_id: str, reason: str, *, timeout_s: float = 15.0) -> None:
    """Point the alias at a checkpoint; harmless when it does already. Raises CheckpointNotProven, CheckpointUnknown."""
    if get_checkpoint(connection, checkpoint_id).state != "active":
        raise CheckpointNotProven(f"{checkpoint_id} is retired")
    require_proven(connection, checkpoint_id, timeout_s)
    _point_alias(connection, alias, checkpoint_id, reason)


def promote(connection: Connection, alias: str, checkpoint_id: str, reason: str, *, timeout_s: float = 15.0) -> None:
    """Move the alias by hand. Raises ExperimentConflict while an experiment runs on it, and what move_alias raises."""
    running = connection.execute(
        "select experiment_id from experiments where alias = %s and state = 'running'", (alias,)
    ).fetchone()
    if running is not None:
        raise ExperimentConflict(f"experiment {running['experiment_id']} runs on {alias}; stop it first")
    move_alias(connection, alias, checkpoint_id, reason, timeout_s=timeout_s)


def rollback(connection: Connection, alias: str, reason: str, *, timeout_s: float = 15.0) -> str:
    """Point the alias back at what it named before its last move, and return that id; twice undoes itself.

    Raises CheckpointUnknown when there was no move, and what promote raises.
    """
    resolve_alias(connection, alias)
    row = connection.execute(
        "select from_checkpoint_id from alias_moves where alias = %s order by move_id desc limit 1", (alias,)
    ).fetchone()
    if row is None or row["from_checkpoint_id"] is None:
        raise CheckpointUnknown(f"{alias} has named one checkpoint only, so there is nothing to go back to")
    promote(connection, alias, row["from_checkpoint_id"], reason, timeout_s=timeout_s)
    return str(row["from_checkpoint_id"])


def describe(connection: Connection, checkpoint_id: str, timeout_s: float = 15.0) -> dict[str, Any]:
    """All that is known of a checkpoint, for people: its row without canaries, aliases, and live replicas' proofs.

    servable: every live replica has proven it; settled: every live replica has tried it. Raises CheckpointUnknown.
    """
    checkpoint = get_checkpoint(connection, checkpoint_id)
    live = live_replicas(connection, checkpoint.base_id, timeout_s)
    found = [proof for proof in _proofs(connection, checkpoint_id, live) if proof.live]
    aliases = connection.execute("select alias from aliases where checkpoint_id = %s order by 1", (checkpoint_id,))
    lineage = {name: value for name, value in checkpoint.manifest.items() if name not in ("canaries", "history")}
    return {
        **checkpoint.model_dump(exclude={"manifest"}),
        "aliases": [row["alias"] for row in aliases],
        "manifest": lineage,
        "live_replicas": len(live),
        "settled": bool(live) and {proof.replica_id for proof in found} >= set(live),
        "servable": bool(live) and {proof.replica_id for proof in found if proof.status == "proven"} >= set(live),
        "proofs": [
            {
                "replica_id": proof.replica_id,
                "status": proof.status,
                "reason": proof.proof.get("reason", ""),
                "sequences": proof.proof.get("sequences", []),
            }
            for proof in found
        ],
    }


def _point_alias(connection: Connection, alias: str, checkpoint_id: str, reason: str) -> None:
    if _find(connection, alias) is not None:
        raise CheckpointConflict(f"{alias} is the id of a checkpoint, so it can't be an alias")
    before = connection.execute("select checkpoint_id from aliases where alias = %s for update", (alias,)).fetchone()
    from_id = before["checkpoint_id"] if before else None
    if from_id == checkpoint_id:
        return
    connection.execute(
        "insert into aliases (alias, checkpoint_id) values (%s, %s) "
        "on conflict (alias) do update set checkpoint_id = excluded.checkpoint_id, updated_at = now()",
        (alias, checkpoint_id),
    )
    connection.execute(
        "insert into alias_moves (alias, from_checkpoint_id, to_checkpoint_id, reason) values (%s, %s, %s, %s)",
        (alias, from_id, checkpoint_id, reason),
    )
    moved = CheckpointEvent(
        kind="promoted", checkpoint_id=checkpoint_id, alias=alias, previous_id=from_id, reason=storable_text(reason)
    )
    announce(connection, moved)


def ensure_base(connection: Connection, settings: ServingSettings) -> str:
    """Register the base model under `flash-base-<6 of digest>` and return that checkpoint id.

    A new alias is pointed to it. An alias that leads to the model that `settings.model` named before is pointed to
    it too, and that model is retired with its adapters: the operator changed the setting. (A model that was added
    to the registry and promoted stays where it is.) No proof is needed for that: gateways send nothing to an
    engine that has not proven what it serves. Raises BaseNotPrepared without canaries.
    """
    from serving.canary import read_model_manifest

    model = settings.model.resolve()
    weights = sorted(model.glob("*.safetensors"))
    if not weights:
        raise BaseNotPrepared(f"{model} holds no safetensors; prepare the base model first")
    manifest = read_model_manifest(model)
    weights_digest = digest(weights)
    checkpoint_id = f"{settings.alias}-base-{weights_digest[:6]}"
    register_checkpoint(
        connection,
        Checkpoint(
            checkpoint_id=checkpoint_id,
            kind="model",
            parent_id=None,
            digest=weights_digest,
            path=str(Path(model)),
            manifest=manifest,
        ),
    )
    connection.execute("update checkpoints set state = 'active' where checkpoint_id = %s", (checkpoint_id,))
    known = connection.execute(
        "select base_id from aliases join checkpoints using (checkpoint_id) where alias = %s", (settings.alias,)
    ).fetchone()
    if known is None:
        _point_alias(connection, settings.alias, checkpoint_id, "first start")
    elif known["base_id"] != checkpoint_id and known["base_id"].startswith(f"{settings.alias}-base-"):
        _point_alias(connection, settings.alias, checkpoint_id, "the base model was changed")
        connection.execute("update checkpoints set state = 'retired' where base_id = %s", (known["base_id"],))
    return checkpoint_id


def active_models(connection: Connection) -> list[Checkpoint]:
    """The models that engines should run, oldest first."""
    return [checkpoint for checkpoint in list_checkpoints(connection, "active") if checkpoint.kind == "model"]
