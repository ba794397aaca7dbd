"""The registry of experiments, in PostgreSQL: which checkpoints share an alias's traffic, and how.

An experiment owns a stretch of its namespace, so experiments of one namespace never share a unit; its arms divide
that stretch (serving/assignment.py). Guarantees: all experiments on an alias are in one namespace, so a request is in
at most one; a change of share or weights moves as few units as it can; every start, ramp and stop is kept.
Each function runs in the caller's transaction and does not commit. Gateways poll, so a change reaches them within
poll_interval_s.
"""

from datetime import datetime
from typing import Any

from psycopg.types.json import Jsonb

from feedback.events import uuid7
from serving.assignment import NOBODY, Allocation, allocate, share_of
from serving.errors import CheckpointNotProven, ExperimentConflict, ExperimentInvalid, ExperimentUnknown
from serving.experiment_plan import MOVES, Arm, Experiment, Namespace, Start, State, Unit, normalised
from serving.registry import get_checkpoint, require_proven, resolve_alias
from storage.postgres import Connection, storable_json


def start_experiment(connection: Connection, start: Start, *, timeout_s: float | None = None) -> Experiment:
    """Begin an experiment.

    timeout_s: live engines (with a heartbeat not older) must have proven the arms; null: the caller knows. Raises
    CheckpointUnknown (alias, checkpoint), CheckpointNotProven (retired, or not proven by a live engine),
    ExperimentConflict (no room in the namespace, another unit there, or the alias has experiments in another one).
    """
    resolve_alias(connection, start.alias)
    for checkpoint in [get_checkpoint(connection, arm.checkpoint_id) for arm in start.arms]:
        if checkpoint.state != "active":
            raise CheckpointNotProven(f"{checkpoint.checkpoint_id} is retired")
        if timeout_s is not None:
            require_proven(connection, checkpoint.checkpoint_id, timeout_s)
    experiment_id, namespace = f"exp-{uuid7().hex}", start.namespace or start.alias
    _settle(connection, namespace, start.unit)
    _stay_in_one_namespace(connection, start.alias, namespace)
    arms = normalised(start.arms)
    weights = {arm.name: arm.weight for arm in arms}
    connection.execute(
        "insert into experiments (experiment_id, alias, namespace, salt, share, allocation, plan) "
        "values (%s, %s, %s, %s, %s, %s, %s)",
        (
            experiment_id,
            start.alias,
            namespace,
            uuid7().hex,
            start.share,
            Jsonb(allocate(weights)),
            storable_json(start.plan.model_dump(mode="json")),
        ),
    )
    for position, arm in enumerate(arms):
        connection.execute(
            "insert into experiment_arms (experiment_id, position, name, checkpoint_id, weight) "
            "values (%s, %s, %s, %s, %s)",
            (experiment_id, position, arm.name, arm.checkpoint_id, arm.weight),
        )
    _take(connection, namespace, experiment_id, start.share)
    _tell(connection, experiment_id, "started", {"share": start.share, "weights": weights})
    return get_experiment(connection, experiment_id)


def ramp_experiment(
    connection: Connection, experiment_id: str, *, weights: dict[str, float] | None = None, share: float | None = None
) -> Experiment:
    """Change the weights of the arms, or the share of the traffic; only the units that must move do.

    weights: arm → weight, for all arms, together 1. Raises ExperimentUnknown, ExperimentConflict (ended, or no room),
    ExperimentInvalid (wrong arms or numbers).
    """
    experiment = _running(connection, experiment_id)
    if weights is not None:
        arms = _weighted(experiment, weights)
        for arm in arms:
            connection.execute(
                "update experiment_arms set weight = %s where experiment_id = %s and name = %s",
                (arm.weight, experiment_id, arm.name),
            )
        connection.execute(
            "update experiments set allocation = %s where experiment_id = %s",
            (Jsonb(allocate({arm.name: arm.weight for arm in arms}, experiment.allocation)), experiment_id),
        )
    if share is not None:
        if not 0 <= share <= 1:
            raise ExperimentInvalid(f"a share lies between 0 and 1, not {share:g}")
        _settle(connection, experiment.namespace, experiment.plan.unit)
        _take(connection, experiment.namespace, experiment_id, share)
        connection.execute("update experiments set share = %s where experiment_id = %s", (share, experiment_id))
    if weights is not None or share is not None:
        _tell(connection, experiment_id, "ramped", {"share": share, "weights": weights})
    return get_experiment(connection, experiment_id)


