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
from feedback.errors import IdTaken, StaleOwner
from feedback.events import VOTES, AnyEvent, Interaction
from feedback.exposures import add_exposures
from feedback.outgoing import headers_to_json
from feedback.preferences import refresh_preferences
from storage.postgres import Connection, storable_json, storable_text

Place = tuple[str, int, str]
"""Topic, partition, log identity."""


_LONGEST_ID = 256


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
                return (value or b"").decode(errors="replace").replace("\0", "\ufffd")[:_LONGEST_ID]
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
    """Insert events whose id is new, and bring the exposures and preferences that they concern up to date.

    An event that PostgreSQL can't hold is refused and harms no other, and so is one whose id another event has; one
    that was erased stays away. Of an event that comes again the earliest time counts: a retry changes no later mind.
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
                new, others = _insert(connection, table, mine)
        except _DOES_NOT_FIT:
            new, others = _insert_singly(connection, table, mine)
        inserted += new
        refused += others
    add_exposures(connection, [event for _, event in kept])
    refresh_preferences(connection, [event for _, event in kept])
    again = len(kept) - inserted - len(refused)
    return Written(inserted, again, len(events) - len(kept), refused)


def _insert_singly(
    connection: Connection, table: "_Table", events: Sequence[tuple[Incoming, AnyEvent]]
) -> tuple[int, list[Refusal]]:
    """One of them does not fit: one by one, to find out which."""
    inserted = 0
    refused: list[Refusal] = []
    for record, event in events:
        try:
            with connection.transaction():
                new, others = _insert(connection, table, [(record, event)])
        except _DOES_NOT_FIT as error:
            refused.append(Refusal(record, error))
        else:
            inserted += new
            refused += others
    return inserted, refused


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


def _insert(
    connection: Connection, table: "_Table", events: Sequence[tuple[Incoming, AnyEvent]]
) -> tuple[int, list[Refusal]]:
    """How many were new, and those whose id another event has.

    By COPY into a temporary table, and from there at once: several times as fast as row by row.
    """
    with connection.cursor() as cursor:
        cursor.execute(table.incoming)
        with cursor.copy(table.copy) as copy:
            for number, (_, event) in enumerate(events):
                copy.write_row([number, *row_of(event)])
        inserted = cursor.execute(table.move).rowcount
        others: list[int] = []
        if inserted < len(events):
            others = [row["number"] for row in cursor.execute(table.unlike).fetchall()]
            cursor.execute(table.earliest, (others,))
        cursor.execute(table.clear)
    error = IdTaken("another event with this id is stored")
    return inserted, [Refusal(events[number][0], error) for number in others]


class _Table:
    """A table of the ledger, whose columns are the fields of the events that it holds, and what `_insert` does there.

    incoming: makes the temporary table for one transaction. copy, move: into it, and what is new from it. unlike: the
    numbers of the incoming events that say other than the stored ones of their ids. earliest: takes over the time of a
    repeated event, but for those numbers.
    """

    def __init__(self, name: str, columns: Sequence[str]) -> None:
        self.name = name
        self.columns = tuple(columns)
        content = [sql.Identifier(column) for column in columns if column != "time"]
        parts = {
            "table": sql.Identifier(name),
            "incoming": sql.Identifier(f"incoming_{name}"),
            "names": sql.SQL(", ").join(map(sql.Identifier, columns)),
            "told": sql.SQL(", ").join(sql.SQL("incoming.{}").format(column) for column in content),
            "stored": sql.SQL(", ").join(sql.SQL("stored.{}").format(column) for column in content),
        }
        self.incoming, self.copy, self.move, self.unlike, self.earliest, self.clear = (
            statement.format(**parts) for statement in _STATEMENTS
        )


_STATEMENTS = (
    sql.SQL(
        "create temporary table if not exists {incoming} on commit delete rows"
        " as select 0 as number, {names} from {table} with no data"
    ),
    sql.SQL("copy {incoming} (number, {names}) from stdin"),
    sql.SQL(
        "insert into {table} ({names}) select {names} from {incoming} order by number on conflict (event_id) do nothing"
    ),
    sql.SQL(
        "select incoming.number from {incoming} incoming join {table} stored using (event_id)"
        " where ({told}) is distinct from ({stored}) order by incoming.number"
    ),
    sql.SQL(
        'update {table} stored set "time" = earlier."time" from ('
        'select event_id, min("time") as "time" from {incoming} where number <> all (%s) group by event_id'
        ') as earlier where stored.event_id = earlier.event_id and earlier."time" < stored."time"'
    ),
    sql.SQL("delete from {incoming}"),
)
_DOES_NOT_FIT = (ValueError, psycopg.DataError, psycopg.IntegrityError, psycopg.errors.ProgramLimitExceeded)
_INTERACTIONS = _Table("interactions", tuple(Interaction.model_fields))
_FEEDBACK = _Table("feedback", tuple(dict.fromkeys(name for vote in VOTES for name in vote.model_fields)))
_TABLES = (_INTERACTIONS, _FEEDBACK)


def _table_of(event: AnyEvent) -> _Table:
    return _INTERACTIONS if isinstance(event, Interaction) else _FEEDBACK


def _column_value(value: Any) -> Any:
    if isinstance(value, str):
        return storable_text(value)
    return storable_json(value) if isinstance(value, dict | list | tuple) else value
