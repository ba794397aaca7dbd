"""An in-memory twin of the log as the relay sees it: topics with identities, and a producer that can fail."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kafka.errors import KafkaError, KafkaTimeoutError, MessageSizeTooLargeError

from feedback.settings import FeedbackSettings
from feedback.topics import EVENT_TOPICS, TopicLog


@dataclass
class MemoryLog:
    """largest: bytes of the largest value it takes. lose: how many of the next records get no acknowledgement.

    hung: from now on no send has an outcome; waited_s: how long was waited for one.
    `records`: (topic, value) in order. `change_after`: another log after that many more sends.
    """

    largest: int = 1_000_000
    lose: int = 0
    change_after: int | None = None
    hung: bool = False
    waited_s: float = 0.0
    identity: int = 1
    producers: int = 0
    records: list[tuple[str, bytes]] = field(default_factory=list)

    def connect_logs(self, settings: FeedbackSettings) -> "MemoryLogs":
        return MemoryLogs(self)

    def connect_producer(self, settings: FeedbackSettings) -> "MemoryProducer":
        self.producers += 1
        return MemoryProducer(self)


@dataclass
class MemoryLogs:
    """The twin of feedback.topics.Logs."""

    log: MemoryLog

    def ensure(self, topics: Sequence[str] = EVENT_TOPICS) -> None:
        """They are there."""

    def current(self, topics: Sequence[str] = EVENT_TOPICS) -> dict[str, TopicLog]:
        return {topic: TopicLog(topic, f"log-{self.log.identity}", (0,)) for topic in topics}

    def close(self) -> None:
        """Nothing is held."""


@dataclass
class Place:
    """Where a record went."""

    partition: int
    offset: int


@dataclass
class Outcome:
    """The twin of a producer's future."""

    value: Place | KafkaError

    def get(self, timeout: float) -> Place:
        if isinstance(self.value, KafkaError):
            raise self.value
        return self.value


@dataclass
class NoOutcome:
    """A producer's future that stays open."""

    log: MemoryLog

    def get(self, timeout: float) -> Place:
        time.sleep(timeout)
        self.log.waited_s += timeout
        raise KafkaTimeoutError


@dataclass
class MemoryProducer:
    """Like kafka-python's idempotent producer, one refusal for its size makes it useless for ever."""

    log: MemoryLog
    fatal: bool = False

    def send(self, topic: str, *, value: bytes, **_: Any) -> Outcome | NoOutcome:
        log = self.log
        if log.hung:
            return NoOutcome(log)
        if self.fatal or len(value) > log.largest:
            self.fatal = True
            return Outcome(MessageSizeTooLargeError())
        if log.lose > 0:
            log.lose -= 1
            return Outcome(KafkaTimeoutError())
        if log.change_after is not None:
            log.change_after -= 1
            if log.change_after < 0:
                log.identity, log.change_after = log.identity + 1, None
                log.records.clear()
        log.records.append((topic, value))
        return Outcome(Place(0, len(log.records) - 1))

    def close(self, timeout: float) -> None:
        """Nothing is held."""
