"""Erasure: a person's prompts, answers and votes leave the store, the outboxes and every later snapshot.

A person is what requests call `user` and votes call `rater`, under any API key. What goes: the answers made for that
user with their prompts, every vote on those, the votes that the person gave, what dead letters say of them, and the
preferences that all this gave. Not what others said: their own answers and votes stay, and are counted anew.
Guarantees
- When `erase` has committed, the store holds nothing of it, and nothing that happened until then can come back, late or
  by another delivery: the ingest keeps it out by the ids of what was erased and by the digest of the person's name.
- Each erased event is told on its own topic and key by a record without a value (a tombstone), so that who keeps copies
  can follow. What happens afterwards, if the person comes back, is a new beginning.
- The relay of each node erases its outboxes within seconds (`Eraser`). The ids of events stay, so counts still add up.
Non-guarantees: frozen snapshots, reward models and checkpoints that used the person's data stay as they are; `erase`
lists them, for it is the operator's choice what to do about a model. The log, dead-letter topics too, forgets when the
topic's retention ends.
A backdated vote of that person that is sent after the request counts as one from before.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from feedback.events import (
    FEEDBACK_TOPIC,
    INTERACTIONS_TOPIC,
    AnyEvent,
    Interaction,
    event_id_of,
    is_response_id,
    target_of,
)
from feedback.outbox_file import OutboxFile, open_files
from feedback.outgoing import write_records
from feedback.preferences import refresh_prompts
from feedback.records import from_record, tombstone_headers
from storage.postgres import Connection, storable_text

NOBODY = "erased"
_LOCK_KEY = 0x65726173
_LINES = 500


class Erased(BaseModel):
    """What an erasure removed from the store, and what had used it before and still stands.

    snapshots, reward_models, checkpoints: ids; a checkpoint counts when it, or one that it descends from, learnt from
    such a snapshot.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    erasure_id: int
    interactions: int
    votes: int
    preferences: int
    dead_letters: int
    snapshots: list[str]
    reward_models: list[str]
    checkpoints: list[str]


def subject_of(name: str) -> str:
    """The digest under which a person is known: sha256 (hex) of the name as the store holds it."""
    return hashlib.sha256(f"flywheel subject\n{_stored(name)}".encode("utf-8", "surrogatepass")).hexdigest()


def erase(connection: Connection, name: str) -> Erased:
    """Erase the person of that name; harmless when repeated. For a transaction of its own, which the caller commits."""
    connection.execute("select pg_advisory_xact_lock(%s)", (_LOCK_KEY,))  # no ingest is between its look and its write
    subject = subject_of(name)
    request = _one(
        connection,
        "insert into erasures (subject, requested_at) values (%(subject)s, clock_timestamp()) returning erasure_id",
        {"subject": subject},
    )
    name = _stored(name)
    prompts = [row["prompt_hash"] for row in connection.execute(_PROMPTS, {"name": name})]
    answers, votes = _delete(connection, _ANSWERS, _VOTES, {"name": name})
    refresh_prompts(connection, prompts)
    scrubbed = connection.execute(
        _SCRUB,
        {
            "name": name,
            "nobody": NOBODY,
            "prompts": prompts,
            "answers": [answer["response_id"] for answer in answers],
        },
    ).rowcount
    letters = _erase_dead_letters(connection, name)
    return Erased(
        erasure_id=request["erasure_id"],
        interactions=len(answers),
        votes=len(votes),
        preferences=scrubbed,
        dead_letters=letters,
        **_used_by(connection, subject),
    )


def hold_off_erasures(connection: Connection) -> datetime:
    """No erasure runs from now, which is returned in the store's time, until the transaction ends."""
    connection.execute("select pg_advisory_xact_lock_shared(%s)", (_LOCK_KEY,))
    now: datetime = _one(connection, "select clock_timestamp() as now")["now"]
    return now


def erased_since(connection: Connection, subjects: Sequence[str], time: datetime) -> bool:
    """Whether any of these people asked to be erased since. No erasure runs until the transaction ends."""
    hold_off_erasures(connection)
    return any(at >= time for at in _requests(connection, set(subjects)).values())


def keep_out(connection: Connection, events: Sequence[AnyEvent]) -> set[str]:
    """The ids of those events that were erased before they came, or were given by somebody erased since.

    For the transaction that stores the others: no erasure runs until it ends.
    """
    hold_off_erasures(connection)
    if not _one(connection, _ANY_EVER)["ever"]:
        return set()
    about = {event.event_id: _answer_of(event) for event in events}
    subjects = {event.event_id: subject_of(person) for event in events if (person := person_of(event)) is not None}
    known = connection.execute(
        "select event_id from erased_events where event_id = any (%s)", ([*about, *filter(None, about.values())],)
    )
    gone = {row["event_id"] for row in known}
    requested = _requests(connection, set(subjects.values()))
    erased = {
        event.event_id
        for event in events
        if event.event_id in gone
        or about[event.event_id] in gone
        or (event.time <= requested.get(subjects.get(event.event_id, ""), _NEVER))
    }
    if erased:
        _remember(connection, sorted(erased - gone))
    return erased


