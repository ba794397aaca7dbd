"""Laws of the statistics with a planned horizon: tests, adjustments, plans."""

import math

import numpy as np
import pytest
from scipy import stats

from rounds.statistics.adjust import cuped, prediction_powered_difference, prediction_powered_mean
from rounds.statistics.anytime import log_evidence_better
from rounds.statistics.fixed import (
    clustered_difference,
    crossing_probability,
    group_sequential_bounds,
    proportion_difference,
    wilson_interval,
)
from rounds.statistics.planning import (
    days_until,
    minimum_detectable_effect,
    votes_anytime,
    votes_for_fixed_test,
)


@pytest.mark.parametrize(
    ("looks", "pocock", "obrien_fleming", "naive"),
    [
        (2, 2.178, 1.977, 0.0831),
        (3, 2.289, 2.004, 0.1073),
        (4, 2.361, 2.024, 0.1262),
        (5, 2.413, 2.040, 0.1417),
        (10, 2.555, 2.087, 0.1934),
    ],
)
def the_published_group_sequential_constants_are_met(
    looks: int, pocock: float, obrien_fleming: float, naive: float
) -> None:
    """Jennison & Turnbull 2000, tables 2.1 and 2.3, and the price of naive peeking, two-sided alpha .05."""
    assert group_sequential_bounds(looks)[0] == pytest.approx(pocock, abs=6e-4)
    assert group_sequential_bounds(looks, kind="obrien-fleming")[-1] == pytest.approx(obrien_fleming, abs=6e-4)
    assert crossing_probability(np.full(looks, stats.norm.ppf(0.975))) == pytest.approx(naive, abs=6e-5)


def the_figures_of_gbstats_are_met() -> None:
    pytest.importorskip("gbstats", reason="gbstats is not installed")
    from gbstats.frequentist.tests import FrequentistConfig, TwoSidedTTest
    from gbstats.models.statistics import RegressionAdjustedStatistic, SampleMeanStatistic

    generator = np.random.default_rng(2)
    is_candidate = generator.random(900) < 0.4
    before = generator.normal(0, 1, 900)
    values = 0.7 * before + generator.normal(0, 1, 900) + 0.1 * is_candidate
    arms = [values[~is_candidate], values[is_candidate]]
    config = FrequentistConfig(difference_type="absolute")
    theirs = TwoSidedTTest(*(SampleMeanStatistic(n=len(a), sum=a.sum(), sum_squares=a @ a) for a in arms), config)
    ours = cuped(values, before, is_candidate)
    result = theirs.compute_result()
    assert (ours.plain.low, ours.plain.high) == pytest.approx(tuple(result.ci), rel=1e-6)
    assert ours.plain.p_value == pytest.approx(result.p_value, rel=1e-6)

    def regression(group: np.ndarray) -> RegressionAdjustedStatistic:
        y, x = values[group], before[group]
        return RegressionAdjustedStatistic(
            n=len(y),
            post_statistic=SampleMeanStatistic(n=len(y), sum=y.sum(), sum_squares=y @ y),
            pre_statistic=SampleMeanStatistic(n=len(x), sum=x.sum(), sum_squares=x @ x),
            post_pre_sum_of_products=x @ y,
            theta=ours.theta,
        )

    adjusted = TwoSidedTTest(regression(~is_candidate), regression(is_candidate), config).compute_result()
    assert ours.adjusted.mean == pytest.approx(adjusted.expected, abs=0.002)  # its slope is another mean of the arms'
    assert ours.adjusted.low == pytest.approx(adjusted.ci[0], abs=0.003)


def the_difference_of_proportions_covers_the_truth() -> None:
    generator = np.random.default_rng(3)
    covered = 0
    for _ in range(800):
        first, second = generator.binomial(60, 0.15), generator.binomial(90, 0.05)
        found = proportion_difference(first, 60, second, 90)
        covered += found.low <= 0.10 <= found.high
    assert abs(covered / 800 - 0.95) < 0.024
    assert proportion_difference(0, 5, 0, 5).p_value == 1.0
    with pytest.raises(ValueError, match="successes"):
        proportion_difference(6, 5, 0, 5)


def a_proportion_of_nothing_or_all_has_an_interval() -> None:
    assert wilson_interval(0, 10)[0] == 0.0
    assert 0.2 < wilson_interval(0, 10)[1] < 0.4
    assert wilson_interval(10, 10)[1] == pytest.approx(1.0)


