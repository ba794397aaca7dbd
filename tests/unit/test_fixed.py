"""Laws of the sample ratio that may be looked at after every unit, and of planned looks."""

import math

import numpy as np
import pytest
from scipy import stats

from rounds.statistics.anytime import sample_ratio_evidence
from rounds.statistics.fixed import group_sequential_bounds

WEIGHTS = np.array([0.2, 0.3, 0.5])


@pytest.mark.parametrize("counts", [[0, 0, 0], [3, 1, 7], [50, 10, 20]])
def the_evidence_of_a_wrong_ratio_is_a_martingale_under_the_right_one(counts: list[int]) -> None:
    after = sample_ratio_evidence(np.array(counts) + np.eye(3, dtype=int), WEIGHTS)
    now = sample_ratio_evidence(np.array(counts), WEIGHTS)
    assert float(WEIGHTS @ np.exp(after)) == pytest.approx(float(np.exp(now)), rel=1e-9)


def a_right_ratio_looked_at_after_every_unit_is_doubted_in_at_most_alpha_and_by_chi_square_often() -> None:
    generator = np.random.default_rng(1)
    runs, units = 300, 1000
    arms = generator.choice(3, size=(runs, units), p=WEIGHTS)
    counts = np.cumsum(np.eye(3)[arms], axis=1)
    doubted = np.mean(np.any(sample_ratio_evidence(counts, WEIGHTS) >= math.log(20), axis=1))
    expected = np.arange(1, units + 1)[:, None] * WEIGHTS
    statistic = np.sum((counts - expected) ** 2 / expected, axis=2)[:, 50:]
    naive = np.mean(np.any(statistic > stats.chi2.isf(0.05, 2), axis=1))
    assert doubted <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / runs)
    assert naive > 0.2


def a_wrong_ratio_is_found_and_the_scale_of_the_weights_does_not_matter() -> None:
    counts = np.array([[600, 400], [500, 500]])
    wrong, right = sample_ratio_evidence(counts, np.array([1, 1]))
    assert wrong > math.log(1000)
    assert right < 0
    assert sample_ratio_evidence(counts, np.array([50, 50])) == pytest.approx(np.array([wrong, right]))


def an_arm_without_weight_must_be_empty() -> None:
    weights = np.array([1.0, 1.0, 0.0])
    evidence = sample_ratio_evidence(np.array([[60, 40, 0], [60, 40, 1]]), weights)
    assert evidence[0] == sample_ratio_evidence(np.array([60, 40]), weights[:2])
    assert evidence[1] == math.inf


@pytest.mark.parametrize(
    ("counts", "weights", "concentration"),
    [([1, 2], [1.0], 100), ([-1, 2], [1.0, 1.0], 100), ([1, 2], [0.0, 0.0], 100), ([1, 2], [1.0, 1.0], 0)],
)
def bad_counts_and_weights_are_refused(counts: list[int], weights: list[float], concentration: float) -> None:
    with pytest.raises(ValueError, match="weight"):
        sample_ratio_evidence(np.array(counts), np.array(weights), concentration)


def no_looks_are_refused() -> None:
    with pytest.raises(ValueError, match="one look"):
        group_sequential_bounds(0)


def the_bounds_of_five_looks_are_passed_in_alpha_of_simulated_experiments() -> None:
    generator = np.random.default_rng(2)
    z = np.cumsum(generator.normal(size=(40_000, 5)), axis=1) / np.sqrt(np.arange(1, 6))
    for kind in ("pocock", "obrien-fleming"):
        bounds = group_sequential_bounds(5, 0.05, kind)
        assert np.mean(np.any(np.abs(z) > bounds, axis=1)) == pytest.approx(0.05, abs=0.0033)
