"""Dead letters over real parts: what becomes one, what it keeps, and that a replay sends it again."""

from pathlib import Path

import pytest

from feedback.audit import audit
from feedback.dead_letters import dead_letter_record
from feedback.events import FEEDBACK_TOPIC, INTERACTIONS_TOPIC
from feedback.ingest import Ingest
from feedback.records import to_record
from feedback.relay import Relay
from feedback.replay import replay
from feedback.topics import DEAD_LETTER_SUFFIX, Logs, make_producer
from storage.postgres import connect
from tests.helpers.events_built import build_interaction, build_thumb, build_vote
from tests.helpers.ledger import (
    accept,
    ledger_settings,
    publish,
    read_topic,
    rows,
    running,
    step_until,
    stored_ids,
    wait_for,
)
from tests.helpers.servers import Broker

pytestmark = pytest.mark.real


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
