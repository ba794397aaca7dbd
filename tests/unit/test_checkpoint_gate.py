"""Laws of the checkpoint gate's judgement and of its readability rules."""

import pytest

from rounds.checkpoint_gate import Side, judge
from rounds.readability import is_degenerate, is_empty, is_gibberish, is_repeating
from rounds.settings import CheckpointGateSettings

SETTINGS = CheckpointGateSettings()
PROMPTS = 48


def side(**changes: object) -> Side:
    """48 readable answers of twenty tokens at 1.5 nats each, but for `changes`."""
    measured: dict[str, object] = {
        "reward": [0.0] * PROMPTS,
        "base_nll": [30.0] * PROMPTS,
        "tokens": [20] * PROMPTS,
        "words": [16] * PROMPTS,
        "degenerate": [False] * PROMPTS,
        "unfinished": [False] * PROMPTS,
        "kl": [0.0] * PROMPTS,
    }
    return Side.model_validate(measured | changes)


BETTER = [1.0 + 0.1 * (place % 5) for place in range(PROMPTS)]


def first(count: int) -> list[bool]:
    """True for the first `count` prompts."""
    return [place < count for place in range(PROMPTS)]


def verdict(new: Side, old: Side | None = None) -> tuple[bool, str]:
    passed, reason, _ = judge(old or side(), new, SETTINGS)
    return passed, reason


def a_readable_checkpoint_with_more_reward_passes() -> None:
    passed, reason = verdict(side(reward=BETTER, base_nll=[40.0] * PROMPTS, kl=[2.5] * PROMPTS))
    assert passed
    assert "readable" in reason


def a_reward_that_did_not_rise_beyond_noise_is_refused() -> None:
    noise = [1.0 if place % 2 else -0.9 for place in range(PROMPTS)]
    passed, reason = verdict(side(reward=noise))
    assert not passed
    assert "beyond noise" in reason


def answers_that_the_base_finds_unlikely_are_refused() -> None:
    passed, reason = verdict(side(reward=BETTER, base_nll=[60.0] * PROMPTS))
    assert not passed
    assert "less likely" in reason


def a_checkpoint_with_many_degenerate_answers_is_refused() -> None:
    assert not verdict(side(reward=BETTER, degenerate=first(8)))[0]


def one_degenerate_answer_is_noise() -> None:
    assert verdict(side(reward=BETTER, degenerate=first(1)))[0]


def a_degenerate_parent_excuses_no_checkpoint_over_the_maximum() -> None:
    assert not verdict(side(reward=BETTER, degenerate=first(12)), side(degenerate=first(12)))[0]


def a_few_more_answers_at_the_token_limit_pass_and_many_do_not() -> None:
    parent = side(unfinished=first(42))
    assert verdict(side(reward=BETTER, unfinished=first(46)), parent)[0]
    assert not verdict(side(reward=BETTER, unfinished=first(40)), side(unfinished=first(20)))[0]


def a_checkpoint_far_from_the_base_is_refused() -> None:
    assert not verdict(side(reward=BETTER, kl=[9.0] * PROMPTS))[0]


@pytest.mark.parametrize("field", ["reward", "base_nll", "kl"])
def a_measurement_that_is_not_a_number_is_refused(field: str) -> None:
    new = side(reward=BETTER).model_copy(update={field: [float("nan")] * PROMPTS})
    assert not verdict(new)[0]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  \n",
        "...",
        "Hiiiiiiiiiii there",
        "PULL LAPAROS NAMING EVERYONE",
        "the cat sat the cat sat the cat sat",
        "no no no no",
        "xkcd brrt pfft grmbl zzk wrrt",
    ],
)
def nonsense_is_degenerate(text: str) -> None:
    assert is_degenerate(text)


@pytest.mark.parametrize(
    "text",
    [
        "Paris.",
        "42",
        "Use the NATO alphabet.",
        "Bees visit flowers, drink nectar and bring it to the hive, where it dries into honey.",
        "No, no, no! That is too much salt.",
        "def add(a, b):\n    return a + b",
        "1. Boil the water.\n2. Add the pasta.\n3. Wait ten minutes.",
        "Mr. Smith, Ph.D., lives at 5 Elm St., NY.",
        "--------\nHeading\n--------",
    ],
)
def plain_text_is_not_degenerate(text: str) -> None:
    assert not is_degenerate(text)


def each_rule_sees_its_own_fault() -> None:
    assert is_empty("?!")
    assert is_repeating("so so so so")
    assert is_gibberish("AAAAAAAAH")
