"""Laws of the anytime-valid statistics."""

import math

import numpy as np
import pytest
from scipy import integrate

from rounds.statistics.anytime import log_evidence_better, log_evidence_worse, win_share_bounds
from rounds.statistics.fixed import clustered_mean_interval


@pytest.mark.parametrize(("wins", "losses"), [(0, 0), (3, 1), (12, 20), (60, 30)])
def the_evidence_equals_its_integral(wins: int, losses: int) -> None:
    integral, _ = integrate.quad(lambda p: 2 * p**wins * (1 - p) ** losses * 2 ** (wins + losses), 0.5, 1)
    assert log_evidence_better(wins, losses) == pytest.approx(math.log(integral), abs=1e-6)


def the_evidence_is_a_martingale_at_one_half() -> None:
    for wins, losses in [(0, 0), (5, 2), (10, 14)]:
        after = 0.5 * math.exp(log_evidence_better(wins + 1, losses)) + 0.5 * math.exp(
            log_evidence_better(wins, losses + 1)
        )
        assert after == pytest.approx(math.exp(log_evidence_better(wins, losses)), rel=1e-9)


def peeking_after_every_vote_keeps_the_false_promotion_rate_under_alpha() -> None:
    generator = np.random.default_rng(7)
    table = {
        (wins, n - wins): log_evidence_better(wins, n - wins) for n in range(1, 301) for wins in range(n // 2, n + 1)
    }
    promoted = 0
    for _ in range(2000):
        wins = np.cumsum(generator.integers(0, 2, size=300))
        promoted += any(table.get((int(w), n - int(w)), 0.0) >= math.log(20) for n, w in enumerate(wins, start=1))
    assert promoted / 2000 <= 0.05


def the_bounds_hold_at_all_times() -> None:
    generator = np.random.default_rng(3)
    missed_low = missed_high = 0
    for _ in range(150):
        votes = np.cumsum(generator.random(150) < 0.6)
        bounds = [win_share_bounds(int(w), n - int(w)) for n, w in enumerate(votes, start=1) if n % 10 == 0]
        missed_low += any(low > 0.6 for low, _ in bounds)
        missed_high += any(high < 0.6 for _, high in bounds)
    assert missed_low / 150 <= 0.05
    assert missed_high / 150 <= 0.05


@pytest.mark.parametrize("alpha", [0.01, 0.05])
def the_lower_bound_passes_one_half_exactly_when_the_evidence_passes_its_threshold(alpha: float) -> None:
    for decided in (1, 2, 7, 20, 45):
        for wins in range(decided + 1):
            proven = log_evidence_better(wins, decided - wins) >= math.log(1 / alpha)
            assert (win_share_bounds(wins, decided - wins, alpha)[0] > 0.5 - 1e-12) == proven


def the_two_sides_mirror_each_other() -> None:
    assert log_evidence_worse(4, 9) == log_evidence_better(9, 4)
    low, high = win_share_bounds(12, 30)
    mirrored = win_share_bounds(30, 12)
    assert (1 - high, 1 - low) == pytest.approx(mirrored, abs=1e-9)
    assert 0 < low < 12 / 42 < high < 1


def an_extreme_record_neither_overflows_nor_turns_into_nan() -> None:
    assert log_evidence_better(5000, 0) > 1000
    assert log_evidence_better(0, 5000) < 0
    assert win_share_bounds(0, 0) == (0.0, 1.0)
    assert win_share_bounds(400, 0)[1] == 1.0


def negative_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        log_evidence_better(-1, 3)


def repeated_answers_to_one_prompt_widen_the_interval() -> None:
    values = np.repeat([1.0, 0.0, 1.0, 1.0, 0.0, 1.0], 10)
    low = clustered_mean_interval(values, np.arange(60)).low
    clustered_low = clustered_mean_interval(values, np.repeat(np.arange(6), 10)).low
    assert clustered_low < low
