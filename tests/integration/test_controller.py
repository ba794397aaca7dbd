"""Laws of the lease, of a round's moves, and of a controller that is killed or fails, on a real database."""

import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from feedback.errors import NothingToLearn
from reward.settings import RewardSettings
from rounds.controller import Controller
from rounds.errors import ForbiddenMove, LeaseLost, WorkFailed, WorkRefused
from rounds.settings import ControllerSettings, RoundsSettings
from rounds.steps import Outcome, Workbench
from rounds.store import Round, advance, current_round, list_rounds, release_lease, take_lease, transitions
from serving.errors import CheckpointNotProven, ExperimentConflict
from storage.errors import ArtifactIncomplete
from storage.postgres import Connection, connect

pytestmark = pytest.mark.real

SETTINGS = RoundsSettings(controller=ControllerSettings(new_preferences=1, poll_interval_s=0.05, lease_s=2))


@pytest.fixture
def connection(dsn: str) -> Any:
    with connect(dsn) as opened:
        yield opened


def move(connection: Connection, holder: str, round_: Round, to_state: str) -> Round:
    return advance(connection, holder, round_, to_state, reason="a test moves it", report={}, context={})


def only_one_controller_holds_the_lease(connection: Connection) -> None:
    assert take_lease(connection, "one", 30)
    assert take_lease(connection, "one", 30)
    assert not take_lease(connection, "two", 30)
    release_lease(connection, "one")
    assert take_lease(connection, "two", 30)


def an_expired_lease_is_taken_over(connection: Connection) -> None:
    assert take_lease(connection, "gone", 0)
    assert take_lease(connection, "next", 30)


def a_controller_that_lost_its_lease_moves_nothing(connection: Connection) -> None:
    assert take_lease(connection, "slow", 0)
    round_ = current_round(connection)
    assert take_lease(connection, "next", 30)
    with pytest.raises(LeaseLost):
        move(connection, "slow", round_, "snapshot")
    assert current_round(connection).state == "collecting"


def a_round_moves_once_from_where_it_was_read(connection: Connection) -> None:
    take_lease(connection, "one", 30)
    round_ = current_round(connection)
    assert move(connection, "one", round_, "snapshot").state == "snapshot"
    with pytest.raises(LeaseLost):
        move(connection, "one", round_, "snapshot")
    with pytest.raises(ForbiddenMove):
        move(connection, "one", current_round(connection), "promoted")
    assert [row["to_state"] for row in transitions(connection, round_.round_id)] == ["snapshot"]


def a_round_that_ended_is_followed_by_the_next(connection: Connection) -> None:
    take_lease(connection, "one", 30)
    round_ = current_round(connection)
    for state in ("snapshot", "reward_training", "reward_gate", "rejected"):
        round_ = move(connection, "one", round_, state)
    following = current_round(connection)
    assert (following.number, following.state) == (round_.number + 1, "collecting")
    assert [listed.number for listed in list_rounds(connection)] == [following.number, round_.number]


def build(dsn: str, tmp_path: Path, run_work: Callable[..., Any], stop: threading.Event) -> Controller:
    return Controller(
        SETTINGS,
        RewardSettings(),
        dsn=dsn,
        artifacts=tmp_path,
        base_model=tmp_path,
        alias="flash",
        stop=stop,
        run_work=run_work,
    )


@pytest.mark.parametrize(("error", "attempts"), [(WorkFailed, SETTINGS.controller.maximum_attempts), (WorkRefused, 1)])
def work_that_fails_is_tried_again_unless_it_can_not_be_done_and_then_ends_the_round(
    error: type[WorkFailed], attempts: int, dsn: str, connection: Connection, tmp_path: Path
) -> None:
    calls = []

    def broken(function: Callable[..., Any], arguments: dict[str, Any], keep_alive: Callable[[], None]) -> Any:
        calls.append(arguments["snapshot_path"])
        raise error("the training side is empty")

    wheel = build(dsn, tmp_path, broken, threading.Event())
    take_lease(connection, wheel.holder, 30)
    round_ = move(connection, wheel.holder, current_round(connection), "snapshot")
    context = {"snapshot_id": "snapshot-1", "snapshot_path": "nowhere"}
    advance(connection, wheel.holder, round_, "reward_training", reason="", report={}, context=context)
    assert [wheel.turn_once(connection) for _ in range(attempts)] == [False] * (attempts - 1) + [True]
    ended = list_rounds(connection)[0]
    assert ended.state == "rejected"
    assert "the training side is empty" in transitions(connection, ended.round_id)[-1]["reason"]
    assert calls == ["nowhere"] * attempts


