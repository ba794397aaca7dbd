"""Limits of one API key: requests a minute, tokens a minute, requests under way.

Two token buckets (capacity: one minute's worth, refilled evenly) and a counter for each key. A request is
let in while both buckets hold something and the counter is below its bound; the tokens that an answer used
are taken when it ends, so a bucket can go into debt and the key waits until that is paid back.
Guarantees: a refused request costs nothing; what is let in is given back or charged exactly once.
Each gateway replica grants its share (limit / replicas), so the limits hold for all of them together when
the load balancer spreads requests evenly. State lives in memory: a restarted gateway begins with full buckets.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from serving.errors import RateLimited
from serving.keys import ApiKey, KeyLimits

_MINUTE_S = 60.0


@dataclass
class Bucket:
    """Refills to `limit` within a minute. Time is monotonic seconds."""

    limit: float
    level: float
    filled_at: float

    @classmethod
    def full(cls, limit: float, now: float) -> "Bucket":
        return cls(limit, limit, now)

    def refill(self, now: float) -> None:
        """Add what the time since the last call brings."""
        self.level = min(self.limit, self.level + (now - self.filled_at) * self.limit / _MINUTE_S)
        self.filled_at = now

    def wait_s(self, needed: float) -> float:
        """Seconds until the level is at least `needed`."""
        return max(0.0, (needed - self.level) * _MINUTE_S / self.limit)


@dataclass
class _Account:
    limits: KeyLimits = field(default_factory=KeyLimits)
    requests: Bucket | None = None
    tokens: Bucket | None = None
    under_way: int = 0


@dataclass
class Admission:
    """One request that was let in. `headers` are OpenAI's x-ratelimit-*; call `end` once, whatever happened."""

    headers: dict[str, str]
    _account: _Account
    _ended: bool = False

    def end(self, tokens: int = 0) -> None:
        """The request is over and used `tokens`; harmless when called again."""
        if self._ended:
            return
        self._ended = True
        self._account.under_way -= 1
        if self._account.tokens is not None:
            self._account.tokens.level -= tokens


class Limits:
    """The accounts of one gateway replica. Use from one event loop. clock: monotonic seconds."""

    def __init__(self, replicas: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self._share = 1 / replicas
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    def admit(self, key: ApiKey) -> Admission:
        """Let a request of `key` in. Raises RateLimited with what is exhausted and when to come back."""
        account = self._account(key)
        now = self._clock()
        for bucket in (account.requests, account.tokens):
            if bucket is not None:
                bucket.refill(now)
        headers = _headers(account)
        bound = key.limits.concurrency
        if bound is not None and account.under_way >= max(1, math.floor(bound * self._share)):
            raise _refusal(f"{account.under_way} requests of this API key are under way, its limit.", 1.0, headers)
        if account.tokens is not None and account.tokens.level < 1:
            limit = key.limits.tokens_per_minute
            raise _refusal(f"This API key may use {limit} tokens a minute.", account.tokens.wait_s(1), headers)
        if account.requests is not None:
            if account.requests.level < 1:
                limit = key.limits.requests_per_minute
                raise _refusal(f"This API key may send {limit} requests a minute.", account.requests.wait_s(1), headers)
            account.requests.level -= 1
        account.under_way += 1
        return Admission(_headers(account), account)

    def _account(self, key: ApiKey) -> _Account:
        account = self._accounts.setdefault(key.key_id, _Account())
        if account.limits != key.limits:  # a new key, or the operator changed its limits
            now = self._clock()
            account.limits = key.limits
            account.requests = self._bucket(key.limits.requests_per_minute, now)
            account.tokens = self._bucket(key.limits.tokens_per_minute, now)
        return account

    def _bucket(self, limit: int | None, now: float) -> Bucket | None:
        return None if limit is None else Bucket.full(max(1.0, limit * self._share), now)


def _refusal(message: str, wait_s: float, headers: dict[str, str]) -> RateLimited:
    return RateLimited(message, retry_after_s=max(1, math.ceil(wait_s)), headers=headers)


def _headers(account: _Account) -> dict[str, str]:
    found = {}
    for name, bucket in (("requests", account.requests), ("tokens", account.tokens)):
        if bucket is not None:
            found[f"x-ratelimit-limit-{name}"] = str(math.floor(bucket.limit))
            found[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(bucket.level)))
            found[f"x-ratelimit-reset-{name}"] = f"{bucket.wait_s(bucket.limit):.3f}s"
    return found
