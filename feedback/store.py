"""The store: the SQL that writes events, dead letters and offsets into PostgreSQL.

The columns of an event are the fields that feedback/events.py declares; nothing is listed twice.
Nothing here begins or ends the outer transaction: the caller decides what belongs together.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from feedback.erasure import keep_out
from feedback.errors import StaleOwner
from feedback.events import VOTES, AnyEvent, Interaction
from feedback.outgoing import headers_to_json
from feedback.preferences import refresh_preferences
from storage.postgres import Connection, storable_json, storable_text

Place = tuple[str, int, str]
"""Topic, partition, log identity."""


@dataclass(frozen=True)
class Incoming:
    """A record as it came from the log, whether or not it can be read."""

    topic: str
    partition: int
    log_id: str
    offset: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes]]

    @property
    def event_id(self) -> str | None:
        """What the CloudEvents header says, for a record whose value can't be read."""
        for name, value in self.headers:
            if name == "ce_id":
                return (value or b"").decode(errors="replace").replace("\0", "\ufffd")
        return None


@dataclass(frozen=True)
class Refusal:
    """A record that is to become a dead letter, and why."""

    record: Incoming
    error: Exception

    @property
    def message(self) -> str:
        return str(self.error).replace("\0", "\ufffd")


@dataclass(frozen=True)
class Written:
    """What became of the events of one call; inserted + duplicate + erased + refused are all of them."""

    inserted: int
    duplicate: int
    erased: int
    refused: list[Refusal]


def insert_events(connection: Connection, events: Sequence[tuple[Incoming, AnyEvent]]) -> Written:
    """Insert events whose id is new, and bring the preferences that they concern up to date.

    An event that PostgreSQL can't hold is refused and harms no other; one that was erased stays away.
    """
    inserted = 0
    refused: list[Refusal] = []
    erased = keep_out(connection, [event for _, event in events])
    kept = [(record, event) for record, event in events if event.event_id not in erased]
    for table in _TABLES:
        mine = [(record, event) for record, event in kept if table is _table_of(event)]
        if not mine:
            continue
        try:
            with connection.transaction():
                inserted += _insert(connection, table, [event for _, event in mine])
        except (ValueError, psycopg.DataError, psycopg.IntegrityError):
            # One of them does not fit: one by one, to find out which.
            for record, event in mine:
                try:
                    with connection.transaction():
                        inserted += _insert(connection, table, [event])
                except (ValueError, psycopg.DataError, psycopg.IntegrityError) as error:
                    refused.append(Refusal(record, error))
    refresh_preferences(connection, [event for _, event in kept])
    again = len(kept) - inserted - len(refused)
    return Written(inserted, again, len(events) - len(kept), refused)


def row_of(event: AnyEvent) -> list[Any]:
    """The event's values in the order of its table's columns; null for those of other kinds, JSON as text.

    PostgreSQL's text can't hold U+0000: it becomes U+FFFD. Raises ValueError for NaN or infinity in JSON.
    """
    values = event.model_dump()
    return [_column_value(values.get(name)) for name in _table_of(event).columns]


def insert_dead_letters(connection: Connection, refusals: Sequence[Refusal]) -> None:
    """Keep the records; one that is there already (same place in the same log) is left as it is."""
    if not refusals:
        return
    with connection.cursor() as cursor:
        cursor.executemany(
            'insert into dead_letters (topic, partition, log_id, "offset", event_id, key, value, headers,'
            " error_class, error_message) values (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s) on conflict do nothing",
            [
                (
                    refusal.record.topic,
                    refusal.record.partition,
                    refusal.record.log_id,
                    refusal.record.offset,
                    refusal.record.event_id,
                    refusal.record.key,
                    refusal.record.value,
                    headers_to_json(refusal.record.headers),
                    type(refusal.error).__name__,
                    refusal.message,
                )
                for refusal in refusals
            ],
        )


def positions(connection: Connection, places: Iterable[Place]) -> dict[Place, int]:
    """The next offset to read at each place; a place never read before starts at 0."""
    found: dict[Place, int] = {}
    for place in places:
        connection.execute(
            "insert into ingest_offsets (topic, partition, log_id, next_offset) values (%s, %s, %s, 0)"
            " on conflict do nothing",
            place,
        )
        row = connection.execute(
            "select next_offset from ingest_offsets where topic = %s and partition = %s and log_id = %s", place
        ).fetchone()
        assert row is not None, "the row was just made sure of"
        found[place] = row["next_offset"]
    return found


def advance(connection: Connection, moves: Mapping[Place, tuple[int, int]]) -> None:
    """Move each place from one next offset to another. Raises StaleOwner when it is not where we left it."""
    for place, (expected, new) in sorted(moves.items()):
        moved = connection.execute(
            "update ingest_offsets set next_offset = %s, updated_at = now()"
            " where topic = %s and partition = %s and log_id = %s and next_offset = %s",
            (new, *place, expected),
        )
        if moved.rowcount != 1:
            raise StaleOwner(f"{place[0]}/{place[1]} is not at offset {expected} any more: another ingest moved it")


def _insert(connection: Connection, table: "_Table", events: Sequence[AnyEvent]) -> int:
    """By COPY into a temporary table, and from there at once: several times as fast as row by row."""
    names = sql.SQL(", ").join(map(sql.Identifier, table.columns))
    parts = {"table": sql.Identifier(table.name), "incoming": sql.Identifier(f"incoming_{table.name}"), "names": names}
    with connection.cursor() as cursor:
        cursor.execute(_INCOMING.format(**parts))
        with cursor.copy(_COPY.format(**parts)) as copy:
            for event in events:
                copy.write_row(row_of(event))
        return cursor.execute(_MOVE.format(**parts)).rowcount


_INCOMING = sql.SQL(
    "create temporary table if not exists {incoming} on commit delete rows as select {names} from {table} with no data"
)
_COPY = sql.SQL("copy {incoming} ({names}) from stdin")
_MOVE = sql.SQL(
    "with taken as (delete from {incoming} returning {names})"
    " insert into {table} ({names}) select {names} from taken on conflict (event_id) do nothing"
)


@dataclass(frozen=True)
class _Table:
    """A table of the ledger. Its columns are the fields of the events that it holds."""

    name: str
    columns: tuple[str, ...]


_INTERACTIONS = _Table("interactions", tuple(Interaction.model_fields))
_FEEDBACK = _Table("feedback", tuple(dict.fromkeys(name for vote in VOTES for name in vote.model_fields)))
_TABLES = (_INTERACTIONS, _FEEDBACK)


def _table_of(event: AnyEvent) -> _Table:
    return _INTERACTIONS if isinstance(event, Interaction) else _FEEDBACK


def _column_value(value: Any) -> Any:
    if isinstance(value, str):
        return storable_text(value)
    return storable_json(value) if isinstance(value, dict | list | tuple) else value
