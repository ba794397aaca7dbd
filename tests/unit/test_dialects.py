"""Laws of the APIs that generate text: what is read from their answers, and what is said about bad fields."""

import json
from typing import Any

import pytest

from serving.capture import StreamCapture, capture_body
from serving.dialects import CHAT, COMPLETION, DIALECTS, MESSAGES, RESPONSE, Dialect
from serving.errors import InvalidRequest
from serving.requests import parse_model

GOOD: dict[str, dict[str, Any]] = {
    CHAT.path: {"model": "flash", "messages": [{"role": "user", "content": "Hi?"}]},
    COMPLETION.path: {"model": "flash", "prompt": "Hi?"},
    RESPONSE.path: {"model": "flash", "input": "Hi?"},
    MESSAGES.path: {"model": "flash", "messages": [{"role": "user", "content": "Hi?"}], "max_tokens": 8},
}
LIMIT = {CHAT.path: "max_tokens", COMPLETION.path: "max_tokens", RESPONSE.path: "max_output_tokens"}
BODIES: dict[str, dict[str, Any]] = {
    CHAT.path: {
        "choices": [{"index": 0, "message": {"content": "Hello."}, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 3},
    },
    COMPLETION.path: {
        "choices": [{"index": 0, "text": "Hello.", "finish_reason": "length"}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 3},
    },
    RESPONSE.path: {
        "output": [
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "content": [{"type": "output_text", "text": "Hello."}]},
        ],
        "status": "incomplete",
        "incomplete_details": {"reason": "max_output_tokens"},
        "usage": {"input_tokens": 5, "output_tokens": 3},
    },
    MESSAGES.path: {
        "content": [{"type": "text", "text": "Hello."}],
        "stop_reason": "max_tokens",
        "usage": {"input_tokens": 5, "output_tokens": 3},
    },
}
EVENTS: dict[str, list[dict[str, Any]]] = {
    CHAT.path: [
        {"choices": [{"index": 0, "delta": {"content": "Hel"}}]},
        {"choices": [{"index": 1, "delta": {"content": "no"}}]},
        {"choices": [{"index": 0, "delta": {"content": "lo."}, "finish_reason": "length"}]},
        {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}},
    ],
    COMPLETION.path: [
        {"choices": [{"index": 0, "text": "Hel"}]},
        {"choices": [{"index": 0, "text": "lo.", "finish_reason": "length"}]},
        {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}},
    ],
    RESPONSE.path: [
        {"type": "response.created", "response": {"status": "in_progress", "usage": None}},
        {"type": "response.output_text.delta", "delta": "Hel"},
        {"type": "response.output_text.delta", "delta": "lo."},
        {"type": "response.output_text.done", "text": "Hello."},
        {"type": "response.incomplete", "response": BODIES[RESPONSE.path]},
    ],
    MESSAGES.path: [
        {"type": "message_start", "message": {"usage": {"input_tokens": 5, "output_tokens": 0}}},
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "Hel"}},
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "lo."}},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "max_tokens"},
            "usage": {"input_tokens": 5, "output_tokens": 3},
        },
        {"type": "message_stop"},
    ],
}

by_api = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.path)


def stream_of(dialect: Dialect) -> bytes:
    named = "event: {}\n" if dialect.named_events else ""
    frames = [f"{named.format(e.get('type'))}data: {json.dumps(e)}\n\n" for e in EVENTS[dialect.path]]
    return "".join(frames).encode() + b"data: [DONE]\n\n"


@by_api
def a_whole_answer_and_its_stream_say_the_same(dialect: Dialect) -> None:
    whole = capture_body(dialect, json.dumps(BODIES[dialect.path]).encode())
    assert (whole.text, whole.status(), whole.prompt_tokens, whole.completion_tokens) == ("Hello.", "length", 5, 3)
    for size in (1, 7, 10_000):
        capture = StreamCapture(dialect, hide_usage=False)
        stream = stream_of(dialect)
        passed = b"".join(capture.feed(stream[at : at + size]) for at in range(0, len(stream), size))
        assert passed == stream
        assert capture.result() == whole


@by_api
def a_stream_that_breaks_off_is_not_completed_and_its_usage_is_unknown(dialect: Dialect) -> None:
    capture = StreamCapture(dialect, hide_usage=False)
    stream = stream_of(dialect)
    capture.feed(stream[: stream.index(b"lo.")])
    broken = capture.result()
    assert (broken.text, broken.finish_reason, broken.completion_tokens) == ("Hel", None, None)
    assert broken.status("client_abort") == "client_abort"


@by_api
def bad_fields_are_told_in_the_same_words(dialect: Dialect) -> None:
    limit = LIMIT.get(dialect.path, "max_tokens")
    for field, value, words in (
        ("model", None, "Invalid `model`: Input should be a valid string."),
        ("temperature", 9, "Invalid `temperature`: Input should be less than or equal to 2."),
        ("top_p", "high", "Invalid `top_p`: Input should be a valid number."),
        ("stream", "yes", "Invalid `stream`: Input should be a valid boolean."),
        (
            limit,
            -1,
            f"Invalid `{limit}`: Input should be greater than or equal to {0 if dialect is COMPLETION else 1}.",
        ),
        (limit, "many", f"Invalid `{limit}`: Input should be a valid integer."),
    ):
        with pytest.raises(InvalidRequest) as refused:
            parse_model(json.dumps({**GOOD[dialect.path], field: value}).encode(), dialect.request)
        assert refused.value.message == words
        assert refused.value.param == field


@by_api
def a_good_request_reaches_the_engine_without_what_is_ours(dialect: Dialect) -> None:
    body = {**GOOD[dialect.path], "temperature": 0.5, "top_k": 3}
    request = parse_model(
        json.dumps({**body, "metadata": {"user_id": "ada"}, "request_id": "mine"}).encode(), dialect.request
    )
    sent = request.for_engine
    assert {name: sent[name] for name in body} == body
    assert not {"metadata", "request_id", "user"} & set(sent)
    assert request.parameters["temperature"] == 0.5
    assert "model" not in request.parameters
    assert request.prompt_messages[-1] == {"role": "user", "content": "Hi?"}
    assert request.asked_by == ("ada" if dialect is MESSAGES else None)


@pytest.mark.parametrize("field", [{"background": True}, {"previous_response_id": "resp_1"}])
def a_conversation_that_would_have_to_be_stored_is_refused(field: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="not stored here"):
        parse_model(json.dumps({**GOOD[RESPONSE.path], **field}).encode(), RESPONSE.request)
