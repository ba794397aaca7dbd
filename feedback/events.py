"""The event contract: what travels from the API through the outbox and Kafka into the store.

A leaf: imports only the standard library and pydantic, so anybody may import it cheaply. Every event is
frozen, has a UUIDv7 `event_id` that makes a repeated delivery harmless, and refuses unknown fields.
feedback/records.py says how they travel.
Evolution is additive: a new field has a default.
"""

import hashlib
import json
import os
import re
import threading
import time as clock
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, TypeAdapter, model_validator

INTERACTIONS_TOPIC = "flywheel.interactions.v1"
FEEDBACK_TOPIC = "flywheel.feedback.v1"
PREFERENCES_TOPIC = "flywheel.preferences.v1"
CHECKPOINTS_TOPIC = "flywheel.checkpoints.v1"
NAME_BYTES = 512  # the store's index of current votes holds three names in one entry of at most 2.7 kB

RESPONSE_PREFIXES = ("chatcmpl-", "cmpl-", "resp_")
_RESPONSE_ID = re.compile(rf"(?:{'|'.join(RESPONSE_PREFIXES)})[0-9a-f]{{32}}")
_COMPARISON_ID = re.compile(r"cmp-[0-9a-f]{32}")


def uuid7() -> uuid.UUID:
    """A UUIDv7 (RFC 9562 §5.7): 48 bits of Unix milliseconds, then 74 random bits."""
    milliseconds = clock.time_ns() // 1_000_000
    random_bits = int.from_bytes(_random_bytes(10), "big")
    value = (milliseconds & (2**48 - 1)) << 80 | random_bits
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    return uuid.UUID(int=value)


class _Entropy(threading.local):
    """Random bytes of the system, many at a time: each fetch lets go of the interpreter, which comes back late."""

    store = b""
    used = 0


_entropy = _Entropy()
_ENTROPY_BYTES = 4096


def _random_bytes(count: int) -> bytes:
    if _entropy.used + count > len(_entropy.store):
        _entropy.store, _entropy.used = os.urandom(_ENTROPY_BYTES), 0
    _entropy.used += count
    return _entropy.store[_entropy.used - count : _entropy.used]


def _forget_entropy() -> None:
    _entropy.store = b""


os.register_at_fork(after_in_child=_forget_entropy)  # or parent and child would go on with the same


def new_response_id(prefix: str = "chatcmpl-") -> str:
    """`chatcmpl-<uuid7 hex>`: the key that feedback, traces and captures share.

    prefix: what clients of an API know its ids by, one of RESPONSE_PREFIXES.
    """
    return f"{prefix}{uuid7().hex}"


def new_comparison_id() -> str:
    """`cmp-<uuid7 hex>`: one prompt answered twice, side by side."""
    return f"cmp-{uuid7().hex}"


def event_id_of(response_id: str) -> str:
    """The event id of the interaction that `response_id` names: its own UUID as a version 8, so one per response.

    No vote has an id of that version (see `is_reserved_id`), so none can be taken for an answer.
    """
    return str(uuid.UUID(int=int(response_id[-32:], 16) & ~(0xF << 76) | 0x8 << 76))


def is_reserved_id(event_id: str) -> bool:
    """Whether only an interaction may have this id (RFC 9562 leaves version 8 to the application)."""
    return uuid.UUID(event_id).version == 8


