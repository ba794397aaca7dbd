"""Laws of the registry and of reconciliation, over a real PostgreSQL and a scripted engine."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from serving.adapters import Reconciler
from serving.database import HeldConnection
from serving.errors import (
    CheckpointConflict,
    CheckpointNotProven,
    CheckpointUnknown,
    EngineRefused,
    ExperimentConflict,
)
from serving.experiment_plan import candidate_start
from serving.experiments import start_experiment
from serving.keys import check, create_key, load_keys, revoke_key
from serving.registry import (
    Checkpoint,
    active_models,
    describe,
    get_checkpoint,
    list_checkpoints,
    live_replicas,
    move_alias,
    promote,
    proofs,
    register_checkpoint,
    resolve_alias,
    retire_checkpoint,
    rollback,
)
from serving.routing import RoutingTable, read_table
from serving.settings import CanaryTolerance
from storage.errors import DatabaseUnreachable
from storage.postgres import Connection, connect

pytestmark = pytest.mark.real

VOCABULARY = 100_000
OWN = [[-1.0, -2.0], [-0.5]]
PARENT = [[-2.0, -1.0], [-1.5]]


def build_checkpoint(checkpoint_id: str, **overrides: Any) -> Checkpoint:
    canaries = [
        {"token_ids": list(range(len(own) + 1)), "log_probabilities": own, "parent_log_probabilities": parent}
        for own, parent in zip(OWN, PARENT, strict=True)
    ]
    values: dict[str, Any] = {
        "kind": "adapter",
        "parent_id": "base",
        "digest": checkpoint_id,
        "path": f"/adapters/{checkpoint_id}",
        "manifest": {"canaries": canaries},
    }
    return Checkpoint(checkpoint_id=checkpoint_id, **{**values, **overrides})


def register(dsn: str, *checkpoints: Checkpoint) -> None:
    base = build_checkpoint("base", kind="model", parent_id=None)
    with connect(dsn) as connection:
        for checkpoint in (base, *checkpoints):
            register_checkpoint(connection, checkpoint)


def table(dsn: str) -> RoutingTable:
    with connect(dsn) as connection:
        return read_table(connection, 15)


@dataclass
class EngineTwin:
    """An engine whose adapters apply, unless they are named in `deaf` (no effect) or `broken` (do not load)."""

    deaf: set[str] = field(default_factory=set)
    broken: set[str] = field(default_factory=set)
    loaded: list[str] = field(default_factory=list)
    base_shift: float = 0.0
    alive: bool = True

    async def load_adapter(self, checkpoint_id: str, path: str) -> None:
        if checkpoint_id in self.broken:
            raise EngineRefused(f"can't load {path}")
        self.loaded.append(checkpoint_id)

    async def unload_adapter(self, checkpoint_id: str) -> None:
        if checkpoint_id in self.loaded:
            self.loaded.remove(checkpoint_id)

    async def log_probabilities(self, token_ids: list[list[int]], checkpoint_id: str | None) -> list[list[float]]:
        if checkpoint_id is None:
            return [[value + self.base_shift for value in row] for row in OWN]
        assert checkpoint_id in self.loaded
        if any(token > VOCABULARY for ids in token_ids for token in ids):
            raise EngineRefused("a token is out of vocabulary")
        return PARENT if checkpoint_id in self.deaf else OWN


def build_reconciler(dsn: str, engine: EngineTwin, replica_id: str = "engine-1") -> Reconciler:
    return Reconciler(
        engine,
        dsn=dsn,
        replica_id=replica_id,
        base_checkpoint_id="base",
        tolerance=CanaryTolerance(max_nats=2),
        unload_after_s=0.2,
    )


async def start(dsn: str, engine: EngineTwin, replica_id: str = "engine-1") -> "asyncio.Task[None]":
    """A replica as the deployment starts it."""
    reconciler = build_reconciler(dsn, engine, replica_id)
    await reconciler.prove_base()
    await reconciler.reconcile()
    task = asyncio.create_task(reconciler.run(0.05))
    for _ in range(100):
        await asyncio.sleep(0.05)
        with connect(dsn) as connection:
            if replica_id in live_replicas(connection, "base"):
                return task
    raise AssertionError("no heartbeat")


async def stop(*tasks: "asyncio.Task[None]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def an_alias_moves_only_after_every_live_replica_has_proven_the_checkpoint(dsn: str) -> None:
    register(dsn, build_checkpoint("good"))
    with connect(dsn) as connection, pytest.raises(CheckpointNotProven, match="no engine replica is live"):
        move_alias(connection, "flash", "good", "a test")
    tasks = [await start(dsn, EngineTwin()), await start(dsn, EngineTwin(deaf={"good"}), "engine-2")]
    with connect(dsn) as connection, pytest.raises(CheckpointNotProven, match="engine-2 refused"):
        move_alias(connection, "flash", "good", "a test")
    assert set(table(dsn).servable) == {"base"}
    await stop(tasks[1])
    with connect(dsn) as connection:
        connection.execute("delete from engine_replicas where replica_id = 'engine-2'")
        move_alias(connection, "flash", "good", "a test")
        move_alias(connection, "flash", "good", "again")
        assert resolve_alias(connection, "flash") == "good"
        moves = connection.execute("select reason, to_checkpoint_id from alias_moves").fetchall()
    assert moves == [{"reason": "a test", "to_checkpoint_id": "good"}]
    assert table(dsn).servable == {"base": "base", "good": "base"}
    await stop(tasks[0])


async def an_adapter_is_tried_once_and_the_reason_is_kept(dsn: str) -> None:
    engine = EngineTwin(deaf={"deaf"}, broken={"broken"})
    whole = build_checkpoint("x").manifest["canaries"]
    strange = {"canaries": [{**whole[0], "token_ids": [VOCABULARY + 1, *whole[0]["token_ids"][1:]]}, *whole[1:]]}
    register(
        dsn,
        build_checkpoint("good"),
        build_checkpoint("deaf"),
        build_checkpoint("broken"),
        build_checkpoint("mute", manifest={}),
        build_checkpoint("odd", manifest={"canaries": "yes"}),
        build_checkpoint("foreign-tongue", manifest=strange),
        build_checkpoint("short", manifest={"canaries": build_checkpoint("x").manifest["canaries"][:1]}),
        build_checkpoint("other", kind="model", parent_id=None),
        build_checkpoint("foreign", parent_id="other"),
    )
    task = await start(dsn, engine)
    assert engine.loaded == ["good"]
    with connect(dsn) as connection:
        found = {
            name: proofs(connection, name)
            for name in ("good", "deaf", "broken", "mute", "odd", "foreign-tongue", "short", "foreign")
        }
        late = build_checkpoint("late", parent_id="good")
        register_checkpoint(connection, late)
    assert {name: [one.status for one in tried] for name, tried in found.items()} == {
        "good": ["proven"],
        "deaf": ["refused"],
        "broken": ["refused"],
        "mute": ["refused"],
        "odd": ["refused"],
        "foreign-tongue": ["refused"],
        "short": ["refused"],
        "foreign": [],
    }
    assert "can't load" in found["broken"][0].proof["reason"]
    assert "no canaries" in found["mute"][0].proof["reason"]
    for _ in range(100):
        await asyncio.sleep(0.05)
        if "late" in table(dsn).servable:
            break
    assert engine.loaded == ["good", "late"]
    with connect(dsn) as connection:
        retire_checkpoint(connection, "late")
    for _ in range(100):
        await asyncio.sleep(0.05)
        if engine.loaded == ["good"]:
            break
    assert engine.loaded == ["good"]
    assert "late" not in table(dsn).active
    await stop(task)


async def a_proof_that_could_not_be_written_is_written_later(dsn: str) -> None:
    class CutOff(EngineTwin):
        """Loses the database's connections while it is being proven, as when PostgreSQL restarts."""

        async def log_probabilities(self, token_ids: list[list[int]], checkpoint_id: str | None) -> list[list[float]]:
            if checkpoint_id is not None:
                with connect(dsn, autocommit=True) as connection:
                    connection.execute(
                        "select pg_terminate_backend(pid) from pg_stat_activity"
                        " where datname = current_database() and pid <> pg_backend_pid()"
                    )
            return await super().log_probabilities(token_ids, checkpoint_id)

    register(dsn, build_checkpoint("good"))
    engine = CutOff()
    reconciler = build_reconciler(dsn, engine)
    await reconciler.prove_base()
    with pytest.raises(DatabaseUnreachable):
        await reconciler.reconcile()
    with connect(dsn) as connection:
        assert proofs(connection, "good") == []
    await reconciler.reconcile()
    assert engine.loaded == ["good"]
    with connect(dsn) as connection:
        assert [one.status for one in proofs(connection, "good")] == ["proven"]


