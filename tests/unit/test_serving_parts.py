"""Laws of serving's pure parts: assignment, capture, keys, canaries, the request reader, HAProxy's configuration."""

import asyncio
import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.asgi import call_asgi
from serving.canary import judge_canaries
from serving.capture import StreamCapture, capture_body
from serving.dialects import CHAT, ChatRequest
from serving.errors import InvalidRequest, MissingScope, Unauthenticated, UpstreamError
from serving.haproxy_launcher import bind_locally, say_not_ready, without_splicing
from serving.keys import ApiKey, check, digest_of, sent_secret
from serving.requests import parse_model, parse_object
from serving.settings import CanaryTolerance

TOLERANCE = CanaryTolerance()


def stream_of(words: list[str], usage: bool = True) -> bytes:
    chunks: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": {"content": word}}]} for word in words]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    if usage:
        chunks.append({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": len(words)}})
    events = [b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n" for chunk in chunks]
    return b"".join([*events, b"data: [DONE]\n\n"])


@given(st.lists(st.text(max_size=8), max_size=6), st.data())
def a_stream_cut_at_any_byte_is_captured_alike(words: list[str], data: st.DataObject) -> None:
    whole = stream_of(words)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    capture = StreamCapture(CHAT, hide_usage=False)
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    assert b"".join(capture.feed(piece) for piece in pieces) + capture.flush() == whole
    captured = capture.result()
    assert captured.text == "".join(words).replace("\0", "\ufffd")
    assert (captured.finish_reason, captured.prompt_tokens, captured.completion_tokens) == ("stop", 3, len(words))
    assert captured.status() == "completed"


@given(st.lists(st.text(max_size=20), max_size=6))
def a_usage_event_nobody_asked_for_is_hidden_and_nothing_else(words: list[str]) -> None:
    words = [*words, '"choices":[] "usage":{"a":1}']
    capture = StreamCapture(CHAT, hide_usage=True)
    assert capture.feed(stream_of(words)) == stream_of(words, usage=False)
    assert capture.result().completion_tokens == len(words)


def a_stream_that_breaks_off_is_never_completed_and_its_usage_is_unknown() -> None:
    capture = StreamCapture(CHAT, hide_usage=True)
    capture.feed(stream_of(["a", "b"])[:70])
    captured = capture.result()
    assert captured.text == "a"
    assert captured.completion_tokens is None
    assert captured.status("client_abort") == "client_abort"
    assert captured.status() == "upstream_error"


def an_error_inside_a_stream_is_an_upstream_error() -> None:
    capture = StreamCapture(CHAT, hide_usage=True)
    capture.feed(b'data: {"error":{"message":"out of memory"}}\n\n')
    assert capture.result().error == "out of memory"
    assert capture.result().status() == "upstream_error"


def an_answer_cut_by_its_length_says_so() -> None:
    body = {"choices": [{"message": {"content": "a"}, "finish_reason": "length"}]}
    captured = capture_body(CHAT, json.dumps(body).encode())
    assert captured.status() == "length"
    assert captured.completion_tokens is None


def a_key_is_checked_by_its_digest_and_its_scopes() -> None:
    key = ApiKey("key-1", "n", frozenset({"inference"}))
    keys = {digest_of("fw-secret"): key}
    assert check(keys, "fw-secret", "inference") is key
    with pytest.raises(MissingScope):
        check(keys, "fw-secret", "admin")
    with pytest.raises(Unauthenticated):
        check(keys, "fw-other", "inference")
    assert sent_secret("bearer fw-secret") == "fw-secret"
    for wrong in (None, "", "fw-secret", "Basic fw-secret", "Bearer "):
        with pytest.raises(Unauthenticated):
            sent_secret(wrong)


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"{", "invalid_json"),
        (b"[]", "invalid_json"),
        (b'"text"', "invalid_json"),
        (b"", "invalid_json"),
        (b'{"a": NaN}', "invalid_json"),
        (b'{"a": 1e999}', "invalid_json"),
        (b'{"a": ' + b"9" * 5000 + b"}", "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}", "invalid_json"),
        (b'{"a": ' + b"[" * 450 + b'"\\u0000"' + b"]" * 450 + b"}", "invalid_json"),
        (b"\xff\xfe", "invalid_encoding"),
        (b'{"a": "\\ud800"}', "invalid_encoding"),
        (b'{"a": ["\\u0000"]}', "invalid_encoding"),
    ],
)
def bad_json_is_refused_with_a_reason(raw: bytes, code: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_object(raw)
    assert caught.value.code == code


@given(st.recursive(st.none() | st.booleans() | st.text() | st.floats(allow_nan=False), st.lists))
def every_json_value_is_read_or_refused(value: Any) -> None:
    with contextlib.suppress(InvalidRequest):
        parse_object(json.dumps({"model": value, "messages": value}).encode())
    with contextlib.suppress(InvalidRequest):
        parse_model(json.dumps({"model": "m", "messages": value, "stop": value}).encode(), ChatRequest)


def a_backslash_u0000_that_is_text_is_kept() -> None:
    assert parse_object(rb'{"a": "\\u0000"}') == {"a": "\\u0000"}


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("messages", [], "messages"),
        ("messages", "hi", "messages"),
        ("messages", [1], "messages[0]"),
        ("model", 3, "model"),
        ("model", "", "model"),
        ("temperature", "hot", "temperature"),
        ("temperature", 5, "temperature"),
        ("max_tokens", -1, "max_tokens"),
        ("max_tokens", 1.5, "max_tokens"),
        ("n", 0, "n"),
        ("seed", 2**70, "seed"),
        ("stream", "yes", "stream"),
        ("stream_options", {"include_usage": 3}, "stream_options.include_usage"),
        ("stop", [1], "stop"),
        ("metadata", {"a": 1}, "metadata.a"),
        ("store", 1, "store"),
        ("user", 1, "user"),
    ],
)
def a_wrong_field_is_named(field: str, value: Any, param: str) -> None:
    body = {"model": "flash", "messages": [{"role": "user", "content": "x"}], field: value}
    with pytest.raises(InvalidRequest) as caught:
        parse_model(json.dumps(body).encode(), ChatRequest)
    assert caught.value.param == param


