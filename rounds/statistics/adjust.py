"""Estimates made sharper by what else is known: a unit's earlier score, or the votes of a judge model.

For a horizon fixed in advance, and for many units: with twenty human votes 95 % intervals cover some 92 %, with a
hundred 95 %. Nothing here lets a judge's votes stand for people's: they only explain part of the
noise.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats

from rounds.statistics.fixed import Estimate, difference


@dataclass(frozen=True)
class Adjusted:
    """adjusted, plain: the difference with and without the covariate. removed: part of the variance that is gone (1:
    all of it; a bit below 0 when the covariate tells nothing).

    theta: slope on the covariate; imputed: units without one, which got the mean.
    """

    adjusted: Estimate
    plain: Estimate
    theta: float
    removed: float
    imputed: int


def cuped(values: np.ndarray, covariate: np.ndarray, is_candidate: np.ndarray, confidence: float = 0.95) -> Adjusted:
    """Candidate less control, adjusted for what was known of each unit before the experiment.

    CUPED (Deng, Xu, Kohavi & Walker 2013, "Improving the sensitivity of online controlled experiments by utilizing
    pre-experiment data", §3), with one slope from both arms. values, covariate: float64[n], one for each unit; NaN in
    the covariate says that nothing is known. Raises ValueError for an arm with fewer than two units.
    """
    known = np.isfinite(covariate)
    filled = np.where(known, covariate, covariate[known].mean() if known.any() else 0.0)
    groups = (is_candidate, ~np.asarray(is_candidate))
    if min(int(group.sum()) for group in groups) < 2:
        raise ValueError("each arm needs at least two units")
    # Within the arms, so that their difference is no part of the slope.
    within = [(values[group] - values[group].mean(), filled[group] - filled[group].mean()) for group in groups]
    spread = sum(float(x @ x) for _, x in within)
    theta = sum(float(y @ x) for y, x in within) / spread if spread > 0 else 0.0
    plain = difference(values[groups[0]], values[groups[1]], confidence)
    rest = values - theta * (filled - filled.mean())
    adjusted = difference(rest[groups[0]], rest[groups[1]], confidence)
    removed = 1 - (adjusted.error / plain.error) ** 2 if plain.error > 0 else 0.0
    return Adjusted(adjusted, plain, theta, removed, int((~known).sum()))


@dataclass(frozen=True)
class Powered:
    """estimate: with the judge; people: without. weight: how far the judge is believed (0: not at all, then both
    agree).
    """

    estimate: Estimate
    people: Estimate
    weight: float


def prediction_powered_mean(
    human: np.ndarray, judge_on_same: np.ndarray, judge_on_rest: np.ndarray, confidence: float = 0.95
) -> Powered:
    """The mean human vote, from few human votes and many of a judge model.

    Prediction-powered inference (Angelopoulos, Bates, Fannjiang, Jordan & Zrnic 2023, Science 382), its weight tuned
    for the least variance (Angelopoulos, Duchi & Zrnic 2023, "PPI++", §6), kept within 0 and 1. human, judge_on_same:
    float64[n], votes on the same items; judge_on_rest: float64[N], on others of the same kind. However biased, the
    judge moves the estimate by nothing on average. Raises ValueError with fewer than two of either.
    """
    if len(human) != len(judge_on_same):
        raise ValueError("the judge must have voted on every item that people voted on")
    n, rest = len(human), len(judge_on_rest)
    if n < 2 or rest < 2:
        raise ValueError("at least two items are needed with, and two without human votes")
    judge = np.concatenate([judge_on_same, judge_on_rest])
    spread = float(np.var(judge, ddof=1))
    shared = float(np.cov(human, judge_on_same)[0, 1])
    weight = min(1.0, max(0.0, shared / ((1 + n / rest) * spread))) if spread > 0 else 0.0
    mean = float(np.mean(human)) + weight * float(np.mean(judge_on_rest) - np.mean(judge_on_same))
    variance = float(np.var(human - weight * judge_on_same, ddof=1)) / n
    variance += weight**2 * float(np.var(judge_on_rest, ddof=1)) / rest
    people = _interval(float(np.mean(human)), float(np.var(human, ddof=1)) / n, confidence)
    return Powered(_interval(mean, variance, confidence), people, weight)


def prediction_powered_difference(candidate: Powered, control: Powered, confidence: float = 0.95) -> Powered:
    """Candidate less control, of two independent arms."""
    return Powered(
        _difference(candidate.estimate, control.estimate, confidence),
        _difference(candidate.people, control.people, confidence),
        (candidate.weight + control.weight) / 2,
    )


def _difference(first: Estimate, second: Estimate, confidence: float) -> Estimate:
    return _interval(first.mean - second.mean, first.error**2 + second.error**2, confidence)


def _interval(mean: float, variance: float, confidence: float) -> Estimate:
    error = math.sqrt(variance)
    width = float(stats.norm.ppf(0.5 + confidence / 2)) * error
    p_value = 2 * float(stats.norm.sf(abs(mean) / error)) if error > 0 else None
    return Estimate(mean, error, mean - width, mean + width, p_value)
