"""Laws of the registry of experiments, on a real PostgreSQL."""

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from serving.assignment import share_of
from serving.errors import (
    CheckpointNotProven,
    CheckpointUnknown,
    Conflict,
    ExperimentConflict,
    ExperimentInvalid,
    ExperimentUnknown,
    InvalidRequest,
    NotFound,
    Overloaded,
)
from serving.experiment_plan import Arm, Start, candidate_start
from serving.experiment_store import ExperimentStore
from serving.experiments import (
    changes,
    get_experiment,
    list_experiments,
    list_namespaces,
    ramp_experiment,
    start_experiment,
    stop_experiment,
)
from serving.registry import Checkpoint, register_checkpoint, retire_checkpoint
from serving.routing import RoutingTable, Units, read_table
from storage.postgres import Connection, connect

pytestmark = pytest.mark.real
HALF = candidate_start("flash", "base", "one", 0.5)


@pytest.fixture
def connection(dsn: str) -> Iterator[Connection]:
    with connect(dsn, autocommit=True) as opened:
        for name, kind, parent in (("base", "model", None), ("one", "adapter", "base"), ("two", "adapter", "base")):
            register_checkpoint(
                opened,
                Checkpoint(checkpoint_id=name, kind=kind, parent_id=parent, digest=name, path="/x", manifest={}),
            )
        for alias in ("flash", "canary"):
            opened.execute("insert into aliases (alias, checkpoint_id) values (%s, 'base')", (alias,))
        yield opened


def table(dsn: str) -> RoutingTable:
    """The routing table as a gateway reads it, with everything servable."""
    with connect(dsn) as connection:
        read = read_table(connection, 15)
    return RoutingTable(**{**vars(read), "servable": dict.fromkeys(("base", "one", "two"), "base")})


def arms_of(table: RoutingTable, count: int = 4000) -> dict[str, str | None]:
    routes = {f"u{number}": table.route("flash", Units(f"u{number}", None, "r")) for number in range(count)}
    return {unit: f"{route.experiment_id}/{route.arm}" if route.arm else None for unit, route in routes.items()}


def a_gateway_follows_start_ramp_and_stop_and_moves_few_units(connection: Connection, dsn: str) -> None:
    assert set(arms_of(table(dsn)).values()) == {None}
    started = start_experiment(connection, candidate_start("flash", "base", "one", 0.2, share=0.5))
    first = arms_of(table(dsn))
    in_it = [arm for arm in first.values() if arm]
    assert abs(len(in_it) / len(first) - 0.5) < 0.045
    assert abs(sum(arm.endswith("candidate") for arm in in_it) / len(in_it) - 0.2) < 0.05
    ramped = ramp_experiment(connection, started.experiment_id, weights={"control": 0.4, "candidate": 0.6})
    assert [arm.weight for arm in ramped.arms] == [0.4, 0.6]
    second = arms_of(table(dsn))
    moved = Counter((first[unit], second[unit]) for unit in first if first[unit] != second[unit])
    assert set(moved) == {(f"{started.experiment_id}/control", f"{started.experiment_id}/candidate")}
    assert abs(moved.total() / len(in_it) - 0.4) < 0.06
    ramp_experiment(connection, started.experiment_id, share=0.8)
    third = arms_of(table(dsn))
    assert all(third[unit] == arm for unit, arm in second.items() if arm)
    stop_experiment(connection, started.experiment_id, "stopped", {"reason": "enough"})
    assert set(arms_of(table(dsn)).values()) == {None}
    kinds = [(row["kind"], row["detail"].get("share")) for row in changes(connection, started.experiment_id)]
    assert kinds == [("started", 0.5), ("ramped", None), ("ramped", 0.8), ("stopped", None)]


def two_experiments_share_an_alias_until_the_room_is_used_up(connection: Connection, dsn: str) -> None:
    first = start_experiment(connection, candidate_start("flash", "base", "one", 0.5, share=0.6))
    with pytest.raises(ExperimentConflict, match="40% is free"):
        start_experiment(connection, candidate_start("flash", "base", "two", 0.5, share=0.5))
    second = start_experiment(connection, candidate_start("flash", "base", "two", 0.5, share=0.4))
    seen = Counter(str(arm).split("/")[0] for arm in arms_of(table(dsn)).values())
    assert set(seen) == {first.experiment_id, second.experiment_id}
    with pytest.raises(ExperimentConflict, match="is free"):
        ramp_experiment(connection, first.experiment_id, share=0.7)
    stop_experiment(connection, second.experiment_id, "stopped", {})
    assert ramp_experiment(connection, first.experiment_id, share=1).share == 1
    (namespace,) = list_namespaces(connection)
    assert share_of(namespace.allocation, first.experiment_id) == 1


