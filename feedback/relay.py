"""The relay: publishes what the outboxes of this node hold.

Guarantees
- A row is marked as sent only after the log acknowledged that very record (idempotent producer, acks=all),
  and only if the log is still the one that was there before; so every accepted event reaches the log that
  exists, at least once. The ingest makes that exactly once.
- When a topic's log identity changes (a broker that restarted empty), what was sent to the old one is sent again.
- A record that the log can't take, or that the disk changed, goes to `<topic>.dlq` and stays in the outbox as dead; it
  blocks nobody, nor does a damaged outbox file.
- One relay works per folder (a lock); a second waits.
Non-guarantee: order is kept per target only while nothing fails; the store does not need it.
"""

import logging
import os
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from kafka.errors import KafkaError, MessageSizeTooLargeError

from feedback.dead_letters import dead_letter_record
from feedback.erasure import Eraser
from feedback.errors import LogChanged, LogError, LogUnreachable
from feedback.outbox_file import OutboxFile, Row, Sent, is_damage, list_files, open_whole
from feedback.settings import FeedbackSettings
from feedback.stopping import Backoff, summary
from feedback.topics import EVENT_TOPICS, Logs, TopicLog, close_producer, make_producer, reaching_the_log
from storage.errors import DatabaseUnreachable
from storage.locks import take_lock
from storage.postgres import connect

logger = logging.getLogger(__name__)

_PRUNE_EVERY_S = 60.0
_PRUNE_ROWS = 5_000
_SMALL = 4  # below a quarter of a batch it waits for more: few large batches cost much less than many small ones
_LOCK_NAME = "relay.lock"


def run(settings: FeedbackSettings, stop: threading.Event, dsn: str | None = None) -> Counter[str]:
    """Relay until `stop` is set; then finish the batch in hand. Returns the counters, and prints them.

    With the store's `dsn` it also erases in the outboxes what was erased there. Waits out a broker that is away.
    Raises OSError when the outbox folder can't be used.
    """
    relay = Relay(settings)
    with _only_one(settings.outbox, stop), _erasing(settings, dsn, stop, relay.counters):
        backoff = Backoff(stop, settings.backoff_max_s)
        while not stop.is_set():
            try:
                if relay.step() < settings.relay_batch // _SMALL:
                    stop.wait(settings.relay_poll_s)
                backoff.reset()
            except (LogError, sqlite3.Error) as error:
                relay.counters["retries"] += 1
                logger.warning("relay: %s; trying again", error)
                relay.disconnect()
                backoff.wait()
        relay.close()
    print(summary("relay", relay.counters), flush=True)
    return relay.counters


