"""Anytime-valid statistics for votes: evidence may be looked at after every vote without raising the error rate.

Pure functions of counts; each names its source. A vote is a win (the candidate was chosen), a loss (the
control was), or a tie, which carries no evidence about the win share of decided votes: the betting factor
of a tie is one. Votes are taken as exchangeable given the win share; clustering is the caller's job.
"""

import math
from collections.abc import Callable

import numpy as np
from scipy import special, stats


def log_evidence_better(wins: int, losses: int) -> float:
    """Natural log of the e-value against "the win share of decided votes is at most one half".

    The mixture of likelihood ratios p^w (1-p)^l / 2^-(w+l) over p uniform on (1/2, 1]: each ratio is a
    supermartingale under the hypothesis, so is their mixture, and by Ville's inequality the chance that it
    ever passes 1/alpha is at most alpha (Robbins 1970; Ramdas et al. 2023, "Game-theoretic statistics and
    safe anytime-valid inference", §3). Closed form by the incomplete beta function.

    Raises ValueError for negative counts.
    """
    _check(wins, losses)
    decided = wins + losses
    upper_half = stats.beta.logsf(0.5, wins + 1, losses + 1)
    return float(math.log(2) + special.betaln(wins + 1, losses + 1) + upper_half + decided * math.log(2))


def log_evidence_worse(wins: int, losses: int) -> float:
    """The same against "the win share of decided votes is at least one half"."""
    return log_evidence_better(losses, wins)


def win_share_confidence_sequence(wins: int, losses: int, alpha: float = 0.05) -> tuple[float, float]:
    """(low, high): holds the true win share at all times at once with probability at least 1 - alpha.

    The shares p at which the uniform-mixture likelihood ratio B(w+1, l+1) / (p^w (1-p)^l) stays below
    1/alpha (Robbins 1970, "Statistical methods related to the law of the iterated logarithm", §2; the
    beta-binomial mixture of Howard et al. 2021). With no decided votes it is (0, 1).
    """
    _check(wins, losses)
    if wins + losses == 0:
        return 0.0, 1.0
    mixture = special.betaln(wins + 1, losses + 1)
    limit = math.log(1 / alpha)

    def excess(share: float) -> float:
        return float(mixture - special.xlogy(wins, share) - special.xlog1py(losses, -share) - limit)

    peak = wins / (wins + losses)
    return _root(excess, 0.0, peak), _root(excess, 1.0, peak)


def clustered_mean_interval(
    values: np.ndarray, clusters: np.ndarray, confidence: float = 0.95
) -> tuple[float, float, float]:
    """(mean, low, high) of `values` (float, any length n >= 2) with errors clustered by `clusters` (length n).

    Cluster-robust standard error of a mean with the G/(G-1) correction and Student's t with G - 1 degrees
    of freedom (Cameron & Miller 2015, "A practitioner's guide to cluster-robust inference", §II). For a
    horizon fixed in advance. Raises ValueError with fewer than two clusters.
    """
    mean = float(np.mean(values))
    _, index = np.unique(clusters, return_inverse=True)
    groups = int(index.max()) + 1
    if groups < 2:
        raise ValueError("an interval needs at least two clusters")
    sums = np.bincount(index, weights=np.asarray(values, dtype=float) - mean)
    error = math.sqrt(groups / (groups - 1) * float(np.sum(sums**2))) / len(values)
    width = float(stats.t.ppf(0.5 + confidence / 2, groups - 1)) * error
    return mean, mean - width, mean + width


def _root(excess: Callable[[float], float], outside: float, inside: float) -> float:
    """Bisect between `outside` (where the excess may be positive) and `inside` (where it is negative)."""
    if excess(outside) <= 0:
        return outside
    for _ in range(60):
        middle = (outside + inside) / 2
        if excess(middle) > 0:
            outside = middle
        else:
            inside = middle
    return (outside + inside) / 2


def _check(wins: int, losses: int) -> None:
    if wins < 0 or losses < 0:
        raise ValueError(f"counts of votes can't be negative: {wins} wins, {losses} losses")
