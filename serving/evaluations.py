"""Feedback in OpenTelemetry's words: log records `gen_ai.evaluation.result` become votes, and votes become such events.

In: OTLP/HTTP's POST /v1/logs, as protobuf or JSON. A score becomes a `score`, a label its tag; an explanation, or a
label without a score, a `comment`. The event id of each is made of what the record says and of the key, so an exporter
that sends a batch again changes nothing. What is no such event, or names no response of ours, is counted as rejected in
the answer, as OTLP has it (partial success), and harms no other.
"""

import hashlib
import json
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from google.protobuf import json_format
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest, ExportLogsServiceResponse
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord

from feedback.events import AnyVote, Choice, Comment, Correction, Rating, Score, Signal, Thumb
from serving.errors import ApiError, BodyTooLarge, InvalidRequest
from serving.feedback_tokens import Grant
from serving.requests import parse_object
from serving.votes import vote_of
from telemetry import evaluations as names

_NAMESPACE = uuid.UUID("3d1f7a52-98f0-4f0e-8a55-0a6b8a7c1f33")
_JSON, _PROTOBUF = "application/json", "application/x-protobuf"
_TAG_LENGTH = 512


@dataclass
class Evaluations:
    """What a request holds: votes, and why the other records are none. known: they are copies of our own votes."""

    media_type: str
    votes: list[AnyVote] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    known: int = 0

    def answer(self) -> bytes:
        """OTLP's answer, in the encoding of the request."""
        answer = ExportLogsServiceResponse()
        if self.refused:
            answer.partial_success.rejected_log_records = len(self.refused)
            answer.partial_success.error_message = "; ".join(dict.fromkeys(self.refused))[:2_000]
        if self.media_type == _JSON:
            return json_format.MessageToJson(answer, indent=None).encode()
        return bytes(answer.SerializeToString())


def parse_evaluations(
    raw: bytes, *, content_type: str, content_encoding: str, grant: Grant, max_bytes: int
) -> Evaluations:
    """Read an OTLP request. Raises InvalidRequest, or BodyTooLarge when it unpacks to more than max_bytes."""
    media_type = content_type.partition(";")[0].strip().lower()
    raw = _unpacked(raw, content_encoding.strip().lower(), max_bytes)
    request = ExportLogsServiceRequest()
    try:
        if media_type == _JSON:
            json_format.ParseDict(parse_object(raw), request, ignore_unknown_fields=True)
        elif media_type == _PROTOBUF:
            request.ParseFromString(raw)
        else:
            raise InvalidRequest(f"Send OTLP as {_PROTOBUF} or {_JSON}.", param="content-type")
    except (json_format.ParseError, DecodeError) as error:
        raise InvalidRequest(f"The body is no OTLP request of log records: {str(error)[:200]}") from error
    found = Evaluations(media_type)
    for resource in request.resource_logs:
        service = _values(resource.resource.attributes).get("service.name")
        for scope in resource.scope_logs:
            for record in scope.log_records:
                _read(record, str(service or "otlp"), grant, found)
    return found


def _read(record: LogRecord, service: str, grant: Grant, found: Evaluations) -> None:
    values = _values(record.attributes)
    if names.EVENT not in (record.event_name, values.get("event.name")):
        found.refused.append(f"only events called {names.EVENT} are taken here")
    elif names.FEEDBACK_ID in values:
        found.known += 1
    else:
        try:
            votes = [vote_of(fields, grant) for fields in _votes(record, values, service, grant)]
        except ApiError as error:
            found.refused.append(error.message)
        else:
            found.votes += votes


