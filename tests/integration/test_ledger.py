"""The ledger over real parts: outbox → relay → broker → ingest → PostgreSQL."""

import json
import random
import subprocess
import sys
from functools import partial
from pathlib import Path

import psycopg
import pytest

from feedback.audit import audit
from feedback.errors import LogChanged, StaleOwner
from feedback.events import FEEDBACK_TOPIC, PREFERENCES_TOPIC
from feedback.ingest import Ingest
from feedback.relay import Relay
from feedback.stream import stream_preferences
from feedback.topics import make_producer
from storage.postgres import connect
from tests.helpers.documents import BROKER, programs
from tests.helpers.events_built import build_comparison, build_interaction, build_preference, build_thumb, build_vote
from tests.helpers.ledger import (
    accept,
    insert,
    ledger_settings,
    publish,
    read_topic,
    rows,
    running,
    step_until,
    stored_ids,
    wait_for,
)
from tests.helpers.servers import Broker, Postgres

pytestmark = pytest.mark.real


def every_accepted_event_is_stored_exactly_once(tmp_path: Path, broker: Broker, dsn: str) -> None:
    settings = ledger_settings(tmp_path, broker.bootstrap_servers)
    answers = [build_interaction() for _ in range(300)]
    votes = [build_thumb(answer.response_id) for answer in answers]
    accept(tmp_path, votes)  # the votes come before their answers
    with running(settings, dsn):
        accept(tmp_path, answers)
        assert accept(tmp_path, votes[:10]) == ["duplicate"] * 10
        wait_for(lambda: len(stored_ids(dsn)) == 600)
    assert sorted(stored_ids(dsn)) == sorted(event.event_id for event in [*answers, *votes])
    report = audit(settings, dsn)
    assert report.clean, report
    assert (report.accepted, report.stored, report.pending, report.orphaned) == (600, 600, 0, 0)
    assert (report.votes_stored, report.interactions_stored, report.unread) == (300, 300, 0)


def a_broker_that_restarts_empty_gets_everything_again_and_nothing_is_stored_twice(
    tmp_path: Path, broker: Broker, dsn: str
) -> None:
    settings = ledger_settings(tmp_path, broker.bootstrap_servers)
    first = [build_thumb() for _ in range(200)]
    second = [build_thumb() for _ in range(50)]
    accept(tmp_path, first)
    relay = Relay(settings)
    while relay.step():  # acknowledged by a log that is lost before anybody read it
        pass
    relay.close()
    broker.restart_empty()
    with running(settings, dsn):
        wait_for(lambda: len(stored_ids(dsn)) == 200)
        broker.restart_empty()  # this time under a relay and an ingest at work
        accept(tmp_path, second)
        wait_for(lambda: len(stored_ids(dsn)) == 250)
    assert sorted(stored_ids(dsn)) == sorted(event.event_id for event in [*first, *second])
    report = audit(settings, dsn)
    assert report.clean, report
    assert report.orphaned == 250


def a_log_that_changed_under_the_ingest_is_read_from_its_beginning(tmp_path: Path, broker: Broker, dsn: str) -> None:
    settings = ledger_settings(tmp_path, broker.bootstrap_servers)
    old, new = [build_thumb() for _ in range(60)], [build_thumb() for _ in range(30)]
    ingest = Ingest(settings, dsn)
    publish(settings, old)
    step_until(ingest, lambda: ingest.counters["inserted"] == 60)
    broker.restart_empty()
    publish(settings, new)  # fewer than there were: at the old offsets the broker would be silent for ever
    step_until(ingest, lambda: ingest.counters["inserted"] == 90, forgiving=True)
    ingest.disconnect()
    assert sorted(stored_ids(dsn)) == sorted(event.event_id for event in [*old, *new])