def prompt_hash(messages: Sequence[dict[str, Any]]) -> str:
    """sha256 (hex) of the canonical JSON of the prompt's messages; groups answers to one prompt."""
    canonical = json.dumps(list(messages), sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def is_response_id(value: str) -> bool:
    """Whether an answer of ours could have this id."""
    return _RESPONSE_ID.fullmatch(value) is not None


def _check_response_id(value: str) -> str:
    if not is_response_id(value):
        raise ValueError("must look like chatcmpl-<32 hexadecimal digits> (or cmpl-…, resp_…), as in the answer's id")
    return value


def _check_comparison_id(value: str) -> str:
    if not _COMPARISON_ID.fullmatch(value):
        raise ValueError("must look like cmp-<32 hexadecimal digits>, as in the comparison's id")
    return value


def _check_uuid(value: str) -> str:
    return str(uuid.UUID(value))


def _check_time(value: datetime) -> datetime:
    if not 2000 <= value.year < 2200:
        raise ValueError("must lie between the years 2000 and 2200")
    return value.astimezone(UTC)


def _check_name(value: str) -> str:
    if len(value.encode("utf-8", "surrogatepass")) > NAME_BYTES:
        raise ValueError(f"must not be longer than {NAME_BYTES} bytes of UTF-8")
    return value


EventId = Annotated[str, AfterValidator(_check_uuid)]
ResponseId = Annotated[str, AfterValidator(_check_response_id)]
ComparisonId = Annotated[str, AfterValidator(_check_comparison_id)]
EventTime = Annotated[AwareDatetime, AfterValidator(_check_time)]
Name = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_check_name)]
Text = Annotated[str, Field(min_length=1, max_length=100_000)]
Finite = Annotated[float, Field(allow_inf_nan=False, strict=True)]
Tags = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]
Status = Literal["completed", "length", "client_abort", "timeout", "upstream_error"]


def _now() -> datetime:
    return datetime.now(UTC)


