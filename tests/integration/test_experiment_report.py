"""Laws of exposures and of the report, on a real PostgreSQL."""

import asyncio
import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from feedback.erasure import erase
from feedback.events import AnyEvent
from flywheel.experiment_page import write_page
from rounds.experiment_report import make_report
from rounds.experiment_rows import write_rows
from rounds.reporter import Reporter
from serving.errors import ExperimentUnknown, Overloaded
from serving.experiment_store import ExperimentStore
from serving.experiments import ramp_experiment, stop_experiment
from storage.postgres import Connection, connect
from tests.helpers.events_built import build_comparison, build_interaction, build_preference, build_vote
from tests.helpers.experiments import crowd, register, shown, start, thumb_on
from tests.helpers.ledger import insert

pytestmark = pytest.mark.real


@pytest.fixture
def connection(dsn: str) -> Iterator[Connection]:
    with connect(dsn, autocommit=True) as opened:
        register(opened, "new")
        yield opened


def report_of(dsn: str, experiment_id: str) -> dict[str, Any]:
    """As the command makes it, once through JSON."""
    with connect(dsn) as fresh:
        made = make_report(fresh, experiment_id)
    again: dict[str, Any] = json.loads(json.dumps(made, allow_nan=False))
    return again


def count(connection: Connection, table: str = "exposures") -> int:
    row = connection.execute(f"select count(*) as n from {table}").fetchone()
    assert row is not None
    return int(row["n"])


def only_what_was_drawn_and_shown_is_an_exposure(connection: Connection, dsn: str) -> None:
    experiment = start(connection)
    answers = [
        shown(experiment, "ada"),
        shown(experiment, "bob", exposed_at=None, status="upstream_error"),  # nothing of it was sent
        shown(experiment, "eve", propensity=None),  # a tester
        build_interaction(pinned=True),
        shown(experiment, "ada", shadow_of="chatcmpl-" + "0" * 32, exposed_at=None),
    ]
    insert(dsn, answers)
    insert(dsn, answers)
    rows = connection.execute("select unit, response_id from exposures").fetchall()
    assert rows == [{"unit": "ada", "response_id": answers[0].response_id}]


def an_erased_person_is_in_no_report(connection: Connection, dsn: str) -> None:
    experiment = start(connection, metric="thumb")
    insert(dsn, crowd(experiment, 40, 0.5, 0.5))
    before = report_of(dsn, experiment.experiment_id)
    with connect(dsn) as other:
        erase(other, "user-7")
    after = report_of(dsn, experiment.experiment_id)
    assert sum(arm["units"] for arm in before["arms"]) == 40
    assert sum(arm["units"] for arm in after["arms"]) == 39
    assert count(connection) == 39
    assert "user-7" not in json.dumps(after)


def a_better_candidate_is_called_better_and_the_numbers_are_the_rows(connection: Connection, dsn: str) -> None:
    experiment = start(connection, metric="thumb")
    events = crowd(experiment, 900, 0.4, 0.75)
    insert(dsn, events)
    report = report_of(dsn, experiment.experiment_id)
    [compared] = report["compared"]
    effect = compared["effect"]
    assert effect["verdict"] == "better"
    assert effect["low"] > 0
    assert effect["low"] < 0.35 < effect["high"]
    ups = {"control": [], "candidate": []}
    for answer, vote in zip(events[::2], events[1::2], strict=True):
        ups[answer.arm].append(vote.value == "up")
    for arm in report["arms"]:
        assert arm["voters"] == arm["units"] == len(ups[arm["name"]])
        assert arm["vote_mean"] == pytest.approx(np.mean(ups[arm["name"]]))
        assert arm["time_to_first_token_median_s"] == pytest.approx(0.2, rel=0.05)
    told = [1 if answer.arm == "candidate" else -1 for answer in events[::2]]
    value = [(1 if vote.value == "up" else 0) - 0.5 for vote in events[1::2]]
    assert effect["difference"] == pytest.approx(np.mean(np.array(told) * np.array(value) / 0.5))
    assert effect["per_exposed"]["difference"] == pytest.approx(effect["difference"])
    assert report["sample_ratio"]["fits"]
    assert "Candidate is better than control" in report["sentence"]
    assert effect["path"][-1]["vote"] == 900
    assert [one["verdict"] for one in compared["guardrails"]][:2] != ["breached", "breached"]


