"""Votes as they are read back from the store. Only reads."""

from typing import Any, get_args

from feedback.events import VOTES, AnyVote
from storage.postgres import Connection

MOST = 1000
_QUERY = """
select * from (
    select
        vote.*,
        row_number() over (
            partition by vote.subject, vote.rater order by vote."time" desc, vote.event_id desc
        ) = 1 as current
    from feedback vote
    where vote.target = %s
) as votes
where votes.api_key_id = %s
order by votes."time" desc, votes.event_id desc
limit %s
"""
_KINDS: dict[str, type[AnyVote]] = {get_args(vote.model_fields["kind"].annotation)[0]: vote for vote in VOTES}


def votes_on(connection: Connection, target: str, api_key_id: str) -> list[dict[str, Any]]:
    """The votes on a target that came with that key, oldest first, of more than MOST the newest: their kinds' fields.

    `current` is false where the rater changed their mind later. target: see feedback.events.target_of.
    """
    rows = connection.execute(_QUERY, (target, api_key_id, MOST)).fetchall()[::-1]
    return [vote_of(row).model_dump(mode="json", exclude_none=True) | {"current": row["current"]} for row in rows]


def vote_of(row: dict[str, Any]) -> AnyVote:
    """The event that a row of `feedback` holds. Numbers lie in the text column `value` in PostgreSQL's own words."""
    kind = _KINDS[row["kind"]]
    fields = {name: row[name] for name in kind.model_fields if row[name] is not None}
    if kind.model_fields.get("value") and kind.model_fields["value"].annotation is float:
        fields["value"] = float(fields["value"])
    return kind.model_validate(fields)
