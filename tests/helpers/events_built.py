"""Builders of valid events, with overrides."""

from typing import Any

from feedback.events import (
    FEEDBACK,
    AnyVote,
    Choice,
    Interaction,
    Thumb,
    event_id_of,
    new_comparison_id,
    new_response_id,
    prompt_hash,
)

_CONTENT: dict[str, dict[str, Any]] = {
    "thumb": {"value": "up"},
    "rating": {"value": 4},
    "score": {"name": "faithfulness", "value": 0.25},
    "comment": {"text": "Rather long."},
    "correction": {"text": "Paris, since 987."},
    "signal": {"name": "copied"},
}


def build_messages(text: str = "What is the capital of France?") -> list[dict[str, Any]]:
    """A prompt of one user message."""
    return [{"role": "user", "content": text}]


def build_interaction(**overrides: Any) -> Interaction:
    """A completed answer. `messages` sets the prompt hash too; `response_id` the event id."""
    response_id = overrides.pop("response_id", None) or new_response_id()
    messages = overrides.pop("messages", None) or build_messages()
    values: dict[str, Any] = {
        "event_id": event_id_of(response_id),
        "response_id": response_id,
        "endpoint": "/v1/chat/completions",
        "checkpoint_id": "flash-r0000-000000",
        "alias": "flash",
        "prompt_hash": prompt_hash(messages),
        "messages": messages,
        "parameters": {"temperature": 0.8},
        "text": "The capital of France is Paris.",
        "finish_reason": "stop",
        "status": "completed",
        "prompt_tokens": 12,
        "completion_tokens": 8,
        "duration_s": 0.5,
    }
    return Interaction.model_validate(values | overrides)


def build_thumb(response_id: str | None = None, **overrides: Any) -> Thumb:
    """An up vote of one rater."""
    values: dict[str, Any] = {
        "kind": "thumb",
        "response_id": response_id or new_response_id(),
        "value": "up",
        "rater": "rater-1",
    }
    return Thumb.model_validate(values | overrides)


def build_vote(kind: str, **overrides: Any) -> AnyVote:
    """A vote of any kind, on a response unless told otherwise."""
    values: dict[str, Any] = {"kind": kind, "rater": "rater-1", **_CONTENT[kind]}
    if not overrides.keys() & {"response_id", "comparison_id", "session_id", "responses"}:
        values["response_id"] = new_response_id()
    return FEEDBACK.validate_python(values | overrides)


def build_preference(comparison_id: str | None = None, chosen: str | None = None, **overrides: Any) -> Choice:
    """A choice; a tie when `chosen` is not given. On a comparison, unless `responses` are given."""
    values: dict[str, Any] = {
        "kind": "preference",
        "comparison_id": comparison_id or (None if "responses" in overrides else new_comparison_id()),
        "verdict": "chosen" if chosen else "tie",
        "chosen": chosen,
        "rater": "rater-1",
    }
    return Choice.model_validate(values | overrides)


def build_comparison(
    prompt: str = "What is the capital of France?",
    texts: tuple[str, str] = ("Paris.", "I do not know."),
    checkpoints: tuple[str, str] = ("flash-r0000-000000", "flash-r0001-111111"),
    **overrides: Any,
) -> tuple[str, list[Interaction]]:
    """(comparison id, its two answers in the order in which they are shown)."""
    comparison_id = new_comparison_id()
    answers = [
        build_interaction(
            endpoint="/v1/comparisons",
            comparison_id=comparison_id,
            position=position,
            messages=build_messages(prompt),
            text=texts[position],
            checkpoint_id=checkpoints[position],
            **overrides,
        )
        for position in (0, 1)
    ]
    return comparison_id, answers