async def an_engine_that_dies_is_sent_nothing_from_its_next_heartbeat_on(dsn: str) -> None:
    register(dsn)
    engine = EngineTwin()
    task = await start(dsn, engine)
    assert set(table(dsn).servable) == {"base"}
    engine.alive = False
    for _ in range(100):
        await asyncio.sleep(0.05)
        if not table(dsn).servable:
            break
    assert table(dsn).servable == {}
    await stop(task)


async def an_engine_that_fails_its_own_proof_never_becomes_live(dsn: str) -> None:
    register(dsn)
    with pytest.raises(EngineRefused, match="does not serve base"):
        await build_reconciler(dsn, EngineTwin(base_shift=1.0)).prove_base()
    with connect(dsn) as connection:
        assert live_replicas(connection, "base") == []
        assert [one.status for one in proofs(connection, "base")] == ["refused"]
    assert table(dsn).servable == {}


async def an_alias_and_a_checkpoint_never_share_a_name(dsn: str) -> None:
    register(dsn, build_checkpoint("good"))
    task = await start(dsn, EngineTwin())
    with connect(dsn) as connection:
        move_alias(connection, "flash", "base", "a test")
        with pytest.raises(CheckpointConflict, match="name of an alias"):
            register_checkpoint(connection, build_checkpoint("flash"))
        with pytest.raises(CheckpointConflict, match="id of a checkpoint"):
            move_alias(connection, "good", "base", "a test")
    await stop(task)


