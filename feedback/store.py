"""The store: the SQL that writes events, dead letters and offsets into PostgreSQL.

The columns of an event are the fields that feedback/events.py declares; nothing is listed twice.
Nothing here begins or ends the outer transaction: the caller decides what belongs together.
"""

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from feedback.errors import StaleOwner
from feedback.events import VOTES, AnyEvent, AnyVote, Interaction
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
    """What became of the events of one call; inserted + duplicate + refused are all of them."""

    inserted: int
    duplicate: int
    refused: list[Refusal]


def columns(event_type: type[Interaction] | type[AnyVote]) -> list[str]:
    """The column names of an event: its fields."""
    return list(event_type.model_fields)


def insert_events(connection: Connection, events: Sequence[tuple[Incoming, AnyEvent]]) -> Written:
    """Insert events whose id is new, and bring the preferences that they concern up to date.

    An event that PostgreSQL can't hold is refused and harms no other.
    """
    inserted = 0
    refused: list[Refusal] = []
    for event_type in (Interaction, *VOTES):
        mine = [(record, event) for record, event in events if type(event) is event_type]
        if not mine:
            continue
        statement = _insert_statement(event_type)
        try:
            with connection.transaction():
                inserted += _insert(connection, statement, [row_of(event) for _, event in mine])
        except (ValueError, psycopg.DataError, psycopg.IntegrityError):
            # One of them does not fit: one by one, to find out which.
            for record, event in mine:
                try:
                    with connection.transaction():
                        inserted += _insert(connection, statement, [row_of(event)])
                except (ValueError, psycopg.DataError, psycopg.IntegrityError) as error:
                    refused.append(Refusal(record, error))
    refresh_preferences(connection, [event for _, event in events])
    return Written(inserted, len(events) - inserted - len(refused), refused)


def row_of(event: AnyEvent) -> list[Any]:
    """The event's values in the order of `columns`; lists and dicts as JSON text.

    PostgreSQL's text can't hold U+0000: it becomes U+FFFD. Raises ValueError for NaN or infinity in JSON.
    """
    values = event.model_dump()
    return [_column_value(values[name]) for name in columns(type(event))]


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
                    _headers_json(refusal.record.headers),
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


def _insert_statement(event_type: type[Interaction] | type[AnyVote]) -> sql.Composed:
    table = "interactions" if event_type is Interaction else "feedback"
    names = columns(event_type)
    return sql.SQL("insert into {} ({}) values ({}) on conflict (event_id) do nothing").format(
        sql.Identifier(table),
        sql.SQL(", ").join(map(sql.Identifier, names)),
        sql.SQL(", ").join(sql.Placeholder() for _ in names),
    )


def _insert(connection: Connection, statement: sql.Composed, rows: Sequence[Sequence[Any]]) -> int:
    with connection.cursor() as cursor:
        cursor.executemany(statement, rows)
        return cursor.rowcount


def _column_value(value: Any) -> Any:
    if isinstance(value, str):
        return storable_text(value)
    return storable_json(value) if isinstance(value, dict | list | tuple) else value


def _headers_json(headers: Sequence[tuple[str, bytes]]) -> str:
    encoded = [(name.replace("\0", "\ufffd"), base64.b64encode(value or b"").decode()) for name, value in headers]
    return json.dumps(encoded)