def the_preferences_are_streamed_as_the_votes_change_them(tmp_path: Path, broker: Broker, dsn: str) -> None:
    settings = ledger_settings(tmp_path, broker.bootstrap_servers)
    comparison_id, answers = build_comparison("a prompt", ("good", "bad"))
    stream = partial(stream_preferences, broker.bootstrap_servers, idle_timeout_s=3.0)
    with running(settings, dsn):
        accept(tmp_path, [*answers, build_preference(comparison_id, answers[0].response_id)])
        live = stream()
        first = next(live)
        accept(tmp_path, [build_preference(comparison_id, answers[1].response_id)])
        retracted, second = sorted([next(live), next(live)], key=lambda row: not row["retracted"])
        live.close()
        accept(tmp_path, [build_vote("correction", response_id=answers[0].response_id, text="best")])
        last = max((first, retracted, second), key=lambda row: sum(json.loads(row["position"])["offsets"].values()))
        (resumed,) = stream(last["position"])
        assert len(list(stream())) == 4
    assert (first["prompt"], first["chosen"], first["rejected"]) == (
        [{"role": "user", "content": "a prompt"}],
        [{"role": "assistant", "content": "good"}],
        [{"role": "assistant", "content": "bad"}],
    )
    assert (retracted["preference_id"], retracted["revision"], retracted["chosen"]) == (first["preference_id"], 2, [])
    assert second["chosen"] == [{"role": "assistant", "content": "bad"}]
    assert (resumed["kind"], resumed["chosen"][0]["content"], resumed["chosen_response_id"]) == (
        "correction",
        "best",
        None,
    )
    broker.restart_empty()
    with running(settings, dsn):
        anew = list(stream())
        with pytest.raises(LogChanged):
            next(stream(last["position"]))
    assert {row["preference_id"] for row in anew} == {second["preference_id"], resumed["preference_id"]}
    with pytest.raises(ValueError, match="not a position"):
        next(stream("yesterday"))


def a_preference_that_is_too_large_for_the_log_holds_up_no_other(tmp_path: Path, broker: Broker, dsn: str) -> None:
    settings = ledger_settings(tmp_path, broker.bootstrap_servers, max_record_bytes=5_000)
    for number in range(9):
        texts = ("x" * (6_000 if number == 4 else 100), "no")
        comparison, answers = build_comparison(f"prompt {number}", texts)
        insert(dsn, [*answers, build_preference(comparison, answers[0].response_id)])
    ingest = Ingest(settings, dsn)
    step_until(ingest, lambda: ingest.counters["published"] == 9)
    ingest.disconnect()
    assert len(read_topic(settings, PREFERENCES_TOPIC, count=8)) == 8
    assert not rows(dsn, "select from preferences where published_log_id is null")


@pytest.mark.parametrize(("where", "program"), programs(BROKER), ids=[where for where, _ in programs(BROKER)])
def every_program_in_the_documents_runs(tmp_path: Path, broker: Broker, dsn: str, where: str, program: str) -> None:
    settings = ledger_settings(tmp_path / "outbox", broker.bootstrap_servers)
    here = program.replace(BROKER, broker.bootstrap_servers)
    with running(settings, dsn):
        for number in range(5):
            comparison_id, answers = build_comparison(f"prompt {number}", (f"good {number}", "bad"))
            accept(settings.outbox, [*answers, build_preference(comparison_id, answers[0].response_id)])
        ran = subprocess.run(
            [sys.executable, "-c", here], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
        )
    assert ran.returncode == 0, f"{where}: {ran.stderr}"
    assert sorted(ran.stdout.splitlines()) == [f"good {number} > bad" for number in range(5)]


def a_stale_owner_stores_nothing(tmp_path: Path, broker: Broker, dsn: str) -> None:
    settings = ledger_settings(tmp_path, broker.bootstrap_servers)
    votes = [build_thumb() for _ in range(20)]
    stale, fresh = Ingest(settings, dsn), Ingest(settings, dsn)
    stale.step()  # both stand at the beginning
    fresh.step()
    publish(settings, votes)
    step_until(fresh, lambda: fresh.counters["read"] == 20)
    rows(dsn, "delete from feedback returning event_id")  # whatever the stale one writes would now be seen
    with pytest.raises(StaleOwner):
        step_until(stale, lambda: False)
    stale.disconnect()
    fresh.disconnect()
    assert stored_ids(dsn) == []


