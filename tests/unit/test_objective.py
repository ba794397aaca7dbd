"""Laws of what an answer earns in a policy update."""

import numpy as np
import pytest

from rounds.objective import rewards
from rounds.sampling import Answer
from rounds.settings import PolicySettings

SETTINGS = PolicySettings(kl_penalty=0.1, degenerate_reward=-3.0, unfinished_penalty=2.0)
WORDS = "The sea is salty because rivers carry salt into it."


def answer(text: str = WORDS, *, finished: bool = True) -> Answer:
    return Answer(prompt=[], prompt_ids=[1], token_ids=[1], log_probabilities=[0.0], text=text, finished=finished)


def earned(*answers: Answer, gaps: tuple[float, ...] = (), share: float = 1.0, score: float = 1.0) -> list[float]:
    scores = np.full(len(answers), score)
    return list(rewards(answers, scores, np.array(gaps or (0.0,) * len(answers)), share, SETTINGS)[0])


def a_plain_answer_earns_its_score_and_each_nat_from_the_base_costs_the_penalty() -> None:
    assert earned(answer(), answer(), answer(), gaps=(0.0, 5.0, -5.0)) == pytest.approx([1.0, 0.5, 1.5])


def a_degenerate_answer_earns_the_fixed_low_reward_whatever_its_score() -> None:
    assert earned(answer(""), answer("no no no no no no no no"), score=9.0) == [-3.0, -3.0]
    assert earned(answer(""), score=-5.0) == [-5.0]


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def an_answer_cut_by_the_limit_loses_as_far_as_the_parents_answers_ended(share: float) -> None:
    assert earned(answer(), answer(finished=False), share=share) == pytest.approx([1.0, 1.0 - 2.0 * share])


def the_counted_scores_are_those_before_the_penalties() -> None:
    _, counted = rewards(
        [answer(finished=False), answer("")], np.array([1.0, 1.0]), np.array([3.0, 3.0]), 1.0, SETTINGS
    )
    assert list(counted) == [1.0, -3.0]
