"""Errors of the feedback room.

FeedbackError
├── OutboxError
│   ├── OutboxConflict      the event id is there with other content (no retry: a new id is needed)
│   ├── OutboxFull          more waits than the bound allows (a retry can help, later)
│   ├── OutboxUnavailable   the file could not be written, or the outbox is closed (a retry can help)
│   └── EventNotEncodable   the event can't be written as JSON text, say a lone surrogate (no retry)
├── LogError
│   ├── LogUnreachable      the broker did not answer in time (a retry can help)
│   └── LogChanged          the topic is no longer the log it was a moment ago (a retry can help)
├── IdTaken                 an event of this id with other content is stored (no retry)
├── StaleOwner              another ingest moved the offsets; this transaction was rolled back (retry)
└── SnapshotError
    ├── NothingToLearn      no preference can be derived yet (a retry can help, later)
    └── SnapshotCorrupt     a snapshot's rows do not have the digest in its manifest (no retry)
"""


class FeedbackError(Exception):
    """Base of the room."""


class OutboxError(FeedbackError):
    """Something about accepting an event."""


class OutboxConflict(OutboxError):
    """An event with this id was accepted before, with other content. `event_id` tells which."""

    def __init__(self, event_id: str) -> None:
        super().__init__(f"event {event_id} was accepted before with other content; use a new event id")
        self.event_id = event_id


class OutboxFull(OutboxError):
    """More events wait than the bound allows."""


class OutboxUnavailable(OutboxError):
    """The outbox file could not be written, or the outbox is closed; nothing was acknowledged."""


class EventNotEncodable(OutboxError, ValueError):
    """The event holds text that JSON in UTF-8 can't carry."""


class LogError(FeedbackError):
    """Something about the Kafka log."""


class LogUnreachable(LogError):
    """The broker did not answer in time."""


class LogChanged(LogError):
    """The topic's id changed: what was read or written may belong to a log that is gone."""


class StaleOwner(FeedbackError):
    """The stored offset is not the one this ingest went on from."""


class IdTaken(FeedbackError):
    """Another event with this id is stored already."""


class SnapshotError(FeedbackError):
    """Something about a snapshot."""


class NothingToLearn(SnapshotError):
    """The store holds no derived preference."""


class SnapshotCorrupt(SnapshotError):
    """The rows read back do not match the manifest."""
