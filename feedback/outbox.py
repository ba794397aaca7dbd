"""The outbox: where an event is accepted, before anything else happens to it.

Guarantees
- When the future of `append` resolves, the events are on the disk (SQLite WAL, synchronous=FULL) and will
  reach the log and the store, whatever process is killed afterwards.
- One process owns a file, under a lock that the kernel drops when the process dies; `open` adopts a file
  whose owner is gone before it makes a new one, so nothing is stranded and files do not pile up.
- The same event again is `duplicate`; the same id with other content is refused. What an event says is
  compared, not when: `time` is no part of the content, for a retry is stamped anew.
- Bounded: in events that wait for the disk, and in events that wait for the log.
Non-guarantees: a retry that reaches another process, or comes after the retention window, is accepted here
again; the store keeps one of the two all the same. A failed append (not a conflict) has an unknown outcome.
"""

import hashlib
import logging
import os
import queue
import sqlite3
import threading
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Literal

from feedback.errors import EventNotEncodable, OutboxConflict, OutboxFull, OutboxUnavailable
from feedback.events import AnyEvent
from feedback.outbox_file import (
    LOCK_SUFFIX,
    SUFFIX,
    Accepted,
    OutboxFile,
    create_file,
    is_damage,
    list_files,
    open_whole,
    set_aside,
)
from feedback.records import to_record
from storage.locks import take_lock

logger = logging.getLogger(__name__)

Answer = Literal["accepted", "duplicate"]
_Request = tuple[list[Accepted], "Future[list[Answer]]"]

_MAX_EVENTS_PER_COMMIT = 500
_RECOUNT_S = 1.0


