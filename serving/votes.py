"""POST /v1/feedback: one vote, on the disk before it is acknowledged.

Guarantees: 202 means that the event is fsynced in the outbox; the same Idempotency-Key (or event_id) again
answers `duplicate` and changes nothing, and with other content 409. A vote is never refused for coming
before its interaction. Does not look up what the vote is about.
"""

import asyncio
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

from pydantic import ValidationError

from feedback.errors import EventNotEncodable, OutboxConflict, OutboxError
from feedback.events import FEEDBACK, Preference, Thumb
from serving.errors import Conflict, InvalidRequest, Overloaded
from serving.keys import ApiKey
from serving.recorder import OutboxLike
from serving.requests import invalid_field, parse_object

_CLOCKS_DIFFER = timedelta(minutes=5)
_NAMESPACE = uuid.UUID("6f0d3a52-5a0f-4d57-9c39-0d4f6c3b1f0e")


def parse_vote(raw: bytes, key: ApiKey, idempotency_key: str | None) -> Thumb | Preference:
    """The event in the body. Raises InvalidRequest that names the field."""
    value = parse_object(raw)
    if "api_key_id" in value:
        raise InvalidRequest("Unknown field: `api_key_id`.", param="api_key_id", code="unknown_parameter")
    value["api_key_id"] = key.key_id
    if idempotency_key is not None:
        if not 1 <= len(idempotency_key) <= 256:
            raise InvalidRequest("The header `Idempotency-Key` must have 1 to 256 characters.")
        if "event_id" in value:
            raise InvalidRequest("Send `event_id` or the header `Idempotency-Key`, not both.", param="event_id")
        value["event_id"] = str(uuid.uuid5(_NAMESPACE, f"{key.key_id}\n{idempotency_key}"))
    try:
        vote = FEEDBACK.validate_python(value)
    except ValidationError as error:
        raise invalid_field(error, skip=1) from error
    if vote.time > datetime.now(UTC) + _CLOCKS_DIFFER:
        raise InvalidRequest("Invalid `time`: it lies in the future, so no later vote could revise it.", param="time")
    return vote


async def accept_vote(vote: Thumb | Preference, outbox: OutboxLike) -> dict[str, Any]:
    """Write the vote and return the answer's body. Raises Conflict, InvalidRequest, Overloaded."""
    try:
        [status] = await asyncio.wrap_future(outbox.append([vote]))
    except OutboxConflict as error:
        raise Conflict("This idempotency key or event_id was used for another vote.") from error
    except EventNotEncodable as error:
        raise InvalidRequest(f"The vote can't be stored: {error}") from error
    except OutboxError as error:
        raise Overloaded(f"The vote could not be stored now: {error}", retry_after_s=2) from error
    return {"feedback_id": vote.event_id, "status": status}
