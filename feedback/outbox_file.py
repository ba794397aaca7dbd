"""One outbox file: its columns, and every statement that runs on it.

A file is SQLite in WAL mode. Two processes work on it at once: its owner, which inserts, and the node's
relay, which marks rows as sent. A file appears under its name only once it is complete.
Guarantee: with `synchronous=FULL` (the owner) a commit has reached the disk when it returns.
Non-guarantee: the relay's marks may be lost with the power; then those events are sent again.

A row is pending until it is sent (`sent_at`, with the log's identity and the place it took there), dead
(`dead_at`, with the reason: the log can't take it; the row is then kept for ever), or erased (`erased_at`: its content
is gone from the file, and its id stays, so that a retry is still a duplicate).
Each row has a checksum, so a byte that the disk changed is seen. A file that SQLite itself finds damaged is set aside
by its owner under DAMAGED_SUFFIX; nothing reads it any more, and the audit names it.
"""

import json
import os
import sqlite3
import time
import uuid
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SUFFIX = ".outbox"
LOCK_SUFFIX = ".lock"
DAMAGED_SUFFIX = ".damaged"
BUSY_TIMEOUT_S = 10.0

_PENDING = "sent_at is null and dead_at is null and erased_at is null"
_SCHEMA = f"""
create table events (
    seq integer primary key autoincrement,
    event_id text not null unique,
    fingerprint blob not null,
    topic text not null,
    key blob not null,
    value blob not null,
    headers text not null,
    accepted_at real not null,
    sent_at real,
    sent_log_id text,
    sent_partition integer,
    sent_offset integer,
    dead_at real,
    dead_reason text,
    erased_at real,
    checksum integer
);
create index pending on events (seq) where {_PENDING};
create index sent on events (sent_at) where sent_at is not null;
"""


_INSERT = "insert into events (event_id, fingerprint, topic, key, value, headers, accepted_at, checksum) values "
_ROWS_AT_ONCE = 256
# Copying the log of writes into the file takes 0.1 s: the relay does it, in its own time. The owner, who has people
# waiting, does only when no relay has for long.
_OWNERS_CHECKPOINT_PAGES = 16_000


@dataclass(frozen=True)
class Accepted:
    """An event on its way to the file; `fingerprint` identifies its content."""

    event_id: str
    fingerprint: bytes
    topic: str
    key: bytes
    value: bytes
    headers: list[tuple[str, bytes]]


@dataclass(frozen=True)
class Row:
    """An event as the relay reads it back; `accepted_at` in seconds since the epoch. Not intact: changed on disk."""

    seq: int
    event_id: str
    topic: str
    key: bytes
    value: bytes
    headers: list[tuple[str, bytes]]
    accepted_at: float
    intact: bool = True

    @property
    def size(self) -> int:
        """Bytes of key, value and headers."""
        return len(self.key) + len(self.value) + sum(len(name.encode()) + len(value) for name, value in self.headers)


@dataclass(frozen=True)
class Sent:
    """Where the log put row `seq`."""

    seq: int
    log_id: str
    partition: int
    offset: int


@dataclass(frozen=True)
class Standing:
    """What became of an accepted event, for the audit. Null where it was not sent."""

    event_id: str
    topic: str
    accepted_at: float
    dead: bool
    erased: bool
    sent_log_id: str | None
    sent_partition: int | None
    sent_offset: int | None


def create_file(path: Path) -> None:
    """Make a new, empty file at `path`; it appears there only once it is complete."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    temporary.touch(mode=0o600)  # conversations are in it; SQLite gives its side files the same mode
    connection = sqlite3.connect(temporary, isolation_level=None, timeout=BUSY_TIMEOUT_S)
    try:
        connection.execute("pragma journal_mode=wal")
        connection.executescript(_SCHEMA)
    finally:
        connection.close()
    os.replace(temporary, path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def is_damage(error: sqlite3.Error) -> bool:
    """Whether the file's own structure is broken, so that no later try can help."""
    return getattr(error, "sqlite_errorname", "").startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB"))


def set_aside(path: Path) -> Path:
    """Rename a damaged file, with its side files; returns its new name. For its owner."""
    for suffix in ("-wal", "-shm", ""):
        side = path.with_name(path.name + suffix)
        if side.exists():
            os.replace(side, side.with_name(f"{path.name}{DAMAGED_SUFFIX}{suffix}"))
    return path.with_name(path.name + DAMAGED_SUFFIX)


