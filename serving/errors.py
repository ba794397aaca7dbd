"""Errors of the serving room, and the one shape in which the API tells them.

ServingError
├── ApiError                  a request that can't be served; carries HTTP status, type, code and field
│   ├── InvalidRequest        400: the body or a field is wrong (no retry)
│   ├── Unauthenticated       401: no key, or an unknown one (no retry)
│   ├── MissingScope          403: the key may not do this (no retry)
│   ├── NotFound              404: no such path or model (no retry)
│   ├── MethodNotAllowed      405: the path exists, the method does not (no retry)
│   ├── BodyTooSlow           408: the body did not arrive within body_timeout_s (a retry can help)
│   ├── Conflict              409: the idempotency key was used for something else (no retry)
│   ├── BodyTooLarge          413: over max_body_bytes (no retry)
│   ├── RateLimited           429: the key is over one of its limits; has Retry-After (a retry helps)
│   ├── UpstreamError         502: the engine failed (a retry can help)
│   ├── Overloaded            503: over a bound, or nothing is ready; has Retry-After (a retry helps)
│   └── RequestTimeout        504: over request_timeout_s (a retry can help)
├── CheckpointUnknown         no such checkpoint (no retry)
├── CheckpointUnreadable      the directory holds no checkpoint that can be served (no retry)
├── CheckpointConflict        the id is taken by other content (no retry)
├── CheckpointNotProven       a live engine replica has not proven it (a retry can help)
├── ExperimentUnknown         no such experiment (no retry)
├── ExperimentInvalid         its weights or its share can't be (no retry)
├── ExperimentConflict        others have the room, or its state forbids it (no retry)
├── BaseNotPrepared           the base model's manifest lacks canaries (no retry)
├── CanariesUnreadable        a manifest's canaries are absent or malformed (no retry)
└── EngineRefused             the engine failed its own canary proof, or refused an adapter (no retry)
"""

import json
from collections.abc import Mapping
from typing import Any


class ServingError(Exception):
    """Base of the room."""


class ApiError(ServingError):
    """A request that can't be served. message: one sentence for the caller; param: the field at fault.

    headers: further ones of the answer.
    """

    status = 500
    type = "server_error"
    code: str | None = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.code
        self.retry_after_s = retry_after_s
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return error_body(self.message, self.type, self.param, self.code)


class InvalidRequest(ApiError):
    """400: the body or one field of it is wrong."""

    status, type, code = 400, "invalid_request_error", "invalid_value"


class Unauthenticated(ApiError):
    """401: no API key was sent, or it is not known."""

    status, type, code = 401, "authentication_error", "invalid_api_key"


class MissingScope(ApiError):
    """403: the API key lacks the scope."""

    status, type, code = 403, "permission_error", "missing_scope"


class NotFound(ApiError):
    """404: no such path or model."""

    status, type, code = 404, "invalid_request_error", "not_found"


class MethodNotAllowed(ApiError):
    """405: the path does not take this method."""

    status, type, code = 405, "invalid_request_error", "method_not_allowed"


class BodyTooSlow(ApiError):
    """408: the body did not arrive in time."""

    status, type, code = 408, "invalid_request_error", "request_timeout"


class Conflict(ApiError):
    """409: the same idempotency key or event id came with other content."""

    status, type, code = 409, "invalid_request_error", "idempotency_conflict"


class BodyTooLarge(ApiError):
    """413: the body is over the bound."""

    status, type, code = 413, "invalid_request_error", "body_too_large"


class RateLimited(ApiError):
    """429: the key used up what it may use for now."""

    status, type, code = 429, "rate_limit_error", "rate_limit_exceeded"


class UpstreamError(ApiError):
    """502: the engine failed while it worked on the request."""

    status, type, code = 502, "server_error", "upstream_error"


class Overloaded(ApiError):
    """503: too many requests are under way, or no engine replica is ready."""

    status, type, code = 503, "server_error", "overloaded"


class RequestTimeout(ApiError):
    """504: the answer took longer than request_timeout_s."""

    status, type, code = 504, "server_error", "timeout"


class CheckpointUnknown(ServingError):
    """No checkpoint or alias has this name."""


class CheckpointUnreadable(ServingError):
    """The directory is neither a model nor an adapter in safetensors."""


class CheckpointConflict(ServingError):
    """The checkpoint id is registered with another digest or path."""


class CheckpointNotProven(ServingError):
    """Not every live engine replica has proven the checkpoint."""


class ExperimentUnknown(ServingError):
    """No experiment has this id."""


class ExperimentInvalid(ServingError):
    """Weights or share that no experiment can have."""


class ExperimentConflict(ServingError):
    """Other experiments have the room, or the state of this one forbids it."""


class BaseNotPrepared(ServingError):
    """The base model's directory has no manifest with canaries."""


class CanariesUnreadable(ServingError):
    """A manifest's canaries are absent or malformed."""


class EngineRefused(ServingError):
    """The engine does not serve what the manifest says, or could not load it."""


def error_body(message: str, type_: str, param: str | None, code: str | None) -> dict[str, Any]:
    """OpenAI's error shape."""
    return {"error": {"message": message, "type": type_, "param": param, "code": code}}


def error_event(error: ApiError, *, named: bool) -> bytes:
    """The same as one server-sent event, for a stream that has begun; `named` when its events have names."""
    if not named:
        return b"data: " + json.dumps(error.body()).encode() + b"\n\n"
    return b"event: error\ndata: " + json.dumps({"type": "error", **error.body()}).encode() + b"\n\n"
