"""Preferences: what the current votes say about pairs of answers. The rules are the view `derived_preferences`.

Guarantee: a function of the store's content only; the order in which events came does not matter.
Non-guarantee: it is computed anew at every call (tens of milliseconds at ten thousand votes).
"""

from typing import Any

from pydantic import BaseModel, ConfigDict

from storage.postgres import Connection


class DerivedPreference(BaseModel):
    """One pair: `chosen_text` beats `rejected_text`, or they tie. weight in (0, 1], capped per rater.

    kind says where it comes from: `stated` (a comparison) or `thumbs` (an up and a down within one prompt,
    from `rater` and `other_rater`). preference_id: the vote's event id, or both response ids.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    preference_id: str
    prompt_hash: str
    messages: list[dict[str, Any]]
    chosen_text: str
    rejected_text: str
    chosen_response_id: str
    rejected_response_id: str
    weight: float
    tie: bool
    rater: str
    other_rater: str
    source: str
    kind: str


def count_decided(connection: Connection) -> int:
    """How many derived preferences name a winner."""
    row = connection.execute("select count(*) as decided from derived_preferences where not tie").fetchone()
    return int(row["decided"]) if row else 0


def derive_preferences(connection: Connection) -> list[DerivedPreference]:
    """Every derived preference, by prompt hash and id."""
    rows = connection.execute("select * from derived_preferences order by prompt_hash, preference_id").fetchall()
    return [DerivedPreference.model_validate(row) for row in rows]