def stop_experiment(connection: Connection, experiment_id: str, state: State, report: dict[str, Any]) -> None:
    """End a running experiment; harmless when it ended in the same state.

    Raises ExperimentUnknown, ExperimentConflict when it ended in another.
    """
    found = get_experiment(connection, experiment_id, lock=True)
    if found.state == state != "running":
        return
    if state not in MOVES[found.state]:
        raise ExperimentConflict(f"experiment {experiment_id} is {found.state}, so it can't become {state}")
    connection.execute(
        "update experiments set state = %s, report = %s, stopped_at = now() where experiment_id = %s",
        (state, Jsonb(report), experiment_id),
    )
    _settle(connection, found.namespace, found.plan.unit)
    _take(connection, found.namespace, experiment_id, 0.0)
    _tell(connection, experiment_id, "stopped", {"state": state, "reason": report.get("reason", "")})


def get_experiment(connection: Connection, experiment_id: str, *, lock: bool = False) -> Experiment:
    """One experiment; `lock` keeps others from changing it until the transaction ends. Raises ExperimentUnknown."""
    if lock:
        connection.execute("select 1 from experiments where experiment_id = %s for update", (experiment_id,))
    row = connection.execute(f"{_SELECT} where experiment_id = %s", (experiment_id,)).fetchone()
    if row is None:
        raise ExperimentUnknown(f"no experiment is called {experiment_id}")
    return Experiment(**row)


def list_experiments(
    connection: Connection, *, alias: str | None = None, state: State | None = None
) -> list[Experiment]:
    """All experiments, oldest first; `alias` and `state` narrow them down."""
    rows = connection.execute(
        f"{_SELECT} where (%(alias)s::text is null or alias = %(alias)s) "
        "and (%(state)s::text is null or state = %(state)s) order by started_at, experiment_id",
        {"alias": alias, "state": state},
    )
    return [Experiment(**row) for row in rows]


def list_namespaces(connection: Connection) -> list[Namespace]:
    """All namespaces that have, or had, experiments."""
    return [Namespace(**row) for row in connection.execute("select * from experiment_namespaces order by 1")]


def changes(connection: Connection, experiment_id: str) -> list[dict[str, Any]]:
    """What was done to the experiment, oldest first: kind, detail, changed_at."""
    rows = connection.execute(
        "select kind, detail, changed_at from experiment_changes where experiment_id = %s order by change_id",
        (experiment_id,),
    )
    return rows.fetchall()


def want_report(connection: Connection, experiment_id: str) -> datetime:
    """Ask for a report; returns the time since when. Raises ExperimentUnknown."""
    get_experiment(connection, experiment_id)
    row = connection.execute(
        "insert into experiment_reports (experiment_id, wanted_at) values (%s, now()) "
        "on conflict (experiment_id) do update set wanted_at = now() returning wanted_at",
        (experiment_id,),
    ).fetchone()
    assert row is not None
    wanted: datetime = row["wanted_at"]
    return wanted


def report_since(connection: Connection, experiment_id: str, wanted_at: datetime) -> dict[str, Any] | None:
    """The report, if it was begun since then."""
    row = connection.execute(
        "select report from experiment_reports where experiment_id = %s and begun_at >= %s", (experiment_id, wanted_at)
    ).fetchone()
    return None if row is None else dict(row["report"])