def person_of(event: AnyEvent) -> str | None:
    """Whose event it is."""
    return event.user if isinstance(event, Interaction) else event.rater


def expire(connection: Connection, older_than_s: float, limit: int) -> int:
    """Delete at most `limit` answers, with the votes on them, and `limit` votes, that were stored so long ago.

    Returns how many went. This is retention, not erasure: nothing is told on the topics. Commits with the caller.
    """
    old = {"age": older_than_s, "limit": limit}
    prompts = [row["prompt_hash"] for row in connection.execute(_OLD_PROMPTS, old)]
    answers, votes = _delete(connection, _OLD_ANSWERS, _OLD_VOTES, old, for_ever=False)
    refresh_prompts(connection, prompts)
    connection.execute(_FORGET_OLD_PAIRS, {"prompts": prompts})  # what they said about other pairs is retracted
    return len(answers) + len(votes)


class Eraser:
    """Erases in the outboxes of one node what was erased in the store. Keeps its place; one thread."""

    def __init__(self, outbox: Path, retention_s: float) -> None:
        self._outbox = outbox
        self._retention_s = retention_s
        self._since = datetime.fromtimestamp(0, tz=UTC)
        self._done: set[str] = set()
        self._erasures = 0

    def step(self, connection: Connection) -> int:
        """Erase what is new since the last step; returns how many rows lost their content.

        Raises psycopg.Error or sqlite3.Error; the next step begins where this one did.
        """
        rows = connection.execute(_ERASED_SINCE, {"since": self._since, "retention": self._retention_s}).fetchall()
        last = _one(connection, "select coalesce(max(erasure_id), 0) as id from erasures")
        ids = [row["event_id"] for row in rows]
        new = [event_id for event_id in ids if event_id not in self._done]
        erased = 0
        for file in open_files(self._outbox):
            waiting = _waiting_for(connection, file) if last["id"] != self._erasures else []
            erased += sum(file.erase(batch) for batch in _batches([*new, *waiting]))
        self._erasures = last["id"]
        self._done = set(ids)
        if rows:
            self._since = rows[-1]["erased_at"] - _COMMITS_WITHIN
        return erased


