"""Laws of answers and checkpoints on the real engine."""

import json
import select
import shutil
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from serving.errors import CheckpointNotProven
from serving.experiment_plan import candidate_start
from serving.experiments import start_experiment, stop_experiment
from serving.registry import (
    Checkpoint,
    move_alias,
    proofs,
    register_checkpoint,
    resolve_alias,
    retire_checkpoint,
)
from tests.helpers.adapters import build_adapter
from tests.helpers.platform import ASK, Platform, wait_for

pytestmark = [pytest.mark.real, pytest.mark.engine]

BAD_MESSAGES: list[Any] = [
    [{"role": "user"}],
    [{"role": "nobody", "content": "x"}],
    [{"content": "x"}],
    [{"role": "user", "content": 3}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}]}],
    [{"role": "user", "content": [{"type": "nonsense"}]}],
    [{"role": "user", "content": {"a": 1}}],
    [{"role": "tool", "content": "x"}],
    [{"role": "user", "content": "word " * 3000}],
]
BAD_FIELDS: list[dict[str, Any]] = [
    {"max_tokens": 100_000},
    {"logprobs": True, "top_logprobs": 20_000},
    {"logit_bias": {"a": 1}},
    {"logit_bias": {"9999999": 1}},
    {"response_format": {"type": "nonsense"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 3}}}},
    {"tools": [{"type": "function"}]},
    {"tool_choice": "required"},
    {"structured_outputs": {"regex": "("}},
    {"top_k": -5},
    {"min_p": 7},
    {"prompt_logprobs": -3},
    {"allowed_token_ids": [10**9]},
    {"bad_words": [3]},
    {"stop_token_ids": ["x"]},
    {"chat_template": "{{ 1/0 }}"},
    {"chat_template_kwargs": 3},
    {"priority": "high"},
    {"truncate_prompt_tokens": -7},
    {"min_tokens": 500},
    {"echo": 3},
    {"vllm_xargs": 3},
    {"kv_transfer_params": 3},
    {"repetition_penalty": -1},
    {"top_k": 10**30},
]


@pytest.fixture(scope="module")
def adapter(platform: Platform, base_model: Path, base_id: str) -> Checkpoint:
    """A proven adapter on the running engine."""
    checkpoint = build_adapter(base_model, platform.home / "adapters", parent_id=base_id, name="flash-r0001", seed=1)
    with platform.database() as connection:
        register_checkpoint(connection, checkpoint)
    wait_for_proof(platform, checkpoint.checkpoint_id)
    return checkpoint


def wait_for_proof(platform: Platform, checkpoint_id: str, within_s: float = 60) -> str:
    deadline = time.monotonic() + within_s
    with platform.database() as connection:
        while not (found := proofs(connection, checkpoint_id)):
            assert time.monotonic() < deadline, "the engine did not try the checkpoint"
            time.sleep(0.2)
    print(checkpoint_id, found[0].status, found[0].proof["reason"], found[0].proof.get("slope"))
    time.sleep(3 * platform.settings.poll_interval_s)  # until the gateway has read it too
    return found[0].status


def the_real_engine_answers_paris(platform: Platform) -> None:
    client = platform.openai()
    whole = client.chat.completions.create(**ASK)
    assert "Paris" in (whole.choices[0].message.content or "")
    assert whole.usage is not None
    pieces = list(client.chat.completions.create(**ASK, stream=True))
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text == whole.choices[0].message.content
    assert {piece.id for piece in pieces} != {whole.id}
    assert all(piece.usage is None for piece in pieces)
    with_usage = list(client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True}))
    assert with_usage[-1].usage == whole.usage
    names = [model.id for model in client.models.list()]
    assert names[0] == "flash"
    assert whole.model in names


def an_answer_tells_its_ids_and_lands_in_the_outbox(platform: Platform, base_id: str) -> None:
    with platform.client() as client:
        answer = client.post("/v1/chat/completions", json={**ASK, "user": "anna"})
        streamed = client.post("/v1/chat/completions", json={**ASK, "stream": True})
    record = platform.interactions()[answer.json()["id"]]  # durable before the answer came
    assert answer.headers["x-flywheel-response-id"] == answer.json()["id"]
    assert answer.headers["x-flywheel-checkpoint"] == answer.json()["model"] == record.checkpoint_id == base_id
    assert "Paris" in (record.text or "")
    assert (record.status, record.user, record.unit) == ("completed", "anna", "anna")
    assert (record.prompt_tokens, record.completion_tokens) == (
        answer.json()["usage"]["prompt_tokens"],
        answer.json()["usage"]["completion_tokens"],
    )
    second = platform.wait_for_interaction(streamed.headers["x-flywheel-response-id"])
    assert (second.text, second.completion_tokens) == (record.text, record.completion_tokens)
    assert second.time_to_first_token_s is not None


