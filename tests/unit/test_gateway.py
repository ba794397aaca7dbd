"""Laws of the gateway, on twins of engine and outbox: what is answered, refused and recorded."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import httpx
import pytest

from serving.keys import KeyLimits
from serving.routing import RoutingTable
from serving.settings import ServingSettings
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


async def an_answer_carries_its_id_and_its_checkpoint_and_is_recorded() -> None:
    bench = Bench()
    answer = await bench.ask(user="anna", temperature=0.5, metadata={"app": "x"})
    assert answer.status_code == 200
    [record] = bench.outbox.interactions
    assert answer.headers["x-flywheel-response-id"] == answer.json()["id"] == record.response_id
    assert answer.headers["x-flywheel-checkpoint"] == answer.json()["model"] == BASE
    assert float(answer.headers["x-flywheel-overhead-ms"]) < 1000
    assert "x-flywheel-experiment" not in answer.headers
    assert (record.text, record.status, record.finish_reason) == ("Hello there.", "completed", "stop")
    assert (record.prompt_tokens, record.completion_tokens) == (5, 3)
    assert (record.alias, record.pinned, record.user, record.unit) == ("flash", False, "anna", "anna")
    assert record.parameters == {"temperature": 0.5}
    assert record.tags == {"app": "x"}
    assert record.traceparent == answer.headers["traceparent"]
    assert bench.engine.requests[0]["model"] == BASE
    assert "user" not in bench.engine.requests[0]


async def a_stream_hides_the_usage_that_was_not_asked_for_and_records_it() -> None:
    for asked in (False, True):
        bench = Bench()
        answer = await bench.ask(stream=True, **({"stream_options": {"include_usage": True}} if asked else {}))
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert ('"usage"' in answer.text) is asked
        assert answer.text.endswith("data: [DONE]\n\n")
        [record] = bench.outbox.interactions
        assert (record.text, record.completion_tokens, record.status) == ("Hello there.", 3, "completed")
        assert record.time_to_first_token_s is not None


async def a_client_that_leaves_a_stream_is_recorded_with_what_was_sent() -> None:
    bench = Bench(engine=ScriptedEngine(words=["a", "b", "c", "d"], pause_s=0.05))
    scope = await chat_scope({"stream": True})
    left = asyncio.Event()
    sent: list[bytes] = []
    body = iter([{"type": "http.request", "body": json.dumps({**ASK, "stream": True}).encode()}])

    async def receive() -> dict[str, Any]:
        for message in body:
            return message
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message.get("body", b""))
        if b'"b"' in sent[-1]:
            left.set()

    await bench.app(scope, receive, send)
    [record] = bench.outbox.interactions
    assert (record.status, record.text, record.completion_tokens) == ("client_abort", "ab", None)
    assert bench.engine.calls[0].cancelled
    assert bench.gateway.under_way == 0


async def a_body_that_never_comes_is_given_up_and_its_slot_comes_back() -> None:
    bench = Bench(settings=ServingSettings(body_timeout_s=0.1))
    body = iter([{"type": "http.request", "body": b'{"model"', "more_body": True}])
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        for message in body:
            return message
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await asyncio.wait_for(bench.app(await chat_scope({}), receive, send), 2)
    assert sent[0]["status"] == 408
    assert bench.gateway.under_way == 0
    assert bench.outbox.interactions == []


async def a_request_counts_against_its_key_while_its_body_is_still_coming() -> None:
    table = build_table()
    [(digest, key)] = table.keys.items()
    narrow = build_table(keys={digest: replace(key, limits=KeyLimits(concurrency=1))})
    bench = Bench(router=StillRouter(narrow))
    received: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    received.put_nowait({"type": "http.request", "body": json.dumps(ASK).encode(), "more_body": True})
    first = asyncio.create_task(bench.app(await chat_scope({}), received.get, send))
    await asyncio.sleep(0.05)
    assert received.empty()
    check_error(await bench.ask(), 429)
    received.put_nowait({"type": "http.request", "body": b"", "more_body": False})
    await asyncio.wait_for(first, 2)
    assert sent[0]["status"] == 200
    assert (await bench.ask()).status_code == 200


async def a_client_that_leaves_before_its_answer_is_recorded() -> None:
    bench = Bench(engine=ScriptedEngine(pause_s=5))
    body = iter([{"type": "http.request", "body": json.dumps(ASK).encode()}])

    async def receive() -> dict[str, Any]:
        for message in body:
            return message
        await asyncio.sleep(0.05)
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        pass

    await asyncio.wait_for(bench.app(await chat_scope({}), receive, send), 2)
    [record] = bench.outbox.interactions
    assert (record.status, record.completion_tokens) == ("client_abort", None)
    assert bench.engine.calls[0].cancelled


async def chat_scope(_: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/chat/completions",
        "raw_path": b"/v1/chat/completions",
        "query_string": b"",
        "root_path": "",
        "headers": [(b"authorization", f"Bearer {SECRET}".encode())],
        "client": ("127.0.0.1", 1),
        "server": ("gateway", 80),
    }


async def an_engine_that_dies_is_told_and_recorded() -> None:
    bench = Bench(engine=ScriptedEngine(fail_after=2))
    streamed = await bench.ask(stream=True)
    assert streamed.status_code == 200
    assert '"error"' in streamed.text
    check_error(await bench.ask(), 502, "upstream_error")
    statuses = [(record.status, record.text, record.error is not None) for record in bench.outbox.interactions]
    assert statuses == [("upstream_error", "Hello there", True), ("upstream_error", None, True)]


async def a_late_answer_is_a_timeout() -> None:
    bench = Bench(engine=ScriptedEngine(pause_s=0.2), settings=ServingSettings(request_timeout_s=0.3))
    check_error(await bench.ask(), 504, "timeout")
    streamed = await bench.ask(stream=True)
    assert '"code": "timeout"' in streamed.text
    assert [record.status for record in bench.outbox.interactions] == ["timeout", "timeout"]
    assert bench.outbox.interactions[1].text == "Hello"


async def an_answer_with_store_false_is_counted_and_its_content_is_not_kept() -> None:
    bench = Bench()
    await bench.ask(store=False, temperature=0.5, documents=[{"text": "secret"}], tools=[{"type": "secret"}])
    [record] = bench.outbox.interactions
    assert record.parameters == {"temperature": 0.5}
    assert "secret" not in record.model_dump_json()
    assert (record.content_kept, record.text, record.messages) == (False, None, None)
    assert record.completion_tokens == 3


async def the_experiment_decides_the_checkpoint_and_is_told() -> None:
    bench = Bench(router=StillRouter(build_table(**build_experiments(build_experiment()))))
    answers = [await bench.ask(user=f"user-{number}") for number in range(20)]
    seen = {answer.headers["x-flywheel-checkpoint"] for answer in answers}
    assert seen == {BASE, CANDIDATE}
    assert {answer.headers["x-flywheel-experiment"] for answer in answers} == {"exp-1"}
    again = await bench.ask(user="user-3")
    assert again.headers["x-flywheel-checkpoint"] == answers[3].headers["x-flywheel-checkpoint"]
    pinned = await bench.ask(user="user-3", model=CANDIDATE)
    assert "x-flywheel-experiment" not in pinned.headers
    record = bench.outbox.interactions[-1]
    assert (record.pinned, record.experiment_id, record.propensity) == (True, None, None)
    assert {record.propensity for record in bench.outbox.interactions[:-1]} == {0.5}


async def a_comparison_is_blind_and_its_order_is_random_and_recorded() -> None:
    bench = Bench(router=StillRouter(build_table(**build_experiments(build_experiment()))))
    firsts = []
    async with bench.client() as client:
        for _ in range(40):
            answer = await client.post("/v1/comparisons", json=ASK)
            assert answer.status_code == 200
            assert BASE not in answer.text + str(answer.headers)
            assert CANDIDATE not in answer.text + str(answer.headers)
            body = answer.json()
            assert (body["object"], [one["position"] for one in body["answers"]]) == ("comparison", [0, 1])
            records = {record.response_id: record for record in bench.outbox.interactions}
            first, second = (records[one["response_id"]] for one in body["answers"])
            assert {first.checkpoint_id, second.checkpoint_id} == {BASE, CANDIDATE}
            assert (first.position, second.position) == (0, 1)
            assert first.comparison_id == second.comparison_id == body["id"]
            assert (first.experiment_id, first.propensity) == ("exp-1", None)
            firsts.append(first.checkpoint_id)
    assert 5 < firsts.count(BASE) < 35


async def a_comparison_without_an_experiment_samples_one_checkpoint_twice() -> None:
    bench = Bench()
    async with bench.client() as client:
        assert (await client.post("/v1/comparisons", json={**ASK, "seed": 7})).status_code == 200
        named = await client.post("/v1/comparisons", json={**ASK, "checkpoints": [BASE, CANDIDATE]})
    assert named.status_code == 200
    assert [record.checkpoint_id for record in bench.outbox.interactions] == [BASE, BASE, BASE, CANDIDATE]
    assert [request["seed"] for request in bench.engine.requests[:2]] == [7, 8]
    assert bench.outbox.interactions[-1].pinned


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": "yes"}, "stream"),
        ({"n": 2}, "n"),
        ({"checkpoints": ["a"]}, "checkpoints"),
        ({"model": None}, "model"),
    ],
)
async def a_wrong_comparison_names_its_field(fields: dict[str, Any], param: str) -> None:
    async with Bench().client() as client:
        error = check_error(await client.post("/v1/comparisons", json={**ASK, **fields}), 400)
    assert error["param"] == param


async def two_answers_of_which_one_failed_are_both_told_as_upstream_errors() -> None:
    bench = Bench(engine=HalfDeadEngine())
    async with bench.client() as client:
        check_error(await client.post("/v1/comparisons", json=ASK), 502)
    assert [record.status for record in bench.outbox.interactions] == ["upstream_error", "upstream_error"]


class HalfDeadEngine(ScriptedEngine):
    """Fails the first call, and is slow with the next."""

    def call(self, *arguments: Any) -> Any:
        self.calls.append(ScriptedEngine(pause_s=5) if self.calls else ScriptedEngine(fail_after=0))
        return self.calls[-1].call(*arguments)


async def only_few_strangers_wait_for_a_new_reading_of_the_keys() -> None:
    router = SlowRouter()
    bench = Bench(router=router)
    async with bench.client("fw-unknown") as client:
        answers = await asyncio.gather(
            *(client.get("/v1/models", headers={"authorization": f"Bearer fw-{number}"}) for number in range(60))
        )
    assert {answer.status_code for answer in answers} == {401}
    assert router.asked == 16


class SlowRouter(StillRouter):
    """A router that counts who waits for a fresh table."""

    asked = 0

    async def fresh(self) -> RoutingTable:
        self.asked += 1
        await asyncio.sleep(0.2)
        return self.table


async def no_endpoint_answers_without_a_key_but_health() -> None:
    bench = Bench()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(bench.app), base_url="http://gateway") as client:
        for method, path in (
            ("POST", "/v1/chat/completions"),
            ("POST", "/v1/comparisons"),
            ("POST", "/v1/feedback"),
            ("GET", "/v1/models"),
        ):
            check_error(await client.request(method, path, json=ASK), 401, "missing_api_key")
        assert (await client.get("/openapi.json")).status_code == 404
        assert (await client.get("/health/live")).status_code == 200
        assert (await client.get("/health/ready")).status_code == 200
    async with bench.client("fw-wrong") as client:
        check_error(await client.post("/v1/chat/completions", json=ASK), 401, "invalid_api_key")
    assert not bench.engine.requests


async def a_key_without_the_scope_is_refused() -> None:
    table = build_table()
    [(digest, key)] = table.keys.items()
    limited = type(key)(key.key_id, key.name, frozenset({"inference"}))
    bench = Bench(router=StillRouter(build_table(keys={digest: limited})))
    async with bench.client() as client:
        check_error(await client.post("/v1/feedback", json={}), 403, "missing_scope")
        check_error(await client.post("/v1/comparisons", json={**ASK, "checkpoints": [BASE, CANDIDATE]}), 403)
        assert (await client.post("/v1/comparisons", json=ASK)).status_code == 200


async def an_unknown_path_method_or_model_has_its_own_status() -> None:
    bench = Bench()
    async with bench.client() as client:
        check_error(await client.get("/v2/nothing"), 404, "not_found")
        check_error(await client.get("/v1/chat/completions"), 405, "method_not_allowed")
        error = check_error(await client.post("/v1/chat/completions", json={**ASK, "model": "gpt"}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")


async def a_body_over_the_bound_is_refused_whole_or_in_pieces() -> None:
    bench = Bench(settings=ServingSettings(max_body_bytes=100))

    async def pieces() -> Any:
        for _ in range(100):
            yield b"x" * 10

    async with bench.client() as client:
        check_error(await client.post("/v1/feedback", content=b"x" * 101), 413, "body_too_large")
        check_error(await client.post("/v1/feedback", content=pieces()), 413, "body_too_large")


async def a_refusal_by_the_engine_keeps_its_status_and_is_no_interaction() -> None:
    refusal = {"error": {"message": "too long", "type": "BadRequestError", "param": "messages", "code": 400}}
    bench = Bench(engine=ScriptedEngine(refusal=(400, json.dumps(refusal).encode())))
    for stream in (False, True):
        error = check_error(await bench.ask(stream=stream), 400)
        assert (error["message"], error["param"]) == ("too long", "messages")
    assert not bench.outbox.events


async def a_request_over_the_bound_is_refused_at_once_and_slots_come_back() -> None:
    bench = Bench(engine=ScriptedEngine(pause_s=0.1), settings=ServingSettings(max_concurrency=2))
    running = [asyncio.ensure_future(bench.ask(stream=number == 0)) for number in range(2)]
    await asyncio.sleep(0.05)
    refused = await bench.ask()
    check_error(refused, 503, "overloaded")
    assert refused.headers["retry-after"] == "1"
    assert [answer.status_code for answer in await asyncio.gather(*running)] == [200, 200]
    assert (await bench.ask()).status_code == 200
    assert bench.gateway.under_way == 0


async def the_gateway_is_not_ready_while_its_alias_can_not_be_served() -> None:
    bench = Bench(router=StillRouter(build_table(servable={})))
    async with bench.client() as client:
        assert (await client.get("/health/ready")).status_code == 503
        assert (await client.get("/health/live")).status_code == 200
        refused = await client.post("/v1/chat/completions", json=ASK)
        check_error(refused, 503, "model_not_ready")
        bench.router.table = build_table()
        assert (await client.get("/health/ready")).status_code == 200
        names = [one["id"] for one in (await client.get("/v1/models")).json()["data"]]
    assert names == ["flash", BASE, CANDIDATE]


async def a_fault_of_ours_is_told_without_its_trace() -> None:
    bench = Bench()
    bench.outbox.error = RuntimeError("secret detail")
    answer = await bench.ask()
    check_error(answer, 500, "internal_error")
    assert "secret detail" not in answer.text


async def a_refusal_that_comes_inside_a_stream_is_a_refusal() -> None:
    refusal = b'data: {"error": {"message": "no such token", "type": "x", "param": "logit_bias", "code": 400}}\n\n'
    bench = Bench(engine=ScriptedEngine(refusal=(200, refusal)))
    error = check_error(await bench.ask(stream=True), 400)
    assert (error["message"], error["param"]) == ("no such token", "logit_bias")
    assert not bench.outbox.events
