"""The experiment that decides about a candidate: live side-by-side votes, an anytime-valid test.

`tally` reads the votes, `decide` is a pure function of them, so a report can be recomputed from the rows.
Guarantees: looking after every vote does not raise the rate of false promotions over `alpha`; one rater counts once, so
nobody decides by voting often, and a taste of one's own does not count as many votes. The rate is that of raters who
are independent: many who judge alike for another reason than the answers (one team, one script) raise it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rounds.settings import ExperimentSettings
from rounds.statistics.anytime import log_evidence_better, log_evidence_worse, win_share_bounds
from storage.postgres import Connection

Outcome = Literal["win", "loss", "tie"]


@dataclass(frozen=True)
class Tally:
    """Votes on the candidate against the control, in the order they were cast."""

    outcomes: tuple[Outcome, ...]
    both_bad: int = 0
    repeated: int = 0

    @property
    def wins(self) -> int:
        return self.outcomes.count("win")

    @property
    def losses(self) -> int:
        return self.outcomes.count("loss")

    @property
    def ties(self) -> int:
        return self.outcomes.count("tie")


@dataclass(frozen=True)
class Decision:
    """What the votes allow: keep `running`, or end as `promoted` or `rejected`. `numbers` are JSON-ready."""

    state: Literal["running", "promoted", "rejected"]
    reason: str
    numbers: dict[str, Any]


def tally(connection: Connection, experiment_id: str, arm: str, *, control: str = "control") -> Tally:
    """Read the experiment's human votes on `arm` beside `control`: of each rater the first that decides, else the
    first.

    "Both bad" counts as a tie (no evidence) and is reported by itself.
    """
    chosen = {"experiment": experiment_id, "arms": [arm, control]}
    rows = connection.execute(
        f"""
        select distinct on (rater) verdict, chosen_arm, voted_at, vote_id, count(*) over (partition by rater) as votes
        from ({_VOTES}) as votes
        order by rater, chosen_arm is null, voted_at, vote_id
        """,
        chosen,
    ).fetchall()
    rows.sort(key=lambda row: (row["voted_at"], row["vote_id"]))
    return Tally(
        outcomes=tuple(_outcome(row, arm) for row in rows),
        both_bad=sum(row["verdict"] == "both_bad" for row in rows),
        repeated=sum(row["votes"] - 1 for row in rows),
    )


_VOTES = """
select * from comparison_votes
where experiment_id = %(experiment)s and source = 'human'
  and arm_a = any (%(arms)s) and arm_b = any (%(arms)s) and arm_a <> arm_b
"""


def _outcome(row: dict[str, Any], arm: str) -> Outcome:
    if row["chosen_arm"] is None:
        return "tie"
    return "win" if row["chosen_arm"] == arm else "loss"


def decide(votes: Tally, settings: ExperimentSettings) -> Decision:
    """Promote on evidence that the candidate is better, reject on evidence that it is worse or on running out.

    Both tests are e-processes at `alpha`; `minimum_votes` guards against a handful of early voters,
    `maximum_votes` bounds the cost of a candidate that is neither.
    """
    wins, losses = votes.wins, votes.losses
    decided = wins + losses
    better, worse = log_evidence_better(wins, losses), log_evidence_worse(wins, losses)
    low, high = win_share_bounds(wins, losses, settings.alpha)
    threshold = math.log(1 / settings.alpha)
    numbers: dict[str, Any] = {
        "votes": len(votes.outcomes),
        "wins": wins,
        "losses": losses,
        "ties": votes.ties,
        "both_bad": votes.both_bad,
        "repeated_votes_not_counted": votes.repeated,
        "win_share": wins / decided if decided else None,
        "win_share_low": low,
        "win_share_high": high,
        "log_evidence_better": better if math.isfinite(better) else None,
        "log_evidence_worse": worse if math.isfinite(worse) else None,
        "log_evidence_needed": threshold,
        "settings": settings.model_dump(mode="json"),
    }
    share = f"{wins} of {decided} decided votes chose the candidate (true share, always valid: {low:.2f} to {high:.2f})"
    if decided >= settings.minimum_votes and better >= threshold:
        return Decision("promoted", f"{share}: better than the control at alpha {settings.alpha}", numbers)
    if decided >= settings.minimum_votes and worse >= threshold:
        return Decision("rejected", f"{share}: worse than the control at alpha {settings.alpha}", numbers)
    if len(votes.outcomes) >= settings.maximum_votes:
        return Decision("rejected", f"{share}: not proven better within {settings.maximum_votes} votes", numbers)
    return Decision("running", f"{share}: not decided yet", numbers)


def evidence_path(outcomes: Sequence[Outcome], alpha: float) -> list[dict[str, float | int]]:
    """The bounds after each vote, for a plot: vote number, share, low, high."""
    wins = losses = 0
    path: list[dict[str, float | int]] = []
    for number, outcome in enumerate(outcomes, start=1):
        wins += outcome == "win"
        losses += outcome == "loss"
        low, high = win_share_bounds(wins, losses, alpha)
        share = wins / (wins + losses) if wins + losses else 0.5
        path.append({"vote": number, "share": share, "low": low, "high": high})
    return path
