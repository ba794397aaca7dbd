"""Laws of the confidence sequences: they hold at all times at once, where looking often at a plain interval fails."""

import math

import numpy as np
import pytest
from scipy import stats

from rounds.statistics.sequences import difference_sequence, first_of_each, mean_sequence

RUNS, UNITS = 300, 800
MOST = 0.05 + 3 * math.sqrt(0.05 * 0.95 / RUNS)  # of runs that may miss at alpha .05


def misses_zero(is_candidate: np.ndarray, propensity: np.ndarray, values: np.ndarray, least: float) -> bool:
    """Whether the interval ever leaves out a difference of 0."""
    sequence = difference_sequence(is_candidate, propensity, values, 0.05, least)
    evidence = np.maximum(sequence.log_evidence(), sequence.log_evidence(better=False))
    return bool(np.any(evidence > math.log(2 / 0.05)))


def the_interval_leaves_out_zero_when_the_evidence_passes_its_level() -> None:
    generator = np.random.default_rng(9)
    is_candidate = generator.random(400) < 0.5
    values = (generator.random(400) < np.where(is_candidate, 0.8, 0.4)).astype(float)
    sequence = difference_sequence(is_candidate, np.full(400, 0.5), values)
    _, low, _ = sequence.bounds()
    assert np.array_equal(low > 0, sequence.log_evidence() > math.log(2 / 0.05))
    assert 0 < np.argmax(low > 0) < 300


def naive_misses_zero(is_candidate: np.ndarray, values: np.ndarray) -> bool:
    """The same of a plain 95 % interval of the difference of means, looked at after every unit from the 20th on."""
    seen = [np.cumsum(chosen) for chosen in (is_candidate, ~is_candidate)]
    sums = [np.cumsum(np.where(chosen, values, 0.0)) for chosen in (is_candidate, ~is_candidate)]
    with np.errstate(invalid="ignore", divide="ignore"):
        means = [total / count for total, count in zip(sums, seen, strict=True)]
        spread = sum(mean * (1 - mean) / count for mean, count in zip(means, seen, strict=True))
        z = (means[0] - means[1]) / np.sqrt(spread)
    return bool(np.any(np.abs(z[20:]) > stats.norm.ppf(0.975)))


@pytest.mark.parametrize("weight", [0.5, 0.1])
def an_aa_test_looked_at_after_every_unit_finds_something_in_at_most_alpha(weight: float) -> None:
    generator = np.random.default_rng(1)
    found = naive = 0
    for _ in range(RUNS):
        is_candidate = generator.random(UNITS) < weight
        values = (generator.random(UNITS) < 0.7).astype(float)
        propensity = np.where(is_candidate, weight, 1 - weight)
        found += misses_zero(is_candidate, propensity, values, min(weight, 1 - weight))
        naive += naive_misses_zero(is_candidate, values)
    assert found / RUNS <= MOST
    assert naive / RUNS > 0.25


def a_ramp_while_the_mood_drifts_fools_the_means_and_not_the_sequence() -> None:
    """The candidate gets 10 % of the units while 90 % are content, then 60 % when half are: it looks worse and is
    not.
    """
    generator = np.random.default_rng(2)
    late = np.arange(UNITS) >= UNITS // 2
    weight, mood = np.where(late, 0.6, 0.1), np.where(late, 0.5, 0.9)
    found = fooled = 0
    for _ in range(RUNS):
        is_candidate = generator.random(UNITS) < weight
        values = (generator.random(UNITS) < mood).astype(float)
        found += misses_zero(is_candidate, np.where(is_candidate, weight, 1 - weight), values, 0.1)
        fooled += stats.ttest_ind(values[is_candidate], values[~is_candidate]).pvalue < 0.05
    assert found / RUNS <= MOST
    assert fooled / RUNS > 0.9


def one_unit_that_votes_200_times_counts_once() -> None:
    """Few units vote very often, each with a taste of its own: all votes find something, the first ones do not."""
    generator = np.random.default_rng(3)
    found = all_votes = 0
    for _ in range(RUNS):
        times = np.where(np.arange(120) < 10, 200, 3)
        units = generator.permutation(np.repeat(np.arange(120), times))
        taste, arm = generator.beta(0.3, 0.3, 120), generator.random(120) < 0.5
        values = (generator.random(len(units)) < taste[units]).astype(float)
        chosen = first_of_each(units)
        half = np.full(len(units), 0.5)
        found += misses_zero(arm[units][chosen], half[chosen], values[chosen], 0.5)
        all_votes += misses_zero(arm[units], half, values, 0.5)
    assert found / RUNS <= MOST
    assert all_votes / RUNS > 0.3


