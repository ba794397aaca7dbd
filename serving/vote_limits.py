"""Limits on votes: of one key, of one rater, and of one feedback token, in votes a minute.

They keep a flood of votes from one place away, and make a rater who is many no cheaper than many raters; what a rater's
votes weigh is capped elsewhere (feedback.preferences). A key of scope `evaluate` is trusted to name its raters, and
imports much at once, so its raters are not limited. Each gateway replica grants its share.
Non-guarantee: state lives in memory; of more than _ACCOUNTS at once the one that was idle longest begins anew.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator

from feedback.events import AnyVote
from serving.errors import RateLimited
from serving.feedback_tokens import Grant
from serving.limits import Bucket

_ACCOUNTS = 20_000


class VoteLimits:
    """The accounts of one gateway replica; 0 is no limit. Use from one event loop. clock: monotonic seconds."""

    def __init__(
        self,
        key_votes_per_minute: int,
        rater_votes_per_minute: int,
        replicas: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._of_key = key_votes_per_minute / replicas
        self._of_rater = rater_votes_per_minute / replicas
        self._clock = clock
        self._buckets: OrderedDict[tuple[str, ...], Bucket] = OrderedDict()

    def admit(self, vote: AnyVote, grant: Grant) -> None:
        """Count a vote. Raises RateLimited with what is exhausted and when to come back; then nothing is counted."""
        now = self._clock()
        buckets = []
        for who, account, limit in self._accounts(vote, grant):
            bucket = self._bucket(account, limit, now)
            if bucket.level < 1:
                wait_s = max(1, math.ceil(bucket.wait_s(1)))
                raise RateLimited(f"{who} may send {math.floor(limit)} votes a minute.", retry_after_s=wait_s)
            buckets.append(bucket)
        for bucket in buckets:
            bucket.level -= 1

    def _accounts(self, vote: AnyVote, grant: Grant) -> Iterator[tuple[str, tuple[str, ...], float]]:
        key = grant.key
        if self._of_key:
            yield "This API key", (key.key_id,), self._of_key
        if self._of_rater and grant.target is not None:  # in a browser: who holds it can call itself anything
            yield "This feedback token", (key.key_id, "target", grant.target), self._of_rater
        if self._of_rater and "evaluate" not in key.scopes:
            yield "This rater", (key.key_id, "rater", vote.rater), self._of_rater

    def _bucket(self, account: tuple[str, ...], limit: float, now: float) -> Bucket:
        bucket = self._buckets.get(account)
        if bucket is None:
            if len(self._buckets) >= _ACCOUNTS:
                self._buckets.popitem(last=False)
            bucket = self._buckets[account] = Bucket.full(max(1.0, limit), now)
        self._buckets.move_to_end(account)
        bucket.refill(now)
        return bucket
