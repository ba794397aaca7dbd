"""The audit: compares what this node's outboxes accepted with the log and the store.

The law it checks: accepted = stored + duplicate + dead_lettered + erased + pending, nothing missing or unexpected.
An accepted event counts as stored if the store has it; else as erased if somebody asked for that; else dead-lettered
if a dead letter has it; else pending while it waits for the log or for the ingest, or was sent to a log that the ingest
never came to read to that place; else it is missing: the ingest has passed it and the store does not have it.
A damaged outbox file can't be compared: the report names it, and is not clean.
Safe at any time, on a platform at work: it reads the outboxes first and the store afterwards, in one snapshot.
Non-guarantee: it knows one node's outboxes; with several nodes the events of the others look unexpected.
"""

import sqlite3
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, computed_field

from feedback.errors import LogError
from feedback.outbox_file import DAMAGED_SUFFIX, SUFFIX, OutboxFile, Standing, is_damage, list_files
from feedback.settings import FeedbackSettings
from storage.postgres import Connection, connect

LISTED_IDS = 20
_ASKED_AT_ONCE = 10_000
_POLL_MS = 500
_UNREAD_WITHIN_S = 10.0


class AuditReport(BaseModel):
    """Counts of events, unless said otherwise.

    accepted: rows in the outboxes (sent ones are there for the retention window). stored, dead_lettered, erased,
    pending: what became of them. duplicate: the same event accepted by two outboxes. orphaned: stored votes
    whose answer, or one of whose two answers, is not stored (yet). mismatched: stored choices of a response
    that the comparison does not have. votes_stored, interactions_stored: rows in the store, of any age.
    unread: records in the log that the ingest has not read; null when the broker does not answer.
    missing, unexpected: how many, with the first ids.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    accepted: int
    stored: int
    duplicate: int
    dead_lettered: int
    erased: int
    pending: int
    missing: int
    unexpected: int
    orphaned: int
    mismatched: int
    votes_stored: int
    interactions_stored: int
    unread: int | None
    missing_ids: list[str]
    unexpected_ids: list[str]
    damaged_files: list[str]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def clean(self) -> bool:
        """The law holds so far; something may still be pending."""
        explained = self.stored + self.duplicate + self.dead_lettered + self.erased + self.pending
        whole = not self.damaged_files and not self.missing and not self.unexpected
        return whole and self.accepted == explained


def audit(settings: FeedbackSettings, dsn: str) -> AuditReport:
    """Compare now. Raises DatabaseUnreachable; a broker that is away only leaves `unread` null."""
    with connect(dsn) as connection:
        began = _one(connection, "select clock_timestamp() as at")["at"]
    standings, damaged = _standings(settings)
    with connect(dsn) as connection:
        connection.execute("set transaction isolation level repeatable read, read only")
        accepted = sorted({standing.event_id for standing in standings})
        stored = _known(connection, accepted, "interactions") | _known(connection, accepted, "feedback")
        erased = _known(connection, accepted, "erased_events")
        dead = _known(connection, accepted, "dead_letters")
        next_offsets = {
            (row["topic"], row["partition"], row["log_id"]): row["next_offset"]
            for row in connection.execute("select topic, partition, log_id, next_offset from ingest_offsets")
        }
        unexpected = _unexpected(connection, settings, began, set(accepted))
        counts = _one(connection, _COUNTS)
    judged: dict[str, str] = {}
    for standing in standings:
        verdict = _judge(standing, stored, erased, dead, next_offsets)
        if judged.get(standing.event_id) != "pending":  # of two deliveries one that still waits decides
            judged[standing.event_id] = verdict
    missing = sorted(event_id for event_id, verdict in judged.items() if verdict == "missing")
    verdicts = list(judged.values())
    return AuditReport(
        accepted=len(standings),
        stored=verdicts.count("stored"),
        duplicate=len(standings) - len(judged),
        dead_lettered=verdicts.count("dead"),
        erased=verdicts.count("erased"),
        pending=verdicts.count("pending"),
        missing=len(missing),
        unexpected=len(unexpected),
        unread=_unread(settings, next_offsets),
        missing_ids=missing[:LISTED_IDS],
        unexpected_ids=unexpected[:LISTED_IDS],
        damaged_files=damaged,
        **counts,
    )


_COUNTS = """
select
    (select count(*) from feedback) as votes_stored,
    (select count(*) from interactions) as interactions_stored,
    (
        select count(*) from feedback vote
        where (vote.response_id is not null
               and not exists (select from interactions i where i.response_id = vote.response_id))
           or (vote.comparison_id is not null
               and (select count(*) from interactions i where i.comparison_id = vote.comparison_id) < 2)
           or (vote.responses is not null
               and (select count(*) from interactions i
                    where i.response_id in (vote.responses ->> 0, vote.responses ->> 1)) < 2)
    ) as orphaned,
    (
        select count(*) from feedback vote
        where vote.chosen is not null
          and (select count(*) from interactions i where i.comparison_id = vote.comparison_id) = 2
          and not exists (
              select from interactions i where i.comparison_id = vote.comparison_id and i.response_id = vote.chosen
          )
    ) as mismatched