def a_real_difference_is_found_and_covered() -> None:
    generator = np.random.default_rng(4)
    missed = found = 0
    for _ in range(40):
        is_candidate = generator.random(3000) < 0.5
        values = (generator.random(3000) < np.where(is_candidate, 0.62, 0.5)).astype(float)
        _, low, high = difference_sequence(is_candidate, np.full(3000, 0.5), values).bounds()
        missed += bool(np.any((low > 0.12) | (high < 0.12)))
        found += bool(low[-1] > 0)
    assert missed <= 6
    assert found > 37


def the_effect_on_everybody_exposed_is_the_voters_scaled_down() -> None:
    generator = np.random.default_rng(5)
    is_candidate = generator.random(100) < 0.5
    sequence = difference_sequence(is_candidate, np.full(100, 0.5), generator.random(100))
    per_voter, per_exposed = sequence.bounds(), sequence.bounds(1000.0)
    for voter, exposed in zip(per_voter, per_exposed, strict=True):
        assert exposed[-1] == pytest.approx(voter[-1] / 10)


@pytest.mark.parametrize(("p", "kind"), [(0.5, "coin"), (0.03, "coin"), (0.8, "smooth")])
def the_mean_is_covered_at_all_times(p: float, kind: str) -> None:
    generator = np.random.default_rng(6)
    missed = 0
    width = 0.0
    for _ in range(60):
        values = (generator.random(UNITS) < p).astype(float) if kind == "coin" else generator.beta(8, 2, UNITS)
        sequence = mean_sequence(values)
        missed += bool(np.any((sequence.low > p) | (sequence.high < p)))
        width = float(sequence.high[-1] - sequence.low[-1])
    assert missed <= 8
    assert 0 < width < 0.2
    if kind == "smooth" or p < 0.1:
        assert width < 0.1  # it adapts to a small variance


def the_first_of_each_is_the_first() -> None:
    units = np.array(["b", "a", "b", "c", "a", "d"])
    assert first_of_each(units).tolist() == [0, 1, 3, 5]
    assert len(first_of_each(np.array([]))) == 0


def the_order_and_number_of_later_votes_change_nothing() -> None:
    generator = np.random.default_rng(11)
    units, values = generator.integers(0, 30, 600), generator.random(600)
    chosen = first_of_each(units)
    tail = generator.permutation(np.arange(chosen.max() + 1, 600))
    shuffled = np.concatenate([np.arange(chosen.max() + 1), tail])
    kept = np.union1d(chosen, generator.choice(600, 100))
    for order in (shuffled, kept):
        assert np.array_equal(values[order][first_of_each(units[order])], values[chosen])


def the_interval_shrinks_as_votes_come() -> None:
    generator = np.random.default_rng(13)
    is_candidate = generator.random(4000) < 0.3
    propensity = np.where(is_candidate, 0.3, 0.7)
    sequence = difference_sequence(is_candidate, propensity, generator.random(4000), 0.05, 0.3)
    width = sequence.radius[[99, 399, 3999]] / sequence.count[[99, 399, 3999]]
    assert width[0] > 1.5 * width[1] > 3 * width[2]


def the_evidence_of_a_much_worse_candidate_is_a_number_at_every_vote() -> None:
    """With a tenth of the units in the candidate, the usual formula of the evidence of "better" has no logarithm."""
    generator = np.random.default_rng(14)
    is_candidate = generator.random(4000) < 0.1
    values = (generator.random(4000) < np.where(is_candidate, 0.1, 0.95)).astype(float)
    sequence = difference_sequence(is_candidate, np.where(is_candidate, 0.1, 0.9), values, 0.05, 0.1)
    assert np.all(sequence.log_evidence() < 1)
    assert sequence.log_evidence(better=False)[-1] > 100


@pytest.mark.parametrize(
    ("propensity", "values", "least"),
    [([0.5], [1.2], None), ([0.4], [0.5], 0.5), ([1.2], [0.5], None), ([0.5, 0.5], [0.5], None), ([0.0], [0.5], None)],
)
def bad_rows_are_refused(propensity: list[float], values: list[float], least: float | None) -> None:
    with pytest.raises(ValueError, match=r"values must|propensities|one length"):
        difference_sequence(np.array([True]), np.array(propensity), np.array(values), 0.05, least)


def an_empty_sequence_has_no_bounds() -> None:
    empty = np.array([])
    assert len(difference_sequence(empty.astype(bool), empty, empty).bounds()[0]) == 0
    assert len(mean_sequence(empty).low) == 0
