"""Confidence sequences: intervals for data in time order that hold at all times at once, so anybody may look whenever.

Empirical-Bernstein boundaries (Howard, Ramdas, McAuliffe & Sekhon 2021, theorem 4) with the gamma-exponential mixture:
they need bounds of the observations, no distribution, and adapt to the variance that is seen. What is covered is the
mean so far of the conditional means, so nothing needs to stand still. One observation for each unit, in the order in
which the units' first votes came (`first_of_each`): a unit that votes again adds nothing.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rounds.statistics.mixtures import GammaExponential, normal_rho

VOTES_OPT = 500.0
"""The number of votes at which the sequences are tightest."""
_CENTRE = 0.5


@dataclass(frozen=True)
class MeanSequence:
    """mean, low, high: float64[n], after each observation; in [0, 1]."""

    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


@dataclass(frozen=True)
class DifferenceSequence:
    """The candidate's value less the control's, after each of n units.

    count: float64[n], 1 to n; total: float64[n], the sum of what each unit tells of the difference; spread: float64[n],
    the sum of squares. scale: the largest that one unit can tell.
    """

    count: np.ndarray
    total: np.ndarray
    spread: np.ndarray
    scale: float
    alpha: float

    @cached_property
    def radius(self) -> np.ndarray:
        """float64[n]: |total - its conditional mean| is below it at all times at once, with a chance of 1 - alpha."""
        return _mixture(self.scale, self.alpha / 2).bound(self.spread, self.alpha / 2)

    def at(self, positions: np.ndarray) -> "DifferenceSequence":
        """The same at some positions (int64[m]) only: a bound takes time."""
        parts = (self.count[positions], self.total[positions], self.spread[positions])
        return DifferenceSequence(*parts, self.scale, self.alpha)

    def bounds(self, units: np.ndarray | float | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(difference, low, high), float64[n] each: for a unit that voted; or, with `units`, for each of so many.

        With the number of exposed units nobody is left out, so it is the intent-to-treat effect, where a unit that
        did not vote counts as indifferent in both arms.
        """
        count = self.count if units is None else np.asarray(units, dtype=float)
        return self.total / count, (self.total - self.radius) / count, (self.total + self.radius) / count

    def log_evidence(self, *, better: bool = True) -> np.ndarray:
        """float64[n]: natural log of the e-value against "the candidate is no better" (or no worse)."""
        mixture = _mixture(self.scale, self.alpha / 2)
        return mixture.log_mixture(self.total if better else -self.total, self.spread)


def mean_sequence(values: np.ndarray, alpha: float = 0.05) -> MeanSequence:
    """The mean of values (float64[n], each in [0, 1]), after each of them.

    Centred on the mean of those before, 1/2 at first. Raises ValueError for values outside of [0, 1].
    """
    values = _in_unit_interval(values)
    count = np.arange(1.0, len(values) + 1)
    sums = np.cumsum(values)
    before = np.concatenate([[_CENTRE], (_CENTRE + sums[:-1]) / count[1:]])[: len(values)]
    radius = _mixture(1.0, alpha / 2).bound(np.cumsum((values - before) ** 2), alpha / 2)
    mean = sums / count
    return MeanSequence(mean, np.maximum(0.0, mean - radius / count), np.minimum(1.0, mean + radius / count))


def difference_sequence(
    is_candidate: np.ndarray,
    propensity: np.ndarray,
    values: np.ndarray,
    alpha: float = 0.05,
    least_propensity: float | None = None,
    centre: float = 0.5,
    is_control: np.ndarray | None = None,
) -> DifferenceSequence:
    """Candidate less control, weighted by the inverse of the probability of the arm (Horvitz & Thompson 1952).

    is_candidate: bool[n]; propensity: float64[n], the probability, known beforehand, of the arm that the unit got;
    values: float64[n] in [0, 1]. A unit tells (value - centre) / propensity, with a minus in the control: its mean is
    the difference whatever the arms' weights are, so these may be ramped while the users' mood drifts, which fools a
    comparison of the arms' means. Deviations are taken from 0 rather than from the mean so far: that halves the
    scale, and costs little where effects are small. least_propensity: a lower bound that was known beforehand; the
    smallest seen when null, which is as good only once an arm was seen at its lowest weight. centre: the value of a
    unit that says nothing. is_control: bool[n], where there are further arms, whose units tell nothing and count.
    Raises ValueError for lengths, values or propensities that can't be.
    """
    values, propensity = _in_unit_interval(values), np.asarray(propensity, dtype=float)
    if not len(is_candidate) == len(propensity) == len(values):
        raise ValueError("arms, propensities and values must be of one length")
    smallest = float(propensity.min()) if len(propensity) else 1.0
    least = smallest if least_propensity is None else least_propensity
    if not 0 < least <= smallest or np.any(propensity > 1):
        raise ValueError(f"propensities lie between least_propensity ({least:g}) and 1; the smallest is {smallest:g}")
    is_control = ~np.asarray(is_candidate) if is_control is None else is_control
    side = np.asarray(is_candidate, dtype=float) - is_control
    told = side * (values - centre) / propensity
    scale = max(centre, 1 - centre) / least
    count = np.arange(1.0, len(told) + 1)
    return DifferenceSequence(count, np.cumsum(told), np.cumsum(told**2), scale, alpha)


def first_of_each(units: np.ndarray) -> np.ndarray:
    """Positions (int64, rising) of the first row of each unit; rows are in time order."""
    return np.sort(np.unique(units, return_index=True)[1])


def _mixture(scale: float, alpha: float) -> GammaExponential:
    return GammaExponential(normal_rho(VOTES_OPT * scale**2 / 2, alpha, one_sided=True), scale)


def _in_unit_interval(values: np.ndarray) -> np.ndarray:
    values = np.asarray(values, dtype=float)
    if np.any(~((values >= 0) & (values <= 1))):
        raise ValueError("values must lie between 0 and 1")
    return values