def list_files(directory: Path) -> list[Path]:
    """The outbox files of a node, by name."""
    return sorted(path for path in directory.glob(f"*{SUFFIX}") if not path.name.startswith("."))


def open_files(directory: Path) -> Iterator["OutboxFile"]:
    """Each outbox file of a node that is whole, one after the other, for somebody who is not its owner."""
    for path in list_files(directory):
        file = open_whole(path)
        if file is None:
            continue
        try:
            yield file
        finally:
            file.close()


def open_whole(path: Path, *, durable: bool = False) -> "OutboxFile | None":
    """The file, or None when it is damaged as far as a first look tells. Raises other errors of sqlite3."""
    try:
        file = OutboxFile(path, durable=durable)
        file.pending(1)
    except sqlite3.Error as error:
        if not is_damage(error):
            raise
        return None
    return file


class OutboxFile:
    """A connection to one file. Use it from one thread at a time. Every method can raise sqlite3.Error."""

    def __init__(self, path: Path, *, durable: bool) -> None:
        """durable: a commit waits for the disk (the owner); otherwise marks may be lost with the power."""
        self.path = path
        self._db = sqlite3.connect(path, isolation_level=None, timeout=BUSY_TIMEOUT_S, check_same_thread=False)
        self._db.text_factory = lambda text: text.decode(errors="replace")  # the checksum tells; one row stops no other
        self._db.execute(f"pragma synchronous={'full' if durable else 'normal'}")
        if durable:
            self._db.execute(f"pragma wal_autocheckpoint={_OWNERS_CHECKPOINT_PAGES}")
        self._upgrade()

    def close(self) -> None:
        self._db.close()

    def _upgrade(self) -> None:
        """A file of an older version gets the columns that it lacks."""
        if not self._lacks("checksum"):
            return
        with self._transaction():
            if self._lacks("checksum"):  # another process may have been faster
                self._db.execute("alter table events add column erased_at real")
                self._db.execute("alter table events add column checksum integer")
                self._db.execute("drop index pending")
                self._db.execute(f"create index pending on events (seq) where {_PENDING}")

    def _lacks(self, column: str) -> bool:
        return all(row[1] != column for row in self._db.execute("pragma table_info(events)"))

    def insert(self, batches: Sequence[Sequence[Accepted]]) -> list[list[bool] | str]:
        """Write several requests in one transaction.

        Returns for each request a list, true where the event is new and false where it was there; or the
        event id that was there with other content, and then nothing of that request is written.
        """
        with self._transaction():
            known = self._fingerprints([event.event_id for batch in batches for event in batch])
            fresh: list[Accepted] = []
            outcomes = [_judge(batch, known, fresh) for batch in batches]
            self._insert(fresh)
        return outcomes

    def _fingerprints(self, event_ids: Sequence[str]) -> dict[str, bytes]:
        """Of those that are there, in one statement: each lets go of the interpreter, which comes back late."""
        query = "select event_id, fingerprint from events where event_id in (select value from json_each(?))"
        return dict(self._db.execute(query, (json.dumps(event_ids),)))

    def _insert(self, events: Sequence[Accepted]) -> None:
        """In statements of a power of two rows each, so that there are few, and few kinds."""
        now = time.time()
        start = 0
        while start < len(events):
            size = min(_ROWS_AT_ONCE, 1 << (len(events) - start).bit_length() - 1)
            values: list[object] = []
            for event in events[start : start + size]:
                sent = (event.topic, event.key, event.value, _dump(event.headers))
                values += (event.event_id, event.fingerprint, *sent, now, _checksum(*sent))
            self._db.execute(_INSERT + ", ".join(["(?, ?, ?, ?, ?, ?, ?, ?)"] * size), values)
            start += size

    def pending_count(self) -> int:
        """How many rows are neither sent nor dead."""
        return int(self._db.execute(f"select count(*) from events where {_PENDING}").fetchone()[0])

    def pending(self, limit: int, after: int = 0) -> list[Row]:
        """The oldest pending rows behind the row `after`."""
        rows = self._db.execute(
            "select seq, event_id, topic, key, value, headers, accepted_at, checksum from events"
            f" where {_PENDING} and seq > ? order by seq limit ?",
            (after, limit),
        ).fetchall()
        return [_row(*row) for row in rows]

    def mark_sent(self, sent: Sequence[Sent]) -> None:
        now = time.time()
        with self._transaction():
            self._db.executemany(
                "update events set sent_at = ?, sent_log_id = ?, sent_partition = ?, sent_offset = ? where seq = ?",
                [(now, row.log_id, row.partition, row.offset, row.seq) for row in sent],
            )

    def mark_dead(self, seq: int, reason: str) -> None:
        self._db.execute("update events set dead_at = ?, dead_reason = ? where seq = ?", (time.time(), reason, seq))

    def revive(self) -> int:
        """Make dead rows pending again; returns how many."""
        return self._db.execute(
            "update events set dead_at = null, dead_reason = null where dead_at is not null and erased_at is null"
        ).rowcount

    def erase(self, event_ids: Sequence[str]) -> int:
        """Overwrite the content of these rows for good; returns how many had any."""
        self._db.execute("pragma secure_delete = on")  # what is freed in the file is overwritten too
        with self._transaction():
            erased = self._db.executemany(
                "update events set key = x'', value = x'', headers = '[]', erased_at = ?,"
                " sent_at = coalesce(sent_at, ?) where event_id = ? and erased_at is null",
                [(time.time(), time.time(), event_id) for event_id in event_ids],
            ).rowcount
        if erased:
            self._db.execute("pragma wal_checkpoint(truncate)")  # the old pages lie in the log of writes until then
        return erased

    def redrive(self, topic: str, log_id: str) -> int:
        """Make every row of `topic` that was sent to another log pending again; returns how many."""
        return self._db.execute(
            "update events set sent_at = null where topic = ? and sent_at is not null and sent_log_id <> ?"
            " and erased_at is null",
            (topic, log_id),
        ).rowcount

    def prune(self, sent_before: float, limit: int) -> int:
        """Delete at most `limit` rows sent before that time (seconds since the epoch); returns how many."""
        return self._db.execute(
            "delete from events where seq in"
            " (select seq from events where sent_at is not null and sent_at < ? order by sent_at limit ?)",
            (sent_before, limit),
        ).rowcount

    def standings(self) -> list[Standing]:
        """Every row, for the audit."""
        rows = self._db.execute(
            "select event_id, topic, accepted_at, dead_at is not null, erased_at is not null,"
            " case when sent_at is not null then sent_log_id end, sent_partition, sent_offset from events"
        ).fetchall()
        return [
            Standing(event_id, topic, at, bool(dead), bool(erased), log_id, partition, offset)
            for event_id, topic, at, dead, erased, log_id, partition, offset in rows
        ]

    def _transaction(self) -> "_Transaction":
        return _Transaction(self._db)


