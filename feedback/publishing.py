"""Publishes what the store itself has to say: the preferences that it derives, and outgoing records.

Guarantees: the last revision of every preference reaches the log that exists, at least once, under an event id that
is made of the preference's id and the revision; a preference that changes again before it was published skips a
revision. Every outgoing record reaches the log at least once, in order. When a topic's log is another one (a broker
that restarted empty), all of it is published again; of preferences what is not retracted.
Non-guarantee: a record that is too large for the log is left out, and logged; snapshots have every preference.
"""

import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from feedback.events import CHECKPOINTS_TOPIC, FEEDBACK_TOPIC, INTERACTIONS_TOPIC, PREFERENCES_TOPIC, Preference
from feedback.outgoing import headers_from_json
from feedback.records import to_record
from feedback.sender import AnyRecord, Sender, size_of
from feedback.settings import FeedbackSettings
from feedback.topics import Logs
from storage.postgres import Connection

logger = logging.getLogger(__name__)

_NAMESPACE = uuid.UUID("0b1c9c3e-6d0a-4a55-9d5f-6f0a3f0d2c11")


@dataclass(frozen=True)
class _Source:
    """A table to publish from.

    waiting: selects what is not published, %(limit)s rows at most. settle: marks one row of it as published to
    %(log_id)s. forget: makes all of %(topic)s wait that another log than %(log_id)s has.
    """

    topics: tuple[str, ...]
    waiting: str
    settle: str
    forget: str
    record_of: Callable[[dict[str, Any]], AnyRecord]


def preference_of(row: dict[str, Any]) -> Preference:
    """The event of a row, with the id that its revision always has."""
    event_id = str(uuid.uuid5(_NAMESPACE, f"{row['preference_id']}\n{row['revision']}"))
    return Preference.model_validate({**row, "event_id": event_id})


def _outgoing(row: dict[str, Any]) -> AnyRecord:
    value = None if row["value"] is None else row["value"].encode()
    return row["topic"], row["key"].encode(), value, headers_from_json(row["headers"])


_PREFERENCES = _Source(
    topics=(PREFERENCES_TOPIC,),
    waiting="""
        select
            p.preference_id, p.revision, p.retracted, p.kind, p.prompt_hash, p.tie, p.rater, p.other_rater, p.source,
            p.chosen_response_id, p.rejected_response_id, p.changed_at as time,
            case when not p.retracted then rejected.messages end as prompt,
            case when not p.retracted then coalesce(chosen.text, correction.text) end as chosen,
            case when not p.retracted then rejected.text end as rejected
        from (
            select * from preferences where published_log_id is null order by changed_at limit %(limit)s
        ) as p
        left join interactions rejected on rejected.response_id = p.rejected_response_id
        left join interactions chosen on chosen.response_id = p.chosen_response_id
        left join feedback correction on correction.event_id = p.vote_id and p.kind = 'correction'
        """,
    settle="""
        update preferences set published_log_id = %(log_id)s
        where preference_id = %(preference_id)s and revision = %(revision)s
        """,
    forget="""
        update preferences set published_log_id = null
        where published_log_id <> %(log_id)s and not retracted
        """,
    record_of=lambda row: to_record(preference_of(row)),
)
_OUTGOING = _Source(
    topics=(INTERACTIONS_TOPIC, FEEDBACK_TOPIC, CHECKPOINTS_TOPIC),
    waiting="""
        select record_id, topic, key, value, headers from outgoing_records
        where published_log_id is null order by record_id limit %(limit)s
        """,
    settle="update outgoing_records set published_log_id = %(log_id)s where record_id = %(record_id)s",
    forget="""
        update outgoing_records set published_log_id = null
        where topic = %(topic)s and published_log_id <> %(log_id)s
        """,
    record_of=_outgoing,
)
TOPICS = (*_PREFERENCES.topics, *_OUTGOING.topics)


class Publisher:
    """One thread. Any error leaves it to be closed; a new one goes on where the store says."""

    def __init__(self, settings: FeedbackSettings, connection: Connection, logs: Logs, sender: Sender) -> None:
        self._settings = settings
        self._connection = connection
        self._logs = logs
        self._sender = sender
        self._log_ids: dict[str, str] = {}

    def step(self) -> int:
        """Publish at most one batch of each source; returns how many records were settled: published, or left out.

        Raises LogUnreachable or LogChanged (nothing is lost: they are published again).
        """
        if not self._log_ids:
            self._find_logs()
        return sum(self._publish(source) for source in (_OUTGOING, _PREFERENCES))

    def _publish(self, source: _Source) -> int:
        waiting = self._connection.execute(source.waiting, {"limit": self._settings.relay_batch}).fetchall()
        if not waiting:
            return 0
        log_ids = self._find_logs()
        records = [source.record_of(row) for row in waiting]
        for number in self._sender.send(records):
            topic, key, *_ = records[number]
            logger.error("ingest: %r has %d bytes, too many for %s: left out", key, size_of(records[number]), topic)
        if self._find_logs() != log_ids:
            return 0
        with self._connection.transaction(), self._connection.cursor() as cursor:
            cursor.executemany(
                source.settle,
                [{**row, "log_id": log_ids[topic]} for row, (topic, *_) in zip(waiting, records, strict=True)],
            )
        return len(records)

    def _find_logs(self) -> dict[str, str]:
        """Each topic's log identity; what another log had waits to be published again."""
        self._logs.ensure(TOPICS)
        log_ids = {topic: log.log_id for topic, log in self._logs.current(TOPICS).items()}
        for source in (_PREFERENCES, _OUTGOING):
            for topic in source.topics:
                if self._log_ids.get(topic) != log_ids[topic]:
                    self._connection.execute(source.forget, {"topic": topic, "log_id": log_ids[topic]})
        self._log_ids = log_ids
        return log_ids
