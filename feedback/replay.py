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
from feedback.sender import AnyRecord, Sender
from feedback.settings import FeedbackSettings
from feedback.topics import EVENT_TOPICS, Logs
from storage.postgres import connect

_BATCH = 500


@dataclass(frozen=True)
class Replayed:
    """sent: dead letters that are in the log again. pending: events that wait in an outbox again. too_large: ids of
    the dead letters that the log can't take; they stay as they are.
    """

    sent: int
    pending: int
    too_large: list[int]


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
    sender = Sender(settings)
    wanted = {"ids": None if dead_letter_ids is None else list(dead_letter_ids), "newest": newest["id"]}
    sent, too_large, behind = 0, [], 0
    try:
        while batch := _send_batch(dsn, sender, {**wanted, "behind": behind}):
            behind = max(batch)
            sent += sum(batch.values())
            too_large += [letter for letter, was_sent in batch.items() if not was_sent]
    finally:
        sender.close()
    return Replayed(sent, _revive(settings) if dead_letter_ids is None else 0, too_large)


def _send_batch(dsn: str, sender: Sender, wanted: dict[str, Any]) -> dict[int, bool]:
    """The dead letters of the next batch by id, and whether each was sent."""
    with connect(dsn) as connection:
        letters = connection.execute(_NEXT, {**wanted, "limit": _BATCH}).fetchall()
        records: list[AnyRecord] = [
            (
                letter["topic"],
                letter["key"],
                letter["value"] if letter["value"] is not None else b"",
                headers_from_json(letter["headers"]),
            )
            for letter in letters
        ]
        too_large = set(sender.send(records))
        batch = {letter["dead_letter_id"]: number not in too_large for number, letter in enumerate(letters)}
        connection.execute(
            "update dead_letters set replayed_at = now() where dead_letter_id = any (%s)",
            ([letter for letter, was_sent in batch.items() if was_sent],),
        )
    return batch


_NEXT = """
select dead_letter_id, topic, key, value, headers from dead_letters
where replayed_at is null and dead_letter_id > %(behind)s and dead_letter_id <= %(newest)s
  and (%(ids)s::bigint[] is null or dead_letter_id = any (%(ids)s))
order by dead_letter_id limit %(limit)s for update skip locked
"""


def _revive(settings: FeedbackSettings) -> int:
    return sum(file.revive() for file in open_files(settings.outbox))
