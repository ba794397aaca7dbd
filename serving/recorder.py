"""Hands interactions to the outbox, and counts what could not be kept.

Guarantees: `record` returns after the events are on the disk, or raises; `record_later` never blocks and
never raises, and counts every loss in `dropped`, which is told at shutdown.
"""

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from feedback.errors import OutboxError
from feedback.events import AnyEvent, Interaction
from serving.errors import Overloaded
from telemetry.metrics import GatewayMetrics

log = logging.getLogger(__name__)


class OutboxLike(Protocol):
    """The part of feedback.outbox.Outbox that serving uses."""

    def append(self, events: Sequence[AnyEvent]) -> "Future[list]":  # type: ignore[type-arg]
        """Accept events, all or none; the future resolves once they are on the disk."""


class Recorder:
    """Records interactions in an outbox, and counts them in the metrics."""

    def __init__(self, outbox: OutboxLike, metrics: GatewayMetrics) -> None:
        self.outbox = outbox
        self.metrics = metrics
        self.recorded = 0
        self.dropped = 0

    async def record(self, interactions: Sequence[Interaction]) -> None:
        """Write them and wait for the disk. Raises Overloaded when the outbox can't take them."""
        self._measure(interactions)
        try:
            await asyncio.wrap_future(self.outbox.append(interactions))
        except OutboxError as error:
            self._count_drop(len(interactions), error)
            raise Overloaded(f"The answer could not be recorded: {error}", retry_after_s=2) from error
        self.recorded += len(interactions)

    def record_later(self, interactions: Sequence[Interaction]) -> None:
        """Write them without waiting: for streams, and for answers that nobody waits for any more."""
        self._measure(interactions)
        try:
            future = self.outbox.append(interactions)
        except OutboxError as error:
            self._count_drop(len(interactions), error)
            return
        future.add_done_callback(lambda done: self._settle(done, len(interactions)))

    def _settle(self, done: "Future[list]", count: int) -> None:  # type: ignore[type-arg]
        error = done.exception()
        if error is None:
            self.recorded += count
        else:
            self._count_drop(count, error)

    def _measure(self, interactions: Sequence[Interaction]) -> None:
        for interaction in interactions:
            self.metrics.count_answer(
                interaction.endpoint,
                interaction.checkpoint_id,
                interaction.status,
                duration_s=interaction.duration_s,
                overhead_s=interaction.overhead_s,
                time_to_first_token_s=interaction.time_to_first_token_s,
                prompt_tokens=interaction.prompt_tokens,
                completion_tokens=interaction.completion_tokens,
            )

    def _count_drop(self, count: int, error: BaseException) -> None:
        self.dropped += count
        self.metrics.count_dropped(count)
        log.error("%d interaction(s) could not be recorded: %s", count, error)
