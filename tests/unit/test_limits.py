"""Laws of a key's limits, on a clock that the test moves."""

from dataclasses import replace

import pytest

from serving.errors import RateLimited
from serving.keys import ApiKey, KeyLimits
from serving.limits import Limits

KEY = ApiKey("key-1", "test", frozenset({"inference"}))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def limited(**limits: int) -> ApiKey:
    return replace(KEY, limits=KeyLimits(**limits))


def a_key_without_limits_is_never_refused_and_gets_no_headers() -> None:
    limits = Limits()
    assert [limits.admit(KEY).headers for _ in range(1000)] == [{}] * 1000


def requests_over_the_limit_are_refused_until_the_bucket_refills() -> None:
    clock = Clock()
    limits, key = Limits(clock=clock), limited(requests_per_minute=6)
    headers = [limits.admit(key).headers for _ in range(6)]
    assert [int(sent["x-ratelimit-remaining-requests"]) for sent in headers] == [5, 4, 3, 2, 1, 0]
    assert {sent["x-ratelimit-limit-requests"] for sent in headers} == {"6"}
    with pytest.raises(RateLimited) as refused:
        limits.admit(key)
    assert refused.value.status == 429
    assert refused.value.retry_after_s == 10
    assert refused.value.headers["x-ratelimit-remaining-requests"] == "0"
    clock.now += 9.9
    with pytest.raises(RateLimited):
        limits.admit(key)
    clock.now += 0.2
    limits.admit(key)


def tokens_are_charged_when_the_answer_is_known_and_debt_is_waited_for() -> None:
    clock = Clock()
    limits, key = Limits(clock=clock), limited(tokens_per_minute=60)
    admission = limits.admit(key)
    assert admission.headers["x-ratelimit-remaining-tokens"] == "60"
    admission.end(tokens=90)
    admission.end(tokens=90)
    with pytest.raises(RateLimited) as refused:
        limits.admit(key)
    assert refused.value.retry_after_s == 31
    clock.now += 31
    limits.admit(key)


def requests_under_way_are_bounded_and_given_back() -> None:
    limits, key = Limits(), limited(concurrency=2)
    first, _ = limits.admit(key), limits.admit(key)
    with pytest.raises(RateLimited, match="under way"):
        limits.admit(key)
    first.end()
    limits.admit(key)


def a_refused_request_costs_nothing() -> None:
    clock = Clock()
    limits, key = Limits(clock=clock), limited(requests_per_minute=60, concurrency=1)
    running = limits.admit(key)
    for _ in range(100):
        with pytest.raises(RateLimited, match="under way"):
            limits.admit(key)
    running.end()
    assert limits.admit(key).headers["x-ratelimit-remaining-requests"] == "58"


def each_gateway_grants_its_share() -> None:
    limits, key = Limits(replicas=3), limited(requests_per_minute=9)
    for _ in range(3):
        limits.admit(key)
    with pytest.raises(RateLimited):
        limits.admit(key)


def a_changed_limit_holds_at_once_and_forgets_nothing_under_way() -> None:
    limits = Limits()
    running = [limits.admit(limited(concurrency=5)) for _ in range(3)]
    with pytest.raises(RateLimited):
        limits.admit(limited(concurrency=3))
    running[0].end()
    limits.admit(limited(concurrency=3))