_ROUNDING = 1e-9
_SELECT = """
select experiment_id, alias, namespace, salt, share, allocation, plan, state, report, started_at, stopped_at, (
        select jsonb_agg(jsonb_build_object('name', name, 'checkpoint_id', checkpoint_id, 'weight', weight)
            order by position)
        from experiment_arms arm where arm.experiment_id = experiments.experiment_id
    ) as arms
from experiments
"""


def _running(connection: Connection, experiment_id: str) -> Experiment:
    experiment = get_experiment(connection, experiment_id, lock=True)
    if experiment.state != "running":
        raise ExperimentConflict(f"experiment {experiment_id} is {experiment.state}, so it can't be changed")
    return experiment


def _weighted(experiment: Experiment, weights: dict[str, float]) -> tuple[Arm, ...]:
    if weights.keys() != {arm.name for arm in experiment.arms}:
        names = ", ".join(arm.name for arm in experiment.arms)
        raise ExperimentInvalid(f"give a weight for each arm: {names}")
    try:
        return normalised(tuple(Arm(**{**arm.model_dump(), "weight": weights[arm.name]}) for arm in experiment.arms))
    except ValueError as error:
        raise ExperimentInvalid(f"weights lie between 0 and 1 and add up to 1: {weights}") from error


def _settle(connection: Connection, namespace: str, unit: Unit) -> None:
    """Make sure of the namespace, and hold it until the transaction ends. Raises ExperimentConflict: another unit."""
    connection.execute(
        "insert into experiment_namespaces (namespace, unit, allocation) values (%s, %s, %s) "
        "on conflict (namespace) do nothing",
        (namespace, unit, Jsonb(NOBODY)),
    )
    row = _namespace(connection, namespace, lock=True)
    if row.unit == unit:
        return
    if share_of(row.allocation, None) < 1:
        raise ExperimentConflict(
            f"the namespace {namespace} is divided by {row.unit}, so an experiment by {unit} needs one of its own"
        )
    connection.execute("update experiment_namespaces set unit = %s where namespace = %s", (unit, namespace))


def _stay_in_one_namespace(connection: Connection, alias: str, namespace: str) -> None:
    for other in list_experiments(connection, alias=alias, state="running"):
        if other.namespace != namespace:
            raise ExperimentConflict(
                f"{alias} has experiment {other.experiment_id} in the namespace {other.namespace}: use the same one, "
                "or a request would be in two"
            )


def _take(connection: Connection, namespace: str, experiment_id: str, share: float) -> None:
    """Give the experiment so much of the namespace. Raises ExperimentConflict when others need the room."""
    row = _namespace(connection, namespace, lock=False)
    shares = {owner: share_of(row.allocation, owner) for owner in _owners(row.allocation)}
    shares[experiment_id] = share
    if sum(shares.values()) > 1 + _ROUNDING:
        free = 1 - sum(part for owner, part in shares.items() if owner != experiment_id)
        others = ", ".join(owner for owner in shares if owner != experiment_id)
        raise ExperimentConflict(
            f"{share:.0%} of {namespace} is asked for and {max(0.0, free):.0%} is free: {others} has the rest"
        )
    connection.execute(
        "update experiment_namespaces set allocation = %s where namespace = %s",
        (Jsonb(allocate(shares, row.allocation)), namespace),
    )


def _namespace(connection: Connection, namespace: str, *, lock: bool) -> Namespace:
    row = connection.execute(
        "select * from experiment_namespaces where namespace = %s" + (" for update" if lock else ""), (namespace,)
    ).fetchone()
    assert row is not None, "the namespace was made sure of"
    return Namespace(**row)


def _owners(allocation: Allocation) -> list[str]:
    return sorted({owner for _, owner in allocation if owner is not None})


def _tell(connection: Connection, experiment_id: str, kind: str, detail: dict[str, Any]) -> None:
    connection.execute(
        "insert into experiment_changes (experiment_id, kind, detail) values (%s, %s, %s)",
        (experiment_id, kind, storable_json(detail)),
    )
