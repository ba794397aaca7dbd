"""Numbers of a reward model on held-out votes, with intervals clustered by prompt.

Votes on one prompt share their answers and are not independent: intervals use the cluster-robust variance of
a mean (Liang & Zeger 1986) and Student's t with one degree fewer than there are prompts.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import expit
from scipy.stats import t as student

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A mean and its two-sided interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} ({self.low:.3f} to {self.high:.3f})"


def clustered_mean(values: Array, group: npt.NDArray[np.int64], confidence: float) -> Interval:
    """Mean of `values` [n] whose errors are shared within a group [n]. One group: mean ± 1."""
    mean = float(values.mean())
    sums = np.bincount(np.unique(group, return_inverse=True)[1], weights=values - mean)
    groups = len(sums)
    if groups < 2:
        return Interval(mean, mean - 1.0, mean + 1.0)
    error = float(np.sqrt(groups / (groups - 1) * (sums**2).sum()) / len(values))
    half = float(student.ppf(0.5 + confidence / 2, groups - 1)) * error
    return Interval(mean, mean - half, mean + half)


def correct(margins: Array) -> Array:
    """1 where the chosen answer scored higher, 0.5 where equal, 0 where lower."""
    return np.asarray(0.5 + 0.5 * np.sign(margins))


def calibration_error(margins: Array, bins: int = 5) -> float:
    """Expected calibration error (Guo et al. 2017, eq. 3) of the favourite's probability, in bins of equal count.

    margins: [n] calibrated score differences, chosen minus rejected. Chance alone gives about 0.3 / √(n / bins).
    """
    confidence = expit(np.abs(margins))
    right = correct(margins)
    parts = np.array_split(np.argsort(confidence), min(bins, len(margins)))
    gaps = [abs(float(right[part].mean() - confidence[part].mean())) * len(part) for part in parts]
    return float(sum(gaps) / len(margins))


def correlation(first: Array, second: Array) -> float:
    """Pearson's correlation; 0 where one side does not vary."""
    if first.std() == 0 or second.std() == 0:
        return 0.0
    return float(np.corrcoef(first, second)[0, 1])
