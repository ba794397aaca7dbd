"""Laws of the reward room's pure parts: pairs, intervals, the fit, and the gate."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward.evaluation import Interval, calibration_error, clustered_mean, correct
from reward.gate import judge_reward
from reward.logistic import choose, fit, out_of_fold, reduce_features
from reward.pairs import compare
from reward.report import RewardReport
from reward.settings import RewardSettings
from reward.training import length_sentence
from tests.helpers.preferences import Pair

SETTINGS = RewardSettings()


def report(**changes: object) -> RewardReport:
    """A report that passes the gate, but for `changes`."""
    numbers: dict[str, object] = {
        "reward_model_id": "rm",
        "snapshot_id": "snap",
        "base_digest": "0",
        "train_pairs": 300,
        "train_prompts": 150,
        "held_out_votes": 120,
        "held_out_prompts": 60,
        "held_out_accuracy": 0.68,
        "held_out_low": 0.59,
        "held_out_high": 0.77,
        "length_only_accuracy": 0.6,
        "length_only_low": 0.5,
        "length_only_high": 0.7,
        "gain_over_length": 0.08,
        "gain_over_length_low": 0.01,
        "gain_over_length_high": 0.15,
        "length_sentence": "Length alone does not explain the votes.",
        "correlation_with_length": -0.5,
        "calibration_error": 0.05,
        "out_of_fold_loss": 0.6,
        "group_gains": {},
        "penalty": 1.0,
        "length_scale": 1.0,
        "counters": {},
        "seconds": 1.0,
        "feature_seconds": 1.0,
    }
    return RewardReport.model_validate(numbers | changes)


def a_reward_model_above_chance_is_released() -> None:
    verdict = judge_reward(report(), SETTINGS)
    assert verdict.passed
    assert "released" in verdict.reason


@pytest.mark.parametrize("low", [0.5, 0.49, 0.0, float("nan"), float("-inf")])
def a_reward_model_whose_interval_touches_chance_is_refused(low: float) -> None:
    verdict = judge_reward(report(held_out_low=low), SETTINGS)
    assert not verdict.passed
    assert "chance" in verdict.reason


def a_reward_model_that_falls_below_its_predecessor_is_refused() -> None:
    worse = report(previous_accuracy=0.78, previous_gain=-0.1, previous_gain_low=-0.18, previous_gain_high=-0.02)
    assert not judge_reward(worse, SETTINGS).passed
    equal = report(previous_accuracy=0.7, previous_gain=-0.02, previous_gain_low=-0.08, previous_gain_high=0.04)
    assert judge_reward(equal, SETTINGS).passed


def a_reward_model_that_length_would_explain_is_released_and_says_so() -> None:
    sentence = length_sentence(Interval(0.68, 0.6, 0.76), Interval(0.67, 0.59, 0.75), Interval(0.01, -0.03, 0.05))
    verdict = judge_reward(report(length_sentence=sentence), SETTINGS)
    assert verdict.passed
    assert "would explain" in verdict.reason


def a_gain_over_length_beyond_noise_is_told() -> None:
    sentence = length_sentence(Interval(0.7, 0.6, 0.8), Interval(0.6, 0.5, 0.7), Interval(0.1, 0.02, 0.18))
    assert "does not explain" in sentence


def every_pair_is_used_or_counted() -> None:
    pairs = [
        Pair(),
        Pair(tie=True),
        Pair(rejected="A short answer."),
        Pair(weight=0.0),
    ]
    kept = compare(pairs, tie_weight=0.5)
    assert len(kept.target) == 2
    assert list(kept.target) == [1.0, 0.5]
    assert list(kept.weight) == [1.0, 0.5]
    assert kept.counters == {
        "pairs": 4,
        "ties": 1,
        "dropped_ties": 0,
        "dropped_identical": 1,
        "dropped_weightless": 1,
    }
    assert compare(pairs, tie_weight=0.0).counters["dropped_ties"] == 1


def an_answer_in_several_pairs_is_listed_once() -> None:
    kept = compare([Pair(chosen="a", rejected="b"), Pair(chosen="b", rejected="c")], 0.5)
    assert kept.answers == ["a", "b", "c"]
    assert list(kept.chosen) == [0, 1]


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=2, max_size=40))
def an_interval_holds_its_mean(rows: list[tuple[int, bool]]) -> None:
    group = np.array([row[0] for row in rows])
    interval = clustered_mean(np.array([float(row[1]) for row in rows]), group, 0.95)
    assert interval.low <= interval.mean <= interval.high


def a_vote_repeated_within_a_prompt_does_not_narrow_the_interval() -> None:
    values = np.random.default_rng(0).integers(0, 2, 40).astype(float)
    group = np.arange(40)
    once = clustered_mean(values, group, 0.95)
    tenfold = clustered_mean(np.repeat(values, 10), np.repeat(group, 10), 0.95)
    assert tenfold.high - tenfold.low == pytest.approx(once.high - once.low)


def an_interval_of_independent_votes_covers_the_truth_as_often_as_it_says() -> None:
    generator = np.random.default_rng(1)
    covered = 0
    for _ in range(1000):
        interval = clustered_mean(generator.binomial(1, 0.6, 80).astype(float), np.arange(80), 0.95)
        covered += interval.low <= 0.6 <= interval.high
    assert 920 <= covered <= 975


def a_calibrated_margin_has_a_small_error_and_an_overconfident_one_has_not() -> None:
    generator = np.random.default_rng(2)
    margin = generator.normal(0, 1.5, 4000)
    chosen = np.where(generator.random(4000) < 1 / (1 + np.exp(-margin)), margin, -margin)
    assert calibration_error(chosen) < 0.04
    assert calibration_error(4 * chosen) > 0.1


def a_tie_in_score_is_half_right() -> None:
    assert list(correct(np.array([1.0, 0.0, -1.0]))) == [1.0, 0.5, 0.0]


def votes_of(differences: np.ndarray, direction: np.ndarray, seed: int) -> np.ndarray:
    """The same rows, turned so that each is chosen − rejected under logistic votes along `direction`."""
    likes = np.random.default_rng(seed).random(len(differences)) < 1 / (1 + np.exp(-differences @ direction))
    return np.where(likes[:, None], differences, -differences)


def the_fit_finds_the_direction_that_made_the_votes() -> None:
    direction = np.array([1.0, -0.5, 0.0, 0.0])
    pairs = votes_of(np.random.default_rng(3).normal(size=(3000, 4)), direction, seed=4)
    beta = fit(pairs, np.ones(3000), np.ones(3000), penalty=1.0)
    assert beta == pytest.approx(direction, abs=0.12)


def a_rotation_of_the_features_changes_no_prediction() -> None:
    pairs = np.random.default_rng(5).normal(size=(20, 60))
    ones, group = np.ones(20), np.arange(20)
    whole = out_of_fold(pairs, ones, ones, group, 1.0, 5)
    reduced = out_of_fold(reduce_features(pairs), ones, ones, group, 1.0, 5)
    assert reduced == pytest.approx(whole, abs=1e-3)


def noise_is_shrunk_harder_than_signal() -> None:
    generator = np.random.default_rng(6)
    raw = generator.normal(size=(200, 50))
    signal = votes_of(raw, np.r_[3.0, np.zeros(49)], seed=7)
    noise = votes_of(raw, np.zeros(50), seed=8)
    ones, group = np.ones(200), np.arange(200) // 2
    grid = {"penalties": (0.1, 1.0, 10.0, 100.0), "length_scales": (1.0,), "folds": 5}

    def loss(pairs: np.ndarray) -> float:
        return choose(pairs[:, :48] / 7, pairs[:, 48:], ones, ones, group, **grid).loss

    assert loss(signal) < 0.6
    assert loss(noise) > 0.65
