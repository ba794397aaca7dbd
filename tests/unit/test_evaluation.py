"""Laws of the true win rate."""

import pytest

from loadtest.evaluation import true_win_rate

PROMPTS = ["Why is the sky blue?", "What is a comet?", "How do I boil an egg?"]
SHORT = [["The sky is blue because air scatters short waves of light much more than it scatters long ones."]] * 3
LONG = [["sky comet egg " + " ".join(f"word{number}" for number in range(90))]] * 3


def a_better_answer_everywhere_wins_everywhere() -> None:
    result = true_win_rate("concise", PROMPTS, LONG, SHORT)
    assert (result.rate, result.low, result.high) == (1.0, 1.0, 1.0)
    assert result.mean_words_new < result.mean_words_old


def the_opposite_taste_gives_the_opposite_verdict() -> None:
    assert true_win_rate("verbose", PROMPTS, LONG, SHORT).rate == 0.0


def the_same_answers_tie() -> None:
    assert true_win_rate("concise", PROMPTS, SHORT, SHORT).rate == 0.5


def random_raters_have_no_true_preference() -> None:
    assert true_win_rate("random", PROMPTS, LONG, SHORT).rate == 0.5


def a_single_prompt_has_no_interval() -> None:
    with pytest.raises(ValueError, match="two prompts"):
        true_win_rate("concise", PROMPTS[:1], SHORT[:1], LONG[:1])
