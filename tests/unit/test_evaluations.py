"""Laws of POST /v1/logs: OpenTelemetry's evaluation events are votes, and votes are such events."""

import gzip
import json
from typing import Any

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest, ExportLogsServiceResponse

from feedback.errors import OutboxFull
from feedback.events import AnyVote, Comment, Score, new_comparison_id, new_response_id
from serving.evaluations import attributes_of
from serving.keys import ApiKey, digest_of
from serving.settings import ServingSettings
from telemetry import evaluations as names
from tests.helpers.events_built import build_preference, build_vote
from tests.helpers.serving import Bench, StillRouter, build_table, check_error

PROTOBUF = {"content-type": "application/x-protobuf"}


def build_record(attributes: dict[str, Any], event: str = names.EVENT, at: int = 1_790_000_000_000_000_000) -> Any:
    """A log record in OTLP's JSON."""
    kinds = {str: "stringValue", int: "intValue", float: "doubleValue", bool: "boolValue"}
    listed = [{"key": key, "value": {kinds[type(value)]: _json(value)}} for key, value in attributes.items()]
    return {"eventName": event, "timeUnixNano": str(at), "attributes": listed}


def _json(value: Any) -> Any:
    """Protobuf's JSON writes infinity as a word."""
    return "Infinity" if value == float("inf") else value


def build_request(*records: Any, service: str = "judge") -> dict[str, Any]:
    """An OTLP request in JSON."""
    resource = {"attributes": [{"key": "service.name", "value": {"stringValue": service}}]}
    return {"resourceLogs": [{"resource": resource, "scopeLogs": [{"logRecords": list(records)}]}]}


def build_binary(*records: Any) -> bytes:
    """The same as protobuf."""
    from google.protobuf import json_format

    return json_format.ParseDict(build_request(*records), ExportLogsServiceRequest()).SerializeToString()


def build_evaluation(**changes: Any) -> dict[str, Any]:
    """The attributes of an evaluation with a score; a change to None takes one away."""
    values = {names.NAME: "relevance", names.SCORE: 0.5, names.RESPONSE_ID: new_response_id()}
    return {key: value for key, value in (values | changes).items() if value is not None}


def votes_of(bench: Bench) -> list[AnyVote]:
    return [event for event in bench.outbox.events if isinstance(event, AnyVote)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("binary", [False, True])
async def an_evaluation_is_a_score_with_its_label_and_a_comment_once_however_often_it_is_sent(
    binary: bool, packed: bool
) -> None:
    bench = Bench()
    record = build_record(build_evaluation(**{names.LABEL: "relevant", names.EXPLANATION: "It names the capital."}))
    body = build_binary(record) if binary else json.dumps(build_request(record)).encode()
    headers = PROTOBUF if binary else {"content-type": "application/json; charset=utf-8"}
    if packed:
        body, headers = gzip.compress(body), headers | {"content-encoding": "gzip"}
    async with bench.client() as client:
        for _ in range(3):
            answer = await client.post("/v1/logs", content=body, headers=headers)
            assert answer.status_code == 200
            if binary:
                assert ExportLogsServiceResponse.FromString(answer.content).partial_success.rejected_log_records == 0
            else:
                assert answer.json() == {}
            assert answer.headers["content-type"].startswith(headers["content-type"].split(";")[0])
    [score, comment] = votes_of(bench)
    assert isinstance(score, Score)
    assert isinstance(comment, Comment)
    assert (score.name, score.value, score.tags, score.rater, score.source) == (
        "relevance",
        0.5,
        {"label": "relevant"},
        "judge",
        "code",
    )
    assert comment.text == "It names the capital."
    assert comment.tags["evaluation"] == "relevance"
    assert comment.response_id == score.response_id
    assert score.time.year == 2026


async def a_label_without_a_score_is_a_comment_and_a_whole_number_a_score() -> None:
    bench = Bench()
    label = build_record(build_evaluation(**{names.SCORE: None, names.LABEL: "pass"}))
    whole = build_record(build_evaluation(**{names.SCORE: 3, names.RATER: "anna", names.RATER_SOURCE: "human"}))
    async with bench.client() as client:
        await client.post("/v1/logs", json=build_request(label, whole))
    [comment, score] = votes_of(bench)
    assert isinstance(comment, Comment)
    assert comment.text == "pass"
    assert isinstance(score, Score)
    assert (score.value, score.rater, score.source) == (3.0, "anna", "human")


@pytest.mark.parametrize(
    "record",
    [
        build_record(build_evaluation(), event="gen_ai.client.inference.operation.details"),
        build_record(build_evaluation(**{names.RESPONSE_ID: None})),
        build_record(build_evaluation(**{names.RESPONSE_ID: "resp-of-another"})),
        build_record(build_evaluation(**{names.NAME: None})),
        build_record(build_evaluation(**{names.SCORE: None})),
        build_record(build_evaluation(**{names.SCORE: "good"})),
        build_record(build_evaluation(**{names.SCORE: True})),
        build_record(build_evaluation(**{names.SCORE: float("inf")})),
        build_record(build_evaluation(**{names.RATER_SOURCE: "alien"})),
        build_record(build_evaluation(), at=1),
        build_record(build_evaluation(), at=2**64 - 1),
        {},
    ],
)
async def what_is_no_evaluation_of_ours_is_rejected_in_otlps_way_and_harms_no_other(record: Any) -> None:
    bench = Bench()
    async with bench.client() as client:
        body = build_binary(record, build_record(build_evaluation()))
        answer = await client.post("/v1/logs", content=body, headers=PROTOBUF)
    assert answer.status_code == 200
    told = ExportLogsServiceResponse.FromString(answer.content).partial_success
    assert told.rejected_log_records == 1
    assert told.error_message
    assert len(votes_of(bench)) == 1


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"\xff\xff\xff", PROTOBUF, 400),
        (b"{", {"content-type": "application/json"}, 400),
        (b"[]", {"content-type": "application/json"}, 400),
        (b"\xff", {"content-type": "application/json"}, 400),
        (b'{"resourceLogs": ' + b"[" * 5000 + b"]" * 5000 + b"}", {"content-type": "application/json"}, 400),
        (b"", {"content-type": "text/plain"}, 400),
        (b"no gzip", PROTOBUF | {"content-encoding": "gzip"}, 400),
        (gzip.compress(build_binary(build_record({})))[:-12], PROTOBUF | {"content-encoding": "gzip"}, 400),
        (gzip.compress(bytes(10_000_000)), PROTOBUF | {"content-encoding": "gzip"}, 413),
        (b"", PROTOBUF | {"content-encoding": "br"}, 400),
    ],
)
async def a_body_that_is_no_otlp_is_refused(body: bytes, headers: dict[str, str], status: int) -> None:
    bench = Bench()
    async with bench.client() as client:
        check_error(await client.post("/v1/logs", content=body, headers=headers), status)
    async with bench.client("fw-unknown") as client:
        check_error(await client.post("/v1/logs", content=body, headers=headers), 401)
    assert votes_of(bench) == []


