"""Publishes what the store derives, the preferences, on a topic of its own.

Guarantees: the last revision of every preference reaches the log that exists, at least once, under an event id that
is made of the preference's id and the revision; a preference that changes again before it was published skips a
revision. When the log is another one (a broker that restarted empty), all that is not retracted is published again.
"""

import uuid
from typing import Any

from feedback.events import PREFERENCES_TOPIC, Preference, to_record
from feedback.settings import FeedbackSettings
from feedback.topics import Logs, close_producer, make_producer, reaching_the_log
from storage.postgres import Connection

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

    def step(self) -> int:
        """Publish at most one batch; returns how many preferences reached the log.

        Raises LogUnreachable or LogChanged (nothing is lost: they are published again).
        """
        waiting = self._connection.execute(_WAITING, (self._settings.relay_batch,)).fetchall()
        if not waiting and self._log_id:
            return 0
        log_id = self._find_log()
        if not waiting:
            return 0
        with reaching_the_log():
            if self._producer is None:
                self._producer = make_producer(self._settings)
            futures = []
            for row in waiting:
                topic, key, value, headers = to_record(preference_of(row))
                futures.append(self._producer.send(topic, key=key, value=value, headers=headers))
            for future in futures:
                future.get(timeout=self._settings.delivery_timeout_s)
        if self._find_log() != log_id:
            return 0
        with self._connection.transaction(), self._connection.cursor() as cursor:
            cursor.executemany(
                "update preferences set published_log_id = %s where preference_id = %s and revision = %s",
                [(log_id, row["preference_id"], row["revision"]) for row in waiting],
            )
        return len(waiting)

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
