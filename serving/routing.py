"""What a gateway must know to answer: keys, aliases, experiments, and which checkpoints are proven.

A background thread reads PostgreSQL every poll_interval_s and swaps in a new immutable `RoutingTable`, so
no request waits for the database. Guarantees: a checkpoint gets traffic only while every live engine
replica has proven it. If the database is away, the last table stays in force.
"""

import asyncio
import itertools
import logging
import threading
import time
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from serving.assignment import SPACE, assign, point_of
from serving.database import HeldConnection
from serving.errors import NotFound, Overloaded
from serving.experiment_plan import Arm, Experiment, Namespace, Unit
from serving.experiments import list_experiments, list_namespaces
from serving.keys import ApiKey, load_keys
from serving.settings import ServingSettings
from storage.errors import DatabaseUnreachable
from storage.postgres import Connection

log = logging.getLogger(__name__)


class Units(NamedTuple):
    """What a request could be assigned by."""

    user: str | None
    session_id: str | None
    response_id: str

    def of(self, kind: Unit) -> str:
        """The unit of that kind; where there is none, the next smaller one."""
        if kind == "user" and self.user:
            return self.user
        if kind != "response" and self.session_id:
            return self.session_id
        return self.response_id


@dataclass(frozen=True)
class Route:
    """Where one request goes, and why.

    base_id: the model whose engines serve the checkpoint. propensity: the probability of this arm for the unit; null
    when nothing was drawn. fallback: the arm's own checkpoint could not be served, so the alias's answers in its place.
    """

    checkpoint_id: str
    base_id: str
    alias: str | None = None
    pinned: bool = False
    experiment_id: str | None = None
    arm: str | None = None
    fallback: bool = False
    unit: str | None = None
    propensity: float | None = None


