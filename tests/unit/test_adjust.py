"""Laws of the judge's help where the judge has a favourite."""

import numpy as np

from rounds.statistics.adjust import prediction_powered_difference, prediction_powered_mean


def a_judge_with_a_favourite_does_not_move_the_difference() -> None:
    """Arms are equal for people; the judge rates the candidate far better, and would alone be sure of it."""
    generator = np.random.default_rng(1)
    covered, means, widths, fooled = 0, [], [], 0
    for _ in range(300):
        arms, judged = [], []
        for favour in (0.3, 0.0):
            truth = (generator.random(900) < 0.5).astype(float)
            judge = 0.6 * truth + favour + generator.normal(0, 0.1, 900)
            arms.append(prediction_powered_mean(truth[:100], judge[:100], judge[100:]))
            judged.append(judge)
        found = prediction_powered_difference(*arms)
        covered += found.estimate.low <= 0 <= found.estimate.high
        means.append(found.estimate.mean)
        widths.append(found.estimate.error / found.people.error)
        fooled += judged[0].mean() - judged[1].mean() > 0.2
    assert fooled == 300
    assert abs(covered / 300 - 0.95) < 0.038
    assert abs(np.mean(means)) < 0.01
    assert np.mean(widths) < 0.6


def a_judge_who_votes_against_people_is_not_believed() -> None:
    generator = np.random.default_rng(2)
    truth = (generator.random(600) < 0.5).astype(float)
    found = prediction_powered_mean(truth[:200], 1 - truth[:200], 1 - truth[200:])
    assert found.weight == 0.0
    assert found.estimate == found.people
