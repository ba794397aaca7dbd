"""Preferences: what the current votes say about pairs of answers. The rules are in migrations/0003_preferences.sql.

Guarantees: the table `preferences` is a function of the votes and answers in the store, in whatever order they came,
at the end of every transaction that calls `refresh_preferences` for what it wrote; the work is that of the prompts
concerned. Each row has a revision, so a reader can tell an old statement about a pair from a newer one.
"""

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from feedback.events import AnyEvent, Choice, Correction, Interaction, Thumb
from storage.postgres import Connection

_LOCK_KEY = 0x70726566
_FETCHED_AT_ONCE = 5_000

_CONCERNED = """
select prompt_hash
from interactions
where response_id = any (%(responses)s) or comparison_id = any (%(comparisons)s)
union
select answer.prompt_hash
from interactions answer
where answer.response_id = any (%(answers)s)
  and (exists (select from feedback vote where vote.target in (answer.response_id, answer.comparison_id))
       or exists (select from feedback vote where vote.responses ->> 0 = answer.response_id)
       or exists (select from feedback vote where vote.responses ->> 1 = answer.response_id))
"""


class DerivedPreference(BaseModel):
    """One pair: `chosen_text` beats `rejected_text`, or they tie. weight in (0, 1], capped per rater.

    kind says where it comes from: `stated` (a choice), `correction` (then no response is the chosen one) or `thumbs`
    (an up and a down within one prompt, from `rater` and `other_rater`). preference_id: the vote's event id, or both
    response ids.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    preference_id: str
    prompt_hash: str
    messages: list[dict[str, Any]]
    chosen_text: str
    rejected_text: str
    chosen_response_id: str | None
    rejected_response_id: str
    weight: float
    tie: bool
    rater: str
    other_rater: str
    source: str
    kind: str


def refresh_preferences(connection: Connection, events: Sequence[AnyEvent]) -> int:
    """Bring the pairs that `events`, just stored, concern up to date; returns how many pairs changed.

    For the transaction that stored them. Whoever refreshes waits for the one before to commit.
    """
    concerned: dict[str, list[str]] = {"responses": [], "comparisons": [], "answers": []}
    for event in events:
        if isinstance(event, Interaction):
            concerned["answers"].append(event.response_id)
        elif isinstance(event, Thumb | Correction) and event.response_id is not None:
            concerned["responses"].append(event.response_id)
        elif isinstance(event, Choice):
            concerned["responses"] += event.responses or ()
            concerned["comparisons"] += [event.comparison_id] if event.comparison_id else []
    connection.execute("select pg_advisory_xact_lock(%s)", (_LOCK_KEY,))
    return refresh_prompts(connection, [row["prompt_hash"] for row in connection.execute(_CONCERNED, concerned)])


def refresh_prompts(connection: Connection, prompts: Sequence[str]) -> int:
    """Bring the pairs of these prompts (hashes) up to date; returns how many pairs changed."""
    connection.execute("select pg_advisory_xact_lock(%s)", (_LOCK_KEY,))
    if not prompts:
        return 0
    row = connection.execute("select refresh_preferences(%s) as changed", (list(prompts),)).fetchone()
    return int(row["changed"]) if row else 0


def count_decided(connection: Connection) -> int:
    """How many derived preferences name a winner."""
    row = connection.execute("select count(*) as decided from preferences where not retracted and not tie").fetchone()
    return int(row["decided"]) if row else 0


def derive_preferences(connection: Connection) -> list[DerivedPreference]:
    """Every derived preference, by prompt hash and id. Fetched in parts, so that no statement lasts for minutes."""
    with connection.transaction(), connection.cursor(name="derived_preferences") as cursor:
        cursor.itersize = _FETCHED_AT_ONCE
        cursor.execute("select * from derived_preferences order by prompt_hash, preference_id")
        return [DerivedPreference.model_validate(row) for row in cursor]
