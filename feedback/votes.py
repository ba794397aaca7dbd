"""Votes as they are read back from the store. Only reads."""

from typing import Any, get_args

from feedback.events import VOTES, AnyVote
from storage.postgres import Connection

_QUERY = """
select
    vote.*,
    exists (select from current_votes now where now.target = vote.target and now.event_id = vote.event_id) as current
from feedback vote
where vote.target = %s and vote.api_key_id = %s
order by vote."time", vote.event_id
"""
_KINDS: dict[str, type[AnyVote]] = {get_args(vote.model_fields["kind"].annotation)[0]: vote for vote in VOTES}


def votes_on(connection: Connection, target: str, api_key_id: str) -> list[dict[str, Any]]:
    """The votes on a target that came with that key, oldest first: the fields of their kind as JSON values.

    `current` is false where the rater changed their mind later. target: see feedback.events.target_of.
    """
    rows = connection.execute(_QUERY, (target, api_key_id)).fetchall()
    return [vote_of(row).model_dump(mode="json", exclude_none=True) | {"current": row["current"]} for row in rows]


def vote_of(row: dict[str, Any]) -> AnyVote:
    """The event that a row of `feedback` holds. Numbers lie in the text column `value` in PostgreSQL's own words."""
    kind = _KINDS[row["kind"]]
    fields = {name: row[name] for name in kind.model_fields if row[name] is not None}
    if kind.model_fields.get("value") and kind.model_fields["value"].annotation is float:
        fields["value"] = float(fields["value"])
    return kind.model_validate(fields)