"""


def _standings(settings: FeedbackSettings) -> tuple[list[Standing], list[str]]:
    """Those that the store should still have, and the names of the files that can't be read."""
    kept_since = time.time() - settings.retention_s if settings.retention_s else 0.0
    damaged = sorted(path.name for path in settings.outbox.glob(f"*{SUFFIX}{DAMAGED_SUFFIX}"))
    found: list[Standing] = []
    for path in list_files(settings.outbox):
        try:
            file = OutboxFile(path, durable=False)
            try:
                found += [standing for standing in file.standings() if standing.accepted_at >= kept_since]
            finally:
                file.close()
        except sqlite3.Error as error:
            if not is_damage(error):
                raise
            damaged.append(path.name)
    return found, damaged


def _judge(
    standing: Standing,
    stored: set[str],
    erased: set[str],
    dead: set[str],
    next_offsets: dict[tuple[str, int, str], int],
) -> str:
    if standing.event_id in stored:
        return "stored"
    if standing.erased or standing.event_id in erased:
        return "erased"
    if standing.dead or standing.event_id in dead:
        return "dead"
    if standing.sent_log_id is None or standing.sent_partition is None or standing.sent_offset is None:
        return "pending"
    read_to = next_offsets.get((standing.topic, standing.sent_partition, standing.sent_log_id), 0)
    return "pending" if standing.sent_offset >= read_to else "missing"


def _unexpected(connection: Connection, settings: FeedbackSettings, began: datetime, known: set[str]) -> list[str]:
    """Stored events that no outbox has, though it should: made and stored within the retention window.

    Only what was stored before the outboxes were read counts; what came later was perhaps not in them yet.
    """
    window_start = datetime.fromtimestamp(time.time() - settings.outbox_retention_s, tz=UTC)
    window = 'where ingested_at < %(began)s and ingested_at >= %(start)s and "time" >= %(start)s'
    found = _ids(
        connection,
        f"select event_id from interactions {window} union all select event_id from feedback {window}",
        {"began": began, "start": window_start},
    )
    return sorted(found - known)


def _unread(settings: FeedbackSettings, next_offsets: dict[tuple[str, int, str], int]) -> int | None:
    """Count the records behind the stored offsets by reading them: a broker's end offset can't be relied on."""
    from kafka import KafkaConsumer, TopicPartition

    from feedback.topics import Logs, open_client, reaching_the_log

    try:
        logs = Logs(settings)
        try:
            current = logs.current()
        finally:
            logs.close()
        with reaching_the_log():
            consumer = open_client(KafkaConsumer, settings, enable_auto_commit=False, auto_offset_reset="earliest")
            try:
                partitions = {
                    TopicPartition(log.topic, number): next_offsets.get((log.topic, number, log.log_id), 0)
                    for log in current.values()
                    for number in log.partitions
                }
                consumer.assign(list(partitions))
                for partition, offset in partitions.items():
                    consumer.seek(partition, offset)
                return _count_polled(consumer)
            finally:
                consumer.close(autocommit=False, timeout_ms=1_000)
    except LogError:
        return None


def _count_polled(consumer: Any) -> int:
    deadline = time.monotonic() + _UNREAD_WITHIN_S
    total = 0
    while time.monotonic() < deadline:
        polled = sum(len(records) for records in consumer.poll(timeout_ms=_POLL_MS).values())
        if not polled:
            break
        total += polled
    return total


def _known(connection: Connection, event_ids: Sequence[str], table: str) -> set[str]:
    """Those of the ids that the table has; asked in parts, so that the work is that of the outboxes."""
    found: set[str] = set()
    for start in range(0, len(event_ids), _ASKED_AT_ONCE):
        part = list(event_ids[start : start + _ASKED_AT_ONCE])
        found |= _ids(connection, f"select event_id from {table} where event_id = any (%(ids)s)", {"ids": part})
    return found


def _ids(connection: Connection, query: str, parameters: dict[str, Any] | None = None) -> set[str]:
    return {row["event_id"] for row in connection.execute(query, parameters)}


def _one(connection: Connection, query: str) -> dict[str, Any]:
    row = connection.execute(query).fetchone()
    assert row is not None, "an aggregate gives one row"
    return row
