"""Before an experiment: what it could find, and how long it would take."""

import math

import numpy as np
from scipy import stats

from rounds.statistics.anytime import log_evidence_better


def minimum_detectable_effect(
    units: float, deviation: float, candidate_weight: float = 0.5, alpha: float = 0.05, power: float = 0.8
) -> float:
    """The difference of two means that a fixed-sample, two-sided z-test finds with this power.

    deviation: standard deviation of one unit's value. (z_(1-alpha/2) + z_power) standard errors; Kohavi, Tang & Xu
    2020, "Trustworthy online controlled experiments", §17. Raises ValueError for fewer than two units, or a weight of
    0 or 1.
    """
    if units < 2 or not 0 < candidate_weight < 1:
        raise ValueError("there must be at least two units, and units in both arms")
    quantiles = float(stats.norm.isf(alpha / 2) + stats.norm.ppf(power))
    return quantiles * deviation / math.sqrt(units * candidate_weight * (1 - candidate_weight))


def votes_for_fixed_test(win_share: float, alpha: float = 0.05, power: float = 0.8) -> int:
    """Decided side-by-side votes for a one-sided exact binomial test at one look that is planned now.

    Raises ValueError unless the win share lies between 1/2 and 1.
    """
    _check(win_share)
    quantiles = float(stats.norm.isf(alpha)) * 0.5 + float(stats.norm.ppf(power)) * 0.5
    votes = np.arange(1, math.ceil(2 * (quantiles / (win_share - 0.5)) ** 2) + 20)
    reached = stats.binom.sf(stats.binom.isf(alpha, votes, 0.5), votes, win_share) >= power
    return int(votes[np.argmax(reached)])


def votes_anytime(win_share: float, alpha: float = 0.05, chance: float = 0.5, most: int = 20_000) -> float:
    """Decided votes by which the evidence of `rounds.statistics.anytime`, looked at after each, has passed 1/alpha.

    Exact: the distribution of the wins of those that have not passed yet, vote by vote. chance: that it has passed
    (1/2: the median experiment). Infinite when more than `most` votes are needed. Raises ValueError unless the win
    share lies between 1/2 and 1.
    """
    _check(win_share)
    level = math.log(1 / alpha)
    running = np.zeros(most + 2)  # the chance of each number of wins, of experiments that have not passed
    running[0] = 1.0
    needed = 0
    for votes in range(1, most + 1):
        reach = needed + 2  # nothing lies beyond what was needed, and one vote adds one win at most
        after = running[:reach] * (1 - win_share)
        after[1:] += running[: reach - 1] * win_share
        while needed <= votes and log_evidence_better(needed, votes - needed) < level:
            needed += 1
        running[:reach] = after
        running[needed:] = 0.0
        if 1 - running[:needed].sum() >= chance:
            return float(votes)
    return math.inf


def days_until(votes: float, votes_per_day: float) -> float:
    """Days until so many votes are in; infinite when none come."""
    return votes / votes_per_day if votes_per_day > 0 else math.inf


def _check(win_share: float) -> None:
    if not 0.5 < win_share < 1:
        raise ValueError(f"a candidate that is better has a win share between 1/2 and 1, not {win_share:g}")
