"""Laws of the plan for evidence that is looked at after every vote."""

import math

import numpy as np
import pytest
from scipy import special

from rounds.statistics.planning import minimum_detectable_effect, votes_anytime


@pytest.mark.parametrize("share", [0.55, 0.6])
@pytest.mark.parametrize("chance", [0.5, 0.8])
def the_planned_votes_are_those_of_simulated_experiments(share: float, chance: float) -> None:
    generator = np.random.default_rng(1)
    expected = votes_anytime(share, chance=chance)
    wins = np.cumsum(generator.random((300, 3 * int(expected))) < share, axis=1)
    losses = np.arange(1, wins.shape[1] + 1) - wins
    more = np.log(special.betaincc(wins + 1.0, losses + 1.0, 0.5))  # log_evidence_better, for all votes at once
    evidence = special.betaln(wins + 1.0, losses + 1.0) + more + (wins + losses + 1) * math.log(2)
    passed = evidence >= math.log(20)
    stops = np.where(passed.any(axis=1), np.argmax(passed, axis=1) + 1, math.inf)
    assert float(np.quantile(stops, chance)) == pytest.approx(expected, rel=0.15)


def a_stricter_alpha_or_a_smaller_lead_takes_more_votes() -> None:
    assert votes_anytime(0.6, 0.01) > votes_anytime(0.6) > votes_anytime(0.65)
    assert votes_anytime(0.51, most=500) == math.inf


def a_hundred_times_the_units_find_a_tenth_of_the_effect() -> None:
    assert minimum_detectable_effect(40_000, 0.5) == pytest.approx(minimum_detectable_effect(400, 0.5) / 10)
    assert minimum_detectable_effect(400, 0.5, 0.1) > minimum_detectable_effect(400, 0.5, 0.5)
