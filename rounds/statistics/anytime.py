"""Anytime-valid statistics for votes: evidence may be looked at after every vote without raising the error rate.

Pure functions of counts; each names its source. A vote is a win (the candidate was chosen), a loss (the
control was), or a tie, which carries no evidence about the win share of decided votes: the betting factor
of a tie is one. Votes are taken as exchangeable given the win share; clustering is the caller's job.
"""

import math
from functools import lru_cache

import numpy as np
from scipy import optimize, special, stats


def log_evidence_better(wins: int, losses: int, share: float = 0.5) -> float:
    """Natural log of the e-value against "the win share of decided votes is at most `share`".

    The mixture of likelihood ratios p^w (1-p)^l / share^w (1-share)^l over p uniform on (share, 1]: each ratio is a
    supermartingale under the hypothesis, so is their mixture, and by Ville's inequality the chance that it
    ever passes 1/alpha is at most alpha (Robbins 1970; Ramdas et al. 2023, "Game-theoretic statistics and
    safe anytime-valid inference", §3). Closed form by the incomplete beta function.

    Raises ValueError for negative counts, or a share that is not between 0 and 1.
    """
    if wins < 0 or losses < 0:
        raise ValueError(f"counts of votes can't be negative: {wins} wins, {losses} losses")
    if not 0 < share < 1:
        raise ValueError(f"a win share lies between 0 and 1: {share}")
    above = stats.beta.logsf(share, wins + 1, losses + 1) - math.log1p(-share)
    likelihood = wins * math.log(share) + losses * math.log1p(-share)
    return float(special.betaln(wins + 1, losses + 1) + above - likelihood)


def log_evidence_worse(wins: int, losses: int) -> float:
    """The same against "the win share of decided votes is at least one half"."""
    return log_evidence_better(losses, wins)


def sample_ratio_evidence(counts: np.ndarray, weights: np.ndarray, concentration: float = 100.0) -> np.ndarray:
    """Natural log of the e-value against "units come to the arms by these weights": may be looked at after every unit.

    Multinomial likelihoods mixed by a Dirichlet density around the weights (Lindon & Malek 2022, "Anytime-valid
    inference for multinomial count data", §3): it passes log(1 / alpha) by chance with a probability of at most alpha.
    counts: int64[..., k], of one stretch of constant weights; add up the stretches between ramps. weights: float64[k],
    any scale; an arm of weight 0 must be empty, else the evidence is infinite. concentration: how near the weights
    deviations are looked for. Returns float64[...]. Raises ValueError for different lengths or numbers that can't be.
    """
    counts, weights = np.asarray(counts, dtype=float), np.asarray(weights, dtype=float)
    if counts.shape[-1:] != weights.shape or np.any(counts < 0):
        raise ValueError("a sample ratio needs a weight for each count, and no count is negative")
    if not concentration > 0 or np.any(weights < 0) or not weights.sum() > 0:
        raise ValueError("weights are 0 or more, not all of them 0, and the concentration is above 0")
    used = weights > 0
    shares, seen = weights[used] / weights[used].sum(), counts[..., used]
    prior, total = concentration * shares, seen.sum(axis=-1)
    arms = special.gammaln(prior + seen) - special.gammaln(prior) - seen * np.log(shares)
    evidence = arms.sum(axis=-1) + special.gammaln(concentration) - special.gammaln(concentration + total)
    return np.where(counts[..., ~used].any(axis=-1), np.inf, evidence)


@lru_cache(maxsize=4096)
def win_share_bounds(wins: int, losses: int, alpha: float = 0.05) -> tuple[float, float]:
    """(low, high) of the win share: each bound holds at all times at once with probability at least 1 - alpha.

    `low` is the largest share that `log_evidence_better` refutes at alpha, `high` its mirror image. So `low` passes
    one half exactly when the candidate is proven better; together the two hold with probability 1 - 2 alpha.
    """
    return _low(wins, losses, alpha), 1 - _low(losses, wins, alpha)


def _low(wins: int, losses: int, alpha: float) -> float:
    if wins == 0:
        return 0.0
    limit = math.log(1 / alpha)

    def excess(share: float) -> float:
        return log_evidence_better(wins, losses, share) - limit

    least, peak = 1e-12, min(wins / (wins + losses), 1 - 1e-12)
    return float(optimize.brentq(excess, least, peak, xtol=1e-12)) if excess(least) > 0 else 0.0
