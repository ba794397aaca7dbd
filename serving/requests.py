"""Reading a request's body: bounded, strictly JSON, with the known fields typed.

Guarantees: what passes can be encoded as UTF-8 and stored in PostgreSQL (no lone surrogates, no NUL, no NaN
or infinity), and a wrong type names its field.
"""

import asyncio
import json
import re
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from serving.errors import BodyTooLarge, BodyTooSlow, InvalidRequest

_SCALARS = ("str", "int", "float", "bool")
MAX_DEPTH = 64
USER_LENGTH = 256  # characters of a user's or a session's name that are kept
_HUGE = re.compile(rb"\d(?:[eE]|\d{300})")
_LONG_NUMBER = re.compile(rb"\d{19}")
Model = TypeVar("Model", bound=BaseModel)


async def read_body(request: Request, limit: int, timeout_s: float) -> bytes:
    """The whole body, at most `limit` bytes. Raises BodyTooLarge before more than that is held, BodyTooSlow."""
    try:
        async with asyncio.timeout(timeout_s):
            return await _read(request, limit)
    except TimeoutError:
        raise BodyTooSlow(f"The body did not arrive within {timeout_s:g} s.") from None


async def _read(request: Request, limit: int) -> bytes:
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
    return as_object(parse_json(raw))


def as_object(value: Any) -> dict[str, Any]:
    """`value`, which must be a JSON object. Raises InvalidRequest."""
    if not isinstance(value, dict):
        raise InvalidRequest("The body must be a JSON object.", code="invalid_json")
    return value


def parse_json(raw: bytes) -> Any:
    """The body as any JSON value. Raises InvalidRequest."""
    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
        # Only an escape can stand for half a character or NUL; only an exponent, or hundreds of digits, for infinity.
        encoded = b""
        if b"\\u" in raw or _HUGE.search(raw):
            encoded = json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeError as error:
        raise InvalidRequest("The body is not UTF-8 text.", code="invalid_encoding") from error
    except RecursionError as error:
        raise InvalidRequest("The body is nested too deeply.", code="invalid_json") from error
    except ValueError as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}", code="invalid_json") from error
    if _is_deeper_than(value, MAX_DEPTH):
        raise InvalidRequest(f"The body is nested more than {MAX_DEPTH} levels deep.", code="invalid_json")
    if b"\\u0000" in encoded and _holds_nul(value):
        raise InvalidRequest("The body holds the character NUL (U+0000).", code="invalid_encoding")
    return value


def parse_model(raw: bytes, model: type[Model]) -> Model:
    """The body as `model`. Raises InvalidRequest that names the first wrong field."""
    value = parse_object(raw)
    try:
        checked = model.model_validate(value)
    except ValidationError as error:
        raise invalid_field(error) from error
    if _LONG_NUMBER.search(raw):
        for name, content in value.items():
            if _holds_huge(content):
                raise InvalidRequest(f"Invalid `{name}`: a whole number does not fit into 64 bits.", param=name)
    return checked


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
    return InvalidRequest(f"{named}{first['msg'].removeprefix('Value error, ')}.", param=param or None)


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


def _holds_huge(value: Any) -> bool:
    """Whether a whole number in it does not fit into 64 bits: the engine's messages can't carry it."""
    if isinstance(value, dict | list):
        return any(_holds_huge(inner) for inner in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, int) and not -(2**63) <= value < 2**64


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
