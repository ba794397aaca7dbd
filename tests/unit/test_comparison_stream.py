"""Laws of comparisons that are streamed: two channels, blind, both recorded, both or none."""

import asyncio
import json
from collections import Counter
from typing import Any

import httpx
import pytest

from feedback.errors import OutboxFull
from serving.keys import ApiKey, KeyLimits, digest_of
from tests.helpers.serving import (
    ASK,
    BASE,
    CANDIDATE,
    SECRET,
    Bench,
    ScriptedEngine,
    StillRouter,
    build_experiment,
    build_experiments,
    build_table,
    check_error,
)

STREAM = {**ASK, "stream": True}


def experiment_bench(**overrides: Any) -> Bench:
    return Bench(router=StillRouter(build_table(**build_experiments(build_experiment()))), **overrides)


def events_of(text: str) -> list[Any]:
    """The data of the events; [DONE] as text."""
    data = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [one if one == "[DONE]" else json.loads(one) for one in data]


async def stream(bench: Bench, **fields: Any) -> httpx.Response:
    async with bench.client() as client:
        return await client.post("/v1/comparisons", json={**STREAM, **fields})


async def two_channels_bring_two_whole_answers_and_both_are_recorded_before_the_end() -> None:
    bench = experiment_bench()
    answer = await stream(bench)
    assert answer.headers["content-type"].startswith("text/event-stream")
    first, *chunks, last = events_of(answer.text)
    assert last == "[DONE]"
    assert [one["position"] for one in first["answers"]] == [0, 1]
    texts = ["", ""]
    finished = Counter()
    for chunk in chunks:
        assert chunk["id"] == first["id"]
        assert "usage" not in chunk
        texts[chunk["position"]] += chunk["delta"].get("content") or ""
        finished[chunk["position"]] += chunk["finish_reason"] is not None
    assert texts == ["Hello there."] * 2
    assert finished == {0: 1, 1: 1}
    records = {record.response_id: record for record in bench.outbox.interactions}
    for shown in first["answers"]:
        record = records[shown["response_id"]]
        assert (record.position, record.text, record.status) == (shown["position"], "Hello there.", "completed")
        assert (record.comparison_id, record.experiment_id, record.propensity) == (first["id"], "exp-1", None)
        assert record.completion_tokens is not None
    assert {record.arm for record in records.values()} == {"control", "candidate"}
    assert bench.gateway.under_way == 0


async def a_streamed_comparison_is_blind_and_its_order_is_random() -> None:
    bench = experiment_bench()
    firsts = []
    for _ in range(40):
        answer = await stream(bench)
        for secret in (BASE, CANDIDATE, "exp-1"):
            assert secret not in answer.text + str(answer.headers)
        [head, *_] = events_of(answer.text)
        records = {record.response_id: record for record in bench.outbox.interactions}
        firsts.append(records[head["answers"][0]["response_id"]].checkpoint_id)
    assert 5 < firsts.count(BASE) < 35


async def the_usage_is_told_when_it_is_asked_for() -> None:
    answer = await stream(Bench(), stream_options={"include_usage": True})
    told = [chunk["position"] for chunk in events_of(answer.text)[1:-1] if "usage" in chunk]
    assert sorted(told) == [0, 1]


class OneSlow(ScriptedEngine):
    """The second answer begins late."""

    def call(self, *arguments: Any) -> Any:
        self.calls.append(ScriptedEngine(pause_s=0.3) if self.calls else ScriptedEngine())
        return self.calls[-1].call(*arguments)


async def the_fast_answer_does_not_wait_for_the_slow_one() -> None:
    places = [chunk["position"] for chunk in events_of((await stream(Bench(engine=OneSlow()))).text)[1:-1]]
    fast = Counter(places[:3]).most_common(1)[0][0]
    assert max(index for index, place in enumerate(places) if place == fast) < len(places) - 2


class OneDies(ScriptedEngine):
    """The first answer fails after a word; the second would go on for long."""

    def call(self, *arguments: Any) -> Any:
        slow = ScriptedEngine(words=["word "] * 50, pause_s=0.05)
        self.calls.append(slow if self.calls else ScriptedEngine(fail_after=1, pause_s=0.05))
        return self.calls[-1].call(*arguments)


async def one_answer_that_fails_ends_both_and_neither_looks_whole() -> None:
    engine = OneDies()
    bench = Bench(engine=engine)
    answer = await stream(bench)
    *_, last = events_of(answer.text)
    assert last["error"]["type"] == "server_error"
    assert "[DONE]" not in answer.text
    assert [record.status for record in bench.outbox.interactions] == ["upstream_error", "upstream_error"]
    assert all(call.cancelled for inner in engine.calls for call in inner.calls)
    assert bench.gateway.under_way == 0


async def a_fault_before_the_first_piece_is_a_plain_error() -> None:
    bench = Bench(engine=ScriptedEngine(refusal=(400, b'{"error": {"message": "too long", "param": "messages"}}')))
    check_error(await stream(bench), 400)
    assert bench.outbox.events == []
    dead = Bench(engine=ScriptedEngine(fail_after=0))
    check_error(await stream(dead), 502)
    assert [record.status for record in dead.outbox.interactions] == ["upstream_error", "upstream_error"]
    check_error(await stream(Bench(router=StillRouter(build_table(servable={})))), 503)


async def an_outbox_that_takes_nothing_is_told_at_the_end() -> None:
    bench = experiment_bench()
    bench.outbox.error = OutboxFull("no room")
    answer = await stream(bench)
    assert "error" in events_of(answer.text)[-1]
    assert "[DONE]" not in answer.text


async def a_client_that_leaves_stops_both_answers_and_both_are_recorded() -> None:
    engine = ScriptedEngine(words=["a", "b", "c", "d", "e", "f"], pause_s=0.05)
    bench = Bench(engine=engine)
    sent: list[bytes] = []
    left = asyncio.Event()
    body = json.dumps(STREAM).encode()
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        if messages:
            return messages.pop(0)
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))
        if len(sent) == 4:
            left.set()

    headers = [(b"authorization", f"Bearer {SECRET}".encode()), (b"content-type", b"application/json")]
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/comparisons",
        "raw_path": b"/v1/comparisons",
        "query_string": b"",
        "headers": headers,
    }
    await bench.app(scope, receive, send)
    await asyncio.sleep(0.05)
    assert [record.status for record in bench.outbox.interactions] == ["client_abort", "client_abort"]
    assert all(call.cancelled for call in engine.calls)
    assert bench.gateway.under_way == 0


async def the_tokens_of_both_answers_are_charged() -> None:
    key = ApiKey("key-1", "test", frozenset({"inference"}), limits=KeyLimits(tokens_per_minute=10))
    bench = Bench(router=StillRouter(build_table(keys={digest_of(SECRET): key})))
    assert (await stream(bench)).status_code == 200
    check_error(await stream(bench), 429)


@pytest.mark.parametrize("fields", [{"n": 2}, {"stream": "yes"}])
async def a_wrong_field_is_refused(fields: dict[str, Any]) -> None:
    check_error(await stream(Bench(), **fields), 400)
