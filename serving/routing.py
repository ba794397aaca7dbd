"""What a gateway must know to answer: keys, aliases, experiments, and which checkpoints are proven.

A background thread reads PostgreSQL every poll_interval_s and swaps in a new immutable `RoutingTable`, so
no request waits for the database. Guarantees: a checkpoint gets traffic only while every live engine
replica has proven it. If the database is away, the last table stays in force.
"""

import asyncio
import logging
import threading
import time
from dataclasses import dataclass, field
from functools import cached_property

from serving.assignment import assign
from serving.database import HeldConnection
from serving.errors import NotFound, Overloaded
from serving.keys import ApiKey, load_keys
from serving.registry import Experiment
from serving.settings import ServingSettings
from storage.errors import DatabaseUnreachable
from storage.postgres import Connection

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Route:
    """Where one request goes, and why. propensity: probability of this checkpoint for the unit, or null.

    base_id: the model whose engines serve the checkpoint.
    """

    checkpoint_id: str
    base_id: str
    alias: str | None = None
    pinned: bool = False
    experiment_id: str | None = None
    unit: str | None = None
    propensity: float | None = None


@dataclass(frozen=True)
class RoutingTable:
    """One reading of the registry. servable: active and proven on every live replica of its model, which it names."""

    keys: dict[str, ApiKey] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    experiments: dict[str, Experiment] = field(default_factory=dict)
    active: dict[str, int] = field(default_factory=dict)  # checkpoint id → Unix time of its registration
    servable: dict[str, str] = field(default_factory=dict)  # checkpoint id → id of the model under it

    @cached_property
    def digests(self) -> dict[str, str]:
        """The digest of each live key, by its id."""
        return {key.key_id: digest for digest, key in self.keys.items()}

    def route(self, model: str, unit: str) -> Route:
        """Where `unit`'s request for `model` goes. Raises NotFound (unknown name), Overloaded (not ready)."""
        if model in self.aliases:
            experiment = self._experiment(model)
            if experiment is None:
                return Route(*self._ready(self.aliases[model]), alias=model, unit=unit)
            arm, propensity = assign(experiment.salt, unit, experiment.candidate_weight)
            checkpoint_id = experiment.candidate_id if arm == "candidate" else experiment.control_id
            return Route(
                *self._ready(checkpoint_id),
                alias=model,
                experiment_id=experiment.experiment_id,
                unit=unit,
                propensity=propensity,
            )
        if model in self.active:
            return Route(*self._ready(model), pinned=True, unit=unit)
        raise NotFound(f"The model `{model}` does not exist.", param="model", code="model_not_found")

    def pair(self, model: str, unit: str) -> tuple[Route, Route]:
        """The two routes of a comparison on `model`: both arms of the running experiment, else one checkpoint twice.

        The arms are forced, so their propensity is null.
        """
        experiment = self._experiment(model)
        if experiment is None:
            route = self.route(model, unit)
            return route, route
        first, second = (
            Route(*self._ready(checkpoint_id), alias=model, experiment_id=experiment.experiment_id, unit=unit)
            for checkpoint_id in (experiment.control_id, experiment.candidate_id)
        )
        return first, second

    def _experiment(self, alias: str) -> Experiment | None:
        """The running experiment, if both its arms can be served; else the alias's own checkpoint answers."""
        experiment = self.experiments.get(alias)
        if experiment is None or not {experiment.control_id, experiment.candidate_id} <= self.servable.keys():
            return None
        return experiment

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
    experiments = connection.execute("select * from experiments where state = 'running'").fetchall()
    aliases = connection.execute("select alias, checkpoint_id from aliases").fetchall()
    return RoutingTable(
        keys=load_keys(connection),
        aliases={row["alias"]: row["checkpoint_id"] for row in aliases},
        experiments={row["alias"]: Experiment(**row) for row in experiments},
        active={row["checkpoint_id"]: int(row["created"]) for row in active},
        servable={row["checkpoint_id"]: row["base_id"] for row in servable},
    )


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
