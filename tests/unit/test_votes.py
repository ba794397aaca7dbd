"""Laws of POST /v1/feedback, on twins of engine and outbox: what is accepted, refused and written."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote

import pytest

from feedback.errors import OutboxConflict, OutboxFull
from feedback.events import Choice, Thumb, event_id_of, new_comparison_id, new_response_id
from serving.feedback_tokens import make_token
from serving.keys import ApiKey, KeyLimits, digest_of
from serving.settings import ServingSettings
from tests.helpers.serving import ASK, SECRET, Bench, StillRouter, build_table, check_error


async def a_vote_is_accepted_once_whatever_is_sent_again() -> None:
    bench = Bench()
    vote = {"kind": "thumb", "response_id": new_response_id(), "value": "up", "rater": "anna"}
    async with bench.client() as client:
        headers = {"Idempotency-Key": "try-1"}
        first = await client.post("/v1/feedback", json=vote, headers=headers)
        second = await client.post("/v1/feedback", json=vote, headers=headers)
        other = await client.post("/v1/feedback", json=vote, headers={"Idempotency-Key": "try-2"})
    assert [answer.status_code for answer in (first, second, other)] == [202, 202, 202]
    assert (first.json()["status"], second.json()["status"]) == ("accepted", "duplicate")
    assert first.json()["feedback_id"] == second.json()["feedback_id"] != other.json()["feedback_id"]
    [stored, _] = bench.outbox.events
    assert isinstance(stored, Thumb)
    assert (stored.api_key_id, stored.rater) == ("key-1", "anna")


async def a_preference_is_accepted_with_its_own_event_id() -> None:
    bench = Bench()
    vote = {
        "kind": "preference",
        "comparison_id": new_comparison_id(),
        "chosen": new_response_id(),
        "rater": "anna",
        "event_id": "0197f1d2-0000-7000-8000-000000000000",
    }
    async with bench.client() as client:
        answer = await client.post("/v1/feedback", json=vote)
    assert answer.json() == {"feedback_id": vote["event_id"], "status": "accepted"}
    assert isinstance(bench.outbox.events[0], Choice)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"value": "sideways"}, "value"),
        ({"response_id": "chatcmpl-1"}, "response_id"),
        ({"kind": "shrug"}, "kind"),
        ({"kind": None}, "kind"),
        ({"rater": ""}, "rater"),
        ({"surprise": 1}, "surprise"),
        ({"api_key_id": "key-2"}, "api_key_id"),
        ({"time": "yesterday"}, "time"),
        ({"event_id": "x"}, "event_id"),
    ],
)
async def a_wrong_vote_names_its_field_and_writes_nothing(change: dict[str, Any], param: str) -> None:
    bench = Bench()
    vote = {"kind": "thumb", "response_id": new_response_id(), "value": "up", "rater": "anna", **change}
    async with bench.client() as client:
        error = check_error(await client.post("/v1/feedback", json=vote), 400)
    assert error["param"] == param
    assert not bench.outbox.events


@pytest.mark.parametrize("time", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "2150-01-01T00:00:00Z"])
async def a_vote_from_no_time_of_ours_is_refused(time: str) -> None:
    bench = Bench()
    vote = {"kind": "thumb", "response_id": new_response_id(), "value": "up", "rater": "anna", "time": time}
    async with bench.client() as client:
        answer = await client.post("/v1/feedback", json=vote)
    assert check_error(answer, 400)["param"] == "time"
    assert bench.outbox.events == []


async def an_outbox_that_refuses_is_told_in_the_right_words() -> None:
    bench = Bench()
    vote = {"kind": "thumb", "response_id": new_response_id(), "value": "up", "rater": "anna"}
    async with bench.client() as client:
        bench.outbox.error = OutboxConflict("x")
        check_error(await client.post("/v1/feedback", json=vote), 409, "idempotency_conflict")
        bench.outbox.error = OutboxFull("full")
        refused = await client.post("/v1/feedback", json=vote)
        check_error(refused, 503)
        assert int(refused.headers["retry-after"]) > 0
        check_error(await client.post("/v1/chat/completions", json=ASK), 503)
        assert (await client.post("/v1/chat/completions", json={**ASK, "stream": True})).status_code == 200
    assert bench.gateway.recorder.dropped == 2


@pytest.mark.parametrize(
    "vote",
    [
        {"kind": "rating", "value": 4, "rater": "anna"},
        {"kind": "rating", "value": 0.5, "lowest": 0, "highest": 1, "rater": "anna"},
        {"kind": "score", "name": "faithfulness", "value": -1.5, "rater": "judge", "source": "ai"},
        {"kind": "comment", "text": "Rather long.", "rater": "anna"},
        {"kind": "correction", "text": "Paris.", "rater": "anna"},
        {"kind": "signal", "name": "copied", "rater": "anna", "source": "code"},
    ],
)
async def every_kind_of_vote_is_accepted(vote: dict[str, Any]) -> None:
    bench = Bench()
    async with bench.client() as client:
        answer = await client.post("/v1/feedback", json={**vote, "response_id": new_response_id()})
    assert answer.status_code == 202, answer.text
    assert bench.outbox.events[0].model_dump(include=set(vote)) == vote


async def every_vote_of_a_batch_has_its_own_answer() -> None:
    bench = Bench()
    vote = {"kind": "thumb", "response_id": new_response_id(), "value": "up", "rater": "anna"}
    votes = [vote, {**vote, "value": "sideways"}, 7, {**vote, "rater": "bob"}]
    headers = {"Idempotency-Key": "batch-1"}
    async with bench.client() as client:
        first = await client.post("/v1/feedback/batch", json=votes, headers=headers)
        again = await client.post("/v1/feedback/batch", json=votes, headers=headers)
    assert (first.status_code, first.json()["accepted"], first.json()["refused"]) == (207, 2, 2)
    assert [item["status"] for item in first.json()["data"]] == ["accepted", "refused", "refused", "accepted"]
    assert first.json()["data"][1]["error"]["param"] == "value"
    assert (again.json()["accepted"], again.json()["duplicate"]) == (0, 2)
    assert len(bench.outbox.events) == 2


async def a_batch_may_come_as_lines() -> None:
    bench = Bench()
    vote = {"kind": "thumb", "response_id": new_response_id(), "value": "up"}
    lines = "\n".join([*(json.dumps({**vote, "rater": name}) for name in ("anna", "bob")), "", "{", "\n"])
    async with bench.client() as client:
        answer = await client.post("/v1/feedback/batch", content=lines)
        whole = await client.post("/v1/feedback/batch", json=[{**vote, "rater": "cem"}])
    assert (answer.status_code, answer.json()["accepted"], answer.json()["refused"]) == (207, 2, 1)
    assert answer.json()["data"][2]["error"]["code"] == "invalid_json"
    assert (whole.status_code, whole.json()["refused"]) == (202, 0)


@pytest.mark.parametrize("body", [b"", b"[]", b"[1,", b"\xff", json.dumps([0] * 1001).encode()])
async def a_batch_that_is_none_is_refused_whole(body: bytes) -> None:
    bench = Bench()
    async with bench.client() as client:
        answer = await client.post("/v1/feedback/batch", content=body)
    if body == b"\xff":  # a line that is no text has its own answer
        assert answer.json()["refused"] == 1
    else:
        check_error(answer, 400)
    assert not bench.outbox.events


async def a_feedback_token_votes_on_its_answer_and_nothing_else() -> None:
    bench = Bench()
    whole, streamed = await bench.ask(), await bench.ask(stream=True)
    async with bench.client() as client:
        compared = await client.post("/v1/comparisons", json=ASK)
    for answer, named in (
        (whole, {"response_id": whole.headers["x-flywheel-response-id"]}),
        (streamed, {"response_id": streamed.headers["x-flywheel-response-id"]}),
        (compared, {"comparison_id": compared.json()["id"]}),
    ):
        vote = {"kind": "thumb", "value": "up", "rater": "anna", **named}
        async with bench.client(answer.headers["x-flywheel-feedback-token"]) as browser:
            assert (await browser.post("/v1/feedback", json=vote)).status_code == 202
            other = await browser.post(
                "/v1/feedback", json={"kind": "thumb", "value": "up", "rater": "anna", "response_id": new_response_id()}
            )
            check_error(other, 403, "other_target")
            check_error(await browser.post("/v1/chat/completions", json=ASK), 401)
            check_error(await browser.get(f"/v1/responses/{new_response_id()}/feedback"), 401)
    assert {event.api_key_id for event in bench.outbox.events} == {"key-1"}


@pytest.mark.parametrize("change", ["forged", "stretched", "moved", "expired", "key gone", "scope gone", "nonsense"])
async def a_feedback_token_that_was_tampered_with_or_outlived_its_key_is_refused(change: str) -> None:
    bench = Bench(settings=ServingSettings(feedback_token_s=0.001 if change == "expired" else 60))
    answer = await bench.ask()
    response_id, token = answer.headers["x-flywheel-response-id"], answer.headers["x-flywheel-feedback-token"]
    expires, key_id, target, signature = token.removeprefix("fwt-").split(".")
    status = 401
    if change == "forged":
        token = token[:-1] + ("A" if token[-1] != "A" else "B")
    elif change == "stretched":
        token = f"fwt-{int(expires) + 3600}.{key_id}.{target}.{signature}"
    elif change == "moved":
        response_id = new_response_id()
        token = f"fwt-{expires}.{key_id}.{response_id}.{signature}"
    elif change == "expired":
        await asyncio.sleep(1.1)
    elif change == "key gone":
        bench.router.table = build_table(keys={})
    elif change == "scope gone":
        bench.router.table = build_table(keys={digest_of(SECRET): ApiKey("key-1", "test", frozenset({"inference"}))})
        status = 403
    else:
        token = "fwt-..."
    vote = {"kind": "thumb", "value": "up", "rater": "anna", "response_id": response_id}
    async with bench.client(token) as browser:
        check_error(await browser.post("/v1/feedback", json=vote), status)
    assert not [event for event in bench.outbox.events if event not in bench.outbox.interactions]


async def no_token_is_given_for_a_key_that_may_not_vote_or_when_they_are_off() -> None:
    off = await Bench(settings=ServingSettings(feedback_token_s=0)).ask()
    key = ApiKey("key-1", "test", frozenset({"inference"}))
    mute = await Bench(router=StillRouter(build_table(keys={digest_of(SECRET): key}))).ask()
    assert (off.status_code, mute.status_code) == (200, 200)
    assert "x-flywheel-feedback-token" not in off.headers.keys() | mute.headers.keys()


async def the_votes_on_a_response_are_read_back_with_the_key_that_sent_them() -> None:
    bench = Bench()
    vote = {"kind": "thumb", "response_id": new_response_id(), "value": "up", "rater": "anna"}
    async with bench.client() as client:
        sent = await client.post("/v1/feedback", json=vote)
        read = await client.get(f"/v1/responses/{vote['response_id']}/feedback")
        none = await client.get(f"/v1/responses/{new_response_id()}/feedback")
        for odd in ("none", "%00", "%ff", "x" * 5000):
            check_error(await client.get(f"/v1/responses/{odd}/feedback"), 404)
    [found] = read.json()["data"]
    assert (found["event_id"], found["value"]) == (sent.json()["feedback_id"], "up")
    assert none.json()["data"] == []


async def only_pages_that_are_named_may_call_from_a_browser() -> None:
    origin = {"origin": "https://app.example"}
    asked = {**origin, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    open_, closed = Bench(settings=ServingSettings(cors_origins=("https://app.example",))), Bench()
    async with open_.client() as client:
        preflight = await client.options("/v1/feedback", headers=asked)
        stranger = await client.options("/v1/feedback", headers={**asked, "origin": "https://else.example"})
        answer = await client.post("/v1/chat/completions", json=ASK, headers=origin)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://app.example"
    assert "access-control-allow-origin" not in stranger.headers
    assert answer.headers["access-control-allow-origin"] == "https://app.example"
    async with closed.client() as client:
        assert "access-control-allow-origin" not in (await client.options("/v1/feedback", headers=asked)).headers


@pytest.mark.parametrize("name", ["anna", "a/b?c#d", "ü \u0000", "%2e%2e"])
async def a_person_is_erased_by_an_admin_only_whatever_the_name(name: str) -> None:
    admin = ApiKey("key-2", "admin", frozenset({"admin"}))
    bench = Bench(router=StillRouter(build_table(keys={digest_of("fw-admin"): admin, **build_table().keys})))
    path = f"/v1/subjects/{quote(name, safe='')}"
    async with bench.client() as client:
        check_error(await client.delete(path), 403)
    async with bench.client("fw-unknown") as client:
        check_error(await client.delete(path), 401)
    assert bench.votes.erased == []
    async with bench.client("fw-admin") as client:
        answer = await client.delete(path)
    assert answer.status_code == 200
    assert answer.json() == {"object": "erasure", "votes": 0}
    assert bench.votes.erased == [name]


async def a_vote_cannot_take_the_id_of_an_answer_nor_browsers_each_others() -> None:
    bench = Bench()
    key = bench.router.table.keys[digest_of(SECRET)]
    answers = [new_response_id() for _ in range(2)]
    tokens = [make_token(key, digest_of(SECRET), answer, 60) for answer in answers]
    for token, answer in zip(tokens, answers, strict=True):
        vote = {"kind": "thumb", "response_id": answer, "value": "up", "rater": "me"}
        async with bench.client(token) as client:
            taken = await client.post("/v1/feedback", json={**vote, "event_id": event_id_of(answer)})
            assert check_error(taken, 400)["param"] == "event_id"
            accepted = await client.post("/v1/feedback", json=vote, headers={"Idempotency-Key": "1"})
            assert accepted.json()["status"] == "accepted"


async def the_slow_bodies_of_one_token_fill_no_slots() -> None:
    bench = Bench(settings=ServingSettings(max_concurrency=8, body_timeout_s=5))
    key = bench.router.table.keys[digest_of(SECRET)]
    token = make_token(key, digest_of(SECRET), new_response_id(), 60)
    release = asyncio.Event()

    async def slow_body() -> AsyncIterator[bytes]:
        yield b"{"
        await release.wait()
        yield b"}"

    async with bench.client(token) as client:
        waiting = [asyncio.create_task(client.post("/v1/feedback", content=slow_body())) for _ in range(8)]
        await asyncio.sleep(0.1)
        assert bench.gateway.under_way == 4
        answered = await bench.ask()
        release.set()
        codes = sorted([(await task).status_code for task in waiting])
    assert answered.status_code == 200
    assert codes == [400] * 4 + [429] * 4


async def every_vote_counts_against_the_limits_of_its_key() -> None:
    key = ApiKey("key-2", "app", frozenset({"feedback"}), KeyLimits(requests_per_minute=2))
    bench = Bench(router=StillRouter(build_table(keys={digest_of("fw-app"): key})))
    vote = {"kind": "thumb", "response_id": new_response_id(), "value": "up", "rater": "me"}
    async with bench.client("fw-app") as client:
        answers = [await client.post("/v1/feedback", json=vote) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [202, 202, 429]
    assert answers[0].headers["x-ratelimit-remaining-requests"] == "1"


@pytest.mark.parametrize("name", ["\U00020000" * 129, "x" * 257])
async def a_name_that_no_index_could_hold_is_refused(name: str) -> None:
    bench = Bench()
    async with bench.client() as client:
        vote = {"kind": "signal", "session_id": "s", "name": "copied", "rater": name}
        assert check_error(await client.post("/v1/feedback", json=vote), 400)["param"] == "rater"
    assert bench.outbox.events == []


async def a_time_with_any_offset_is_kept_in_utc() -> None:
    bench = Bench()
    vote = {"kind": "thumb", "response_id": new_response_id(), "value": "up", "rater": "me"}
    async with bench.client() as client:
        answer = await client.post("/v1/feedback", json={**vote, "time": "2024-01-01T00:00:00+23:00"})
    assert answer.status_code == 202
    assert bench.outbox.events[0].time.isoformat() == "2023-12-31T01:00:00+00:00"
