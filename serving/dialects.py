"""The APIs that generate text, each as its clients know it: what a request may hold, and how to read an answer.

The engine speaks all of them (vLLM's own application); here is only what the gateway must understand to
check, route and record: model, who asks, the prompt, the text of the first choice, why it ended, the usage.
Guarantees: what is wrong with a field is said in the same words whatever the API. Fields that are not listed
go to vLLM as they came, which checks them itself.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from feedback.events import Tags

# Fields that are this platform's business and not the engine's.
NOT_FOR_THE_ENGINE = frozenset(
    {"store", "metadata", "safety_identifier", "user", "checkpoints", "prompt_cache_key", "request_id", "session_id"}
)
_NO_PARAMETERS = NOT_FOR_THE_ENGINE | {
    "messages",
    "prompt",
    "input",
    "instructions",
    "system",
    "model",
    "stream",
    "stream_options",
}

Finite = Annotated[float, Field(allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
TokenCount = Annotated[int, Field(ge=1, lt=2**31)]
Messages = list[dict[str, Any]]


class StreamOptions(BaseModel):
    """OpenAI's `stream_options`."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)

    include_usage: bool = False


class GenerateRequest(BaseModel):
    """What every request to generate text has. Fields that are not listed are kept and go to vLLM."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)

    model: Name
    stream: bool | None = None
    temperature: Annotated[Finite, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Finite, Field(gt=0, le=1)] | None = None

    @property
    @abstractmethod
    def prompt_messages(self) -> Messages:
        """The prompt as chat messages, for the record."""

    @property
    def asked_by(self) -> str | None:
        """The user whom the body names."""
        return None

    @property
    def tags(self) -> dict[str, str]:
        """The caller's own labels of this request."""
        return {}

    @property
    def kept(self) -> bool:
        """False when the caller does not want the content recorded."""
        return True

    @property
    def shows_usage(self) -> bool:
        """Whether a stream's usage reaches the client."""
        return True

    @property
    def for_engine(self) -> dict[str, Any]:
        """The body without what is not the engine's business, as the client sent it."""
        sent = self.model_dump(exclude_unset=True)
        return {name: value for name, value in sent.items() if name not in NOT_FOR_THE_ENGINE}

    @property
    def parameters(self) -> dict[str, Any]:
        """Sampling parameters and other options, for the record; only numbers and switches without the content."""
        sent = self.model_dump(exclude_unset=True)
        if not self.kept:
            sent = {name: value for name, value in sent.items() if isinstance(value, int | float)}
        return {name: value for name, value in sent.items() if name not in _NO_PARAMETERS}


class OpenAIRequest(GenerateRequest):
    """What OpenAI's three APIs share."""

    user: Name | None = None
    safety_identifier: Name | None = None
    metadata: Tags | None = None
    store: bool | None = None
    presence_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None

    @property
    def asked_by(self) -> str | None:
        return self.user or self.safety_identifier

    @property
    def tags(self) -> dict[str, str]:
        return self.metadata or {}

    @property
    def kept(self) -> bool:
        return self.store is not False