def _judge(batch: Sequence[Accepted], known: dict[str, bytes], fresh: list[Accepted]) -> list[bool] | str:
    """The answer to one request. What is new joins `known` and `fresh`, unless the request is refused."""
    mine: dict[str, Accepted] = {}
    answers: list[bool] = []
    for event in batch:
        there = known.get(event.event_id) or (mine[event.event_id].fingerprint if event.event_id in mine else None)
        if there is not None and there != event.fingerprint:
            return event.event_id
        answers.append(there is None)
        if there is None:
            mine[event.event_id] = event
    known |= {event_id: event.fingerprint for event_id, event in mine.items()}
    fresh += mine.values()
    return answers


class _Transaction:
    """`begin immediate` … commit, or rollback on an error."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._db = connection

    def __enter__(self) -> None:
        self._db.execute("begin immediate")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._db.execute("commit")
        finally:
            if self._db.in_transaction:  # an open one would keep the other process out
                self._db.execute("rollback")


def _row(seq: int, event_id: str, topic: str, key: bytes, value: bytes, headers: str, at: float, checksum: int) -> Row:
    """A row as it lies in the file, where nothing is certain, types included."""
    whole = all(isinstance(part, kind) for part, kind in ((topic, str), (key, bytes), (value, bytes), (headers, str)))
    if whole and checksum in (None, _checksum(topic, key, value, headers)):
        return Row(seq, event_id, topic, key, value, _load(headers), at)
    key, value = (part if isinstance(part, bytes) else str(part).encode() for part in (key, value))
    return Row(seq, str(event_id), str(topic), key, value, [], float(at or 0), intact=False)


def _checksum(topic: str, key: bytes, value: bytes, headers: str) -> int:
    """CRC-32 of what is to be sent."""
    return zlib.crc32(b"\0".join((topic.encode(), key, value, headers.encode())))


def _dump(headers: Sequence[tuple[str, bytes]]) -> str:
    return json.dumps([(name, value.decode()) for name, value in headers])


def _load(headers: str) -> list[tuple[str, bytes]]:
    return [(name, value.encode()) for name, value in json.loads(headers)]
