"""Statistics for a horizon that was fixed in advance: looked at once, when the planned number of votes is in.

Whoever looks earlier, or again, wants `rounds.statistics.anytime`.
"""

import math

import numpy as np
from scipy import stats


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
