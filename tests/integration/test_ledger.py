"""The ledger over real parts: outbox → relay → broker → ingest → PostgreSQL."""

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import psycopg
import pytest

from feedback.audit import audit
from feedback.dead_letters import dead_letter_record
from feedback.errors import LogChanged, LogError, StaleOwner
from feedback.events import FEEDBACK_TOPIC, INTERACTIONS_TOPIC, PREFERENCES_TOPIC, AnyEvent, to_record
from feedback.ingest import Ingest
from feedback.relay import Relay
from feedback.replay import replay
from feedback.settings import FeedbackSettings
from feedback.stream import stream_preferences
from feedback.topics import DEAD_LETTER_SUFFIX, Logs, make_producer
from storage.postgres import connect
from tests.helpers.documents import BROKER, programs
from tests.helpers.events_built import build_comparison, build_interaction, build_preference, build_thumb, build_vote
from tests.helpers.ledger import accept, insert, ledger_settings, read_topic, rows, running, stored_ids, wait_for
from tests.helpers.servers import Broker, Postgres

pytestmark = pytest.mark.real


def publish(settings: FeedbackSettings, events: Sequence[AnyEvent]) -> None:
    """Put events into the log without an outbox."""
    logs = Logs(settings)
    logs.ensure()
    logs.close()
    producer = make_producer(settings)
    for event in events:
        topic, key, value, headers = to_record(event)
        producer.send(topic, key=key, value=value, headers=headers).get(5)
    producer.close(timeout=2)