def an_unproven_difference_is_called_open_and_not_equal(connection: Connection, dsn: str) -> None:
    experiment = start(connection, metric="thumb")
    insert(dsn, crowd(experiment, 60, 0.5, 0.55))
    report = report_of(dsn, experiment.experiment_id)
    assert "open" in report["sentence"]
    assert any("are equal" in said for said in report["cannot"])


def a_unit_that_votes_again_or_late_or_as_a_judge_adds_no_vote(connection: Connection, dsn: str) -> None:
    experiment = start(connection, metric="thumb", window_s=60)
    first = shown(experiment, "ada", 10)
    second = shown(experiment, "ada", 20)
    late = shown(experiment, "bob", 30)
    judged = shown(experiment, "cem", 40)
    insert(
        dsn,
        [
            first,
            second,
            late,
            judged,
            thumb_on(first, True),
            thumb_on(first, False, after_s=2),
            thumb_on(second, False),
            thumb_on(late, True, after_s=61),
            thumb_on(judged, True, source="ai", rater="judge"),
        ],
    )
    report = report_of(dsn, experiment.experiment_id)
    voters = {arm["name"]: (arm["voters"], arm["vote_mean"]) for arm in report["arms"] if arm["voters"]}
    assert voters == {first.arm: (1, 1.0)}
    assert sum(arm["units"] for arm in report["arms"]) == 3
    assert sum(arm["answers"] for arm in report["arms"]) == 4


def a_misfit_of_units_and_weights_discredits_the_report(connection: Connection, dsn: str) -> None:
    experiment = start(connection, metric="thumb")
    events = crowd(experiment, 400, 0.5, 0.5)
    lost = {answer.response_id for answer in events[::2] if answer.arm == "candidate" and answer.unit[-1] in "13579"}
    insert(dsn, [event for event in events if event.response_id not in lost])
    report = report_of(dsn, experiment.experiment_id)
    assert not report["sample_ratio"]["fits"]
    assert report["sentence"].startswith("Nothing can be concluded")


def a_ramp_changes_no_verdict_by_itself(connection: Connection, dsn: str) -> None:
    """10 % in the candidate while 90 % are content, then 60 % while half are."""
    experiment = start(connection, 0.1, metric="thumb")
    generator = np.random.default_rng(2)
    early = [shown(experiment, f"early-{number}", number) for number in range(500)]
    ramped = ramp_experiment(connection, experiment.experiment_id, weights={"control": 0.4, "candidate": 0.6})
    connection.execute("update experiment_changes set changed_at = now() - interval '50 minutes' where kind = 'ramped'")
    late = [shown(ramped, f"late-{number}", 600 + number) for number in range(500)]
    insert(dsn, [*early, *(thumb_on(answer, bool(generator.random() < 0.9)) for answer in early)])
    insert(dsn, [*late, *(thumb_on(answer, bool(generator.random() < 0.5)) for answer in late)])
    report = report_of(dsn, experiment.experiment_id)
    assert report["sample_ratio"]["fits"]
    assert len(report["sample_ratio"]["periods"]) == 2
    effect = report["compared"][0]["effect"]
    assert effect["verdict"] == "open"
    assert effect["fixed_horizon"]["p_value"] < 0.05  # the means of the arms are fooled
    assert any("weights were changed" in said for said in report["cannot"])


def a_fallback_stays_in_its_arm_and_is_told(connection: Connection, dsn: str) -> None:
    experiment = start(connection, metric="thumb")
    events = crowd(experiment, 60, 0.5, 0.5)
    broken = [
        event.model_copy(update={"fallback": True, "checkpoint_id": "base"})
        if getattr(event, "arm", None) == "candidate"
        else event
        for event in events
    ]
    insert(dsn, broken)
    report = report_of(dsn, experiment.experiment_id)
    [control, candidate] = report["arms"]
    assert candidate["units"] == candidate["fallbacks"] > 10
    assert control["fallbacks"] == 0
    assert any("another answered in its place" in said for said in report["cannot"])


def a_guardrail_is_breached_when_it_is_sure(connection: Connection, dsn: str) -> None:
    experiment = start(connection, metric="thumb")
    events: list[AnyEvent] = []
    for number in range(600):
        answer = shown(experiment, f"user-{number}", number * 0.1)
        broken = answer.arm == "candidate" and number % 4 == 0
        events.append(answer.model_copy(update={"status": "upstream_error"}) if broken else answer)
    insert(dsn, events)
    report = report_of(dsn, experiment.experiment_id)
    verdicts = {one["guardrail"]: one["verdict"] for one in report["compared"][0]["guardrails"]}
    assert verdicts["error_rate"] == "breached"
    assert verdicts["time_to_first_token"] == "kept"
    insert(dsn, [thumb_on(answer, True) for answer in events if answer.status == "completed"])
    assert "more answers fail" in report_of(dsn, experiment.experiment_id)["sentence"]