class Relay:
    """The relay's work in steps. Holds one producer and one connection per outbox file; one thread.

    connect_logs, connect_producer: the seam to Kafka; each makes a new connection.
    """

    def __init__(
        self,
        settings: FeedbackSettings,
        connect_logs: Callable[[FeedbackSettings], Any] = Logs,
        connect_producer: Callable[[FeedbackSettings], Any] = make_producer,
    ) -> None:
        self.counters: Counter[str] = Counter(
            sent=0, failed=0, redriven=0, dead_lettered=0, erased=0, pruned=0, retries=0
        )
        self._settings = settings
        self._connect_logs = connect_logs
        self._connect_producer = connect_producer
        self._files: dict[Path, OutboxFile] = {}
        self._numbers: dict[Path, int] = {}
        self._driven: dict[tuple[Path, str], str] = {}
        self._logs: Any = None
        self._producer: Any = None
        self._singly: set[Path] = set()
        self._checked_at = 0.0
        self._pruned_at = 0.0

    def step(self) -> int:
        """Send at most one batch of each outbox file; returns how many events left their outbox.

        Raises LogError when the broker is away or changed (nothing is lost; call `disconnect`, try again),
        sqlite3.Error when a file can't be read.
        """
        files = self._open_files()
        pending = self._pending(files)
        files = list(self._files.values())
        idle_check = time.monotonic() - self._checked_at > self._settings.log_check_s
        if not pending and not idle_check:
            return 0
        before = self._current_logs()
        if self._redrive(files, before):
            pending = self._pending(files)
        moved = sum(self._send(file, rows, before) for file, rows in pending.items())
        self._prune(files)
        return moved

    def _pending(self, files: Sequence[OutboxFile]) -> dict[OutboxFile, list[Row]]:
        pending = {}
        for file in files:
            try:
                rows = file.pending(self._settings.relay_batch)
            except sqlite3.Error as error:
                if not is_damage(error):
                    raise
                self._leave_alone(file.path)
            else:
                if rows:
                    pending[file] = rows
        return pending

    def disconnect(self) -> None:
        """Drop the producer and the connection to the broker; the next step makes new ones."""
        if self._producer is not None:
            close_producer(self._producer)
            self._producer = None
        if self._logs is not None:
            self._logs.close()
            self._logs = None

    def close(self) -> None:
        self.disconnect()
        for file in self._files.values():
            file.close()

    def _open_files(self) -> list[OutboxFile]:
        """Those that are whole. A damaged one, or one that was set aside, stops no other."""
        for path in list_files(self._settings.outbox):
            try:
                number = path.stat().st_ino
            except FileNotFoundError:  # its owner has just set it aside
                continue
            if self._numbers.get(path) == number:
                continue
            if path in self._files:  # another file took its place
                self._files.pop(path).close()
            self._numbers[path] = number
            file = open_whole(path)
            if file is None:
                self._leave_alone(path)
            else:
                self._files[path] = file
        return list(self._files.values())

    def _leave_alone(self, path: Path) -> None:
        logger.error("relay: %s is damaged and left alone", path)
        if path in self._files:
            self._files.pop(path).close()

    def _current_logs(self) -> dict[str, TopicLog]:
        if self._logs is None:
            self._logs = self._connect_logs(self._settings)
            self._logs.ensure()
        try:
            logs: dict[str, TopicLog] = self._logs.current()
        except LogChanged:  # the topics are gone: the broker restarted empty
            self._logs.ensure()
            logs = self._logs.current()
        self._checked_at = time.monotonic()
        return logs

    def _redrive(self, files: Sequence[OutboxFile], logs: dict[str, TopicLog]) -> int:
        redriven = 0
        for file in files:
            for topic, log in logs.items():
                if self._driven.get((file.path, topic)) != log.log_id:
                    redriven += file.redrive(topic, log.log_id)
                    self._driven[file.path, topic] = log.log_id
        if redriven:
            self.counters["redriven"] += redriven
            logger.warning("relay: the log is a new one; %d events are sent again", redriven)
            if self._producer is not None:  # its sequence numbers belong to the log that is gone
                close_producer(self._producer)
                self._producer = None
        return redriven

    def _send(self, file: OutboxFile, rows: Sequence[Row], before: dict[str, TopicLog]) -> int:
        small = []
        for row in rows:
            if row.topic not in EVENT_TOPICS:
                self._bury(file, row, f"no event travels on topic {row.topic!r}")
            elif not row.intact:
                self._bury(file, row, "the disk changed it: its checksum is another")
            elif row.size > self._settings.max_record_bytes:
                self._bury(file, row, f"{row.size} bytes, more than max_record_bytes={self._settings.max_record_bytes}")
            else:
                small.append(row)
        parts = [[row] for row in small] if file.path in self._singly else [small]
        for part in parts:
            self._publish(file, part, before)
        self._singly.discard(file.path)
        return len(rows)

    def _publish(self, file: OutboxFile, rows: Sequence[Row], before: dict[str, TopicLog]) -> None:
        """Send `rows`, wait for every acknowledgement, and mark those that have it."""
        sent: list[Sent] = []
        failure: KafkaError | None = None
        futures: list[tuple[Row, Any]] = []
        try:
            for row in rows:
                futures.append((row, self._offer(row.topic, row.key, row.value, row.headers, row.accepted_at)))
        except KafkaError as error:  # no metadata within the time-out, or a producer that turned fatal
            failure = error
        # One deadline for all: a producer that hangs leaves every future open, and there are hundreds.
        deadline = time.monotonic() + self._settings.delivery_timeout_s + self._settings.request_timeout_s
        for row, future in futures:
            try:
                place = future.get(timeout=max(0.0, deadline - time.monotonic()))
            except KafkaError as error:
                failure = error
            else:
                sent.append(Sent(row.seq, before[row.topic].log_id, place.partition, place.offset))
        if sent and self._current_logs() == before:
            file.mark_sent(sent)
            self.counters["sent"] += len(sent)
        elif sent:
            raise LogChanged("the log changed while records were sent; they are sent again")
        if failure is not None:
            self._judge(file, rows, len(rows) - len(sent), failure)

    def _judge(self, file: OutboxFile, rows: Sequence[Row], failed: int, failure: KafkaError) -> None:
        """Too large for the broker: find out which one by sending singly, and bury that. Else: try again."""
        self.counters["failed"] += failed
        self.disconnect()  # one such answer makes an idempotent producer fail for ever
        if isinstance(failure, MessageSizeTooLargeError) and len(rows) == 1:
            self._bury(file, rows[0], f"{rows[0].size} bytes, more than the broker takes: {failure!r}")
            return
        if isinstance(failure, MessageSizeTooLargeError):
            self._singly.add(file.path)
        raise LogUnreachable(f"{failed} of {len(rows)} records were not acknowledged: {failure!r}") from failure

    def _bury(self, file: OutboxFile, row: Row, reason: str) -> None:
        """Tell the dead-letter topic (the value cut to what fits), then mark the row; it stays in the outbox."""
        record = dead_letter_record(
            topic=row.topic if row.topic in EVENT_TOPICS else EVENT_TOPICS[-1],
            key=row.key,
            value=row.value[: self._settings.max_record_bytes // 2],
            headers=row.headers,
            place=None,
            stage="relay",
            error_class="RecordRefused",
            error_message=reason,
        )
        with reaching_the_log():
            self._offer(*record, row.accepted_at).get(timeout=self._settings.delivery_timeout_s)
        file.mark_dead(row.seq, reason)
        self.counters["dead_lettered"] += 1
        logger.error("relay: event %s is a dead letter: %s", row.event_id, reason)

    def _offer(self, topic: str, key: bytes | None, value: bytes | None, headers: Any, accepted_at: float) -> Any:
        if self._producer is None:
            self._producer = self._connect_producer(self._settings)
        return self._producer.send(topic, key=key, value=value, headers=headers, timestamp_ms=int(accepted_at * 1000))

    def _prune(self, files: Sequence[OutboxFile]) -> None:
        if time.monotonic() - self._pruned_at < _PRUNE_EVERY_S:
            return
        sent_before = time.time() - self._settings.outbox_retention_s
        pruned = [file.prune(sent_before, _PRUNE_ROWS) for file in files]
        self.counters["pruned"] += sum(pruned)
        if _PRUNE_ROWS not in pruned:  # else there is more; the next step goes on
            self._pruned_at = time.monotonic()


@contextmanager
def _erasing(
    settings: FeedbackSettings, dsn: str | None, stop: threading.Event, counters: Counter[str]
) -> Iterator[None]:
    """A thread that erases; it ends with the block. A store that is away is asked again later."""
    if dsn is None:
        yield
        return
    eraser = Eraser(settings.outbox, settings.outbox_retention_s)

    def work() -> None:
        while not stop.wait(settings.erase_poll_s):
            try:
                with connect(dsn) as connection:
                    counters["erased"] += eraser.step(connection)
            except (DatabaseUnreachable, psycopg.Error, sqlite3.Error) as error:
                logger.warning("relay: nothing could be erased now: %s", error)

    thread = threading.Thread(target=work, name="eraser")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextmanager
def _only_one(directory: Path, stop: threading.Event) -> Iterator[None]:
    """Hold the folder's relay lock; waits for it, or for the stop."""
    directory.mkdir(parents=True, exist_ok=True)
    handle = take_lock(directory / _LOCK_NAME)
    while handle is None and not stop.wait(0.2):
        handle = take_lock(directory / _LOCK_NAME)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)
