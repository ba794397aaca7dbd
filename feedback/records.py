"""How events travel: JSON values with CloudEvents 1.0 headers in binary mode (Kafka protocol binding, §3.2).

`to_record` and `from_record` are the only codec.
"""

import uuid
from collections.abc import Sequence
from datetime import datetime

from feedback.events import (
    CHECKPOINTS_TOPIC,
    FEEDBACK,
    FEEDBACK_TOPIC,
    INTERACTIONS_TOPIC,
    PREFERENCES_TOPIC,
    AnyEvent,
    CheckpointEvent,
    Interaction,
    Preference,
    Told,
    target_of,
)

SOURCE = "flywheel"
ERASED_TYPE = "flywheel.erased.v1"

Headers = list[tuple[str, bytes]]
Record = tuple[str, bytes, bytes, Headers]


def topic_of(event: AnyEvent | Told) -> str:
    """The topic that carries the event."""
    if isinstance(event, Preference):
        return PREFERENCES_TOPIC
    if isinstance(event, CheckpointEvent):
        return CHECKPOINTS_TOPIC
    return INTERACTIONS_TOPIC if isinstance(event, Interaction) else FEEDBACK_TOPIC


def type_of(event: AnyEvent | Told) -> str:
    """The CloudEvents type, such as `flywheel.feedback.thumb.v1`."""
    if isinstance(event, Preference):
        return "flywheel.preference.v1"
    if isinstance(event, CheckpointEvent):
        return f"flywheel.checkpoint.{event.kind}.v1"
    return "flywheel.interaction.v1" if isinstance(event, Interaction) else f"flywheel.feedback.{event.kind}.v1"


def to_record(event: AnyEvent | Told) -> Record:
    """(topic, key, value, headers) of the event, ready to publish.

    The key is what the event is about, so that what follows on it comes after it; a preference's is its id.
    """
    headers = [*cloud_headers(event.event_id, type_of(event), event.time), ("content-type", b"application/json")]
    return topic_of(event), key_of(event).encode(), event.model_dump_json().encode(), headers


def key_of(event: AnyEvent | Told) -> str:
    """The record's key."""
    if isinstance(event, Preference):
        return event.preference_id
    return event.checkpoint_id if isinstance(event, CheckpointEvent) else target_of(event)


def cloud_headers(event_id: str, event_type: str, time: datetime) -> Headers:
    """The CloudEvents headers that every record has."""
    headers = {
        "ce_specversion": "1.0",
        "ce_id": event_id,
        "ce_source": SOURCE,
        "ce_type": event_type,
        "ce_time": time.isoformat(),
    }
    return [(name, value.encode()) for name, value in headers.items()]


def tombstone_headers(event_id: str, time: datetime) -> Headers:
    """Headers of the record without a value that says, on the event's own topic and key: `ce_subject` was erased."""
    tombstone_id = str(uuid.uuid5(uuid.UUID(event_id), ERASED_TYPE))
    return [*cloud_headers(tombstone_id, ERASED_TYPE, time), ("ce_subject", event_id.encode())]


def is_tombstone(value: bytes | None, headers: Sequence[tuple[str, bytes]]) -> bool:
    """Whether a record says that an event was erased."""
    return value is None and ("ce_type", ERASED_TYPE.encode()) in headers


def from_record(topic: str, value: bytes) -> AnyEvent:
    """Read a record's value back from a topic that the ingest reads.

    Raises pydantic.ValidationError (a ValueError) for anything that does not fit.
    """
    if topic == INTERACTIONS_TOPIC:
        return Interaction.model_validate_json(value)
    if topic == FEEDBACK_TOPIC:
        return FEEDBACK.validate_json(value)
    raise ValueError(f"no event travels on topic {topic!r}")
