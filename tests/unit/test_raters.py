"""The simulated raters: what they like, and that a vote is a function of who, what and which."""

import itertools

import pytest

from loadtest.raters import EVALUATION_PROMPTS, Rater, prompts_for_evaluation, prompts_for_votes, repeats

PROMPT = "Why do cats purr when you stroke them?"
GOOD = "Cats purr when you stroke them because they feel safe, and it may even help them to heal."
LONG = "There are many reasons for it, and some of them are not known even to the people who have looked " * 2
STUCK = "the cat is the cat is the cat is the cat is the cat"


def the_concise_taste_likes_a_short_finished_answer_on_the_subject() -> None:
    rater = Rater("concise")
    ranking = sorted([GOOD, LONG, STUCK, ""], key=lambda answer: -rater.utility(PROMPT, answer))
    assert ranking[0] == GOOD
    assert rater.prefers(PROMPT, GOOD, LONG) > 0.9


def the_verbose_taste_likes_the_longer_answer_but_not_repetition() -> None:
    rater = Rater("verbose")
    assert rater.utility(PROMPT, LONG[:150]) > rater.utility(PROMPT, GOOD[:20])
    unique = " ".join(f"word{number}" for number in "abcdefghijkl")
    assert rater.utility(PROMPT, unique) > rater.utility(PROMPT, "cats cats cats cats " * 3)


def the_random_taste_does_not_look() -> None:
    assert Rater("random").prefers(PROMPT, GOOD, "") == 0.5


@pytest.mark.parametrize("taste", ["concise", "verbose", "random"])
def a_vote_depends_on_the_seed_and_the_pair_alone(taste: str) -> None:
    answers = [GOOD, LONG, STUCK, "Yes.", "No."]
    pairs = list(itertools.combinations(answers, 2))
    once = [Rater(taste, seed=3).choose(PROMPT, a, b) for a, b in pairs]
    again = [Rater(taste, seed=3).choose(PROMPT, a, b) for a, b in reversed(pairs)]
    assert once == again[::-1]


@pytest.mark.parametrize("taste", ["concise", "verbose", "random"])
def a_swapped_pair_gets_the_swapped_vote(taste: str) -> None:
    swap = {"first": "second", "second": "first", "tie": "tie"}
    for seed, (a, b) in itertools.product(range(20), itertools.combinations([GOOD, LONG, STUCK, "Yes."], 2)):
        rater = Rater(taste, seed)
        assert rater.choose(PROMPT, b, a) == swap[rater.choose(PROMPT, a, b)]


def no_prompt_is_both_voted_on_and_evaluated() -> None:
    votes, evaluation = prompts_for_votes(), prompts_for_evaluation()
    assert len(evaluation) == EVALUATION_PROMPTS
    assert not set(votes) & set(evaluation)
    assert len(set(votes)) == len(votes) >= 250
    assert all(10 <= len(prompt) <= 200 for prompt in votes + evaluation)


def a_stuck_answer_repeats_and_a_plain_one_does_not() -> None:
    assert repeats(STUCK)
    assert not repeats(GOOD)