def _delete(
    connection: Connection,
    answers_query: str,
    votes_query: str,
    parameters: Mapping[str, Any],
    *,
    for_ever: bool = True,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Delete the answers, the votes on them, and the votes; for ever: they can't come back, and tombstones say so."""
    answers = connection.execute(answers_query, parameters).fetchall()
    on: dict[str, Any] = {"targets": [answer["response_id"] for answer in answers] + _comparisons(answers)}
    votes = connection.execute(votes_query, {**parameters, **on}).fetchall()
    if for_ever:
        gone = [(INTERACTIONS_TOPIC, answer["response_id"], answer["event_id"]) for answer in answers]
        gone += [(FEEDBACK_TOPIC, vote["target"], vote["event_id"]) for vote in votes]
        _remember(connection, [event_id for _, _, event_id in gone])
        now = datetime.now(UTC)
        write_records(connection, [(topic, key, None, tombstone_headers(id_, now)) for topic, key, id_ in gone])
    return answers, votes


def _comparisons(answers: Sequence[Mapping[str, Any]]) -> list[str]:
    return sorted({answer["comparison_id"] for answer in answers if answer["comparison_id"]})


def _remember(connection: Connection, event_ids: Sequence[str]) -> None:
    connection.execute(
        "insert into erased_events (event_id) select unnest(%s::text[]) on conflict do nothing", (list(event_ids),)
    )


def _erase_dead_letters(connection: Connection, name: str) -> int:
    """A dead letter can't be read, so each goes that has the name in it as a JSON string, whatever it says of it."""
    spellings = [json.dumps(name).encode(), json.dumps(name, ensure_ascii=False).encode()]
    return connection.execute(_DEAD_LETTERS, {"spellings": spellings}).rowcount


def _requests(connection: Connection, subjects: set[str]) -> dict[str, datetime]:
    """When each of them last asked to be erased."""
    rows = connection.execute(
        "select subject, max(requested_at) as at from erasures where subject = any (%s) group by subject",
        (list(subjects),),
    )
    return {row["subject"]: row["at"] for row in rows}


def _answer_of(event: AnyEvent) -> str | None:
    """The event id of the answer that a vote is about."""
    target = target_of(event)
    return event_id_of(target) if is_response_id(target) else None


def _waiting_for(connection: Connection, file: OutboxFile) -> list[str]:
    """The ids of the rows that wait for the log and are of somebody erased since."""
    whose: dict[str, tuple[str, datetime]] = {}
    after = 0
    while rows := file.pending(_LINES, after):
        after = rows[-1].seq
        for row in rows:
            event = from_record(row.topic, row.value)
            if (person := person_of(event)) is not None:
                whose[row.event_id] = (subject_of(person), event.time)
    requested = _requests(connection, {subject for subject, _ in whose.values()})
    return [event_id for event_id, (subject, time) in whose.items() if time <= requested.get(subject, _NEVER)]


def _batches(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(ids), _LINES):
        yield ids[start : start + _LINES]


def _used_by(connection: Connection, subject: str) -> dict[str, list[str]]:
    row = _one(connection, _USED_BY, {"subject": subject})
    return {name: list(ids or ()) for name, ids in row.items()}


def _one(connection: Connection, query: str, parameters: Mapping[str, Any] | None = None) -> dict[str, Any]:
    row = connection.execute(query, parameters).fetchone()
    assert row is not None, "the query gives one row"
    return row


def _stored(name: str) -> str:
    """A name as events and the store have it."""
    return storable_text(name)


_COMMITS_WITHIN = timedelta(minutes=2)  # transactions do not commit in the order of their clocks
_ANY_EVER = "select exists (select from erasures) or exists (select from erased_events) as ever"
_NEVER = datetime.min.replace(tzinfo=UTC)
# Three joins and not one with three ways: each then has its index.
_PROMPTS_OF = """
select answer.prompt_hash
from votes vote join interactions answer on answer.response_id = vote.response_id
union
select answer.prompt_hash
from votes vote join interactions answer on answer.comparison_id = vote.comparison_id
union
select answer.prompt_hash
from votes vote join interactions answer on answer.response_id in (vote.responses ->> 0, vote.responses ->> 1)
"""
_PROMPTS = f"""
with votes as materialized (select * from feedback where rater = %(name)s)
select prompt_hash from interactions where "user" = %(name)s
union
select prompt_hash from preferences where rater = %(name)s or other_rater = %(name)s
union
{_PROMPTS_OF}
"""
_ANSWERS = """
delete from interactions where "user" = %(name)s returning event_id, response_id, comparison_id
"""
_ON = """
target = any (%(targets)s) or responses ->> 0 = any (%(targets)s) or responses ->> 1 = any (%(targets)s)
"""
_VOTES = f"delete from feedback where rater = %(name)s or {_ON} returning event_id, target"
_SCRUB = """
update preferences set
    rater = %(nobody)s, other_rater = %(nobody)s, published_log_id = null,
    revision = revision + case when published_log_id is null then 0 else 1 end
where retracted and prompt_hash = any (%(prompts)s)
  and (rater = %(name)s or other_rater = %(name)s
       or chosen_response_id = any (%(answers)s) or rejected_response_id = any (%(answers)s))
"""
_DEAD_LETTERS = """
update dead_letters set key = null, value = null, headers = '[]', replayed_at = coalesce(replayed_at, now())
where exists (select from unnest(%(spellings)s::bytea[]) as name where position(name in value) > 0)
"""
_ERASED_SINCE = """
select event_id, erased_at from erased_events
where erased_at > greatest(%(since)s, now() - make_interval(secs => %(retention)s)) order by erased_at
"""
_USED_BY = """
with recursive held as (
    select snapshot_id from snapshot_subjects where subject = %(subject)s
),
descended as (
    select checkpoint_id from checkpoints where manifest ->> 'snapshot_id' in (select snapshot_id from held)
    union
    select child.checkpoint_id from checkpoints child join descended on child.parent_id = descended.checkpoint_id
)
select
    (select array_agg(snapshot_id order by snapshot_id) from held) as snapshots,
    (
        select array_agg(reward_model_id order by reward_model_id) from reward_models
        where snapshot_id in (select snapshot_id from held)
    ) as reward_models,
    (select array_agg(checkpoint_id order by checkpoint_id) from descended) as checkpoints
"""
_AGED = "ingested_at < now() - make_interval(secs => %(age)s) order by ingested_at limit %(limit)s"
_OLD_PROMPTS = f"""
with answers as materialized (select * from interactions where {_AGED}),
votes as materialized (select * from feedback where {_AGED})
select prompt_hash from answers
union
{_PROMPTS_OF}
"""
_OLD_ANSWERS = f"""
delete from interactions where event_id in (select event_id from interactions where {_AGED})
returning event_id, response_id, comparison_id
"""
_OLD_VOTES = f"""
delete from feedback where event_id in (select event_id from feedback where {_AGED}) or {_ON}
returning event_id, target
"""
_FORGET_OLD_PAIRS = """
delete from preferences gone
where gone.prompt_hash = any (%(prompts)s) and gone.retracted
  and not exists (select from interactions i where i.response_id = gone.rejected_response_id)
"""
