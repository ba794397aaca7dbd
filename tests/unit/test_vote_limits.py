"""Laws of the limits on votes, on a clock that stands still, and of what it takes to turn a comparison."""

import random

import pytest

from feedback.integrity import raters_to_flip
from serving.errors import RateLimited
from serving.feedback_tokens import Grant
from serving.keys import ApiKey
from serving.vote_limits import VoteLimits
from tests.helpers.events_built import build_thumb

KEY = ApiKey("key-1", "app", frozenset({"feedback"}))
TRUSTED = ApiKey("key-2", "import", frozenset({"feedback", "evaluate"}))


def count_admitted(limits: VoteLimits, grant: Grant, raters: list[str]) -> int:
    admitted = 0
    for rater in raters:
        try:
            limits.admit(build_thumb(rater=rater), grant)
        except RateLimited:
            continue
        admitted += 1
    return admitted


def each_account_has_its_own_limit_and_a_trusted_key_only_its_own() -> None:
    limits = VoteLimits(50, 10, clock=lambda: 0.0)
    assert count_admitted(limits, Grant(KEY), ["anna"] * 30) == 10
    assert count_admitted(limits, Grant(KEY), ["ben"] * 30) == 10
    assert count_admitted(limits, Grant(TRUSTED), ["anna"] * 90) == 50
    assert count_admitted(limits, Grant(KEY), [f"rater-{number}" for number in range(90)]) == 30


def a_token_lets_few_votes_through_whatever_its_holder_is_called() -> None:
    limits = VoteLimits(0, 10, clock=lambda: 0.0)
    names = [f"rater-{number}" for number in range(90)]
    assert count_admitted(limits, Grant(KEY, "chatcmpl-1"), names) == 10
    assert count_admitted(limits, Grant(KEY, "chatcmpl-2"), names) == 10
    assert count_admitted(limits, Grant(KEY), names) == 90


def a_limit_refills_evenly_and_replicas_share_it() -> None:
    now = 0.0
    limits = VoteLimits(0, 120, replicas=2, clock=lambda: now)
    assert count_admitted(limits, Grant(KEY), ["anna"] * 200) == 60
    now = 10.0
    assert count_admitted(limits, Grant(KEY), ["anna"] * 200) == 10


def no_number_of_raters_makes_the_accounts_grow_without_bound() -> None:
    limits = VoteLimits(0, 10, clock=lambda: 0.0)
    assert count_admitted(limits, Grant(KEY), [f"rater-{number}" for number in range(25_000)]) == 25_000
    assert len(limits._buckets) == 20_000


@pytest.mark.parametrize("seed", range(20))
def the_named_number_of_raters_can_turn_the_result_and_no_smaller_one(seed: int) -> None:
    draw = random.Random(seed)
    net = [draw.randint(-3, 5) for _ in range(draw.randint(1, 12))]
    margin = sum(net)
    if margin < 0:
        net, margin = [-votes for votes in net], -margin
    needed = raters_to_flip(net, margin)
    turning = sorted((votes for votes in net if votes > 0), reverse=True)
    if needed <= len(turning):
        assert margin - 2 * sum(turning[:needed]) < 0
    assert margin - 2 * sum(turning[: needed - 1]) >= 0
