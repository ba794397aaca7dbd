"""How far the votes can be trusted: what it would take to rig a comparison, and what looks rigged. Only reads."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

from pydantic import BaseModel, ConfigDict

from storage.postgres import Connection

_LISTED = 20


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Contest(_Frozen):
    """Two checkpoints side by side: their wins in current choices, and what would put the loser ahead.

    changed_votes: votes for the leader that would have to be for the other one. added_votes: further votes for the
    other one. rigged_raters: raters, those who voted most for the leader, who would have to vote for the other instead.
    Small numbers beside `votes` mean: a few people, or one with many names, could have made this result.
    """

    experiment_id: str | None
    leader: str
    other: str
    votes: int
    raters: int
    leader_wins: int
    other_wins: int
    ties: int
    changed_votes: int
    added_votes: int
    rigged_raters: int


class RepeatedText(_Frozen):
    """One comment or correction that several raters sent, letter case and punctuation apart."""

    text: str
    votes: int
    raters: int


class BusyRater(_Frozen):
    """One of the raters who voted most. share: of all votes."""

    rater: str
    votes: int
    share: float


class Integrity(_Frozen):
    """The report. The lists are the worst first, at most 20 long."""

    contests: list[Contest]
    repeated_texts: list[RepeatedText]
    busiest_raters: list[BusyRater]


def examine(connection: Connection) -> Integrity:
    """Look at the votes as they are now."""
    choices = connection.execute(_CHOICES).fetchall()
    contests: dict[tuple[str | None, str, str], list[dict[str, Any]]] = {}
    for choice in choices:
        first, second = sorted((choice["checkpoint_a"], choice["checkpoint_b"]))
        contests.setdefault((choice["experiment_id"], first, second), []).append(choice)
    found = [_contest(*names, votes) for names, votes in contests.items()]
    return Integrity(
        contests=sorted(found, key=lambda contest: contest.changed_votes / contest.votes)[:_LISTED],
        repeated_texts=[RepeatedText(**row) for row in connection.execute(_REPEATED, {"limit": _LISTED})],
        busiest_raters=[BusyRater(**row) for row in connection.execute(_BUSIEST, {"limit": _LISTED})],
    )


def _contest(experiment_id: str | None, first: str, second: str, choices: Sequence[dict[str, Any]]) -> Contest:
    winners = [(choice["rater"], choice["chosen_checkpoint_id"]) for choice in choices]
    wins = Counter(winner for _, winner in winners)
    leader, other = (first, second) if wins[first] >= wins[second] else (second, first)
    margin = wins[leader] - wins[other]
    net = Counter({rater: 0 for rater, _ in winners})
    for rater, winner in winners:
        net[rater] += {leader: 1, other: -1}.get(winner, 0)
    return Contest(
        experiment_id=experiment_id,
        leader=leader,
        other=other,
        votes=len(choices),
        raters=len(net),
        leader_wins=wins[leader],
        other_wins=wins[other],
        ties=wins[None],
        changed_votes=margin // 2 + 1,
        added_votes=margin + 1,
        rigged_raters=raters_to_flip(net.values(), margin),
    )


def raters_to_flip(net: Iterable[int], margin: int) -> int:
    """How few raters would have to turn to put the loser ahead. net: each one's votes for the leader less the others.

    A rater who turns takes twice what they gave. When all who gave anything do not suffice, one more must be found.
    """
    turned = list(accumulate(2 * votes for votes in sorted(net, reverse=True) if votes > 0))
    return next((number for number, taken in enumerate(turned, 1) if taken > margin), len(turned) + 1)


_CHOICES = """
select experiment_id, rater, checkpoint_a, checkpoint_b, chosen_checkpoint_id
from comparison_votes
where verdict in ('chosen', 'tie') and checkpoint_a <> checkpoint_b
"""
_REPEATED = """
select min(text) as text, count(*) as votes, count(distinct rater) as raters
from (
    select left(text, 200) as text, rater, btrim(lower(regexp_replace(text, '[^[:alnum:]]+', ' ', 'g'))) as plain
    from feedback
    where kind in ('comment', 'correction')
) as told
where length(plain) >= 12
group by plain
having count(distinct rater) > 1
order by raters desc, votes desc, text
limit %(limit)s
"""
_BUSIEST = """
select rater, count(*) as votes, count(*)::double precision / sum(count(*)) over () as share
from feedback group by rater order by votes desc, rater limit %(limit)s
"""