def a_judge_is_shown_apart_and_helps_people(connection: Connection, dsn: str) -> None:
    experiment = start(connection, metric="thumb")
    generator = np.random.default_rng(5)
    events: list[AnyEvent] = []
    for number in range(400):
        answer = shown(experiment, f"user-{number}", number * 0.1)
        good = bool(generator.random() < (0.7 if answer.arm == "candidate" else 0.5))
        agrees = bool(generator.random() < 0.9)
        events += [answer, thumb_on(answer, good if agrees else not good, source="ai", rater="judge")]
        if number % 4 == 0:
            events.append(thumb_on(answer, good))
    insert(dsn, events)
    [compared] = report_of(dsn, experiment.experiment_id)["compared"]
    judge = compared["judge"]
    assert judge["votes"] == 400
    assert compared["effect"]["voters"] == 100
    alone = judge["people_alone"]
    assert judge["high"] - judge["low"] < 0.9 * (alone["high"] - alone["low"])


def what_was_voted_earlier_sharpens_the_difference(connection: Connection, dsn: str) -> None:
    experiment = start(connection, metric="thumb")
    generator = np.random.default_rng(6)
    before = datetime.now(UTC) - timedelta(hours=3)
    events: list[AnyEvent] = []
    for number in range(200):
        mood = generator.beta(0.3, 0.3)
        for _ in range(3):
            old = build_interaction(user=f"user-{number}", time=before)
            vote = build_vote(
                "thumb",
                response_id=old.response_id,
                rater=f"user-{number}",
                time=before,
                value="up" if generator.random() < mood else "down",
            )
            events += [old, vote]
        answer = shown(experiment, f"user-{number}", number * 0.1)
        events += [answer, thumb_on(answer, bool(generator.random() < mood))]
    insert(dsn, events)
    effect = report_of(dsn, experiment.experiment_id)["compared"][0]["effect"]
    assert effect["cuped"]["variance_removed"] > 0.3
    assert (
        effect["cuped"]["high"] - effect["cuped"]["low"]
        < effect["fixed_horizon"]["high"] - effect["fixed_horizon"]["low"]
    )


def the_votes_side_by_side_decide_where_they_are_the_metric(connection: Connection, dsn: str) -> None:
    experiment = start(connection)
    events: list[AnyEvent] = []
    for number in range(40):
        comparison_id, answers = build_comparison(f"question {number}", ("a", "b"))
        told = [
            answer.model_copy(update={"experiment_id": experiment.experiment_id, "arm": arm})
            for answer, arm in zip(answers, ("control", "candidate"), strict=True)
        ]
        chosen = told[number % 8 != 0].response_id
        events += [*told, build_preference(comparison_id, chosen, rater=f"rater-{number}")]
    insert(dsn, events)
    report = report_of(dsn, experiment.experiment_id)
    side = report["compared"][0]["side_by_side"]
    assert (side["wins"], side["losses"], side["verdict"]) == (35, 5, "better")
    assert "people prefer candidate to control" in report["sentence"].lower()
    assert report["compared"][0]["effect"] is None


def an_aa_test_says_that_it_is_one(connection: Connection, dsn: str) -> None:
    started = start(connection, candidate="base", metric="thumb")
    insert(dsn, crowd(started, 200, 0.6, 0.6))
    report = report_of(dsn, started.experiment_id)
    assert report["is_aa"]
    assert "no difference was found" in report["sentence"]


def a_report_before_anything_happened_is_no_trouble(connection: Connection, dsn: str, tmp_path: Path) -> None:
    for metric in ("preference", "thumb", "rating", "score:helpful", "signal:regenerated"):
        experiment = start(connection, metric=metric)
        report = report_of(dsn, experiment.experiment_id)
        assert report["sentence"]
        write_page(report, tmp_path / "page.html")
        stop_experiment(connection, experiment.experiment_id, "stopped", {})
    with pytest.raises(ExperimentUnknown):
        report_of(dsn, "exp-none")