@dataclass(frozen=True)
class RoutingTable:
    """One reading of the registry. servable: active and proven on every live replica of its model, which it names."""

    keys: dict[str, ApiKey] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    experiments: dict[str, Experiment] = field(default_factory=dict)  # the running ones, by id
    namespaces: dict[str, Namespace] = field(default_factory=dict)
    active: dict[str, int] = field(default_factory=dict)  # checkpoint id → Unix time of its registration
    servable: dict[str, str] = field(default_factory=dict)  # checkpoint id → id of the model under it

    @cached_property
    def digests(self) -> dict[str, str]:
        """The digest of each live key, by its id."""
        return {key.key_id: digest for digest, key in self.keys.items()}

    @cached_property
    def _namespace_of(self) -> dict[str, Namespace]:
        """The namespace of each alias on which an experiment runs."""
        return {one.alias: self.namespaces[one.namespace] for one in self.experiments.values()}

    def route(self, model: str, units: Units) -> Route:
        """Where a request for `model` goes. Raises NotFound (unknown name), Overloaded (not ready)."""
        if model in self.aliases:
            experiment, unit = self.experiment_of(model, units)
            if experiment is None:
                return Route(*self._ready(self.aliases[model]), alias=model, unit=unit)
            tested = experiment.plan.testers.get(unit)
            arm = experiment.arm(tested or _assigned(experiment, unit))
            return self._arm_route(experiment, arm, unit, None if tested else arm.weight)
        if model in self.active:
            return Route(*self._ready(model), pinned=True, unit=units.of("user"))
        raise NotFound(f"The model `{model}` does not exist.", param="model", code="model_not_found")

    def pair(self, model: str, units: Units) -> tuple[Route, Route]:
        """The two routes of a comparison on `model`: two arms of the unit's experiment, else one checkpoint twice.

        Of more than two arms each pair is as likely as another. The arms are forced, so their propensity is null. An
        arm that can't be served is not compared with itself: then it is one checkpoint twice, too.
        """
        if model in self.aliases:
            experiment, unit = self.experiment_of(model, units)
            if experiment is not None:
                pairs = list(itertools.combinations(experiment.arms, 2))
                drawn = pairs[point_of(f"pair:{experiment.salt}", units.response_id) * len(pairs) // SPACE]
                if all(arm.checkpoint_id in self.servable for arm in drawn):
                    first, second = (self._arm_route(experiment, arm, unit, None) for arm in drawn)
                    return first, second
            route = Route(*self._ready(self.aliases[model]), alias=model, unit=unit)
        else:
            route = self.route(model, units)
        return route, route

    def experiment_of(self, alias: str, units: Units) -> tuple[Experiment | None, str]:
        """The experiment on the alias that the request is in, if any, and its unit."""
        namespace = self._namespace_of.get(alias)
        if namespace is None:
            return None, units.of("user")
        unit = units.of(namespace.unit)
        owner = assign(namespace.allocation, f"namespace:{namespace.namespace}", unit)
        experiment = self.experiments.get(owner or "")
        return (experiment if experiment is not None and experiment.alias == alias else None), unit

    def shadowing(self, alias: str) -> list[Experiment]:
        """The experiments whose candidates answer a share of the alias's prompts unseen."""
        return [one for one in self.experiments.values() if one.alias == alias and one.plan.shadow_share]

    def _arm_route(self, experiment: Experiment, arm: Arm, unit: str, propensity: float | None) -> Route:
        """To the arm's checkpoint, or to the alias's when that can't be served: the unit stays in its arm."""
        fallback = arm.checkpoint_id not in self.servable
        checkpoint_id = self.aliases[experiment.alias] if fallback else arm.checkpoint_id
        return Route(
            *self._ready(checkpoint_id),
            alias=experiment.alias,
            experiment_id=experiment.experiment_id,
            arm=arm.name,
            fallback=fallback,
            unit=unit,
            propensity=propensity,
        )

    def _ready(self, checkpoint_id: str) -> tuple[str, str]:
        """The checkpoint and the model under it."""
        if checkpoint_id not in self.servable:
            raise Overloaded(
                f"No engine serves `{checkpoint_id}` at the moment.", code="model_not_ready", retry_after_s=2
            )
        return checkpoint_id, self.servable[checkpoint_id]


def read_table(connection: Connection, replica_timeout_s: float) -> RoutingTable:
    """Read the registry once, all of it as of one moment. `connection` must be at the start of a transaction."""
    connection.execute("set transaction isolation level repeatable read, read only")
    active = connection.execute(
        "select checkpoint_id, extract(epoch from created_at)::bigint as created from checkpoints "
        "where state = 'active'"
    ).fetchall()
    servable = connection.execute(
        "select wanted.checkpoint_id, wanted.base_id from checkpoints wanted "
        "join engine_replicas live on live.base_checkpoint_id = wanted.base_id "
        "    and live.heartbeat_at > now() - make_interval(secs => %s) "
        "left join checkpoint_replicas proof on proof.checkpoint_id = wanted.checkpoint_id "
        "    and proof.replica_id = live.replica_id and proof.status = 'proven' "
        "where wanted.state = 'active' "
        "group by wanted.checkpoint_id, wanted.base_id having count(*) = count(proof.replica_id)",
        (replica_timeout_s,),
    ).fetchall()
    experiments = list_experiments(connection, state="running")
    aliases = connection.execute("select alias, checkpoint_id from aliases").fetchall()
    return RoutingTable(
        keys=load_keys(connection),
        aliases={row["alias"]: row["checkpoint_id"] for row in aliases},
        experiments={experiment.experiment_id: experiment for experiment in experiments},
        namespaces={row.namespace: row for row in list_namespaces(connection)},
        active={row["checkpoint_id"]: int(row["created"]) for row in active},
        servable={row["checkpoint_id"]: row["base_id"] for row in servable},
    )


def _assigned(experiment: Experiment, unit: str) -> str:
    owner = assign(experiment.allocation, experiment.salt, unit)
    assert owner is not None, "the arms own the whole line"
    return owner


class Router:
    """Keeps the newest table in `table`."""

    def __init__(self, dsn: str, settings: ServingSettings) -> None:
        self._settings = settings
        self._database = HeldConnection(dsn)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="routing", daemon=True)
        self.table = RoutingTable()
        self.reads = 0
        self.read_at = 0.0  # monotonic seconds of the last good reading

    def start(self) -> None:
        """Read once (raises DatabaseUnreachable), then go on in the background."""
        self._read()
        self._thread.start()

    async def fresh(self) -> RoutingTable:
        """A table whose reading began after this call, or the newest one after two poll intervals.

        For what is not in the table: a key or checkpoint that was made a moment ago.
        """
        wanted = self.reads + 2  # the next reading may have begun already
        for _ in range(4):
            await asyncio.sleep(self._settings.poll_interval_s / 2)
            if self.reads >= wanted:
                break
        return self.table

    def check(self) -> None:
        """Raises RuntimeError when the polling has died."""
        if not self._thread.is_alive():
            raise RuntimeError("the routing table is no longer read")

    def close(self) -> None:
        """Stop polling."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        self._database.close()

    def _read(self) -> None:
        self.table = self._database.run(lambda c: read_table(c, self._settings.replica_timeout_s))
        self.reads += 1
        self.read_at = time.monotonic()

    def _poll(self) -> None:
        while not self._stop.wait(self._settings.poll_interval_s):
            try:
                self._read()
            except DatabaseUnreachable as error:
                log.warning("routing goes on with the last reading: %s", error)
