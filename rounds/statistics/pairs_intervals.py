"""Confidence intervals of fitted strengths when votes hang together: by rater, by prompt, or both at once.

For a horizon fixed in advance, and for many clusters: with a handful of raters the intervals are too short.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import sparse, stats

from rounds.statistics.pairs import Comparisons, Fit, information, scores


@dataclass(frozen=True)
class Intervals:
    """low, high: float64[k], bounds of the log strengths; error: float64[k], their standard errors.

    clusters: how many there are in the smallest of the groupings, the rows themselves where there is none.
    """

    low: np.ndarray
    high: np.ndarray
    error: np.ndarray
    clusters: int


def strength_intervals(
    fit: Fit, data: Comparisons, groupings: Sequence[np.ndarray] = (), confidence: float = 0.95
) -> Intervals:
    """Intervals of the log strengths (mean 0) by the sandwich formula.

    groupings: none (every row by itself; Huber 1967, White 1982), one, or two arrays of int64[n] that say which rows
    hang together; with two the variances are added and that of their intersection is taken away (Cameron, Gelbach &
    Miller 2011, §2.2; negative eigenvalues are set to 0, §2.3). Each has the factor G / (G - 1) for G clusters;
    Student's t with G - 1 degrees of freedom for the smallest G. Raises ValueError with fewer than two clusters.
    """
    if len(groupings) > 2:
        raise ValueError("rows can be grouped in at most two ways")
    size = len(data.models)
    gradients = scores(fit, data) * data.weight[:, None]
    bread = np.linalg.pinv(information(fit, data), hermitian=True)
    labels = [np.unique(grouping, return_inverse=True)[1] for grouping in groupings] or [np.arange(len(data.a))]
    counts = [int(label.max()) + 1 for label in labels]
    if min(counts) < 2:
        raise ValueError("an interval needs at least two clusters: two raters, or two prompts")
    meat = sum((_meat(gradients, label) for label in labels), np.zeros_like(bread))
    if len(labels) == 2:
        both = np.unique(labels[0].astype(np.int64) * counts[1] + labels[1], return_inverse=True)[1]
        meat = _positive(meat - _meat(gradients, both))
    variance = bread @ meat @ bread
    centre = np.eye(size) - 1 / size
    error = np.sqrt(np.maximum(0.0, np.diag(centre @ variance[:size, :size] @ centre)))
    width = float(stats.t.ppf(0.5 + confidence / 2, min(counts) - 1)) * error
    return Intervals(fit.log_strengths - width, fit.log_strengths + width, error, min(counts))


def _meat(gradients: np.ndarray, label: np.ndarray) -> np.ndarray:
    """The clusters' summed gradients, squared and summed."""
    rows, groups = len(label), int(label.max()) + 1
    member = sparse.csr_matrix((np.ones(rows), (label, np.arange(rows))), shape=(groups, rows))
    sums = member @ gradients
    return np.asarray(sums.T @ sums) * (groups / max(1, groups - 1))


def _positive(matrix: np.ndarray) -> np.ndarray:
    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    return np.asarray(vectors * np.maximum(values, 0.0) @ vectors.T)