async def an_exporter_is_told_to_come_again_when_the_outbox_is_full() -> None:
    bench = Bench()
    body = build_binary(build_record(build_evaluation()))
    async with bench.client() as client:
        bench.outbox.error = OutboxFull("full")
        refused = await client.post("/v1/logs", content=body, headers=PROTOBUF)
        bench.outbox.error = None
        again = await client.post("/v1/logs", content=body, headers=PROTOBUF)
    check_error(refused, 503)
    assert refused.headers["retry-after"]
    assert again.status_code == 200
    assert len(votes_of(bench)) == 1


@pytest.mark.parametrize(
    "vote",
    [
        *(build_vote(kind) for kind in ("thumb", "rating", "score", "comment", "correction", "signal")),
        build_vote("thumb", comparison_id=new_comparison_id()),
        build_vote("comment", session_id="s"),
        build_preference(),
        build_preference(responses=(new_response_id(), new_response_id())),
    ],
    ids=lambda vote: vote.kind,
)
async def every_accepted_vote_is_told_as_an_event_that_changes_nothing_when_it_comes_back(vote: AnyVote) -> None:
    told = attributes_of(vote)
    assert told[names.NAME]
    assert told[names.FEEDBACK_ID] == vote.event_id
    bench = Bench()
    async with bench.client() as client:
        answer = await client.post("/v1/logs", json=build_request(build_record(dict(told))))
    assert answer.json() == {}
    assert votes_of(bench) == []


async def a_vote_is_told_once_and_only_if_it_was_accepted() -> None:
    heard: list[AnyVote] = []
    bench = Bench(tell_vote=heard.append)
    vote = build_vote("thumb").model_dump(mode="json", exclude={"api_key_id"}, exclude_none=True)
    async with bench.client() as client:
        await client.post("/v1/feedback", json=vote)
        await client.post("/v1/feedback", json=vote)
        await client.post("/v1/feedback", json={**vote, "value": "sideways"})
    assert [one.event_id for one in heard] == [vote["event_id"]]


async def a_flood_of_one_rater_is_refused_and_others_and_trusted_keys_are_not() -> None:
    key = ApiKey("key-2", "app", frozenset({"feedback"}))
    table = build_table(keys={digest_of("fw-app"): key, **build_table().keys})
    bench = Bench(router=StillRouter(table), settings=ServingSettings(rater_votes_per_minute=3))
    votes = [
        build_vote("thumb", rater=rater).model_dump(mode="json", exclude={"api_key_id"}, exclude_none=True)
        for rater in ["anna"] * 5 + ["ben"]
    ]
    async with bench.client("fw-app") as client:
        answers = [await client.post("/v1/feedback", json=vote) for vote in votes]
        batch = await client.post("/v1/feedback/batch", json=votes[:5])
    async with bench.client() as client:
        trusted = await client.post("/v1/feedback/batch", json=votes[3:5])
    assert trusted.json()["accepted"] == 2
    assert [answer.status_code for answer in answers] == [202, 202, 202, 429, 429, 202]
    refused = check_error(answers[3], 429)
    assert "3 votes a minute" in refused["message"]
    assert int(answers[3].headers["retry-after"]) >= 1
    assert batch.status_code == 207
    assert batch.json()["refused"] == 5
