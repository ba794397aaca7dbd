"""Replay: sends dead letters again, after what made them dead was put right (a newer version reads them, say).

Guarantees: a dead letter is marked as replayed only after the log acknowledged it, and the store keeps each event
once, so replaying twice is harmless. What still can't be read becomes another dead letter. Events that the log could
not take at all are dead in their outbox: they become pending again, and the relay tries them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from feedback.outbox_file import open_files
from feedback.outgoing import headers_from_json
from feedback.settings import FeedbackSettings
from feedback.topics import EVENT_TOPICS, Logs, close_producer, make_producer, reaching_the_log
from storage.postgres import connect

_BATCH = 500


@dataclass(frozen=True)
class Replayed:
    """sent: dead letters that are in the log again. pending: events that wait in an outbox again."""

    sent: int
    pending: int


def replay(settings: FeedbackSettings, dsn: str, *, dead_letter_ids: Sequence[int] | None = None) -> Replayed:
    """Send again the dead letters of these ids; without ids all that were not yet, and those in the outboxes.

    What becomes a dead letter meanwhile, perhaps again, is left to the next replay.

    Raises LogUnreachable or DatabaseUnreachable; what was sent until then is marked.
    """
    with connect(dsn) as connection:
        newest = connection.execute("select coalesce(max(dead_letter_id), 0) as id from dead_letters").fetchone()
    assert newest is not None, "an aggregate gives one row"
    logs = Logs(settings)
    try:
        logs.ensure(EVENT_TOPICS)
    finally:
        logs.close()
    with reaching_the_log():
        producer = make_producer(settings)
    sent = 0
    try:
        while batch := _send_batch(settings, dsn, producer, dead_letter_ids, newest["id"]):
            sent += batch
    finally:
        close_producer(producer)
    return Replayed(sent, _revive(settings) if dead_letter_ids is None else 0)


def _send_batch(settings: FeedbackSettings, dsn: str, producer: Any, ids: Sequence[int] | None, newest: int) -> int:
    with connect(dsn) as connection:
        letters = connection.execute(
            "select dead_letter_id, topic, key, value, headers from dead_letters"
            " where replayed_at is null and dead_letter_id <= %(newest)s"
            " and (%(ids)s::bigint[] is null or dead_letter_id = any (%(ids)s))"
            " order by dead_letter_id limit %(limit)s for update skip locked",
            {"ids": None if ids is None else list(ids), "newest": newest, "limit": _BATCH},
        ).fetchall()
        with reaching_the_log():
            futures = [
                producer.send(
                    letter["topic"],
                    key=letter["key"],
                    value=letter["value"] if letter["value"] is not None else b"",
                    headers=headers_from_json(letter["headers"]),
                )
                for letter in letters
            ]
            for future in futures:
                future.get(timeout=settings.delivery_timeout_s)
        connection.execute(
            "update dead_letters set replayed_at = now() where dead_letter_id = any (%s)",
            ([letter["dead_letter_id"] for letter in letters],),
        )
    return len(letters)


def _revive(settings: FeedbackSettings) -> int:
    return sum(file.revive() for file in open_files(settings.outbox))