def step_until(ingest: Ingest, condition: Callable[[], bool], *, forgiving: bool = False) -> None:
    """Let the ingest work; forgiving: start over after an error of the log, as `run` does."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, ingest.counters
        try:
            ingest.step()
        except LogError:
            if not forgiving:
                raise
            ingest.disconnect()


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


def a_dead_letter_that_can_be_read_by_now_is_stored_by_a_replay(tmp_path: Path, broker: Broker, dsn: str) -> None:
    settings = ledger_settings(tmp_path, broker.bootstrap_servers)
    vote, hopeless = build_thumb(), b"not JSON"
    logs = Logs(settings)
    logs.ensure()
    logs.close()
    producer = make_producer(settings)
    topic, key, value, headers = to_record(vote)
    for unreadable in (value.replace(b'"up"', b'"UP"'), hopeless):
        producer.send(topic, key=key, value=unreadable, headers=headers).get(5)
    producer.close(timeout=2)
    with running(settings, dsn):
        wait_for(lambda: len(rows(dsn, "select * from dead_letters")) == 2)
        with connect(dsn) as connection:  # what made it unreadable is put right
            fixed = "update dead_letters set value = %s where value <> %s"
            assert connection.execute(fixed, (value, hopeless)).rowcount == 1
        assert replay(settings, dsn).sent == 2
        wait_for(lambda: len(rows(dsn, "select * from dead_letters")) == 3)
        wait_for(lambda: stored_ids(dsn) == [vote.event_id])
        [again] = rows(dsn, "select dead_letter_id from dead_letters where replayed_at is null")
        assert replay(settings, dsn, dead_letter_ids=[again["dead_letter_id"] - 1]).sent == 0
    assert len(rows(dsn, "select * from dead_letters where replayed_at is not null")) == 2


def a_dead_letter_that_is_too_large_for_the_log_holds_up_no_replay_and_no_ingest(
    tmp_path: Path, broker: Broker, dsn: str
) -> None:
    settings = ledger_settings(tmp_path, broker.bootstrap_servers, max_record_bytes=20_000)
    vote = build_thumb()
    topic, key, value, headers = to_record(vote)
    roomy = make_producer(ledger_settings(tmp_path, broker.bootstrap_servers))
    logs = Logs(settings)
    logs.ensure()
    logs.close()
    unreadable = [(b"k" * 30_000, b"garbage"), (key, b"x" * 30_000), (key, value.replace(b'"up"', b'"UP"'))]
    for each_key, each_value in unreadable:
        roomy.send(topic, key=each_key, value=each_value, headers=[*headers, ("ce_id", b"x" * 5_000)]).get(5)
    roomy.close(timeout=2)
    with running(settings, dsn):
        wait_for(lambda: len(rows(dsn, "select * from dead_letters")) == 3)
        with connect(dsn) as connection:
            connection.execute("update dead_letters set value = %s where value like %s", (value, b"%UP%"))
        done = replay(settings, dsn)
        assert (done.sent, len(done.too_large)) == (1, 2)
        wait_for(lambda: stored_ids(dsn) == [vote.event_id])


def an_event_that_the_log_takes_by_now_is_sent_by_a_replay(tmp_path: Path, broker: Broker, dsn: str) -> None:
    small = ledger_settings(tmp_path, broker.bootstrap_servers, max_record_bytes=2_000)
    vote = build_vote("comment", text="x" * 3_000)
    accept(tmp_path, [vote])
    relay = Relay(small)
    relay.step()
    relay.close()
    assert relay.counters["dead_lettered"] == 1
    settings = ledger_settings(tmp_path, broker.bootstrap_servers)
    with running(settings, dsn):
        assert replay(settings, dsn).pending == 1
        wait_for(lambda: stored_ids(dsn) == [vote.event_id])
    assert audit(settings, dsn).clean


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


def a_record_that_cannot_be_read_becomes_a_dead_letter_and_stops_nobody(
    tmp_path: Path, broker: Broker, dsn: str
) -> None:
    settings = ledger_settings(tmp_path, broker.bootstrap_servers)
    publish(settings, [])
    good = build_thumb()
    twice = build_interaction()
    clash = build_interaction(response_id=twice.response_id, event_id=build_thumb().event_id)
    producer = make_producer(settings)
    for topic, value in [
        (FEEDBACK_TOPIC, b"\xff not json"),
        (FEEDBACK_TOPIC, good.model_dump_json().encode()),
        (FEEDBACK_TOPIC, None),
        (INTERACTIONS_TOPIC, twice.model_dump_json().encode()),
        (INTERACTIONS_TOPIC, clash.model_dump_json().encode()),
    ]:
        producer.send(topic, key=b"one", value=value, headers=[("ce_id", b"the-id"), ("x", b"\x00\xff")]).get(5)
    assert dead_letter_record(
        topic=FEEDBACK_TOPIC,
        key=None,
        value=None,
        headers=[("null", None)],  # type: ignore[list-item]
        place=None,
        stage="ingest",
        error_class="E",
        error_message="m",
    )[3][0] == ("null", b"")  # Kafka allows it; its Python client does not send it
    producer.close(timeout=2)
    ingest = Ingest(settings, dsn)
    step_until(ingest, lambda: ingest.counters["read"] == 5)
    ingest.disconnect()
    assert ingest.counters["inserted"] == 2
    assert ingest.counters["dead_lettered"] == 3
    kept = rows(dsn, 'select value, event_id, error_class from dead_letters order by topic, "offset"')
    assert [row["value"] and bytes(row["value"]) for row in kept] == [
        b"\xff not json",
        None,
        clash.model_dump_json().encode(),
    ]
    assert [row["error_class"] for row in kept] == ["ValidationError", "ValueError", "UniqueViolation"]
    assert {row["event_id"] for row in kept} == {"the-id"}
    letters = {letter.value: letter for letter in read_topic(settings, FEEDBACK_TOPIC + DEAD_LETTER_SUFFIX, count=2)}
    headers = letters[b"\xff not json"].headers
    assert letters[b"\xff not json"].key == b"one"
    assert headers[:2] == [("ce_id", b"the-id"), ("x", b"\x00\xff")]
    assert dict(headers)["__connect.errors.topic"] == FEEDBACK_TOPIC.encode()
    assert dict(headers)["__connect.errors.exception.class.name"] == b"ValidationError"
    assert dict(headers)["__connect.errors.offset"].isdigit()


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


def an_oversized_event_is_a_dead_letter_of_the_relay_and_blocks_nobody(
    tmp_path: Path, broker: Broker, dsn: str
) -> None:
    settings = ledger_settings(tmp_path, broker.bootstrap_servers, max_record_bytes=4_000)
    large = build_interaction(text="x" * 10_000)
    small = [build_thumb() for _ in range(5)]
    accept(tmp_path, [small[0], large, *small[1:]])
    with running(settings, dsn):
        wait_for(lambda: len(stored_ids(dsn)) == 5)
    report = audit(settings, dsn)
    assert report.clean, report
    assert (report.accepted, report.stored, report.dead_lettered) == (6, 5, 1)


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
