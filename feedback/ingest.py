"""The ingest: reads the log and writes the store, exactly once.

Guarantees
- One PostgreSQL transaction holds a batch's rows, what they change in the preferences, its dead letters and the
  next offset of each (topic, partition, log identity). The offset moves by compare-and-set, so of two ingests
  that read the same records one commits and the other rolls back and starts over from the stored offset.
- An event is stored once, by event id, however often it comes through the log.
- A record that can't be read or stored goes to `<topic>.dlq` and to the table `dead_letters`, and stops nobody.
- One that is frozen in the middle of a batch loses its transaction after a while, so another can go on.
- It waits out a broker or a database that is away, and begins anew when the log is another one.
- What somebody asked to erase is not stored when it arrives late or again (feedback.erasure).
- The counters add up: read = inserted + duplicate + dead_lettered + erased + tombstones.
- What changed in the preferences, and other records of the store's own, are published (feedback.publishing).
Non-guarantees: Kafka's committed offset is written as a hint for lag tools and never read. A dead letter can
come twice on `<topic>.dlq` (never in the table). A record of somebody else's whose header names are not UTF-8 stops its
partition: the Kafka client does not get past it.
"""

import contextlib
import logging
import threading
import time
from collections import Counter
from contextlib import suppress
from typing import Any

import psycopg
from kafka import KafkaConsumer, OffsetAndMetadata, TopicPartition
from kafka.errors import KafkaError

from feedback import store
from feedback.dead_letters import dead_letter_record
from feedback.erasure import expire
from feedback.errors import LogChanged, LogError, StaleOwner
from feedback.events import AnyEvent
from feedback.publishing import Publisher
from feedback.records import from_record, is_tombstone
from feedback.sender import Sender
from feedback.settings import FeedbackSettings
from feedback.stopping import Backoff, summary
from feedback.store import Incoming, Place, Refusal
from feedback.topics import Logs, TopicLog, open_client, reaching_the_log
from storage.errors import DatabaseUnreachable
from storage.postgres import Connection, connect

logger = logging.getLogger(__name__)

_POLL_MS = 500
_SMALL = 4  # below a quarter of a batch it waits for more: few large transactions cost much less than many small ones
_EXPIRE_EVERY_S = 60.0
_EXPIRE_ROWS = 500
_DATABASE_AWAY = (
    DatabaseUnreachable,
    psycopg.OperationalError,
    psycopg.InterfaceError,
    psycopg.errors.IdleInTransactionSessionTimeout,
)


def run(settings: FeedbackSettings, dsn: str, stop: threading.Event) -> Counter[str]:
    """Ingest until `stop` is set; then finish the batch in hand. Returns the counters, and prints them."""
    ingest = Ingest(settings, dsn)
    backoff = Backoff(stop, settings.backoff_max_s)
    while not stop.is_set():
        try:
            if ingest.step() < settings.ingest_batch // _SMALL:
                stop.wait(settings.ingest_pause_s)
            backoff.reset()
        except (LogError, StaleOwner, *_DATABASE_AWAY) as error:
            ingest.counters["stale" if isinstance(error, StaleOwner) else "retries"] += 1
            logger.warning("ingest: %s; trying again", error)
            ingest.disconnect()
            backoff.wait()
    ingest.disconnect()
    print(summary("ingest", ingest.counters), flush=True)
    return ingest.counters


class Ingest:
    """The ingest's work in steps; one thread. Any error leaves it to be `disconnect`ed and used again."""

    def __init__(self, settings: FeedbackSettings, dsn: str) -> None:
        self.counters: Counter[str] = Counter(
            read=0,
            inserted=0,
            duplicate=0,
            dead_lettered=0,
            erased=0,
            tombstones=0,
            expired=0,
            skipped_offsets=0,
            published=0,
            stale=0,
            retries=0,
        )
        self._settings = settings
        self._dsn = dsn
        self._session: _Session | None = None

    def step(self) -> int:
        """Read and store at most one batch, then publish what it changed; returns the number of records read.

        Raises LogError, StaleOwner, DatabaseUnreachable, psycopg.OperationalError: nothing of the batch is
        stored (or all of it, when the database vanished during the commit; the offset then says so).
        """
        if self._session is None:
            self._session = _Session(self._settings, self._dsn)
        session = self._session
        records = session.poll()
        if records:
            self._store(session, records)
        self.counters["published"] += session.publish()
        self.counters["expired"] += session.expire()
        return len(records)

    def _store(self, session: "_Session", records: list[Incoming]) -> None:
        events: list[tuple[Incoming, AnyEvent]] = []
        unreadable: list[Refusal] = []
        for record in records:
            if is_tombstone(record.value, record.headers):  # our own, for others who read the log
                continue
            try:
                events.append((record, _read(record)))
            except ValueError as error:
                unreadable.append(Refusal(record, error))
        moves = _moves(session.positions, records)
        with session.connection.transaction():
            store.advance(session.connection, moves)
            written = store.insert_events(session.connection, events)
            refusals = unreadable + written.refused
            session.publish_dead_letters(refusals)
            store.insert_dead_letters(session.connection, refusals)
        # A log that was cut at its head (retention) skips offsets; so do transaction markers.
        span = sum(new - old for old, new in moves.values())
        self.counters.update(
            read=len(records),
            inserted=written.inserted,
            duplicate=written.duplicate,
            dead_lettered=len(refusals),
            erased=written.erased,
            tombstones=len(records) - len(events) - len(unreadable),
            skipped_offsets=span - len(records),
        )
        session.moved(moves)

    def disconnect(self) -> None:
        """Drop the connections; the next step starts from the offsets that the store has then."""
        if self._session is not None:
            self._session.close()
            self._session = None