class Event(BaseModel):
    """What every event has. time: when it happened, with a time zone."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    event_id: EventId = Field(default_factory=lambda: str(uuid7()))
    time: EventTime = Field(default_factory=_now)
    api_key_id: str = ""


class Interaction(Event):
    """One answer of the API, whole or aborted. Unknown numbers are null, never 0. Times in seconds.

    `propensity` is the probability with which the experiment gave `arm` to this unit; null when nothing was drawn: the
    client pinned the checkpoint, no experiment ran, a tester's arm or both arms of a comparison were forced.
    With `fallback` another checkpoint answered for the arm's. `exposed_at` is when the first of the answer was
    sent; null when nothing was. `position` is the place (0 or 1) at which a comparison shows the answer. `shadow_of`
    names the response to the same prompt that the client got; this one was never shown, and its propensity is that of
    being asked for. With `content_kept` false (OpenAI's `store: false`) messages and text are null.
    """

    response_id: ResponseId
    endpoint: str
    checkpoint_id: str
    alias: str | None = None
    pinned: bool = False
    experiment_id: str | None = None
    arm: str | None = None
    fallback: bool = False
    unit: str | None = None
    propensity: float | None = Field(default=None, ge=0, le=1)
    exposed_at: EventTime | None = None
    shadow_of: ResponseId | None = None
    comparison_id: ComparisonId | None = None
    position: Literal[0, 1] | None = None
    user: str | None = None
    session_id: str | None = None
    tags: Tags = Field(default_factory=dict)
    content_kept: bool = True
    prompt_hash: str
    messages: list[dict[str, Any]] | None = None
    parameters: dict[str, Any] = Field(default_factory=dict)
    text: str | None = None
    finish_reason: str | None = None
    status: Status
    error: str | None = None
    prompt_tokens: int | None = Field(default=None, ge=0)
    completion_tokens: int | None = Field(default=None, ge=0)
    time_to_first_token_s: float | None = Field(default=None, ge=0)
    duration_s: float = Field(ge=0)
    overhead_s: float | None = Field(default=None, ge=0)
    traceparent: str | None = None


class Vote(Event):
    """What every kind of feedback has: who judged, and in which role."""

    rater: Name
    source: Literal["human", "ai", "code"] = "human"
    tags: Tags = Field(default_factory=dict)


class TargetedVote(Vote):
    """Feedback about one thing: a response, a comparison, or a session (as its client calls it)."""

    response_id: ResponseId | None = None
    comparison_id: ComparisonId | None = None
    session_id: Name | None = None

    @model_validator(mode="after")
    def _one_target(self) -> Self:
        if sum(target is not None for target in (self.response_id, self.comparison_id, self.session_id)) != 1:
            raise ValueError("name one of `response_id`, `comparison_id` and `session_id`")
        return self


class Thumb(TargetedVote):
    """Up or down."""

    kind: Literal["thumb"]
    value: Literal["up", "down"]


class Rating(TargetedVote):
    """A value on a scale that the vote itself declares, by default 1 to 5; `highest` is the best."""

    kind: Literal["rating"]
    value: Finite
    lowest: Finite = 1.0
    highest: Finite = 5.0

    @model_validator(mode="after")
    def _within_the_scale(self) -> Self:
        if not self.lowest < self.highest:
            raise ValueError("`lowest` must be below `highest`")
        if not self.lowest <= self.value <= self.highest:
            raise ValueError(f"`value` must lie between {self.lowest:g} and {self.highest:g}, the scale's ends")
        return self


class Score(TargetedVote):
    """A named metric's value, such as an automatic judge's; what is better depends on the metric."""

    kind: Literal["score"]
    name: Name
    value: Finite


class Comment(TargetedVote):
    """Free text about it."""

    kind: Literal["comment"]
    text: Text


class Signal(TargetedVote):
    """What somebody did with it, without being asked."""

    kind: Literal["signal"]
    name: Literal["copied", "regenerated", "abandoned", "shared"]


class Correction(Vote):
    """The text that the response should have been: it beats the response."""

    kind: Literal["correction"]
    response_id: ResponseId
    text: Text


class Choice(Vote):
    """A choice between two answers: the two of a comparison, or any two `responses` to one prompt.

    `chosen` names the better one; a `verdict` of `tie` or `both_bad` names none.
    """

    kind: Literal["preference"]
    comparison_id: ComparisonId | None = None
    responses: tuple[ResponseId, ResponseId] | None = None
    verdict: Literal["chosen", "tie", "both_bad"] = "chosen"
    chosen: ResponseId | None = None

    @model_validator(mode="after")
    def _between_two(self) -> Self:
        if (self.comparison_id is None) == (self.responses is None):
            raise ValueError("name a `comparison_id`, or two `responses`")
        if self.responses is not None and self.responses[0] == self.responses[1]:
            raise ValueError("`responses` must be two different ones")
        return self

    @model_validator(mode="after")
    def _chosen_goes_with_the_verdict(self) -> Self:
        if (self.verdict == "chosen") != (self.chosen is not None):
            raise ValueError("send `chosen` (the id of the better response), or `verdict` with `tie` or `both_bad`")
        if self.chosen is not None and self.responses is not None and self.chosen not in self.responses:
            raise ValueError("`chosen` must be one of `responses`")
        return self


AnyVote = Thumb | Rating | Score | Comment | Correction | Choice | Signal
VOTES: tuple[type[AnyVote], ...] = get_args(AnyVote)
Feedback = Annotated[AnyVote, Field(discriminator="kind")]
FEEDBACK: TypeAdapter[AnyVote] = TypeAdapter(Feedback)
AnyEvent = Interaction | AnyVote


class Preference(Event):
    """What the votes say about a pair of answers now: `chosen` beats `rejected`, or they tie.

    A later `revision` of the same `preference_id` replaces what an earlier one said; `retracted` ones say that the
    votes no longer give this pair, and have no texts. kind: where it comes from, `stated` (a choice), `correction`
    (then no response is the chosen one), or `thumbs` (an up by `rater` and a down by `other_rater`).
    """

    preference_id: str
    revision: int = Field(ge=1)
    retracted: bool = False
    kind: Literal["stated", "correction", "thumbs"]
    prompt_hash: str
    prompt: list[dict[str, Any]] | None = None
    chosen: str | None = None
    rejected: str | None = None
    tie: bool = False
    rater: Name
    other_rater: Name
    source: Literal["human", "ai", "code"]
    chosen_response_id: ResponseId | None = None
    rejected_response_id: ResponseId


class CheckpointEvent(Event):
    """What became of a checkpoint: it was `registered`; an alias names it now (`promoted`), as `previous_id` before;
    or it was taken out of service (`retired`).
    """

    kind: Literal["registered", "promoted", "retired"]
    checkpoint_id: Name
    alias: str | None = None
    previous_id: str | None = None
    parent_id: str | None = None
    digest: str | None = None
    reason: str = ""


Told = Preference | CheckpointEvent
"""What the platform itself says on the topics; the ingest does not read it."""


def target_of(event: AnyEvent) -> str:
    """What the event is about: the id of a response, of a comparison, `session:` and the id of a
    session, or two response ids in alphabetical order with a colon between them.
    """
    if isinstance(event, Interaction | Correction):
        return event.response_id
    if isinstance(event, Choice):
        return event.comparison_id or ":".join(sorted(event.responses or ()))
    return event.response_id or event.comparison_id or f"session:{event.session_id}"