@pytest.mark.parametrize("fields", [*({"messages": messages} for messages in BAD_MESSAGES), *BAD_FIELDS], ids=str)
def bad_input_is_a_4xx_in_openais_shape(platform: Platform, fields: dict[str, Any]) -> None:
    with platform.client() as client:
        for stream in (False, True):
            answer = client.post("/v1/chat/completions", json={**ASK, **fields, "stream": stream})
            if answer.status_code == 200:
                assert '"error"' not in answer.text  # accepted, as vLLM takes what it does not know
                continue
            assert 400 <= answer.status_code < 500, answer.text
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            assert "Traceback" not in answer.text
            assert answer.headers["x-flywheel-response-id"]


def the_engine_lives_on_after_bad_input(platform: Platform, base_model: Path) -> None:
    vocabulary = json.loads((base_model / "config.json").read_text())["vocab_size"]
    with platform.client() as client:
        for ids in ([vocabulary], [[1, vocabulary]], [-1], [10**9]):
            refused = client.post("/v1/completions", json={"model": "flash", "prompt": ids, "max_tokens": 2})
            assert refused.status_code == 400, refused.text
        assert "Paris" in client.post("/v1/chat/completions", json=ASK).text


def a_client_that_leaves_in_mid_stream_frees_the_engine(platform: Platform) -> None:
    long = {**ASK, "stream": True, "max_tokens": 900, "ignore_eos": True}
    with platform.client() as client, client.stream("POST", "/v1/chat/completions", json=long) as answer:
        response_id = answer.headers["x-flywheel-response-id"]
        for _, _line in zip(range(8), answer.iter_lines(), strict=False):
            pass
        wait_for(lambda: platform.running_in_the_engine() == 1, 5, "the engine does not work on it")
    wait_for(lambda: platform.running_in_the_engine() == 0, 5, "the engine works for nobody")
    record = platform.wait_for_interaction(response_id)
    assert record.status == "client_abort"
    assert record.text
    assert record.completion_tokens is None


@pytest.mark.parametrize("stream", [False, True])
def a_client_that_leaves_during_the_prefill_frees_the_engine(platform: Platform, stream: bool) -> None:
    words = f"{stream} word " * 280
    long = {"max_tokens": 400, "ignore_eos": True, "messages": [{"role": "user", "content": words}]}
    body = {**ASK, **long, "stream": stream, "user": f"left-{stream}"}
    with socket.create_connection(("127.0.0.1", platform.settings.port), timeout=30) as connection:
        sent = json.dumps(body).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {platform.secret}\r\n"
        connection.sendall(f"{head}content-length: {len(sent)}\r\n\r\n".encode() + sent)
        wait_for(lambda: platform.running_in_the_engine() == 1, 30, "the engine did not begin")
        assert not select.select([connection], [], [], 0)[0], "it answered already: the prompt is too short"
    wait_for(lambda: platform.running_in_the_engine() == 0, 5, "the engine works for nobody")
    wait_for(lambda: any(one.user == body["user"] for one in platform.interactions().values()), 20, "not recorded")
    [record] = [one for one in platform.interactions().values() if one.user == body["user"]]
    assert (record.status, record.text or "", record.completion_tokens) == ("client_abort", "", None)


def an_adapter_is_loaded_proven_and_assigned_without_a_restart(
    platform: Platform, adapter: Checkpoint, base_id: str
) -> None:
    assert wait_for_proof(platform, adapter.checkpoint_id) == "proven"
    with platform.client() as client:
        ask = {**ASK, "logprobs": True}
        pinned = client.post("/v1/chat/completions", json={**ask, "model": adapter.checkpoint_id})
        assert pinned.headers["x-flywheel-checkpoint"] == pinned.json()["model"] == adapter.checkpoint_id
        base = client.post("/v1/chat/completions", json=ask)
        assert base.headers["x-flywheel-checkpoint"] == base_id
        first, second = (one.json()["choices"][0]["logprobs"]["content"][0]["logprob"] for one in (base, pinned))
        assert abs(first - second) > 0.02
        with platform.database() as connection:
            plan = candidate_start("flash", base_id, adapter.checkpoint_id, 0.5, shadow_share=1.0)
            experiment = start_experiment(connection, plan)
        try:
            time.sleep(3 * platform.settings.poll_interval_s)
            seen: set[str] = set()
            for number in range(40):  # each user is on either side with probability one half
                answer = client.post("/v1/chat/completions", json={**ASK, "user": f"u{number}", "max_tokens": 2})
                assert answer.headers["x-flywheel-experiment"] == experiment.experiment_id
                seen.add(answer.headers["x-flywheel-checkpoint"])
                if len(seen) == 2:
                    break
            assert seen == {base_id, adapter.checkpoint_id}
            pair = client.post("/v1/comparisons", json=ASK)
            streamed = client.post("/v1/comparisons", json={**ASK, "stream": True})
            wait_for(
                lambda: any(one.shadow_of for one in platform.interactions().values()), 20, "no shadow was recorded"
            )
        finally:
            with platform.database() as connection:
                stop_experiment(connection, experiment.experiment_id, "stopped", {"reason": "the test is over"})
    records = platform.interactions()
    both = [records[one["response_id"]] for one in pair.json()["answers"]]
    assert {one.checkpoint_id for one in both} == {base_id, adapter.checkpoint_id}
    assert [one.position for one in both] == [0, 1]
    events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    for shown in events[0]["answers"]:
        told = "".join(one["delta"].get("content") or "" for one in events[1:] if one["position"] == shown["position"])
        assert records[shown["response_id"]].text == told
        assert records[shown["response_id"]].position == shown["position"]
    for secret in (base_id, adapter.checkpoint_id):
        assert secret not in pair.text + str(pair.headers) + streamed.text + str(streamed.headers)
    for shadow in (one for one in records.values() if one.shadow_of):
        live = records[shadow.shadow_of]
        assert (live.checkpoint_id, shadow.checkpoint_id) == (base_id, adapter.checkpoint_id)
        assert (shadow.prompt_hash, shadow.exposed_at, shadow.status) == (live.prompt_hash, None, live.status)