class _Session:
    """The connections, and the log that they are good for."""

    def __init__(self, settings: FeedbackSettings, dsn: str) -> None:
        self._settings = settings
        self._sender = Sender(settings)
        self._consumer: Any = None
        self._publisher: Publisher | None = None
        self._checked_at = 0.0
        self._expired_at = -_EXPIRE_EVERY_S
        self.connection: Connection = connect(dsn, autocommit=True)
        # Frozen within a transaction (paused, swapped out) it would hold every other ingest up.
        patience_s = 2 * (settings.request_timeout_s + settings.delivery_timeout_s)
        self.connection.execute(f"set idle_in_transaction_session_timeout = {int(1000 * patience_s)}")
        self._logs: Logs | None = None
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self._logs = Logs(settings)
            self._logs.ensure()
            self._publisher = Publisher(settings, self.connection, self._logs, self._sender)
            self._behind = False
            self._log_of: dict[str, TopicLog] = self._logs.current()
            places = [(log.topic, number, log.log_id) for log in self._log_of.values() for number in log.partitions]
            self.positions: dict[Place, int] = store.positions(self.connection, places)
            self._consumer = self._make_consumer()
            undo.pop_all()

    def _make_consumer(self) -> Any:
        consumer = open_client(
            KafkaConsumer,
            self._settings,
            group_id=self._settings.ingest_group,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            allow_auto_create_topics=False,
            max_poll_records=self._settings.ingest_batch,
        )
        partitions = {TopicPartition(topic, number): offset for (topic, number, _), offset in self.positions.items()}
        consumer.assign(list(partitions))
        for partition, offset in partitions.items():
            consumer.seek(partition, offset)
        return consumer

    def poll(self) -> list[Incoming]:
        """Records of the log that this session is good for. Raises LogChanged when it is another by now.

        The question comes after the answer: an unchanged identity proves where the records came from. The
        idle check matters too: a broker that restarted empty never says that our offset is out of range.
        """
        with reaching_the_log():
            polled = self._consumer.poll(timeout_ms=0 if self._behind else _POLL_MS)
        if polled or time.monotonic() - self._checked_at > self._settings.log_check_s:
            assert self._logs is not None
            if self._logs.current() != self._log_of:
                raise LogChanged("the log is another one, or has other partitions")
            self._checked_at = time.monotonic()
        return [
            Incoming(
                topic=record.topic,
                partition=record.partition,
                log_id=self._log_of[record.topic].log_id,
                offset=record.offset,
                key=record.key,
                value=record.value,
                headers=list(record.headers),
            )
            for records in polled.values()
            for record in records
        ]

    def publish(self) -> int:
        """Publish at most one batch of what there is to say; the next poll does not wait while there is more."""
        assert self._publisher is not None
        published = self._publisher.step()
        self._behind = published > 0
        return published

    def expire(self) -> int:
        """Delete a little of what is older than the retention; returns how many rows went."""
        if not self._settings.retention_s or time.monotonic() - self._expired_at < _EXPIRE_EVERY_S:
            return 0
        with self.connection.transaction():
            expired = expire(self.connection, self._settings.retention_s, _EXPIRE_ROWS)
        if not expired:  # else there may be more; the next step goes on
            self._expired_at = time.monotonic()
        return expired

    def publish_dead_letters(self, refusals: list[Refusal]) -> None:
        """Send them to their topics and wait; one that is too large for that is in the table only.

        Raises LogUnreachable.
        """
        records = []
        for refusal in refusals:
            record = refusal.record
            logger.error(
                "ingest: %s/%d@%d is a dead letter: %s",
                record.topic,
                record.partition,
                record.offset,
                refusal.message[:500],
            )
            records.append(
                dead_letter_record(
                    topic=record.topic,
                    key=record.key,
                    value=record.value
                    and record.value[: self._settings.max_record_bytes // 2],  # the table has it whole
                    headers=record.headers,
                    place=(record.partition, record.offset),
                    stage="ingest",
                    error_class=type(refusal.error).__name__,
                    error_message=refusal.message,
                )
            )
        self._sender.send(records)

    def moved(self, moves: dict[Place, tuple[int, int]]) -> None:
        """Remember the new offsets, and drop Kafka a hint for lag tools."""
        self.positions.update({place: new for place, (_, new) in moves.items()})
        hint = {
            TopicPartition(topic, number): OffsetAndMetadata(new, "", -1)
            for (topic, number, _), (_, new) in moves.items()
        }
        with suppress(KafkaError):
            self._consumer.commit_async(hint)

    def close(self) -> None:
        self._sender.close()
        if self._consumer is not None:
            with suppress(KafkaError, OSError):
                self._consumer.close(autocommit=False, timeout_ms=1_000)
        if self._logs is not None:
            self._logs.close()
        with suppress(psycopg.Error):
            self.connection.close()


def _read(record: Incoming) -> AnyEvent:
    if record.value is None:
        raise ValueError("the record has no value")
    return from_record(record.topic, record.value)


def _moves(at: dict[Place, int], records: list[Incoming]) -> dict[Place, tuple[int, int]]:
    """Where each place was and where it is after `records`."""
    moves: dict[Place, tuple[int, int]] = {}
    for record in records:
        place = (record.topic, record.partition, record.log_id)
        old, new = moves.get(place, (at[place], at[place]))
        moves[place] = (old, max(new, record.offset + 1))
    return moves
