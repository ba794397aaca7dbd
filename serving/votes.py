"""Feedback over HTTP: votes are on the disk before they are acknowledged.

Guarantees: 202 means that the event is fsynced in the outbox; the same Idempotency-Key (or event_id) again
answers `duplicate` and changes nothing, and with other content 409. A vote is never refused for coming
before its interaction. Does not look up what the vote is about.
Votes beyond the limits of a key or a rater are refused (serving.vote_limits).
In a batch every vote has an answer of its own, in order; what is wrong with one harms no other.
"""

import asyncio
import uuid
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from pydantic import ValidationError

from feedback.errors import EventNotEncodable, OutboxConflict, OutboxError
from feedback.events import FEEDBACK, AnyVote, is_reserved_id, target_of
from serving.errors import ApiError, Conflict, InvalidRequest, MissingScope, Overloaded, RateLimited
from serving.feedback_tokens import Grant
from serving.recorder import OutboxLike
from serving.requests import as_object, invalid_field, parse_json, parse_object
from serving.vote_limits import VoteLimits

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
    if idempotency_key is not None:
        if "event_id" in value:
            raise InvalidRequest("Send `event_id` or the header `Idempotency-Key`, not both.", param="event_id")
        value = dict(value)
        whose = "\n".join(filter(None, (grant.key.key_id, grant.target)))  # browsers share a key, and no names
        value["event_id"] = str(uuid.uuid5(_NAMESPACE, f"{whose}\n{idempotency_key}"))
    return vote_of(value, grant)


def vote_of(value: dict[str, Any], grant: Grant) -> AnyVote:
    """The event of these fields, given in the name of the grant's key. Raises InvalidRequest, MissingScope."""
    try:
        vote = FEEDBACK.validate_python({**value, "api_key_id": grant.key.key_id})
    except ValidationError as error:
        raise invalid_field(error, skip=1) from error
    if is_reserved_id(vote.event_id):
        raise InvalidRequest("Invalid `event_id`: UUIDs of version 8 are kept for answers.", param="event_id")
    if vote.time > datetime.now(UTC) + _CLOCKS_DIFFER:
        raise InvalidRequest("Invalid `time`: it lies in the future, so no later vote could revise it.", param="time")
    if grant.target not in (None, target_of(vote)):
        raise MissingScope(f"This feedback token is for `{grant.target}` only.", code="other_target")
    return vote


class VoteDesk:
    """Takes votes in: within the limits, onto the disk, and then, where somebody listens, told on."""

    def __init__(self, outbox: OutboxLike, limits: VoteLimits, tell: Callable[[AnyVote], None] | None = None) -> None:
        self._outbox = outbox
        self._limits = limits
        self._tell = tell

    async def accept(self, vote: AnyVote, grant: Grant) -> dict[str, Any]:
        """Write the vote and return the answer's body. Raises RateLimited, Conflict, InvalidRequest, Overloaded."""
        self._limits.admit(vote, grant)
        try:
            [status] = await asyncio.wrap_future(self._outbox.append([vote]))
        except OutboxConflict as error:
            raise Conflict("This idempotency key or event_id was used for another vote.") from error
        except EventNotEncodable as error:
            raise InvalidRequest(f"The vote can't be stored: {error}") from error
        except OutboxError as error:
            raise Overloaded(f"The vote could not be stored now: {error}", retry_after_s=2) from error
        if self._tell is not None and status == "accepted":
            self._tell(vote)
        return {"feedback_id": vote.event_id, "status": status}

    async def accept_batch(self, votes: Sequence[AnyVote | ApiError], grant: Grant) -> dict[str, Any]:
        """Write those that are votes, and return the answer's body: what became of each, and how many of each kind."""

        async def one(vote: AnyVote | ApiError) -> dict[str, Any]:
            try:
                if isinstance(vote, ApiError):
                    raise vote
                return await self.accept(vote, grant)
            except ApiError as error:
                return {"status": "refused", **error.body()}

        data = await asyncio.gather(*map(one, votes))
        counts = {name: sum(item["status"] == name for item in data) for name in ("accepted", "duplicate", "refused")}
        return {"object": "list", "data": data, **counts}

    async def accept_all(self, votes: Sequence[AnyVote], grant: Grant) -> list[str]:
        """Write them; returns what is wrong with those that were refused.

        Raises RateLimited or Overloaded when a later try can help; what was written by then is a duplicate in that.
        """

        async def one(vote: AnyVote) -> ApiError | None:
            try:
                await self.accept(vote, grant)
            except ApiError as error:
                return error
            return None

        errors = [error for error in await asyncio.gather(*map(one, votes)) if error is not None]
        for error in errors:
            if isinstance(error, RateLimited | Overloaded):
                raise error
        return [error.message for error in errors]