def an_adapter_whose_weights_silently_did_not_apply_is_refused_for_that(
    platform: Platform, adapter: Checkpoint, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(adapter.path, tmp_path / "silent")
    weights = tmp_path / "silent" / "adapter_model.safetensors"
    nothing = {name: value * 0 if "lora_B" in name else value for name, value in load_file(weights).items()}
    save_file(nothing, weights)
    silent = adapter.model_copy(update={"checkpoint_id": "flash-r0004-silent", "path": str(tmp_path / "silent")})
    with platform.database() as connection:
        register_checkpoint(connection, silent)
        assert wait_for_proof(platform, silent.checkpoint_id) == "refused"
        proof = proofs(connection, silent.checkpoint_id)[0].proof
    assert "the adapter's weights did not apply" in proof["reason"]
    assert abs(proof["slope"]) < 0.2
    assert len(proof["sequences"]) == len(silent.manifest["canaries"])


def an_adapter_that_is_not_what_its_manifest_says_gets_no_traffic(
    platform: Platform, adapter: Checkpoint, base_id: str
) -> None:
    canaries = [
        {**one, "log_probabilities": [value - 1.5 for value in one["log_probabilities"]]}
        for one in adapter.manifest["canaries"]
    ]
    liar = adapter.model_copy(
        update={"checkpoint_id": "flash-r0002-liar00", "manifest": {**adapter.manifest, "canaries": canaries}}
    )
    broken = adapter.model_copy(update={"checkpoint_id": "flash-r0003-gone00", "path": "/nowhere"})
    with platform.database() as connection:
        for checkpoint in (liar, broken):
            register_checkpoint(connection, checkpoint)
            assert wait_for_proof(platform, checkpoint.checkpoint_id) == "refused"
            with pytest.raises(CheckpointNotProven, match="refused"):
                move_alias(connection, "flash", checkpoint.checkpoint_id, "a test")
            with platform.client() as client:
                refused = client.post("/v1/chat/completions", json={**ASK, "model": checkpoint.checkpoint_id})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_not_ready")
        assert resolve_alias(connection, "flash") == base_id


@pytest.mark.parametrize("fault", ["a token that does not exist", "longer than the context"])
def canaries_that_the_engine_does_not_take_refuse_their_adapter_and_nothing_else(
    platform: Platform, adapter: Checkpoint, base_model: Path, fault: str
) -> None:
    vocabulary = json.loads((base_model / "config.json").read_text())["vocab_size"]
    ids = [vocabulary] * 4 if fault.startswith("a token") else [1] * (platform.settings.max_model_len + 1)
    row = [-1.0] * (len(ids) - 1)
    canary = {"token_ids": ids, "log_probabilities": row, "parent_log_probabilities": row}
    odd = adapter.model_copy(
        update={"checkpoint_id": f"flash-odd-{len(ids)}", "manifest": {**adapter.manifest, "canaries": [canary]}}
    )
    with platform.database() as connection:
        register_checkpoint(connection, odd)
        assert wait_for_proof(platform, odd.checkpoint_id) == "refused"
        retire_checkpoint(connection, odd.checkpoint_id)
    with platform.client() as client:
        assert client.post("/v1/chat/completions", json=ASK).status_code == 200


def a_retired_adapter_is_unknown_again(platform: Platform, adapter: Checkpoint) -> None:
    with platform.database() as connection:
        retire_checkpoint(connection, adapter.checkpoint_id)
    time.sleep(4 * platform.settings.poll_interval_s)
    with platform.client() as client:
        refused = client.post("/v1/chat/completions", json={**ASK, "model": adapter.checkpoint_id})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


def every_listener_is_on_loopback(platform: Platform) -> None:
    open_to_all = [
        (process.name(), connection.laddr)
        for process in platform.family()
        for connection in process.net_connections(kind="tcp")
        if connection.status == "LISTEN" and connection.laddr.ip not in ("127.0.0.1", "::1", "::ffff:127.0.0.1")
    ]
    assert not open_to_all