def _votes(record: LogRecord, values: Mapping[str, Any], service: str, grant: Grant) -> Iterator[dict[str, Any]]:
    name, score, label, explanation = (
        values.get(key) for key in (names.NAME, names.SCORE, names.LABEL, names.EXPLANATION)
    )
    if score is None and label is None and explanation is None:
        raise InvalidRequest(f"{names.EVENT} needs {names.SCORE}, {names.LABEL} or {names.EXPLANATION}")
    tags = {"label": str(label)[:_TAG_LENGTH]} if label is not None else {}
    common = {
        "response_id": values.get(names.RESPONSE_ID),
        "rater": values.get(names.RATER, service),
        "source": values.get(names.RATER_SOURCE, "code"),
        "time": _time_of(record),
    }
    told = json.dumps([grant.key.key_id, sorted(values.items()), service, record.time_unix_nano], default=str)
    origin = hashlib.sha256(told.encode("utf-8", "surrogatepass") + record.trace_id + record.span_id).hexdigest()
    if score is not None:
        event_id = str(uuid.uuid5(_NAMESPACE, f"{origin} score"))
        value = float(score) if isinstance(score, int) and not isinstance(score, bool) else score
        yield {**common, "kind": "score", "event_id": event_id, "name": name, "value": value, "tags": tags}
    text = explanation if explanation is not None else label
    if text is not None and (score is None or explanation is not None):
        event_id = str(uuid.uuid5(_NAMESPACE, f"{origin} comment"))
        yield {**common, "kind": "comment", "event_id": event_id, "text": text, "tags": {**tags, "evaluation": name}}


def _time_of(record: LogRecord) -> datetime:
    nanoseconds = record.time_unix_nano or record.observed_time_unix_nano
    return datetime.fromtimestamp(nanoseconds / 1e9, tz=UTC) if nanoseconds else datetime.now(UTC)


def _unpacked(raw: bytes, encoding: str, max_bytes: int) -> bytes:
    if encoding in ("", "identity"):
        return raw
    if encoding != "gzip":
        raise InvalidRequest("The content encoding must be gzip, or none.", param="content-encoding")
    unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    try:
        unpacked = unpacker.decompress(raw, max_bytes + 1)
    except zlib.error as error:
        raise InvalidRequest(f"The body is not gzip: {error}", param="content-encoding") from error
    if len(unpacked) > max_bytes:
        raise BodyTooLarge(f"The body unpacks to more than {max_bytes} bytes.")
    if not unpacker.eof:
        raise InvalidRequest("The body is cut off: its gzip has no end.", param="content-encoding")
    return unpacked


def _values(attributes: Sequence[KeyValue]) -> dict[str, Any]:
    """The attributes that are strings, numbers or truth values; others say nothing here."""
    return {pair.key: value for pair in attributes if (value := _plain(pair.value)) is not None}


def _plain(value: AnyValue) -> str | float | bool | None:
    kind = value.WhichOneof("value")
    return getattr(value, kind) if kind in ("string_value", "int_value", "double_value", "bool_value") else None


def tell_through(log: names.EvaluationLog) -> Callable[[AnyVote], None]:
    """What tells a vote to the log."""
    return lambda vote: log.emit(attributes_of(vote), vote.time)


def attributes_of(vote: AnyVote) -> dict[str, str | float]:
    """The attributes of the evaluation event that says the same as the vote."""
    said: dict[str, str | float | None]
    match vote:
        case Thumb():
            said = {names.NAME: "thumb", names.SCORE: float(vote.value == "up"), names.LABEL: vote.value}
        case Rating():
            said = {names.NAME: "rating", names.SCORE: vote.value}
        case Score():
            said = {names.NAME: vote.name, names.SCORE: vote.value, names.LABEL: vote.tags.get("label")}
        case Comment() | Correction():
            said = {names.NAME: vote.kind, names.EXPLANATION: vote.text}
        case Signal():
            said = {names.NAME: "signal", names.LABEL: vote.name}
        case Choice():
            said = {names.NAME: "preference", names.LABEL: vote.verdict}
    response_id = vote.chosen if isinstance(vote, Choice) else vote.response_id
    said |= {
        names.RESPONSE_ID: response_id,
        names.COMPARISON_ID: getattr(vote, "comparison_id", None),
        names.CONVERSATION_ID: getattr(vote, "session_id", None),
        names.FEEDBACK_ID: vote.event_id,
        names.RATER: vote.rater,
        names.RATER_SOURCE: vote.source,
    }
    return {name: value for name, value in said.items() if value is not None}