def a_checkpoint_id_means_one_content_for_ever(dsn: str) -> None:
    register(dsn, build_checkpoint("one"))
    register(dsn, build_checkpoint("one"))
    with connect(dsn) as connection:
        with pytest.raises(CheckpointConflict):
            register_checkpoint(connection, build_checkpoint("one", digest="other"))
        with pytest.raises(CheckpointUnknown):
            register_checkpoint(connection, build_checkpoint("two", parent_id="nobody"))
        with pytest.raises(CheckpointUnknown):
            get_checkpoint(connection, "two")
        assert [one.checkpoint_id for one in list_checkpoints(connection)] == ["base", "one"]


def a_secret_is_not_kept_and_a_revoked_key_is_unknown(dsn: str) -> None:
    with connect(dsn) as connection:
        key_id, secret = create_key(connection, "app", ["inference"])
        assert check(load_keys(connection), secret, "inference").key_id == key_id
        kept = connection.execute("select * from api_keys").fetchall()
        assert secret not in str(kept)
        assert revoke_key(connection, key_id)
        assert not revoke_key(connection, key_id)
        assert load_keys(connection) == {}
        with pytest.raises(ValueError, match="scopes"):
            create_key(connection, "app", ["everything"])
        for name in ("", "two\nlines", "\x1b[31mred"):
            with pytest.raises(ValueError, match="printable"):
                create_key(connection, name, ["inference"])


def a_held_connection_is_opened_again_after_it_broke(dsn: str) -> None:
    held = HeldConnection(dsn)

    def backend(connection: Connection) -> int:
        row = connection.execute("select pg_backend_pid() as pid").fetchone()
        assert row is not None
        return int(row["pid"])

    first = held.run(backend)
    assert held.run(backend) == first
    with connect(dsn, autocommit=True) as other:
        other.execute("select pg_terminate_backend(%s)", (first,))
    with pytest.raises(Exception, match="broke"):
        held.run(backend)
    assert held.run(backend) != first
    held.close()


async def a_model_of_its_own_is_served_by_its_own_engines_and_retires_with_its_adapters(dsn: str) -> None:
    register(
        dsn, build_checkpoint("other", kind="model", parent_id=None), build_checkpoint("foreign", parent_id="other")
    )
    task = await start(dsn, EngineTwin())
    assert table(dsn).servable == {"base": "base"}  # the other model has no engine, and is in nobody's way
    with connect(dsn) as connection:
        assert get_checkpoint(connection, "foreign").base_id == "other"
        assert [model.checkpoint_id for model in active_models(connection)] == ["base", "other"]
        with pytest.raises(CheckpointNotProven, match="no engine replica is live"):
            move_alias(connection, "flash", "foreign", "a test")
        retire_checkpoint(connection, "other")
        assert get_checkpoint(connection, "foreign").state == "retired"
        assert [model.checkpoint_id for model in active_models(connection)] == ["base"]
    await stop(task)


async def a_rollback_goes_back_and_a_running_experiment_forbids_it(dsn: str) -> None:
    register(dsn, build_checkpoint("good"))
    task = await start(dsn, EngineTwin())
    with connect(dsn, autocommit=True) as connection:
        move_alias(connection, "flash", "base", "first")
        with pytest.raises(CheckpointUnknown, match="nothing to go back to"):
            rollback(connection, "flash", "a test")
        promote(connection, "flash", "good", "better")
        told = describe(connection, "good")
        assert (told["servable"], told["settled"], told["aliases"], told["live_replicas"]) == (True, True, ["flash"], 1)
        assert told["proofs"][0]["sequences"]
        assert "canaries" not in told["manifest"]
        assert rollback(connection, "flash", "worse") == "base"
        assert rollback(connection, "flash", "not worse") == "good"
        start_experiment(connection, candidate_start("flash", "base", "good", 0.5))
        with pytest.raises(ExperimentConflict, match="runs on flash"):
            promote(connection, "flash", "base", "by hand")
    await stop(task)
