"""Reading a request's body: bounded, strictly JSON, with the known fields typed.

Guarantees: what passes can be encoded as UTF-8 and stored in PostgreSQL (no lone surrogates, no NUL, no NaN
or infinity), and a wrong type names its field. Fields that are not listed go to vLLM as they came, which
checks them itself.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request

from feedback.events import Tags
from serving.errors import BodyTooLarge, InvalidRequest

# OpenAI's fields that are this platform's business and not the engine's.
NOT_FOR_THE_ENGINE = ("store", "metadata", "safety_identifier", "user", "checkpoints", "prompt_cache_key")
_SCALARS = ("str", "int", "float", "bool")
MAX_DEPTH = 64
CONTENT_FIELDS = ("messages", "model", "stream", "stream_options", *NOT_FOR_THE_ENGINE)

Finite = Annotated[float, Field(allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Model = TypeVar("Model", bound=BaseModel)


class StreamOptions(BaseModel):
    """OpenAI's `stream_options`."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)

    include_usage: bool = False


class ChatRequest(BaseModel):
    """The fields of a chat completion that are checked here; the rest is kept and goes to vLLM."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)

    model: Name
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[Finite, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Finite, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    n: Annotated[int, Field(ge=1, le=16)] | None = None
    seed: Int64 | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    user: Name | None = None
    safety_identifier: Name | None = None
    metadata: Tags | None = None
    store: bool | None = None

    @property
    def for_engine(self) -> dict[str, Any]:
        """The body without what is not the engine's business, as the client sent it."""
        sent = self.model_dump(exclude_unset=True)
        return {name: value for name, value in sent.items() if name not in NOT_FOR_THE_ENGINE}

    @property
    def parameters(self) -> dict[str, Any]:
        """Sampling parameters and other options, for the record; only numbers and switches without the content."""
        sent = self.model_dump(exclude_unset=True)
        if self.store is False:
            sent = {name: value for name, value in sent.items() if isinstance(value, int | float)}
        return {name: value for name, value in sent.items() if name not in CONTENT_FIELDS}


class ComparisonRequest(ChatRequest):
    """A chat request to be answered twice, side by side; `checkpoints` names two, else the alias decides."""

    stream: Literal[False] | None = None
    n: Literal[1] | None = None
    checkpoints: Annotated[list[Name], Field(min_length=2, max_length=2)] | None = None


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body, at most `limit` bytes. Raises BodyTooLarge before more than that is held."""
    message = f"The body is larger than {limit} bytes."
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > limit:
        raise BodyTooLarge(message)
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        if size > limit:
            raise BodyTooLarge(message)
        pieces.append(piece)
    return b"".join(pieces)


def parse_object(raw: bytes) -> dict[str, Any]:
    """The body as a JSON object. Raises InvalidRequest."""
    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
        encoded = json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeError as error:
        raise InvalidRequest("The body is not UTF-8 text.", code="invalid_encoding") from error
    except RecursionError as error:
        raise InvalidRequest("The body is nested too deeply.", code="invalid_json") from error
    except ValueError as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise InvalidRequest("The body must be a JSON object.", code="invalid_json")
    if _is_deeper_than(value, MAX_DEPTH):
        raise InvalidRequest(f"The body is nested more than {MAX_DEPTH} levels deep.", code="invalid_json")
    if b"\\u0000" in encoded and _holds_nul(value):
        raise InvalidRequest("The body holds the character NUL (U+0000).", code="invalid_encoding")
    return value


def parse_model(raw: bytes, model: type[Model]) -> Model:
    """The body as `model`. Raises InvalidRequest that names the first wrong field."""
    try:
        return model.model_validate(parse_object(raw))
    except ValidationError as error:
        raise invalid_field(error) from error


def invalid_field(error: ValidationError, *, skip: int = 0) -> InvalidRequest:
    """The first fault that pydantic found, as OpenAI tells it: message, and the field in `param`.

    skip: how many leading parts of the location are no fields (the tag of a discriminated union).
    """
    first = error.errors(include_url=False, include_context=False)[0]
    if first["type"].startswith("union_tag"):
        return InvalidRequest(f"Invalid `kind`: {first['msg']}.", param="kind")
    param = _path(first["loc"][skip:])
    if first["type"] == "missing":
        return InvalidRequest(f"Missing required field: `{param}`.", param=param, code="missing_required_parameter")
    if first["type"] == "extra_forbidden":
        return InvalidRequest(f"Unknown field: `{param}`.", param=param, code="unknown_parameter")
    named = f"Invalid `{param}`: " if param else ""
    return InvalidRequest(f"{named}{first['msg']}.", param=param or None)


def _path(location: Sequence[int | str]) -> str:
    """`messages[0].role`; the names that pydantic gives to the members of a union are left out."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in _SCALARS:
            path += f".{part}" if path else part
    return path


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _is_deeper_than(value: Any, levels: int) -> bool:
    """Level by level, not by recursion: the readers of the record downstream are bounded, this is the first."""
    layer = [value]
    for _ in range(levels):
        layer = [
            inner
            for outer in layer
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return any(isinstance(inner, dict | list) for inner in layer)


def _holds_nul(value: Any) -> bool:
    if isinstance(value, str):
        return "\0" in value
    if isinstance(value, dict):
        return any(_holds_nul(key) or _holds_nul(item) for key, item in value.items())
    return isinstance(value, list) and any(_holds_nul(item) for item in value)
