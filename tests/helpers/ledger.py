"""A ledger for one test: settings, the relay and the ingest in this process, and what the store has."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kafka import KafkaConsumer

from feedback import ingest, relay, store
from feedback.errors import LogError
from feedback.events import AnyEvent
from feedback.ingest import Ingest
from feedback.outbox import Outbox
from feedback.records import to_record
from feedback.settings import FeedbackSettings
from feedback.topics import Logs, client_options, make_producer
from storage.postgres import connect


def ledger_settings(outbox: Path, bootstrap_servers: str, **overrides: Any) -> FeedbackSettings:
    """Settings with short pauses."""
    values: dict[str, Any] = {
        "bootstrap_servers": bootstrap_servers,
        "outbox": outbox,
        "relay_poll_s": 0.05,
        "ingest_pause_s": 0.05,
        "log_check_s": 0.3,
        "request_timeout_s": 2.0,
        "delivery_timeout_s": 4.0,
        "backoff_max_s": 0.5,
    }
    return FeedbackSettings.model_validate(values | overrides)


def accept(outbox: Path, events: Sequence[AnyEvent]) -> list[str]:
    """Put events into an outbox of the folder and wait for the disk; returns the answers."""
    box = Outbox.open(outbox)
    try:
        return list(box.append(events).result(timeout=10))
    finally:
        box.close()


@contextmanager
def running(settings: FeedbackSettings, dsn: str) -> Iterator[None]:
    """The relay and the ingest at work in threads; both end with the block."""
    stop = threading.Event()
    threads = [
        threading.Thread(target=relay.run, args=(settings, stop, dsn)),
        threading.Thread(target=ingest.run, args=(settings, dsn, stop)),
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive(), "relay or ingest did not stop"


def rows(dsn: str, query: str) -> list[dict[str, Any]]:
    """What the store answers."""
    with connect(dsn) as connection:
        return connection.execute(query).fetchall()


def read_topic(settings: FeedbackSettings, topic: str, *, count: int) -> list[Any]:
    """The first `count` records of a topic."""
    consumer = KafkaConsumer(
        topic, **client_options(settings), auto_offset_reset="earliest", consumer_timeout_ms=10_000
    )
    records = list(itertools.islice(consumer, count))
    consumer.close()
    return records


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


def stored_ids(dsn: str) -> list[str]:
    """The event ids in the store, each as often as it is there."""
    query = "select event_id from interactions union all select event_id from feedback"
    return [row["event_id"] for row in rows(dsn, query)]


def wait_for(condition: Any, within_s: float = 30.0) -> None:
    """Return once `condition()` is true. Fails after within_s seconds."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"did not come true within {within_s} s"
        time.sleep(0.1)


def insert(dsn: str, events: Sequence[AnyEvent]) -> store.Written:
    """Put events into the store without the log."""
    incoming = [
        (store.Incoming(topic, 0, "log", offset, key, value, headers), event)
        for offset, event in enumerate(events)
        for topic, key, value, headers in [to_record(event)]
    ]
    with connect(dsn) as connection:
        return store.insert_events(connection, incoming)
