"""Laws of the time-uniform boundaries.

The figures are those of the tests of confseq (MIT, commit 70b1ef3), whose authors took them from their reference in R.
"""

import math
from typing import Any

import numpy as np
import pytest
from scipy import special

from rounds.statistics.mixtures import (
    BetaBinomial,
    GammaExponential,
    GammaPoisson,
    OneSidedNormal,
    TwoSidedNormal,
    bernoulli_interval,
    normal_rho,
    poly_stitching_bound,
)

RHO, RHO_ONE_SIDED = normal_rho(100, 0.05), normal_rho(100, 0.05, one_sided=True)
MIXTURES = [
    (TwoSidedNormal(RHO), -0.6510052, 30.35209),
    (OneSidedNormal(RHO_ONE_SIDED), -0.06502391, 27.66071),
    (GammaExponential(RHO_ONE_SIDED, 2), -0.2490165, 33.02017),
    (GammaPoisson(RHO_ONE_SIDED, 2), -0.06991219, 30.1949),
    (BetaBinomial.tuned(100, 0.05, 0.2, 0.8), -0.6941012, 31.4308),
    (BetaBinomial.tuned(100, 0.05, 0.2, 0.8, one_sided=True), -0.07134019, 28.41238),
]


@pytest.mark.parametrize(("mixture", "log_mixture", "bound"), MIXTURES)
def the_published_figures_are_met(mixture: Any, log_mixture: float, bound: float) -> None:
    assert pytest.approx(12.60056, abs=1e-5) == RHO
    assert float(mixture.log_mixture(np.array(10.0), np.array(100.0))) == pytest.approx(log_mixture, abs=1e-5)
    assert float(mixture.bound(np.array(100.0), 0.05)) == pytest.approx(bound, abs=1e-5)


@pytest.mark.parametrize(("c", "bound"), [(3, 64.48755), (-1, 28.99389)])
def the_published_stitched_bound_is_met(c: float, bound: float) -> None:
    assert float(poly_stitching_bound(np.array(100.0), 0.05, 10, c)) == pytest.approx(bound, abs=1e-5)


@pytest.mark.parametrize(
    ("successes", "trials", "t_opt", "low", "high"),
    [
        (700, 1000, 100, 0.651629, 0.745949),
        (15, 50, 50, 0.129556, 0.511896),
        (5, 50, 50, 0.013021, 0.269264),
        (1, 50, 50, 0.0, 0.13489),
        (1, 2, 50, 0.0, 1.0),
        (100, 200, 1, 0.328923, 0.671076),
        (0, 1, 50, 0.0, 1.0),
    ],
)
def the_published_intervals_of_a_rate_are_met(
    successes: int, trials: int, t_opt: float, low: float, high: float
) -> None:
    assert bernoulli_interval(successes, trials, 0.05, t_opt) == pytest.approx((low, high), abs=1e-5)


@pytest.mark.parametrize(("mixture", "log_mixture", "bound"), MIXTURES)
def a_bound_is_where_the_mixture_reaches_its_level(mixture: Any, log_mixture: float, bound: float) -> None:
    for alpha in (0.001, 0.05, 0.3):
        v = np.array([20.0, 100.0, 4000.0])
        bounds = mixture.bound(v, alpha)
        reached = bounds < v / 0.2 * (1 - 1e-9) if isinstance(mixture, BetaBinomial) else np.full(3, True)
        assert mixture.log_mixture(bounds, v)[reached] == pytest.approx(np.full(reached.sum(), math.log(1 / alpha)))
        assert np.all(np.diff(bounds) > 0)


def a_hundred_thousand_bounds_come_at_once() -> None:
    v = np.linspace(1, 1e5, 100_000)
    bounds = GammaExponential(100.0, 2.0).bound(v, 0.025)
    assert bounds.shape == v.shape
    assert np.all(np.diff(bounds) > 0)