@pytest.mark.parametrize(
    ("metric", "vote", "verdict"),
    [
        ("rating", lambda up: {"kind": "rating", "value": 5 if up else 2}, "better"),
        ("score:helpful", lambda up: {"kind": "score", "name": "helpful", "value": 0.9 if up else 0.2}, "better"),
        ("signal:regenerated", lambda up: {"kind": "signal", "name": "regenerated"} if up else None, "worse"),
    ],
)
def every_metric_is_measured(metric: str, vote: Any, verdict: str, connection: Connection, dsn: str) -> None:
    experiment = start(connection, metric=metric)
    generator = np.random.default_rng(7)
    events: list[AnyEvent] = []
    for number in range(900):
        answer = shown(experiment, f"user-{number}", number * 0.1)
        events.append(answer)
        told = vote(bool(generator.random() < (0.8 if answer.arm == "candidate" else 0.3)))
        if told is not None:
            fields = {name: value for name, value in told.items() if name != "kind"}
            events.append(build_vote(told["kind"], response_id=answer.response_id, rater=answer.user, **fields))
    insert(dsn, events)
    effect = report_of(dsn, experiment.experiment_id)["compared"][0]["effect"]
    assert effect["metric"] == metric
    assert effect["verdict"] == verdict


def a_further_metric_is_told_and_decides_nothing(connection: Connection, dsn: str, tmp_path: Path) -> None:
    experiment = start(connection, metric="thumb", further_metrics=("signal:copied", "rating"))
    events = crowd(experiment, 600, 0.5, 0.5)
    copied = [
        build_vote("signal", response_id=one.response_id, rater=one.user)
        for one in events[::2]
        if one.arm == "candidate"
    ]
    insert(dsn, [*events, *copied])
    report = report_of(dsn, experiment.experiment_id)
    [compared] = report["compared"]
    assert compared["effect"]["verdict"] == "open"
    assert compared["further"] == [None, None]  # nobody copied in the control, nobody rated
    some = [
        build_vote("signal", response_id=one.response_id, rater=one.user)
        for one in events[:40:2]
        if one.arm == "control"
    ]
    insert(dsn, some)
    report = report_of(dsn, experiment.experiment_id)
    [found, _] = report["compared"][0]["further"]
    assert (found["metric"], found["verdict"]) == ("signal:copied", "better")
    assert "open" in report["sentence"]
    write_page(report, tmp_path / "page.html")
    assert "decides nothing" in (tmp_path / "page.html").read_text()


def the_page_holds_its_plots_and_loads_nothing(connection: Connection, dsn: str, tmp_path: Path) -> None:
    experiment = start(connection, metric="thumb")
    events = crowd(experiment, 200, 0.5, 0.6)
    tagged = [
        event.model_copy(update={"tags": {"<b>": "&\"'"}}) if getattr(event, "arm", None) else event for event in events
    ]
    insert(dsn, tagged)
    write_page(report_of(dsn, experiment.experiment_id), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") == 3
    assert "<script" not in page
    assert 'src="' not in page
    assert "<b>=" not in page


def the_raw_rows_give_the_same_counts_and_no_names(connection: Connection, dsn: str, tmp_path: Path) -> None:
    experiment = start(connection, metric="thumb")
    insert(dsn, crowd(experiment, 50, 0.5, 0.5))
    with connect(dsn) as fresh:
        counts = write_rows(fresh, experiment.experiment_id, tmp_path)
    assert counts == {"exposures": 50, "votes": 50, "choices": 0}
    exposures, votes = (pq.read_table(tmp_path / f"{name}.parquet").to_pylist() for name in ("exposures", "votes"))
    assert {row["unit"] for row in exposures} == {row["rater"] for row in votes}
    assert "user-" not in str(exposures) + str(votes)


async def a_report_over_the_api_is_made_after_it_was_asked_for(connection: Connection, dsn: str) -> None:
    experiment = start(connection, metric="thumb")
    store = ExperimentStore(dsn, 15, report_timeout_s=15)
    impatient = ExperimentStore(dsn, 15, report_timeout_s=0.2)
    with pytest.raises(Overloaded):
        await impatient.report(experiment.experiment_id)
    reporter = Reporter(dsn)
    reporter.start()
    try:
        insert(dsn, crowd(experiment, 30, 0.5, 0.5))
        both = await asyncio.gather(*(store.report(experiment.experiment_id) for _ in range(2)))
        assert [sum(arm["units"] for arm in report["arms"]) for report in both] == [30, 30]
        insert(dsn, [shown(experiment, "late")])
        report = await store.report(experiment.experiment_id)
        assert sum(arm["units"] for arm in report["arms"]) == 31
    finally:
        reporter.close()
        store.close()
        impatient.close()
    assert not any(thread.name == "reporter" for thread in threading.enumerate())
