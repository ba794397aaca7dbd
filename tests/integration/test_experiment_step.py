"""Laws of the experiment's step on a real database: decided once, by votes that count, and never waiting for ever."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from feedback.events import AnyEvent
from reward.settings import RewardSettings
from rounds.experiments import tally
from rounds.settings import ExperimentSettings, RoundsSettings
from rounds.steps import Workbench, experiment
from rounds.store import Round
from serving.experiment_plan import candidate_start
from serving.experiments import get_experiment, list_experiments, start_experiment, stop_experiment
from serving.registry import (
    Checkpoint,
    get_checkpoint,
    register_checkpoint,
)
from storage.postgres import Connection, connect
from tests.helpers.events_built import build_comparison, build_preference
from tests.helpers.experiments import shown
from tests.helpers.ledger import insert

pytestmark = pytest.mark.real

SETTINGS = ExperimentSettings(minimum_votes=6, maximum_votes=40)


@pytest.fixture
def connection(dsn: str) -> Iterator[Connection]:
    with connect(dsn, autocommit=True) as opened:
        for name, kind, parent in (("base", "model", None), ("new", "adapter", "base")):
            register_checkpoint(
                opened,
                Checkpoint(checkpoint_id=name, kind=kind, parent_id=parent, digest=name, path="/x", manifest={}),
            )
        opened.execute("insert into aliases (alias, checkpoint_id) values ('flash', 'base')")
        yield opened


@pytest.fixture
def experiment_id(connection: Connection) -> str:
    return start_experiment(connection, candidate_start("flash", "base", "new", 0.5)).experiment_id


def bench(connection: Connection, dsn: str, settings: ExperimentSettings = SETTINGS) -> Workbench:
    return Workbench(
        connection=connection,
        dsn=dsn,
        rounds=RoundsSettings(experiment=settings),
        reward=RewardSettings(),
        artifacts=Path("/nowhere"),
        base_model=Path("/nowhere"),
        alias="flash",
        run=lambda *_: None,
    )


def round_of(experiment_id: str) -> Round:
    context = {"experiment_id": experiment_id, "checkpoint_id": "new"}
    return Round(round_id="round-1", number=1, state="experiment", context=context)


def vote(dsn: str, experiment_id: str, number: int, rater: str, winner: str | None) -> None:
    comparison_id, answers = build_comparison(f"question {number}", ("a", "b"))
    told: list[AnyEvent] = [
        answer.model_copy(update={"experiment_id": experiment_id, "arm": arm})
        for answer, arm in zip(answers, ("control", "candidate"), strict=True)
    ]
    chosen = answers[("base", "new").index(winner)].response_id if winner else None
    insert(dsn, [*told, build_preference(comparison_id, chosen, rater=rater)])


def one_rater_counts_once_by_the_first_vote_that_decides(connection: Connection, dsn: str, experiment_id: str) -> None:
    vote(dsn, experiment_id, 0, "eager", None)
    assert tally(connection, experiment_id, "candidate").outcomes == ("tie",)
    for number in range(1, 12):
        vote(dsn, experiment_id, number, "eager", "new")
    vote(dsn, experiment_id, 12, "other", "base")
    votes = tally(connection, experiment_id, "candidate")
    assert (votes.wins, votes.losses, votes.ties, votes.repeated) == (1, 1, 0, 11)


def a_candidate_that_loses_is_withdrawn(connection: Connection, dsn: str, experiment_id: str) -> None:
    assert experiment(bench(connection, dsn), round_of(experiment_id)) is None
    for number in range(12):
        vote(dsn, experiment_id, number, f"rater-{number}", "base")
    outcome = experiment(bench(connection, dsn), round_of(experiment_id))
    assert outcome is not None
    assert outcome.to_state == "rejected"
    assert get_checkpoint(connection, "new").state == "retired"
    assert list_experiments(connection, state="running") == []


@pytest.mark.parametrize(
    ("state", "to_state"), [("promoted", "promoted"), ("rejected", "rejected"), ("stopped", "rejected")]
)
def an_experiment_that_was_decided_before_a_kill_is_not_decided_again(
    state: Any, to_state: str, connection: Connection, dsn: str, experiment_id: str
) -> None:
    stop_experiment(connection, experiment_id, state, {"wins": 30})
    outcome = experiment(bench(connection, dsn), round_of(experiment_id))
    assert outcome is not None
    assert (outcome.to_state, outcome.report) == (to_state, {"wins": 30})


def an_experiment_without_votes_ends_when_its_days_are_over(
    connection: Connection, dsn: str, experiment_id: str
) -> None:
    connection.execute("update experiments set started_at = now() - interval '15 days'")
    outcome = experiment(bench(connection, dsn), round_of(experiment_id))
    assert outcome is not None
    assert outcome.to_state == "rejected"
    assert "not decided within 14 days" in outcome.reason


def a_candidate_that_an_engine_refuses_later_is_withdrawn(connection: Connection, dsn: str, experiment_id: str) -> None:
    connection.execute("insert into engine_replicas (replica_id, base_checkpoint_id) values ('engine-2', 'base')")
    connection.execute(
        "insert into checkpoint_replicas (checkpoint_id, replica_id, status, proof)"
        " values ('new', 'engine-2', 'refused', '{\"reason\": \"its folder is gone\"}')"
    )
    outcome = experiment(bench(connection, dsn), round_of(experiment_id))
    assert outcome is not None
    assert outcome.to_state == "rejected"
    assert "its folder is gone" in outcome.reason


def a_candidate_that_breaches_a_guardrail_is_withdrawn_however_well_it_is_liked(
    connection: Connection, dsn: str, experiment_id: str
) -> None:
    for number in range(30):
        vote(dsn, experiment_id, number, f"rater-{number}", "new")
    started = get_experiment(connection, experiment_id)
    answers = [shown(started, f"user-{number}", number) for number in range(400)]
    broken = {"status": "upstream_error"}
    insert(dsn, [one.model_copy(update=broken) if one.arm == "candidate" else one for one in answers])
    outcome = experiment(bench(connection, dsn), round_of(experiment_id))
    assert outcome is not None
    assert (outcome.to_state, "error_rate" in outcome.reason) == ("rejected", True)
    assert get_checkpoint(connection, "new").state == "retired"
    assert get_experiment(connection, experiment_id).state == "rejected"
