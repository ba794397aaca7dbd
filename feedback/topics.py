"""Topics: what the log is made of, and which log it is.

A topic's *log identity* is the topic id that the broker gave it (KIP-516). It is never used twice: a broker
that restarted empty, or a topic that was deleted and made again, is another log, whose offsets mean
something else. So: whoever reads or writes asks for the identity afterwards; if it is still the one from
before, everything in between was that log.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from kafka import KafkaAdminClient, KafkaProducer
from kafka.errors import KafkaError
from kafka.net.compat import KafkaNetClient

from feedback.errors import LogChanged, LogUnreachable
from feedback.events import FEEDBACK_TOPIC, INTERACTIONS_TOPIC
from feedback.settings import FeedbackSettings

EVENT_TOPICS = (INTERACTIONS_TOPIC, FEEDBACK_TOPIC)
DEAD_LETTER_SUFFIX = ".dlq"


@dataclass(frozen=True)
class TopicLog:
    """A topic as it is now: the identity of its log and its partitions' numbers."""

    topic: str
    log_id: str
    partitions: tuple[int, ...]


class Logs:
    """Asks the broker about topics. One connection, kept; not thread-safe.

    Every method raises LogUnreachable when there is no answer within the request time-out.
    """

    def __init__(self, settings: FeedbackSettings) -> None:
        self._settings = settings
        self._admin = open_client(KafkaAdminClient, settings)

    def ensure(self, topics: Sequence[str] = EVENT_TOPICS) -> None:
        """Create `topics` and their dead-letter topics where they are missing."""
        wanted = [name for topic in topics for name in (topic, topic + DEAD_LETTER_SUFFIX)]
        with reaching_the_log():
            found = {topic["name"] for topic in self._admin.describe_topics(wanted) if topic["error_code"] == 0}
            missing = [name for name in wanted if name not in found]
            if not missing:
                return
            options = {
                "num_partitions": self._settings.partitions,
                "replication_factor": self._settings.replication_factor,
            }
            # Somebody else may create them at the same moment: an error is one only if they stay away.
            self._admin.create_topics(
                dict.fromkeys(missing, options), timeout_ms=_ms(self._settings.request_timeout_s), raise_errors=False
            )
            self._admin.wait_for_topics(missing, timeout_ms=_ms(self._settings.request_timeout_s))

    def current(self, topics: Sequence[str] = EVENT_TOPICS) -> dict[str, TopicLog]:
        """The logs of `topics`, asked now. Raises LogChanged when one does not exist (any more)."""
        with reaching_the_log():
            answers = self._admin.describe_topics(list(topics))
        return {answer["name"]: _topic_log(answer) for answer in answers}

    def close(self) -> None:
        with suppress(KafkaError, OSError):
            self._admin.close()


def ensure_topics(settings: FeedbackSettings) -> None:
    """Create the event topics and their dead-letter topics where they are missing.

    Raises LogUnreachable when the broker does not answer in time.
    """
    logs = Logs(settings)
    try:
        logs.ensure()
    finally:
        logs.close()


def make_producer(settings: FeedbackSettings) -> Any:
    """A KafkaProducer that is idempotent, waits for all replicas, and fails in bounded time.

    Its errors are per record: read each future. Any error can leave it useless: make a new one.
    """
    return open_client(
        KafkaProducer,
        settings,
        enable_idempotence=True,
        acks="all",
        max_block_ms=_ms(settings.request_timeout_s),
        delivery_timeout_ms=_ms(settings.delivery_timeout_s),
        # Room for the protocol's own bytes; our limit on records is checked before.
        max_request_size=settings.max_record_bytes + 65_536,
        allow_auto_create_topics=False,
    )


def close_producer(producer: Any) -> None:
    """Close without waiting for records: theirs futures were read, or they are sent again anyway."""
    with suppress(KafkaError, OSError):
        producer.close(timeout=0)


def open_client(kind: Callable[..., Any], settings: FeedbackSettings, **options: Any) -> Any:
    """A KafkaAdminClient, KafkaProducer or KafkaConsumer. Raises LogUnreachable.

    When its constructor fails, kafka-python 3.0 leaves the thread behind that it started: it is ended here.
    """
    inner: list[Any] = []

    def remember(**config: Any) -> Any:
        inner.append(KafkaNetClient(**config))
        return inner[-1]

    try:
        with reaching_the_log():
            return kind(**client_options(settings), kafka_client=remember, **options)
    except LogUnreachable:
        for client in inner:
            client.close()
        raise


def client_options(settings: FeedbackSettings) -> dict[str, Any]:
    """What every Kafka client of ours is made with."""
    return {
        "bootstrap_servers": settings.bootstrap_servers.split(","),
        "client_id": "flywheel",
        "request_timeout_ms": _ms(settings.request_timeout_s),
        "bootstrap_timeout_ms": _ms(settings.request_timeout_s),
        "reconnect_backoff_max_ms": 1_000,
        "metadata_max_age_ms": 30_000,
    }


@contextmanager
def reaching_the_log() -> Iterator[None]:
    """The one place where Kafka's errors become ours."""
    try:
        yield
    except (KafkaError, OSError) as error:
        raise LogUnreachable(f"the Kafka broker did not do as asked: {error!r}") from error


def _topic_log(answer: dict[str, Any]) -> TopicLog:
    if answer["error_code"] != 0 or not answer["partitions"]:
        raise LogChanged(f"topic {answer['name']} does not exist (error code {answer['error_code']})")
    if answer["topic_id"] is None:
        raise LogUnreachable("the broker gives topics no id: Apache Kafka 2.8 or newer is needed")
    return TopicLog(
        topic=answer["name"],
        log_id=str(answer["topic_id"]),
        partitions=tuple(sorted(partition["partition_index"] for partition in answer["partitions"])),
    )


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