def a_report_may_hold_what_models_say(connection: Connection) -> None:
    take_lease(connection, "one", 30)
    said = {"answers": [{"text": "a\0b"}], "a\0": math.nan}
    round_ = current_round(connection)
    moved = advance(connection, "one", round_, "snapshot", reason="because \0", report=said, context=said)
    assert moved.context["answers"] == [{"text": "a\ufffdb"}]
    [row] = transitions(connection, round_.round_id)
    assert (row["reason"], row["report"]) == ("because \ufffd", {"answers": [{"text": "a\ufffdb"}], "a\ufffd": None})


@pytest.mark.parametrize("error", [ArtifactIncomplete("half"), NothingToLearn("no votes"), ExperimentConflict("gone")])
def an_error_of_a_step_itself_ends_the_round_and_not_the_controller(
    error: Exception, dsn: str, connection: Connection, tmp_path: Path
) -> None:
    def broken(bench: Workbench, round_: Round) -> Outcome:
        raise error

    wheel = build(dsn, tmp_path, lambda *_: None, threading.Event())
    take_lease(connection, wheel.holder, 30)
    move(connection, wheel.holder, current_round(connection), "snapshot")
    wheel.steps = {**wheel.steps, "snapshot": broken}
    assert [wheel.turn_once(connection), wheel.turn_once(connection)] == [False, True]
    ended = list_rounds(connection)[0]
    assert ended.state == "rejected"
    assert str(error) in transitions(connection, ended.round_id)[-1]["reason"]


def a_promotion_waits_for_engines_that_are_away(dsn: str, connection: Connection, tmp_path: Path) -> None:
    stop = threading.Event()
    asked = []

    def unproven(bench: Workbench, round_: Round) -> Outcome:
        asked.append(round_.state)
        if len(asked) == 3:
            stop.set()
        raise CheckpointNotProven("no engine replica is live")

    wheel = build(dsn, tmp_path, lambda *_: None, stop)
    wheel.steps = {**wheel.steps, "collecting": unproven}
    wheel.run()
    assert asked == ["collecting"] * 3
    assert current_round(connection).state == "collecting"


def a_controller_that_starts_again_goes_on_with_the_step_it_was_in(
    dsn: str, connection: Connection, tmp_path: Path
) -> None:
    take_lease(connection, "killed", 0)
    round_ = current_round(connection)
    take_lease(connection, "killed", 30)
    move(connection, "killed", round_, "snapshot")
    release_lease(connection, "killed")
    seen = []

    def snapshot(bench: Workbench, round_: Round) -> Outcome:
        seen.append(round_.state)
        return Outcome("reward_training", "frozen")

    wheel = build(dsn, tmp_path, lambda *_: None, threading.Event())
    wheel.steps = {**wheel.steps, "snapshot": snapshot}
    assert wheel.turn_once(connection)
    assert seen == ["snapshot"]
    assert current_round(connection).state == "reward_training"


def a_stop_ends_the_controller_and_gives_the_lease_back(dsn: str, connection: Connection, tmp_path: Path) -> None:
    stop = threading.Event()
    wheel = build(dsn, tmp_path, lambda *_: None, stop)
    thread = threading.Thread(target=wheel.run)
    thread.start()
    try:
        deadline = threading.Event()
        while not list_rounds(connection) and not deadline.wait(0.05):
            connection.rollback()
    finally:
        stop.set()
        thread.join(10)
    assert not thread.is_alive()
    assert take_lease(connection, "another", 30)