def the_clustered_difference_holds_where_rows_would_lie() -> None:
    generator = np.random.default_rng(4)
    clustered = rows = 0
    for _ in range(300):
        units = np.repeat(np.arange(40), 25)
        taste = generator.beta(0.5, 0.5, (2, 40))
        first, second = ((generator.random(1000) < arm[units]).astype(float) for arm in taste)
        clustered += (clustered_difference(first, units, second, units).p_value or 0) < 0.05
        rows += stats.ttest_ind(first, second).pvalue < 0.05
    assert clustered / 300 < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 300)
    assert rows / 300 > 0.4


def what_the_past_explains_is_removed_and_the_truth_is_kept() -> None:
    generator = np.random.default_rng(5)
    covered, removed = 0, []
    for _ in range(300):
        is_candidate = generator.random(300) < 0.5
        before = generator.normal(0, 1, 300)
        values = 0.8 * before + generator.normal(0, 0.6, 300) + 0.2 * is_candidate
        found = cuped(values, before, is_candidate)
        covered += found.adjusted.low <= 0.2 <= found.adjusted.high
        removed.append(found.removed)
    assert abs(covered / 300 - 0.95) < 0.045
    assert np.mean(removed) == pytest.approx(0.64, abs=0.05)


def no_past_changes_nothing() -> None:
    generator = np.random.default_rng(6)
    values, is_candidate = generator.random(50), np.arange(50) % 2 == 0
    for covariate in (np.full(50, 3.0), np.full(50, np.nan)):
        found = cuped(values, covariate, is_candidate)
        assert found.adjusted == found.plain
    assert cuped(values, np.where(is_candidate, values, np.nan), is_candidate).imputed == 25
    with pytest.raises(ValueError, match="two units"):
        cuped(values, values, np.zeros(50, dtype=bool))


def a_biased_judge_sharpens_the_mean_and_does_not_move_it() -> None:
    generator = np.random.default_rng(7)
    covered, widths, means = 0, [], []
    for _ in range(400):
        truth = (generator.random(1100) < 0.6).astype(float)
        judge = np.clip(0.9 * truth + 0.3 + generator.normal(0, 0.1, 1100), 0, 2)  # half as much again too high
        found = prediction_powered_mean(truth[:100], judge[:100], judge[100:])
        covered += found.estimate.low <= 0.6 <= found.estimate.high
        means.append(found.estimate.mean)
        widths.append(found.estimate.error / found.people.error)
    assert abs(covered / 400 - 0.95) < 0.035
    assert np.mean(means) == pytest.approx(0.6, abs=0.005)
    assert np.mean(widths) < 0.5


def a_useless_judge_is_not_believed() -> None:
    generator = np.random.default_rng(8)
    human = (generator.random(3000) < 0.4).astype(float)
    found = prediction_powered_mean(human, generator.random(3000), generator.random(3000))
    assert found.weight < 0.05
    assert found.estimate.error == pytest.approx(found.people.error, rel=0.01)
    constant = prediction_powered_mean(human, np.ones(3000), np.ones(3000))
    assert (constant.weight, constant.estimate) == (0.0, constant.people)
    both = prediction_powered_difference(found, constant)
    assert both.people.error == pytest.approx(math.sqrt(2) * found.people.error, rel=1e-6)
    with pytest.raises(ValueError, match="every item"):
        prediction_powered_mean(human, human[1:], human)


def the_planned_effect_is_found_with_the_planned_power() -> None:
    generator = np.random.default_rng(9)
    effect = minimum_detectable_effect(400, 1.0, 0.25)
    found = 0
    for _ in range(400):
        first, second = generator.normal(effect, 1, 100), generator.normal(0, 1, 300)
        found += stats.ttest_ind(first, second).pvalue < 0.05
    assert abs(found / 400 - 0.8) < 0.065
    with pytest.raises(ValueError, match="both arms"):
        minimum_detectable_effect(400, 1.0, 1.0)


@pytest.mark.parametrize("share", [0.6, 0.7])
def the_expected_votes_are_the_median_of_experiments(share: float) -> None:
    generator = np.random.default_rng(10)
    expected = votes_anytime(share)
    passed = 0
    for _ in range(300):
        wins = np.cumsum(generator.random(int(expected)) < share)
        evidence = (log_evidence_better(int(won), n - int(won)) for n, won in enumerate(wins, start=1))
        passed += any(one >= math.log(20) for one in evidence)
    assert abs(passed / 300 - 0.5) < 0.09
    assert votes_anytime(share, chance=0.9) > expected
    assert votes_for_fixed_test(share) < votes_anytime(share, chance=0.8)


def a_plan_for_a_candidate_that_is_not_better_is_refused() -> None:
    for share in (0.5, 1.0, 0.2):
        with pytest.raises(ValueError, match="win share"):
            votes_anytime(share)
    assert days_until(100, 0) == math.inf
    assert days_until(100, 50) == 2