def a_refused_start_leaves_nothing_behind(connection: Connection) -> None:
    start_experiment(connection, HALF)
    before = list_experiments(connection)
    for wrong in (
        candidate_start("flash", "base", "two", 0.5),
        candidate_start("flash", "base", "two", 0.5, namespace="elsewhere"),
        candidate_start("canary", "base", "two", 0.5, namespace="flash", unit="response"),
    ):
        with pytest.raises(ExperimentConflict), connection.transaction():
            start_experiment(connection, wrong)
    with pytest.raises(CheckpointUnknown), connection.transaction():
        start_experiment(connection, candidate_start("flash", "base", "nobody", 0.5))
    with pytest.raises(CheckpointUnknown), connection.transaction():
        start_experiment(connection, candidate_start("nobody", "base", "one", 0.5))
    with pytest.raises(CheckpointNotProven), connection.transaction():
        start_experiment(connection, candidate_start("canary", "base", "two", 0.5), timeout_s=15)
    assert list_experiments(connection) == before


def an_experiment_ends_once(connection: Connection) -> None:
    started = start_experiment(connection, HALF)
    with pytest.raises(ExperimentConflict, match="serves the alias"):
        retire_checkpoint(connection, "one")
    for _ in range(2):
        stop_experiment(connection, started.experiment_id, "rejected", {"reason": "worse"})
    with pytest.raises(ExperimentConflict, match="is rejected"):
        stop_experiment(connection, started.experiment_id, "promoted", {})
    with pytest.raises(ExperimentConflict, match="is rejected"):
        ramp_experiment(connection, started.experiment_id, share=0.1)
    with pytest.raises(ExperimentUnknown):
        get_experiment(connection, "exp-none")
    assert start_experiment(connection, HALF).salt != started.salt


@pytest.mark.parametrize(
    "weights",
    [{"control": 1.0}, {"control": 0.5, "candidate": 0.2}, {"control": -1, "candidate": 2}, {"a": 0.5, "b": 0.5}],
)
def bad_weights_are_refused(weights: dict[str, float], connection: Connection) -> None:
    started = start_experiment(connection, HALF)
    with pytest.raises(ExperimentInvalid):
        ramp_experiment(connection, started.experiment_id, weights=weights)


def one_of_many_who_start_at_once_gets_the_room(connection: Connection, dsn: str) -> None:
    outcomes: list[str] = []

    def begin() -> None:
        try:
            with connect(dsn) as mine:
                start_experiment(mine, HALF)
        except ExperimentConflict:
            outcomes.append("refused")
        else:
            outcomes.append("started")

    threads = [threading.Thread(target=begin) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert Counter(outcomes) == {"started": 1, "refused": 7}


def a_weight_written_in_thirds_is_made_whole(connection: Connection) -> None:
    arms = tuple(
        Arm(name=name, checkpoint_id=checkpoint, weight=0.333)
        for name, checkpoint in (("control", "base"), ("one", "one"), ("two", "two"))
    )
    started = start_experiment(connection, Start(alias="flash", arms=arms))
    assert sum(arm.weight for arm in started.arms) == pytest.approx(1, abs=1e-12)
    assert share_of(started.allocation, "two") == pytest.approx(1 / 3, abs=1e-9)


async def the_api_turns_refusals_into_errors_that_name_the_remedy(connection: Connection, dsn: str) -> None:
    store = ExperimentStore(dsn, 15, report_timeout_s=0.3)
    started = start_experiment(connection, HALF)
    for call, error in (
        (store.start(candidate_start("canary", "base", "two", 0.5)), Conflict),
        (store.start(candidate_start("canary", "base", "nobody", 0.5)), InvalidRequest),
        (store.get("exp-none"), NotFound),
        (store.ramp(started.experiment_id, {"control": 1.0}, None), InvalidRequest),
        (store.report(started.experiment_id), Overloaded),
    ):
        with pytest.raises(error):
            await call
    answers: list[Any] = await asyncio.gather(
        store.stop(started.experiment_id, "enough"), store.list("flash", None), store.changes(started.experiment_id)
    )
    assert answers[0].state == "stopped"
    assert [one.experiment_id for one in answers[1]] == [started.experiment_id]
    store.close()
