"""Laws of POST /v1/feedback, on twins of engine and outbox: what is accepted, refused and written."""

from typing import Any

import pytest

from feedback.errors import OutboxConflict, OutboxFull
from feedback.events import Preference, Thumb, new_comparison_id, new_response_id
from tests.helpers.serving import (
    ASK,
    Bench,
    check_error,
)


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
    assert isinstance(bench.outbox.events[0], Preference)


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