class Outbox:
    """The outbox of one process. Thread-safe. Make it with `Outbox.open`."""

    def __init__(self, path: Path, lock: int, max_pending: int, max_queued: int) -> None:
        self.path = path
        self.counters: Counter[str] = Counter(
            accepted=0, duplicate=0, conflict=0, refused_full=0, failed=0, damaged_files=0
        )
        self._lock = lock
        self._file = OutboxFile(path, durable=True)
        self._max_pending = max_pending
        self._max_queued = max_queued
        self._pending = self._file.pending_count()
        self._queued = 0
        self._closed = False
        self._guard = threading.Lock()
        self._queue: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="outbox-writer", daemon=True)
        self._writer.start()

    @classmethod
    def open(cls, directory: Path, *, max_pending: int = 1_000_000, max_queued: int = 10_000) -> "Outbox":
        """Own a file in `directory`: one whose owner is gone, else a new one.

        max_pending: events that may wait for the log; max_queued: events that may wait for the disk.
        Raises OutboxUnavailable when the folder or the file can't be written.
        """
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            path, lock = _adopt(directory) or _create(directory)
            return cls(path, lock, max_pending, max_queued)
        except (OSError, sqlite3.Error) as error:
            raise OutboxUnavailable(f"no outbox file can be opened in {directory}: {error}") from error

    def append(self, events: Sequence[AnyEvent]) -> "Future[list[Answer]]":
        """Accept `events`, all or none; the future resolves, in their order, once they are on the disk.

        Raises EventNotEncodable, OutboxFull or OutboxUnavailable at once. The future fails with
        OutboxConflict (nothing of this call was written) or OutboxUnavailable (unknown outcome: try again).
        """
        accepted = [_encode(event) for event in events]
        answer: Future[list[Answer]] = Future()
        with self._guard:
            if self._closed:
                raise OutboxUnavailable("the outbox is closed")
            full = self._queued + len(accepted) > self._max_queued
            if full or self._pending + self._queued + len(accepted) > self._max_pending:
                self.counters["refused_full"] += len(accepted)
                waits = f"{self._queued} events wait for the disk" if full else f"{self._pending} wait for the log"
                raise OutboxFull(f"the outbox is full: {waits}; try again later")
            self._queued += len(accepted)
            self._queue.put((accepted, answer))
        return answer

    def close(self) -> None:
        """Write what is queued, then give the file back; whoever comes next adopts it. Idempotent."""
        with self._guard:
            if self._closed:
                return
            self._closed = True
            self._queue.put(None)
        self._writer.join()
        self._file.close()
        os.close(self._lock)

    def _write(self) -> None:
        """The writer thread: everything that queued up during one fsync shares the next."""
        counted_at = time.monotonic()
        open_ = True
        while open_:
            requests, open_ = self._take()
            if requests:
                self._commit(requests)
            if time.monotonic() - counted_at > _RECOUNT_S:
                counted_at = time.monotonic()
                self._recount()

    def _take(self) -> tuple[list[_Request], bool]:
        """Wait a moment for a request, then take those behind it; false when the outbox is closing."""
        requests: list[_Request] = []
        size = 0
        try:
            request = self._queue.get(timeout=_RECOUNT_S)
        except queue.Empty:
            return [], True
        while request is not None:
            requests.append(request)
            size += len(request[0])
            if size >= _MAX_EVENTS_PER_COMMIT or self._queue.empty():
                return requests, True
            request = self._queue.get()
        return requests, False

    def _commit(self, requests: list[_Request]) -> None:
        try:
            results = self._file.insert([events for events, _ in requests])
        except sqlite3.Error as error:
            if is_damage(error):
                self._begin_anew(error)
            self._settle(requests, error)
        else:
            self._settle(requests, results)

    def _begin_anew(self, error: sqlite3.Error) -> None:
        """Set the damaged file aside and go on with a new one. The lock stays: it is this process's all the same."""
        self._file.close()
        logger.error("outbox: %s is damaged (%s); it is kept as %s", self.path, error, set_aside(self.path).name)
        create_file(self.path)
        self._file = OutboxFile(self.path, durable=True)
        self.counters["damaged_files"] += 1

    def _settle(self, requests: list[_Request], results: list[list[bool] | str] | sqlite3.Error) -> None:
        """Count first, then answer: who has the answer may look at the counters."""
        outcomes = [results] * len(requests) if isinstance(results, sqlite3.Error) else results
        with self._guard:
            for (events, _), outcome in zip(requests, outcomes, strict=True):
                self._queued -= len(events)
                if isinstance(outcome, list):
                    self._pending += sum(outcome)
                    self.counters["accepted"] += sum(outcome)
                    self.counters["duplicate"] += len(outcome) - sum(outcome)
                else:
                    self.counters["conflict" if isinstance(outcome, str) else "failed"] += len(events)
        for (_, answer), outcome in zip(requests, outcomes, strict=True):
            if not answer.set_running_or_notify_cancel():
                continue
            if isinstance(outcome, list):
                answer.set_result(["accepted" if new else "duplicate" for new in outcome])
            elif isinstance(outcome, str):
                answer.set_exception(OutboxConflict(outcome))
            else:
                answer.set_exception(OutboxUnavailable(f"the outbox file could not be written: {outcome}"))

    def _recount(self) -> None:
        """The relay, another process, lowers the number of pending rows; see how many are left."""
        try:
            pending = self._file.pending_count()
        except sqlite3.Error:
            return  # the estimate stays, on the safe side; writing will tell if the file is broken
        with self._guard:
            self._pending = pending


def _adopt(directory: Path) -> tuple[Path, int] | None:
    """The lock lies next to the file: SQLite's own locks live on the file itself."""
    for path in list_files(directory):
        lock = take_lock(path.with_suffix(LOCK_SUFFIX))
        if lock is None:
            continue
        file = open_whole(path, durable=True)
        if file is not None:
            file.close()
            return path, lock
        os.close(lock)
        logger.error("outbox: %s is damaged; it is kept as %s", path, set_aside(path).name)
    return None


def _create(directory: Path) -> tuple[Path, int]:
    path = directory / f"{uuid.uuid4().hex}{SUFFIX}"
    lock = take_lock(path.with_suffix(LOCK_SUFFIX))
    if lock is None:
        raise OSError(f"the lock of the new file {path} is taken")
    create_file(path)
    return path, lock


def _encode(event: AnyEvent) -> Accepted:
    try:
        topic, key, value, headers = to_record(event)
        content = event.model_dump_json(exclude={"time"})
    except ValueError as error:  # pydantic's serialisation error and UnicodeEncodeError are both ValueErrors
        raise EventNotEncodable(f"event {event.event_id} can't be written as JSON: {error}") from error
    fingerprint = hashlib.sha256(f"{topic}\0{content}".encode()).digest()
    return Accepted(event.event_id, fingerprint, topic, key, value, headers)
