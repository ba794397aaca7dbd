"""Laws of the REST API on the real engine: the official clients work unchanged, and every API says errors alike."""

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from serving.dialects import DIALECTS
from serving.keys import KeyLimits, create_key, revoke_key
from tests.helpers.documents import API, programs
from tests.helpers.platform import ASK, Platform

pytestmark = [pytest.mark.real, pytest.mark.engine]

QUESTION = "What is the capital of France?"
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": QUESTION}]},
    "/v1/completions": {"prompt": QUESTION},
    "/v1/responses": {"input": QUESTION},
    "/v1/messages": {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 8},
}
TOOL = {
    "name": "weather",
    "description": "The weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
by_api = pytest.mark.parametrize("path", [dialect.path for dialect in DIALECTS])


@pytest.fixture(scope="module")
def claude(platform: Platform) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=platform.url, api_key=platform.secret, timeout=120, max_retries=0)


def the_openai_client_completes_text_whole_and_streamed(platform: Platform) -> None:
    client = platform.openai()
    ask: dict[str, Any] = {"model": "flash", "prompt": "The capital of France is", "temperature": 0, "max_tokens": 8}
    whole = client.completions.create(**ask, logprobs=1)
    pieces = list(client.completions.create(**ask, stream=True))
    assert "Paris" in whole.choices[0].text
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
    assert whole.choices[0].logprobs is not None
    record = platform.interactions()[whole.id]
    assert (record.endpoint, record.text, record.status) == ("/v1/completions", whole.choices[0].text, "length")
    assert platform.wait_for_interaction(pieces[0].id).completion_tokens == record.completion_tokens == 8


def the_openai_client_gets_responses_whole_and_streamed(platform: Platform) -> None:
    client = platform.openai()
    ask: dict[str, Any] = {"model": "flash", "input": QUESTION, "temperature": 0, "max_output_tokens": 16}
    whole = client.responses.create(**ask, instructions="You are helpful.")
    assert "Paris" in whole.output_text
    record = platform.interactions()[whole.id]
    assert whole.usage is not None
    assert (record.text, record.completion_tokens) == (whole.output_text, whole.usage.output_tokens)
    assert record.messages is not None
    assert [message["role"] for message in record.messages] == ["system", "user"]
    events = list(client.responses.create(**ask, stream=True))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert "Paris" in text
    assert events[-1].type in ("response.completed", "response.incomplete")
    assert platform.wait_for_interaction(events[-1].response.id).text == text


def the_anthropic_client_gets_messages_whole_and_streamed(platform: Platform, claude: anthropic.Anthropic) -> None:
    ask: dict[str, Any] = {
        "model": "flash",
        "max_tokens": 16,
        "extra_body": {"temperature": 0},
        "messages": [{"role": "user", "content": QUESTION}],
        "metadata": {"user_id": "ada"},
    }
    whole = claude.messages.create(**ask, system="You are helpful.")
    assert "Paris" in whole.content[0].text
    record = platform.interactions()[whole.id]
    assert (record.text, record.completion_tokens, record.user) == (
        whole.content[0].text,
        whole.usage.output_tokens,
        "ada",
    )
    with claude.messages.stream(**ask) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert "Paris" in text
    assert platform.wait_for_interaction(final.id).text == text
    assert claude.messages.count_tokens(model="flash", messages=ask["messages"]).input_tokens > 5


def the_asynchronous_clients_work_side_by_side(platform: Platform) -> None:
    async def ask_all() -> list[str]:
        ours = openai.AsyncOpenAI(base_url=f"{platform.url}/v1", api_key=platform.secret, timeout=120)
        theirs = anthropic.AsyncAnthropic(base_url=platform.url, api_key=platform.secret, timeout=120)

        async def chat() -> str:
            answer = await ours.chat.completions.create(**ASK)
            return answer.choices[0].message.content or ""

        async def streamed() -> str:
            stream = await ours.chat.completions.create(**ASK, stream=True)
            return "".join([piece.choices[0].delta.content or "" async for piece in stream])

        async def message() -> str:
            answer = await theirs.messages.create(
                model="flash",
                max_tokens=16,
                messages=[{"role": "user", "content": QUESTION}],
                extra_body={"temperature": 0},
            )
            return answer.content[0].text

        async with ours, theirs:
            return list(await asyncio.gather(chat(), streamed(), message()))

    assert all("Paris" in text for text in asyncio.run(ask_all()))


