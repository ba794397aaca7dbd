"""An experiment in a store, with answers and votes as they would have come through the ledger."""

from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np

from feedback.events import AnyEvent, Interaction
from serving.assignment import assign
from serving.experiment_plan import Experiment, candidate_start
from serving.experiments import get_experiment, start_experiment
from serving.registry import Checkpoint, register_checkpoint
from storage.postgres import Connection
from tests.helpers.events_built import build_interaction, build_thumb


def register(connection: Connection, *names: str) -> None:
    """The model `base`, under the alias `flash`, and adapters of these names."""
    for name, kind, parent in (("base", "model", None), *((name, "adapter", "base") for name in names)):
        register_checkpoint(
            connection,
            Checkpoint(checkpoint_id=name, kind=kind, parent_id=parent, digest=name, path="/x", manifest={}),
        )
    connection.execute(
        "insert into aliases (alias, checkpoint_id) values ('flash', 'base') on conflict (alias) do nothing"
    )


def start(connection: Connection, weight: float = 0.5, candidate: str = "new", **plan: Any) -> Experiment:
    """A running test of the candidate against `base`, begun an hour ago; its salt, and so who is in which arm, is
    always the same.
    """
    started = start_experiment(connection, candidate_start("flash", "base", candidate, weight, **plan))
    connection.execute("update experiments set salt = 'salt'")
    for table, column in (("experiments", "started_at"), ("experiment_changes", "changed_at")):
        connection.execute(f"update {table} set {column} = now() - interval '1 hour'")
    return get_experiment(connection, started.experiment_id)


def shown(experiment: Experiment, unit: str, at: float = 0.0, **overrides: Any) -> Interaction:
    """An answer that the experiment showed to the unit, `at` seconds after an hour ago."""
    arm = experiment.arm(str(assign(experiment.allocation, experiment.salt, unit)))
    time = datetime.now(UTC) - timedelta(seconds=3500 - at)
    values: dict[str, Any] = {
        "experiment_id": experiment.experiment_id,
        "checkpoint_id": arm.checkpoint_id,
        "arm": arm.name,
        "propensity": arm.weight,
        "unit": unit,
        "user": unit,
        "exposed_at": time,
        "time": time,
        "time_to_first_token_s": 0.2,
    }
    return build_interaction(**(values | overrides))


def thumb_on(answer: Interaction, up: bool, *, after_s: float = 1.0, **overrides: Any) -> AnyEvent:
    """A thumb of the answer's user."""
    assert answer.exposed_at is not None
    values: dict[str, Any] = {
        "value": "up" if up else "down",
        "rater": answer.user or "somebody",
        "time": answer.exposed_at + timedelta(seconds=after_s),
    }
    return build_thumb(answer.response_id, **(values | overrides))


def crowd(experiment: Experiment, count: int, control: float, candidate: float, seed: int = 1) -> list[AnyEvent]:
    """So many units with one answer and one thumb each; the numbers are the shares of ups."""
    generator = np.random.default_rng(seed)
    events: list[AnyEvent] = []
    for number in range(count):
        answer = shown(experiment, f"user-{number}", number * 0.1)
        share = candidate if answer.arm == "candidate" else control
        events += [answer, thumb_on(answer, bool(generator.random() < share))]
    return events