class CompletionsRequest(OpenAIRequest):
    """What OpenAI's chat and plain completions share."""

    stream_options: StreamOptions | None = None
    max_tokens: TokenCount | None = None
    n: Annotated[int, Field(ge=1, le=16)] | None = None
    seed: Int64 | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None

    @property
    def shows_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def for_engine(self) -> dict[str, Any]:
        body = super().for_engine
        if self.stream:  # the record needs the usage, whether the client asked for it or not
            body["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
        return body


class ChatRequest(CompletionsRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[Messages, Field(min_length=1)]
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def prompt_messages(self) -> Messages:
        return self.messages


class ComparisonRequest(ChatRequest):
    """A chat request to be answered twice, side by side; `checkpoints` names two, else the alias decides."""

    n: Literal[1] | None = None
    checkpoints: Annotated[list[Name], Field(min_length=2, max_length=2)] | None = None


class CompletionRequest(CompletionsRequest):
    """POST /v1/completions: a text, several, or token ids, to be continued."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def prompt_messages(self) -> Messages:
        return [{"role": "user", "content": self.prompt}]


class ResponseRequest(OpenAIRequest):
    """POST /v1/responses. The conversation is the caller's to keep: nothing is stored to be continued from."""

    input: str | Annotated[Messages, Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: TokenCount | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    background: bool | None = None
    previous_response_id: str | None = None

    @field_validator("background", "previous_response_id")
    @classmethod
    def _needs_no_store(cls, value: Any) -> Any:
        if value:
            raise ValueError("answers are not stored here; send the whole conversation as `input` and wait for it")
        return value

    @property
    def prompt_messages(self) -> Messages:
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        asked = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        return [*system, *asked]

    @property
    def for_engine(self) -> dict[str, Any]:
        return {**super().for_engine, "store": False}


class MessagesRequest(GenerateRequest):
    """POST /v1/messages, Anthropic's API. `metadata.user_id` is the user."""

    messages: Annotated[Messages, Field(min_length=1)]
    max_tokens: TokenCount
    system: str | Messages | None = None
    metadata: dict[str, Any] | None = None
    stop_sequences: Annotated[list[str], Field(max_length=16)] | None = None

    @property
    def prompt_messages(self) -> Messages:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.messages]

    @property
    def asked_by(self) -> str | None:
        user = (self.metadata or {}).get("user_id")
        return user if isinstance(user, str) else None


class UtilityRequest(BaseModel):
    """A call that generates no text; without a model it means the alias."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)

    model: Name | None = None


@dataclass(frozen=True)
class Piece:
    """What an answer, or one event of a stream, says. Counts are tokens; None: it does not say."""

    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


@dataclass(frozen=True)
class Dialect:
    """One API. id_prefix: of its response ids; read_event, read_answer: from decoded JSON.

    named_events: its streams name each event, an error too, before the data.
    """

    path: str
    id_prefix: str
    request: type[GenerateRequest]
    read_event: Callable[[dict[str, Any]], Piece]
    read_answer: Callable[[dict[str, Any]], Piece]
    named_events: bool = False


def _openai_usage(answer: dict[str, Any]) -> dict[str, int | None]:
    usage = answer.get("usage") or {}
    return {"prompt_tokens": usage.get("prompt_tokens"), "completion_tokens": usage.get("completion_tokens")}


def _io_usage(usage: dict[str, Any] | None) -> dict[str, int | None]:
    """Usage as the newer APIs name it."""
    found = usage or {}
    return {"prompt_tokens": found.get("input_tokens"), "completion_tokens": found.get("output_tokens")}


def _first_choice(answer: dict[str, Any]) -> dict[str, Any]:
    """Choice 0, or nothing when this event speaks of another."""
    return next((choice for choice in answer.get("choices") or [] if choice.get("index", 0) == 0), {})


def _chat_event(event: dict[str, Any]) -> Piece:
    choice = _first_choice(event)
    text = (choice.get("delta") or {}).get("content") or ""
    return Piece(text, choice.get("finish_reason"), **_openai_usage(event))


def _chat_answer(answer: dict[str, Any]) -> Piece:
    choice = _first_choice(answer)
    text = (choice.get("message") or {}).get("content") or ""
    return Piece(text, choice.get("finish_reason"), **_openai_usage(answer))


def _completion(answer: dict[str, Any]) -> Piece:
    choice = _first_choice(answer)
    return Piece(choice.get("text") or "", choice.get("finish_reason"), **_openai_usage(answer))


def _response_end(response: dict[str, Any]) -> str | None:
    if response.get("status") == "completed":
        return "stop"
    reason = (response.get("incomplete_details") or {}).get("reason")
    return "length" if reason == "max_output_tokens" else reason


def _response_event(event: dict[str, Any]) -> Piece:
    if event.get("type") == "response.output_text.delta":
        return Piece(event.get("delta") or "")
    if event.get("type") in ("response.completed", "response.incomplete"):
        response = event.get("response") or {}
        return Piece(finish_reason=_response_end(response), **_io_usage(response.get("usage")))
    return Piece()


def _response_answer(answer: dict[str, Any]) -> Piece:
    parts = [part for item in answer.get("output") or [] for part in item.get("content") or []]
    text = "".join(part.get("text") or "" for part in parts if part.get("type") == "output_text")
    return Piece(text, _response_end(answer), **_io_usage(answer.get("usage")))


_STOP_REASONS = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls"}


def _messages_event(event: dict[str, Any]) -> Piece:
    delta = event.get("delta") or {}
    if event.get("type") == "content_block_delta":
        return Piece(delta.get("text") or "")
    if event.get("type") == "message_delta":
        reason = delta.get("stop_reason")
        return Piece(finish_reason=_STOP_REASONS.get(reason, reason), **_io_usage(event.get("usage")))
    return Piece()


def _messages_answer(answer: dict[str, Any]) -> Piece:
    text = "".join(block.get("text") or "" for block in answer.get("content") or [] if block.get("type") == "text")
    reason = answer.get("stop_reason")
    return Piece(text, _STOP_REASONS.get(reason, reason), **_io_usage(answer.get("usage")))


CHAT = Dialect("/v1/chat/completions", "chatcmpl-", ChatRequest, _chat_event, _chat_answer)
COMPLETION = Dialect("/v1/completions", "cmpl-", CompletionRequest, _completion, _completion)
RESPONSE = Dialect("/v1/responses", "resp_", ResponseRequest, _response_event, _response_answer, named_events=True)
MESSAGES = Dialect("/v1/messages", "chatcmpl-", MessagesRequest, _messages_event, _messages_answer, named_events=True)
DIALECTS = (CHAT, COMPLETION, RESPONSE, MESSAGES)