@pytest.mark.parametrize("mixture", [OneSidedNormal(20.0), GammaExponential(20.0, 1.0), GammaPoisson(20.0, 1.0)])
def the_bounds_are_passed_seldom_by_fair_coins(mixture: Any) -> None:
    """Steps of +-1 are sub-Gaussian with v = n, hence sub-exponential and sub-Poisson with any positive scale."""
    generator = np.random.default_rng(8)
    bounds = mixture.bound(np.arange(1.0, 501.0), 0.1)
    sums = np.cumsum(generator.choice([-1, 1], (1000, 500)), axis=1)
    passed = np.mean(np.any(sums >= bounds, axis=1))
    assert 0.005 < passed <= 0.1


@pytest.mark.parametrize(
    "mixture",
    [OneSidedNormal(20.0), GammaExponential(20.0, 1.0), GammaExponential(700.0, 5.0), GammaPoisson(20.0, 1.0)],
)
def the_evidence_falls_with_the_sum_and_stays_a_number_far_below_zero(mixture: Any) -> None:
    """Where the sum is so negative that the usual formula has no logarithm, another one goes on smoothly."""
    v = np.array([0.1, 3.0, 500.0, 1e5])
    sums = np.outer(np.linspace(-20, 2, 400), np.maximum(v, 1.0))
    evidence = mixture.log_mixture(sums, v)
    assert np.all(np.isfinite(evidence))
    assert np.all(np.diff(evidence, axis=0) > 0)
    assert np.all(np.diff(evidence, 2, axis=0) > -1e-6)  # convex, so without a step where the formulas meet


@pytest.mark.parametrize(("s", "v"), [(-30.0, 4.0), (-24.0, 4.0), (-3.0, 4.0), (6.0, 4.0), (-400.0, 30.0)])
def the_evidence_equals_its_integral(s: float, v: float) -> None:
    """The mixture over the rate of betting, HRMS propositions 9 and 10, by quadrature; rho 20, scale 1."""

    def log_integral(power: float, rate: float, low: float, high: float) -> float:
        points, weights = np.polynomial.legendre.leggauss(400)
        u = low + (high - low) * (points + 1) / 2
        return float(special.logsumexp(power * np.log(u) - rate * u, b=weights * (high - low) / 2))

    lower = s + v + log_integral(v + 19, s + v + 20, 0, 1) - log_integral(19, 20, 0, 1)
    assert float(GammaExponential(20, 1).log_mixture(np.array(s), np.array(v))) == pytest.approx(lower, abs=1e-8)
    upper = v + log_integral(s + v + 19, v + 20, 1, 12) - log_integral(19, 20, 1, 12)
    assert float(GammaPoisson(20, 1).log_mixture(np.array(s), np.array(v))) == pytest.approx(upper, abs=1e-8)


def the_sequential_test_of_gbstats_is_the_normal_mixture() -> None:
    pytest.importorskip("gbstats", reason="gbstats is not installed")
    from gbstats.frequentist.tests import SequentialConfig, SequentialTwoSidedTTest
    from gbstats.models.statistics import ProportionStatistic

    arms = [ProportionStatistic(n=900, sum=400), ProportionStatistic(n=1100, sum=560)]
    config = SequentialConfig(difference_type="absolute", sequential_tuning_parameter=500)
    theirs = SequentialTwoSidedTTest(*arms, config)
    low, high = theirs.compute_result().ci
    # In units of the standard deviation of one observation, time is their number.
    bound = TwoSidedNormal(normal_rho(500, 0.05)).bound(np.array(2000.0), 0.05)
    assert (high - low) / 2 == pytest.approx(float(bound) / 2000 * math.sqrt(theirs.variance * 2000), rel=1e-9)


@pytest.mark.parametrize("alpha", [0.0, 1.0, -0.1])
def a_bound_without_an_alpha_is_refused(alpha: float) -> None:
    for mixture, _, _ in MIXTURES:
        with pytest.raises(ValueError, match="alpha"):
            mixture.bound(np.array([1.0]), alpha)


@pytest.mark.parametrize(("v_opt", "alpha"), [(0, 0.05), (10, 0), (10, 1.0)])
def bad_tuning_is_refused(v_opt: float, alpha: float) -> None:
    with pytest.raises(ValueError, match="v_opt"):
        normal_rho(v_opt, alpha)