def the_tools_structured_output_logprobs_n_stop_and_seed_do_what_vllm_documents(platform: Platform) -> None:
    client = platform.openai()
    called = client.chat.completions.create(
        **{**ASK, "max_tokens": 64},
        tools=[{"type": "function", "function": TOOL}],
        tool_choice={"type": "function", "function": {"name": "weather"}},
    )
    [call] = called.choices[0].message.tool_calls or []
    assert set(json.loads(call.function.arguments)) == {"city"}
    shape = {"name": "city", "schema": {**TOOL["parameters"], "additionalProperties": False}}
    structured = client.chat.completions.create(
        **{**ASK, "max_tokens": 64}, response_format={"type": "json_schema", "json_schema": shape}
    )
    assert set(json.loads(structured.choices[0].message.content or "")) == {"city"}
    many = client.chat.completions.create(**{**ASK, "temperature": 1.0}, n=3, logprobs=True, top_logprobs=2)
    assert [choice.index for choice in many.choices] == [0, 1, 2]
    assert many.choices[0].logprobs is not None
    stopped = client.chat.completions.create(**ASK, stop=["France"])
    assert "France" not in (stopped.choices[0].message.content or "")
    same = [client.chat.completions.create(**{**ASK, "temperature": 1.0}, seed=7).choices[0].message for _ in "ab"]
    assert same[0].content == same[1].content


def tokens_are_counted_and_turned_back(platform: Platform) -> None:
    with platform.client() as client:
        tokens = client.post("/tokenize", json={"model": "flash", "prompt": QUESTION}).json()["tokens"]
        back = client.post("/detokenize", json={"model": "flash", "tokens": tokens}).json()
    assert back["prompt"] == QUESTION


def one_model_is_told_by_its_name(platform: Platform) -> None:
    client = platform.openai()
    assert client.models.retrieve("flash").id == "flash"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


def bad_input_is_told_in_the_same_words_by_every_api(platform: Platform) -> None:
    told: dict[str, set[tuple[int, str | None, str]]] = {}
    with platform.client() as client:
        for path, good in GOOD.items():
            body = {"model": "flash", **good}
            cases: dict[str, httpx.Response] = {
                "json": client.post(path, content=b"{"),
                "list": client.post(path, content=b"[]"),
                "encoding": client.post(path, content=b'{"model": "\\xff"}'.replace(b"\\xff", bytes([255]))),
                "model": client.post(path, json={**body, "model": "nobody"}),
                "no model": client.post(path, json=good),
                "model type": client.post(path, json={**body, "model": 3}),
                "temperature": client.post(path, json={**body, "temperature": "hot"}),
                "too large": client.post(path, content=b" " * (platform.settings.max_body_bytes + 1)),
                "wrong key": client.post(path, json=body, headers={"authorization": "Bearer fw-wrong"}),
                "method": client.get(path),
            }
            for case, answer in cases.items():
                error = answer.json()["error"]
                assert set(error) == {"message", "type", "param", "code"}, (path, case)
                assert answer.headers["x-flywheel-response-id"]
                told.setdefault(case, set()).add(
                    (answer.status_code, error["code"], error["message"].replace(path, ""))
                )
        unknown = client.post("/v1/nothing", json={})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "not_found")
        too_long = [
            client.post(path, json={"model": "flash", **long})
            for path, long in (
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 3000}]}),
                ("/v1/completions", {"prompt": "word " * 3000}),
                ("/v1/responses", {"input": "word " * 3000}),
                ("/v1/messages", {"messages": [{"role": "user", "content": "word " * 3000}], "max_tokens": 8}),
            )
        ]
        for answer in too_long:
            assert answer.status_code == 400, answer.text
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert {case: [entry[0] for entry in entries] for case, entries in told.items()} == {
        "json": [400],
        "list": [400],
        "encoding": [400],
        "model": [404],
        "no model": [400],
        "model type": [400],
        "temperature": [400],
        "too large": [413],
        "wrong key": [401],
        "method": [405],
    }


def a_key_over_its_limit_is_told_when_to_come_back_and_a_revoked_one_stops(platform: Platform) -> None:
    with platform.database() as connection:
        key_id, secret = create_key(connection, "narrow", ["inference"], KeyLimits(requests_per_minute=2))
    client = openai.OpenAI(base_url=f"{platform.url}/v1", api_key=secret, max_retries=0)
    first = client.chat.completions.with_raw_response.create(**ASK)
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    client.chat.completions.create(**ASK)
    with pytest.raises(openai.RateLimitError) as refused:
        client.chat.completions.create(**ASK)
    assert 1 <= int(refused.value.response.headers["retry-after"]) <= 30
    assert refused.value.code == "rate_limit_exceeded"
    with platform.database() as connection:
        assert revoke_key(connection, key_id)
    time.sleep(3 * platform.settings.poll_interval_s)
    with pytest.raises(openai.AuthenticationError):
        client.models.list()


def the_metrics_tell_what_gateway_and_engine_did(platform: Platform) -> None:
    with platform.client() as client:
        text = client.get("/metrics").text
    assert 'endpoint="/v1/chat/completions",replica="gateway-' in text
    assert "vllm:num_requests_running" in text


@pytest.mark.parametrize(("where", "program"), programs(API), ids=[where for where, _ in programs(API)])
def every_program_in_the_documents_runs(platform: Platform, tmp_path: Path, where: str, program: str) -> None:
    (tmp_path / ".flywheel").mkdir()
    (tmp_path / ".flywheel" / "api-key").write_text(platform.secret)
    here = program.replace(API, platform.url)
    ran = subprocess.run([sys.executable, "-c", here], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, f"{where}: {ran.stderr}"
    assert "Paris" in ran.stdout
    assert "202" in ran.stdout
