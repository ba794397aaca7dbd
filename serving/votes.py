"""Feedback over HTTP: votes are on the disk before they are acknowledged.

Guarantees: 202 means that the event is fsynced in the outbox; the same Idempotency-Key (or event_id) again
answers `duplicate` and changes nothing, and with other content 409. A vote is never refused for coming
before its interaction. Does not look up what the vote is about.
In a batch every vote has an answer of its own, in order; what is wrong with one harms no other.
"""

import asyncio
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from pydantic import ValidationError

from feedback.errors import EventNotEncodable, OutboxConflict, OutboxError
from feedback.events import FEEDBACK, AnyVote, target_of
from serving.errors import ApiError, Conflict, InvalidRequest, MissingScope, Overloaded
from serving.feedback_tokens import Grant
from serving.recorder import OutboxLike
from serving.requests import as_object, invalid_field, parse_json, parse_object

MOST_IN_A_BATCH = 1000
_CLOCKS_DIFFER = timedelta(minutes=5)
_NAMESPACE = uuid.UUID("6f0d3a52-5a0f-4d57-9c39-0d4f6c3b1f0e")


def parse_vote(raw: bytes, grant: Grant, idempotency_key: str | None) -> AnyVote:
    """The event in the body. Raises InvalidRequest that names the field, MissingScope."""
    return _vote(parse_object(raw), grant, _checked(idempotency_key))


def parse_batch(raw: bytes, grant: Grant, idempotency_key: str | None) -> list[AnyVote | ApiError]:
    """The events in the body, a JSON list or an object on each line, or what is wrong with each.

    Raises InvalidRequest when the body is neither, or holds more than MOST_IN_A_BATCH.
    """
    if raw.lstrip().startswith(b"["):
        items: list[Any] = parse_json(raw)
    else:
        items = [line for line in raw.splitlines() if line.strip()]
    if not 1 <= len(items) <= MOST_IN_A_BATCH:
        raise InvalidRequest(f"Send 1 to {MOST_IN_A_BATCH} votes: a JSON list, or one JSON object on each line.")
    _checked(idempotency_key)
    votes: list[AnyVote | ApiError] = []
    for number, item in enumerate(items):
        name = None if idempotency_key is None else f"{idempotency_key}\n{number}"
        try:
            value = parse_object(item) if isinstance(item, bytes) else as_object(item)
            votes.append(_vote(value, grant, name))
        except ApiError as error:
            votes.append(error)
    return votes


def _checked(idempotency_key: str | None) -> str | None:
    if idempotency_key is not None and not 1 <= len(idempotency_key) <= 256:
        raise InvalidRequest("The header `Idempotency-Key` must have 1 to 256 characters.")
    return idempotency_key


def _vote(value: dict[str, Any], grant: Grant, idempotency_key: str | None) -> AnyVote:
    if "api_key_id" in value:
        raise InvalidRequest("Unknown field: `api_key_id`.", param="api_key_id", code="unknown_parameter")
    value = {**value, "api_key_id": grant.key.key_id}
    if idempotency_key is not None:
        if "event_id" in value:
            raise InvalidRequest("Send `event_id` or the header `Idempotency-Key`, not both.", param="event_id")
        value["event_id"] = str(uuid.uuid5(_NAMESPACE, f"{grant.key.key_id}\n{idempotency_key}"))
    try:
        vote = FEEDBACK.validate_python(value)
    except ValidationError as error:
        raise invalid_field(error, skip=1) from error
    if vote.time > datetime.now(UTC) + _CLOCKS_DIFFER:
        raise InvalidRequest("Invalid `time`: it lies in the future, so no later vote could revise it.", param="time")
    if grant.target not in (None, target_of(vote)):
        raise MissingScope(f"This feedback token is for `{grant.target}` only.", code="other_target")
    return vote


async def accept_vote(vote: AnyVote, outbox: OutboxLike) -> dict[str, Any]:
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


async def accept_batch(votes: Sequence[AnyVote | ApiError], outbox: OutboxLike) -> dict[str, Any]:
    """Write those that are votes, and return the answer's body: what became of each, and how many of each kind."""

    async def one(vote: AnyVote | ApiError) -> dict[str, Any]:
        try:
            if isinstance(vote, ApiError):
                raise vote
            return await accept_vote(vote, outbox)
        except ApiError as error:
            return {"status": "refused", **error.body()}

    data = await asyncio.gather(*map(one, votes))
    counts = {name: sum(item["status"] == name for item in data) for name in ("accepted", "duplicate", "refused")}
    return {"object": "list", "data": data, **counts}