def two_ingests_at_once_store_every_event_once(tmp_path: Path, broker: Broker, dsn: str) -> None:
    settings = ledger_settings(tmp_path, broker.bootstrap_servers, ingest_batch=20)
    votes = [build_thumb() for _ in range(300)]
    with running(settings, dsn), running(settings, dsn):
        for start in range(0, 300, 50):
            accept(tmp_path, votes[start : start + 50])
        wait_for(lambda: len(stored_ids(dsn)) == 300)
    assert sorted(stored_ids(dsn)) == sorted(vote.event_id for vote in votes)
    assert audit(settings, dsn).clean


def a_batch_that_fails_on_its_way_leaves_neither_rows_nor_a_moved_offset(
    tmp_path: Path, broker: Broker, dsn: str
) -> None:
    settings = ledger_settings(tmp_path, broker.bootstrap_servers)
    votes = [build_thumb() for _ in range(10)]
    publish(settings, votes)
    producer = make_producer(settings)
    producer.send(FEEDBACK_TOPIC, key=b"one", value=b"not json").get(5)
    producer.close(timeout=2)
    with connect(dsn) as connection:
        connection.execute("alter table dead_letters rename to hidden")
    ingest = Ingest(settings, dsn)
    with pytest.raises(psycopg.errors.UndefinedTable):
        step_until(ingest, lambda: False)
    ingest.disconnect()
    committed = len(stored_ids(dsn))  # batches of other partitions may have gone before
    assert rows(dsn, "select sum(next_offset)::int as read from ingest_offsets") == [{"read": committed}]
    with connect(dsn) as connection:
        connection.execute("alter table hidden rename to dead_letters")
    step_until(ingest, lambda: ingest.counters["dead_lettered"] == 1 and len(stored_ids(dsn)) == 10)
    ingest.disconnect()
    assert ingest.counters["read"] == 11
    assert sorted(stored_ids(dsn)) == sorted(vote.event_id for vote in votes)


def a_text_that_postgresql_cannot_hold_is_stored_all_the_same(tmp_path: Path, broker: Broker, dsn: str) -> None:
    settings = ledger_settings(tmp_path, broker.bootstrap_servers)
    answer = build_interaction(text="a\0b", messages=[{"role": "user", "content": "nul \0 here"}])
    accept(tmp_path, [answer])
    with running(settings, dsn):
        wait_for(lambda: stored_ids(dsn) == [answer.event_id])
    stored = rows(dsn, "select text, messages from interactions")[0]
    assert stored == {"text": "a\ufffdb", "messages": [{"role": "user", "content": "nul \ufffd here"}]}


def the_ingest_waits_out_a_database_that_is_away(tmp_path: Path, broker: Broker) -> None:
    server = Postgres(tmp_path / "postgres").start()
    dsn = server.new_database()
    outbox = tmp_path / "outbox"
    settings = ledger_settings(outbox, broker.bootstrap_servers)
    votes = [build_thumb() for _ in range(100)]
    with running(settings, dsn):
        accept(outbox, votes[:50])
        wait_for(lambda: len(stored_ids(dsn)) == 50)
        server.kill()
        accept(outbox, votes[50:])
        server.start()
        wait_for(lambda: len(stored_ids(dsn)) == 100)
    server.stop()


def a_snapshot_follows_from_the_content_and_not_from_the_order_of_events(
    tmp_path: Path, broker: Broker, postgres: Postgres
) -> None:
    from feedback.snapshots import create_snapshot

    events = []
    for number in range(40):
        comparison_id, answers = build_comparison(f"prompt {number % 20}", (f"good {number}", f"bad {number}"))
        events += [*answers, build_preference(comparison_id, answers[0].response_id, rater=f"rater-{number % 5}")]
    digests = []
    for seed in (1, 2):
        random.Random(seed).shuffle(events)
        dsn = postgres.new_database()
        outbox = tmp_path / f"outbox-{seed}"
        settings = ledger_settings(outbox, broker.bootstrap_servers)
        broker.restart_empty()
        accept(outbox, events)
        with running(settings, dsn):
            wait_for(lambda dsn=dsn: len(stored_ids(dsn)) == 120)
        snapshot = create_snapshot(dsn, tmp_path / f"artifacts-{seed}")
        again = create_snapshot(dsn, tmp_path / f"artifacts-{seed}")
        assert again == snapshot
        assert len(snapshot.train) + len(snapshot.heldout) == 40
        digests.append(snapshot.manifest["content_sha256"])
    assert digests[0] == digests[1]
