"""Publishes what the store derives, the preferences, on a topic of its own.

Guarantees: the last revision of every preference reaches the log that exists, at least once, under an event id that
is made of the preference's id and the revision; a preference that changes again before it was published skips a
revision. When the log is another one (a broker that restarted empty), all that is not retracted is published again.
Non-guarantee: a preference whose two answers and prompt together are too large for the log is left out, and logged;
snapshots have it.
"""

import logging
import uuid
from typing import Any

from kafka.errors import MessageSizeTooLargeError

from feedback.events import PREFERENCES_TOPIC, Preference, to_record
from feedback.settings import FeedbackSettings
from feedback.topics import Logs, close_producer, make_producer, reaching_the_log
from storage.postgres import Connection

logger = logging.getLogger(__name__)

_NAMESPACE = uuid.UUID("0b1c9c3e-6d0a-4a55-9d5f-6f0a3f0d2c11")
_WAITING = """
select
    p.preference_id, p.revision, p.retracted, p.kind, p.prompt_hash, p.tie, p.rater, p.other_rater, p.source,
    p.chosen_response_id, p.rejected_response_id, p.changed_at as time,
    case when not p.retracted then rejected.messages end as prompt,
    case when not p.retracted then coalesce(chosen.text, correction.text) end as chosen,
    case when not p.retracted then rejected.text end as rejected
from (
    select * from preferences where published_log_id is null order by changed_at limit %s
) as p
left join interactions rejected on rejected.response_id = p.rejected_response_id
left join interactions chosen on chosen.response_id = p.chosen_response_id
left join feedback correction on correction.event_id = p.vote_id and p.kind = 'correction'
"""


class PreferencePublisher:
    """One thread. Any error leaves it to be closed; a new one goes on where the store says."""

    def __init__(self, settings: FeedbackSettings, connection: Connection, logs: Logs) -> None:
        self._settings = settings
        self._connection = connection
        self._logs = logs
        self._log_id = ""
        self._producer: Any = None
        self._batch = settings.relay_batch

    def step(self) -> int:
        """Publish at most one batch; returns how many preferences were settled: published, or left out as too large.

        Raises LogUnreachable or LogChanged (nothing is lost: they are published again).
        """
        waiting = self._connection.execute(_WAITING, (self._batch,)).fetchall()
        if not waiting and self._log_id:
            return 0
        log_id = self._find_log()
        if not waiting:
            return 0
        while not self._send(waiting) and len(waiting) > 1:  # one of them is too large: which?
            self._batch = 1
            waiting = waiting[:1]
        if self._find_log() != log_id:
            return 0
        self._batch = min(self._settings.relay_batch, 2 * self._batch)
        with self._connection.transaction(), self._connection.cursor() as cursor:
            cursor.executemany(
                "update preferences set published_log_id = %s where preference_id = %s and revision = %s",
                [(log_id, row["preference_id"], row["revision"]) for row in waiting],
            )
        return len(waiting)

    def _send(self, waiting: list[dict[str, Any]]) -> bool:
        """Send them and wait; false when one is too large for the log, and then some may not have been sent."""
        records = [to_record(preference_of(row)) for row in waiting]
        sizes = [len(key) + len(value) for _, key, value, _ in records]
        if max(sizes) <= self._settings.max_record_bytes:
            with reaching_the_log():
                if self._producer is None:
                    self._producer = make_producer(self._settings)
                try:
                    futures = [
                        self._producer.send(topic, key=key, value=value, headers=headers)
                        for topic, key, value, headers in records
                    ]
                    for future in futures:
                        future.get(timeout=self._settings.delivery_timeout_s)
                except MessageSizeTooLargeError:  # the broker's own limit is lower; the producer is of no use any more
                    close_producer(self._producer)
                    self._producer = None
                else:
                    return True
        if len(waiting) == 1:
            logger.error(
                "ingest: preference %s has %d bytes, too many for %s: it is left out there",
                waiting[0]["preference_id"],
                sizes[0],
                PREFERENCES_TOPIC,
            )
        return False

    def _find_log(self) -> str:
        """The topic's log identity; what another log had waits to be published again."""
        self._logs.ensure((PREFERENCES_TOPIC,))
        log_id = self._logs.current((PREFERENCES_TOPIC,))[PREFERENCES_TOPIC].log_id
        if log_id != self._log_id:
            self._connection.execute(
                "update preferences set published_log_id = null where published_log_id <> %s and not retracted",
                (log_id,),
            )
            self._log_id = log_id
        return log_id

    def close(self) -> None:
        if self._producer is not None:
            close_producer(self._producer)


def preference_of(row: dict[str, Any]) -> Preference:
    """The event of a row, with the id that its revision always has."""
    event_id = str(uuid.uuid5(_NAMESPACE, f"{row['preference_id']}\n{row['revision']}"))
    return Preference.model_validate({**row, "event_id": event_id})
