"""Statistics for a horizon that was fixed in advance: looked at once, when the planned number of votes is in.

Whoever looks earlier, or again, wants `rounds.statistics.anytime` and `rounds.statistics.sequences`, or one of the
group-sequential bounds here.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import optimize, special, stats

_GRID = 401  # points of the density between two looks
_EDGE = 8.0  # standard deviations beyond which the density is nothing


@dataclass(frozen=True)
class Estimate:
    """An estimate with its standard error, interval and two-sided p-value (against 0 for a difference)."""

    mean: float
    error: float
    low: float
    high: float
    p_value: float | None = None


def clustered_mean_interval(values: np.ndarray, clusters: np.ndarray, confidence: float = 0.95) -> Estimate:
    """The mean of `values` (float, any length n >= 2) with errors clustered by `clusters` (length n).

    Cluster-robust standard error of a mean with the G/(G-1) correction and Student's t with G - 1 degrees
    of freedom (Cameron & Miller 2015, "A practitioner's guide to cluster-robust inference", §II). Raises ValueError
    with fewer than two clusters.
    """
    mean, variance, groups = _clustered(values, clusters)
    width = float(stats.t.ppf(0.5 + confidence / 2, groups - 1)) * math.sqrt(variance)
    return Estimate(mean, math.sqrt(variance), mean - width, mean + width)


def clustered_difference(
    candidate: np.ndarray,
    candidate_units: np.ndarray,
    control: np.ndarray,
    control_units: np.ndarray,
    confidence: float = 0.95,
) -> Estimate:
    """mean(candidate) - mean(control), values of one unit taken together.

    Welch's test on cluster-robust variances, with Satterthwaite's degrees of freedom from the numbers of units (Welch
    1947; Cameron & Miller 2015, §II). Raises ValueError when an arm has fewer than two units.
    """
    first, first_variance, first_groups = _clustered(candidate, candidate_units)
    second, second_variance, second_groups = _clustered(control, control_units)
    variance = first_variance + second_variance
    difference, error = first - second, math.sqrt(variance)
    if variance == 0:
        return Estimate(difference, 0.0, difference, difference, 1.0 if difference == 0 else 0.0)
    freedom = variance**2 / (first_variance**2 / (first_groups - 1) + second_variance**2 / (second_groups - 1))
    width = float(stats.t.ppf(0.5 + confidence / 2, freedom)) * error
    p_value = 2 * float(stats.t.sf(abs(difference) / error, freedom))
    return Estimate(difference, error, difference - width, difference + width, p_value)


def difference(candidate: np.ndarray, control: np.ndarray, confidence: float = 0.95) -> Estimate:
    """mean(candidate) - mean(control) of values (float64) that are independent: Welch's t-test."""
    return clustered_difference(candidate, np.arange(len(candidate)), control, np.arange(len(control)), confidence)


def proportion_difference(
    candidate_successes: int,
    candidate_trials: int,
    control_successes: int,
    control_trials: int,
    confidence: float = 0.95,
) -> Estimate:
    """The difference of two proportions of independent trials.

    Interval: Newcombe 1998, method 10 (Wilson's intervals combined); p-value: the pooled z-test; error: unpooled.
    Raises ValueError without trials, or with more successes than trials.
    """
    for successes, trials in ((candidate_successes, candidate_trials), (control_successes, control_trials)):
        if trials < 1 or not 0 <= successes <= trials:
            raise ValueError(f"{successes} successes of {trials} trials")
    first, second = candidate_successes / candidate_trials, control_successes / control_trials
    first_low, first_high = wilson_interval(candidate_successes, candidate_trials, confidence)
    second_low, second_high = wilson_interval(control_successes, control_trials, confidence)
    difference = first - second
    low = difference - math.hypot(first - first_low, second_high - second)
    high = difference + math.hypot(first_high - first, second - second_low)
    pooled = (candidate_successes + control_successes) / (candidate_trials + control_trials)
    spread = pooled * (1 - pooled) * (1 / candidate_trials + 1 / control_trials)
    p_value = 2 * float(stats.norm.sf(abs(difference) / math.sqrt(spread))) if spread > 0 else 1.0
    error = math.sqrt(first * (1 - first) / candidate_trials + second * (1 - second) / control_trials)
    return Estimate(difference, error, low, high, p_value)


def wilson_interval(successes: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """(low, high) of a proportion of independent trials (Wilson 1927)."""
    z = float(stats.norm.ppf(0.5 + confidence / 2))
    share = successes / trials
    centre = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    width = z / (1 + z * z / trials) * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials**2))
    return max(0.0, centre - width), min(1.0, centre + width)


def group_sequential_bounds(
    looks: int, alpha: float = 0.05, kind: Literal["pocock", "obrien-fleming"] = "pocock"
) -> np.ndarray:
    """float64[looks]: the |z| to pass at each of so many evenly spaced looks, two-sided error alpha in all.

    pocock: the same at each look (Pocock 1977); obrien-fleming: C sqrt(looks / look) (O'Brien & Fleming 1979). The
    constant solves the recursion of Armitage, McPherson & Rowe (1969). Raises ValueError for less than one look.
    """
    if looks < 1 or not 0 < alpha < 1:
        raise ValueError("there is at least one look, and alpha lies between 0 and 1")
    shape = np.ones(looks) if kind == "pocock" else np.sqrt(looks / np.arange(1, looks + 1))

    def excess(constant: float) -> float:
        return crossing_probability(constant * shape) - alpha

    single = float(stats.norm.isf(alpha / 2))
    return np.asarray(float(optimize.brentq(excess, single * 0.9, single * 3, xtol=1e-7)) * shape)


def crossing_probability(bounds: np.ndarray) -> float:
    """The chance that |z| passes its bound at any of the evenly spaced looks when there is no difference.

    By recursion over the density of the sum at each look that did not cross (Armitage, McPherson & Rowe 1969), with
    Simpson's rule. bounds: float64[looks].
    """
    looks = len(bounds)
    limits = np.minimum(bounds, _EDGE) * np.sqrt(np.arange(1, looks + 1))
    points = np.linspace(-limits[0], limits[0], _GRID)
    density = _normal(points)
    crossed = 2 * float(stats.norm.sf(bounds[0]))
    for look in range(1, looks):
        weights = _simpson(points) * density
        upper = special.ndtr(points - limits[look])
        lower = special.ndtr(-limits[look] - points)
        crossed += float(weights @ (upper + lower))
        new = np.linspace(-limits[look], limits[look], _GRID)
        density = _normal(new[:, None] - points[None, :]) @ weights
        points = new
    return crossed


def _normal(points: np.ndarray) -> np.ndarray:
    return np.asarray(np.exp(-0.5 * points**2) / math.sqrt(2 * math.pi))


def _simpson(points: np.ndarray) -> np.ndarray:
    weights = np.ones(len(points))
    weights[1:-1:2], weights[2:-1:2] = 4, 2
    return np.asarray(weights * (points[1] - points[0]) / 3)


def _clustered(values: np.ndarray, clusters: np.ndarray) -> tuple[float, float, int]:
    """(mean, variance of the mean, number of clusters)."""
    mean = float(np.mean(values))
    index = np.unique(clusters, return_inverse=True)[1]
    groups = int(index.max()) + 1
    if groups < 2:
        raise ValueError("an interval needs at least two clusters")
    sums = np.bincount(index, weights=np.asarray(values, dtype=float) - mean)
    return mean, groups / (groups - 1) * float(np.sum(sums**2)) / len(values) ** 2, groups