def a_field_unknown_here_reaches_the_engine_and_ours_do_not() -> None:
    body = {"model": "flash", "messages": [{"role": "user", "content": "x"}], "top_k": 3, "user": "u", "store": False}
    request = parse_model(json.dumps(body).encode(), ChatRequest)
    assert set(request.for_engine) == {"model", "messages", "top_k"}
    assert request.parameters == {"top_k": 3}


REFERENCE = [[-1.0, -2.0, -0.5], [-3.0, -0.1]]
PARENT = [[-1.3, -1.6, -0.6], [-2.5, -0.4]]
NOISE = [[0.02, -0.03, 0.01], [-0.02, 0.02]]


def plus(first: list[list[float]], second: list[list[float]]) -> list[list[float]]:
    return [[a + b for a, b in zip(x, y, strict=True)] for x, y in zip(first, second, strict=True)]


def an_engine_that_shows_the_manifests_numbers_passes() -> None:
    assert judge_canaries(REFERENCE, plus(REFERENCE, NOISE), None, TOLERANCE).passed
    report = judge_canaries(REFERENCE, plus(REFERENCE, NOISE), PARENT, TOLERANCE)
    assert report.passed
    assert report.slope == pytest.approx(1, abs=0.2)


def an_adapter_that_did_not_apply_is_refused() -> None:
    lenient = CanaryTolerance(mean_nats=10, max_nats=10)
    report = judge_canaries(REFERENCE, plus(PARENT, NOISE), PARENT, lenient)
    assert not report.passed
    assert "did not apply" in report.reason
    assert not judge_canaries(REFERENCE, plus(PARENT, NOISE), PARENT, TOLERANCE).passed


def an_adapter_that_equals_its_parent_can_not_be_proven() -> None:
    report = judge_canaries(REFERENCE, plus(REFERENCE, NOISE), plus(REFERENCE, [[0.001] * 3, [0.001] * 2]), TOLERANCE)
    assert not report.passed
    assert "parent" in report.reason


def an_engine_that_computes_nonsense_is_refused() -> None:
    for served in ([[-4.0, -5.0, -6.0], [-7.0, -8.0]], [[float("nan")] * 3, [-3.0, -0.1]]):
        assert not judge_canaries(REFERENCE, served, None, TOLERANCE).passed


def every_listener_of_haproxy_moves_to_loopback_but_the_one_that_may_be_public() -> None:
    given = (
        "frontend a\n    bind :9101\nlisten s\n  bind *:8404\n"
        "frontend b\n    bind 127.0.0.1:8000\n    bind 127.0.0.1:1 x\n"
    )
    wanted = (
        "frontend a\n    bind 127.0.0.1:9101\nlisten s\n  bind 127.0.0.1:8404\n"
        "frontend b\n    bind 127.0.0.1:8000\n    bind 127.0.0.1:1 x\n"
    )
    assert bind_locally(given) == wanted
    assert bind_locally("  bind *:8000\n  bind *:8404\n", "8000") == "  bind *:8000\n  bind 127.0.0.1:8404\n"


def a_request_that_no_gateway_takes_is_told_to_try_again() -> None:
    given = 'backend b\n    http-request return status 404 content-type text/plain lf-string "not found"\n'
    answered = say_not_ready(given)
    assert "404" not in answered
    assert "return status 503" in answered
    assert "Retry-After" in answered


def no_bytes_are_spliced_so_clients_that_leave_are_seen() -> None:
    rendered = (
        "defaults\n    option abortonclose\n    option splice-request\n    option splice-response\n    balance x\n"
    )
    assert without_splicing(rendered) == "defaults\n    option abortonclose\n    balance x\n"


async def an_application_hears_when_its_caller_leaves_and_its_fault_is_an_upstream_error() -> None:
    heard = asyncio.Event()

    async def patient(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        assert (await receive())["type"] == "http.disconnect"
        heard.set()

    answer = call_asgi(patient, "POST", "/", [], b"{}")
    assert await anext(answer) == (200, [])
    await answer.aclose()
    assert heard.is_set()

    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise KeyError("a fault")

    with pytest.raises(UpstreamError):
        await anext(call_asgi(broken, "POST", "/", [], b"{}"))
