"""`flywheel bench statistics`: what the statistics promise, simulated with the functions that experiments use.

Every case is a whole experiment, repeated; a look is taken after every vote. The rates are shares of experiments,
with a binomial error of about sqrt(rate (1 - rate) / runs).
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import stats

from rounds.statistics.adjust import cuped, prediction_powered_mean
from rounds.statistics.anytime import log_evidence_better, win_share_bounds
from rounds.statistics.fixed import (
    clustered_difference,
    clustered_mean_interval,
    group_sequential_bounds,
    proportion_difference,
    wilson_interval,
)
from rounds.statistics.lengths import length_controlled_rate
from rounds.statistics.mixtures import bernoulli_interval
from rounds.statistics.pairs import Comparisons, Ties, fit_strengths, probabilities
from rounds.statistics.pairs_intervals import strength_intervals
from rounds.statistics.planning import votes_for_fixed_test
from rounds.statistics.sequences import difference_sequence, first_of_each, mean_sequence

ALPHA = 0.05
VOTES = 2000
SHARES = (0.52, 0.55, 0.60)
_LONGEST = 20_000


def run(*, runs: int, seed: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Simulate `runs` experiments a case, fewer where one takes long. Rates lie between 0 and 1."""
    generator = np.random.default_rng(seed)
    say("A/A experiments, side by side")
    false_promotions, naive = _side_by_side(generator, runs)
    say("A/A experiments, votes on single answers")
    false_promotions |= _single_answers(generator, max(200, runs // 10))
    say("power")
    power = {f"{share:.2f}": _power(generator, share, max(200, runs // 4)) for share in SHARES}
    say("coverage")
    coverage = _coverage(generator, max(200, runs // 10))
    return {
        "alpha": ALPHA,
        "votes": VOTES,
        "runs": runs,
        "seed": seed,
        "false_promotion_rate": false_promotions,
        "naive_false_promotion_rate": naive,
        "median_votes": {
            share: {name: found["median_votes"] for name, found in by.items()} for share, by in power.items()
        },
        "power": {share: {name: found["power"] for name, found in by.items()} for share, by in power.items()},
        "coverage": coverage,
    }


def needed_wins(votes: int, alpha: float = ALPHA) -> np.ndarray:
    """int64[votes]: the wins at which the evidence passes 1/alpha after 1, 2, … decided votes; more than can be:
    never.
    """
    level, needed, found = math.log(1 / alpha), 0, []
    for count in range(1, votes + 1):
        while needed <= count and log_evidence_better(needed, count - needed) < level:
            needed += 1
        found.append(needed)
    return np.array(found)


def _side_by_side(generator: np.random.Generator, runs: int) -> tuple[dict[str, float], dict[str, float]]:
    """No arm is better; how often is one promoted? As experiments count votes, and as they would be counted naively."""
    needed = needed_wins(VOTES)

    def promoted(wins: np.ndarray) -> float:
        """wins: bool[runs, votes], the counted votes."""
        return float(np.mean(np.any(np.cumsum(wins, axis=1) >= needed[: wins.shape[1]], axis=1)))

    fair = generator.random((runs, VOTES)) < 0.5
    counts = np.arange(1, VOTES + 1)
    z = (np.cumsum(fair, axis=1) - counts / 2) / np.sqrt(counts / 4)
    # 400 raters with a taste of their own, five votes each: counted is each one's first.
    taste = generator.beta(0.3, 0.3, (runs, 400))
    all_votes = generator.random((runs, 400, 5)) < taste[:, :, None]
    # One rater with a firm taste votes 200 times among 1800 others.
    eager = np.repeat(generator.random((runs, 1)) < 0.5, 200, axis=1)
    others = generator.random((runs, VOTES - 200)) < 0.5
    critical = stats.norm.isf(ALPHA)
    ours = {
        "independent votes": promoted(fair),
        "raters who vote alike, first vote of each": promoted(all_votes[:, :, 0]),
        "one rater votes 200 times, counted once": promoted(np.hstack([eager[:, :1], others])),
    }
    naive = {
        "raters who vote alike, all five votes of each": promoted(all_votes.reshape(runs, -1)),
        "one rater votes 200 times, all counted": promoted(np.hstack([eager, others])),
        "a plain z-test after every vote from the 20th": float(np.mean(np.any(z[:, 19:] > critical, axis=1))),
    }
    return ours, naive


def _single_answers(generator: np.random.Generator, runs: int) -> dict[str, float]:
    """The same for thumbs on single answers, in two arms."""
    level = math.log(1 / ALPHA)
    found = dict.fromkeys(
        (
            "thumbs, even arms",
            "thumbs, 10 % in the candidate",
            "thumbs, weights ramped while the mood drifts",
            "thumbs, units vote alike and often, first vote of each",
        ),
        0,
    )
    late = np.arange(VOTES) >= VOTES // 2
    for _ in range(runs):
        cases = [
            _thumbs(generator, np.full(VOTES, 0.5), np.full(VOTES, 0.7)),
            _thumbs(generator, np.full(VOTES, 0.1), np.full(VOTES, 0.7)),
            _thumbs(generator, np.where(late, 0.6, 0.1), np.where(late, 0.5, 0.9)),
            _repeated(generator),
        ]
        for name, (is_candidate, propensity, values) in zip(found, cases, strict=True):
            evidence = difference_sequence(is_candidate, propensity, values, 2 * ALPHA).log_evidence()
            found[name] += bool(np.any(evidence >= level))
    return {name: count / runs for name, count in found.items()}


def _thumbs(
    generator: np.random.Generator, weight: np.ndarray, mood: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    is_candidate = generator.random(len(weight)) < weight
    values = (generator.random(len(weight)) < mood).astype(float)
    return is_candidate, np.where(is_candidate, weight, 1 - weight), values


def _repeated(generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    units = generator.permutation(np.concatenate([np.zeros(200, int), np.repeat(np.arange(1, 300), 6)]))
    taste, arm = generator.beta(0.3, 0.3, 300), generator.random(300) < 0.5
    values = (generator.random(len(units)) < taste[units]).astype(float)
    chosen = first_of_each(units)
    return arm[units][chosen], np.full(len(chosen), 0.5), values[chosen]


def _power(generator: np.random.Generator, share: float, runs: int) -> dict[str, dict[str, float]]:
    """Decided votes until a candidate with this win share is promoted, and the part that is within _LONGEST votes."""
    needed = needed_wins(_LONGEST)
    stops = np.full(runs, math.inf)
    for index in range(runs):
        passed = np.cumsum(generator.random(_LONGEST) < share) >= needed
        if passed.any():
            stops[index] = int(np.argmax(passed)) + 1
    fixed = votes_for_fixed_test(share, ALPHA)
    wins = generator.binomial(fixed, share, runs)
    bound = stats.binom.isf(ALPHA, fixed, 0.5)
    looks = 5
    steps = math.ceil(fixed * 1.2 / looks)
    sums = np.cumsum(generator.binomial(steps, share, (runs, looks)), axis=1)
    votes = steps * np.arange(1, looks + 1)
    crossed = (sums - votes / 2) / np.sqrt(votes / 4) >= group_sequential_bounds(looks, 2 * ALPHA, "obrien-fleming")
    ended = np.where(crossed.any(axis=1), votes[np.argmax(crossed, axis=1)], votes[-1])
    median = float(np.median(stops))
    return {
        "anytime": {"median_votes": median, "power": float(np.mean(np.isfinite(stops)))},
        "fixed sample": {"median_votes": float(fixed), "power": float(np.mean(wins > bound))},
        "five planned looks": {"median_votes": float(np.median(ended)), "power": float(np.mean(crossed.any(axis=1)))},
    }


def _coverage(generator: np.random.Generator, runs: int) -> dict[str, float]:
    """The part of experiments in which the interval holds the truth: always (sequences), or at its one look."""
    cases: dict[str, Callable[[np.random.Generator], bool]] = {
        "win share, at all times (both bounds: 90 %)": _win_share,
        "rate, at all times": _rate,
        "mean, at all times": _mean,
        "difference of arms, at all times": _difference,
        "mean, clustered": _clustered_mean,
        "difference of arms, clustered": _clustered_difference,
        "proportion": _proportion,
        "difference of proportions": _proportions,
        "difference of arms, CUPED": _cuped,
        "mean with a biased judge": _judge,
        "length-controlled win rate": _length,
        "strength, ties half": lambda g: _strength(g, "half", None),
        "strength, Davidson": lambda g: _strength(g, "davidson", -0.4),
        "strength, Rao-Kupper": lambda g: _strength(g, "rao-kupper", -0.3),
    }
    return {name: float(np.mean([case(generator) for _ in range(runs)])) for name, case in cases.items()}


def _holds(low: float, high: float, truth: float) -> bool:
    return bool(low <= truth <= high)


def _win_share(generator: np.random.Generator) -> bool:
    wins = np.cumsum(generator.random(400) < 0.6)
    looks = [win_share_bounds(int(won), n - int(won), ALPHA) for n, won in enumerate(wins, start=1) if n % 5 == 0]
    return all(_holds(low, high, 0.6) for low, high in looks)


def _rate(generator: np.random.Generator) -> bool:
    wins = np.cumsum(generator.random(300) < 0.3)
    return all(
        _holds(*bernoulli_interval(int(wins[n - 1]), n, ALPHA, 100), 0.3) for n in (10, 30, 60, 100, 150, 200, 300)
    )


def _mean(generator: np.random.Generator) -> bool:
    sequence = mean_sequence(generator.beta(4, 2, 500), ALPHA)
    return bool(np.all((sequence.low <= 2 / 3) & (sequence.high >= 2 / 3)))


def _difference(generator: np.random.Generator) -> bool:
    is_candidate, propensity, _ = _thumbs(generator, np.full(500, 0.3), np.full(500, 0.5))
    values = (generator.random(500) < np.where(is_candidate, 0.6, 0.5)).astype(float)
    _, low, high = difference_sequence(is_candidate, propensity, values, ALPHA).bounds()
    return bool(np.all((low <= 0.1) & (high >= 0.1)))


def _clustered_mean(generator: np.random.Generator) -> bool:
    units = np.repeat(np.arange(60), 5)
    values = (generator.random(300) < generator.beta(1, 1, 60)[units]).astype(float)
    found = clustered_mean_interval(values, units)
    return _holds(found.low, found.high, 0.5)


def _clustered_difference(generator: np.random.Generator) -> bool:
    units = np.repeat(np.arange(50), 4)
    arms = [(generator.random(200) < generator.beta(a, 2, 50)[units]).astype(float) for a in (3, 2)]
    found = clustered_difference(arms[0], units, arms[1], units)
    return _holds(found.low, found.high, 0.1)


def _proportion(generator: np.random.Generator) -> bool:
    return _holds(*wilson_interval(int(generator.binomial(200, 0.07)), 200), 0.07)


def _proportions(generator: np.random.Generator) -> bool:
    found = proportion_difference(int(generator.binomial(150, 0.2)), 150, int(generator.binomial(250, 0.1)), 250)
    return _holds(found.low, found.high, 0.1)


def _cuped(generator: np.random.Generator) -> bool:
    is_candidate, before = generator.random(200) < 0.5, generator.normal(0, 1, 200)
    values = 0.8 * before + generator.normal(0, 0.6, 200) + 0.2 * is_candidate
    found = cuped(values, before, is_candidate).adjusted
    return _holds(found.low, found.high, 0.2)


def _judge(generator: np.random.Generator) -> bool:
    truth = (generator.random(1100) < 0.6).astype(float)
    judge = 0.9 * truth + 0.3 + generator.normal(0, 0.2, 1100)
    found = prediction_powered_mean(truth[:100], judge[:100], judge[100:]).estimate
    return _holds(found.low, found.high, 0.6)


def _length(generator: np.random.Generator) -> bool:
    difference = generator.normal(20, 30, 400)
    squeezed = np.tanh(difference / np.std(difference))
    preference = (generator.random(400) < 1 / (1 + np.exp(-0.3 - squeezed))).astype(float)
    found = length_controlled_rate(preference, 100 + difference, np.full(400, 100.0))
    return _holds(found.rate - 1.96 * found.error, found.rate + 1.96 * found.error, 1 / (1 + math.exp(-0.3)))


def _strength(generator: np.random.Generator, ties: Ties, inner: float | None) -> bool:
    logs = np.array([0.6, 0.0, -0.6])
    a = generator.integers(0, 3, 300)
    b = (a + generator.integers(1, 3, 300)) % 3
    win, loss, _ = probabilities(ties, logs[a], logs[b], inner)
    point = generator.random(300)
    outcome = np.where(point < win, 1.0, np.where(point < win + loss, 0.0, 0.5))
    data = Comparisons(["x", "y", "z"], a, b, outcome, np.ones(300))
    found = strength_intervals(fit_strengths(data, ties), data)
    return _holds(float(found.low[0]), float(found.high[0]), 0.6)
