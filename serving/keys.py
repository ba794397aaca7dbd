"""API keys: made once, shown once, kept as a sha256 digest.

A secret is `fw-` and 43 characters of 256 random bits, so a plain digest is enough at rest (nobody can
guess it, hence no slow hash). Gateways hold all live digests in memory and refresh them by polling, so a
revoked key stops within poll_interval_s. The limits that a key carries are kept by serving.limits.
"""

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from feedback.events import uuid7
from serving.errors import MissingScope, Unauthenticated
from storage.postgres import Connection

SCOPES = ("inference", "feedback", "evaluate", "admin")
_NAME_LENGTH = 200


@dataclass(frozen=True)
class KeyLimits:
    """What a key may use of all gateways together; None: as much as there is."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None


@dataclass(frozen=True)
class ApiKey:
    """A key without its secret."""

    key_id: str
    name: str
    scopes: frozenset[str]
    limits: KeyLimits = KeyLimits()
    created_at: datetime | None = None
    revoked_at: datetime | None = None


def digest_of(secret: str) -> str:
    """sha256 (hex) of the secret."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def create_key(
    connection: Connection, name: str, scopes: Sequence[str], limits: KeyLimits | None = None
) -> tuple[str, str]:
    """Make a key and return (key_id, secret); the secret can't be read again.

    Raises ValueError for an unknown scope, a name that is empty or over 200 characters, a limit below one.
    """
    unknown = sorted(set(scopes) - set(SCOPES))
    if unknown or not scopes:
        raise ValueError(f"scopes must be some of {', '.join(SCOPES)}; got {', '.join(scopes) or 'none'}")
    if not 0 < len(name.strip()) <= _NAME_LENGTH or not name.isprintable():
        raise ValueError(f"a key's name has 1 to {_NAME_LENGTH} printable characters")
    limits = limits or KeyLimits()
    for field, limit in vars(limits).items():
        if limit is not None and not 1 <= limit < 2**31:
            raise ValueError(f"{field} must lie between 1 and {2**31 - 1}; got {limit}")
    key_id, secret = f"key-{uuid7().hex}", f"fw-{secrets.token_urlsafe(32)}"
    connection.execute(
        "insert into api_keys (key_id, name, sha256, scopes, requests_per_minute, tokens_per_minute, concurrency)"
        " values (%s, %s, %s, %s, %s, %s, %s)",
        (key_id, name.strip(), digest_of(secret), sorted(set(scopes)), *vars(limits).values()),
    )
    return key_id, secret


def revoke_key(connection: Connection, key_id: str) -> bool:
    """Stop a key for good; False when there is no live key of that id."""
    statement = "update api_keys set revoked_at = now() where key_id = %s and revoked_at is null"
    return connection.execute(statement, (key_id,)).rowcount == 1


def list_keys(connection: Connection) -> list[ApiKey]:
    """All keys, oldest first, revoked ones too."""
    return [_key_of(row) for row in connection.execute("select * from api_keys order by created_at, key_id")]


def load_keys(connection: Connection) -> dict[str, ApiKey]:
    """All live keys by digest."""
    rows = connection.execute("select * from api_keys where revoked_at is null")
    return {row["sha256"]: _key_of(row) for row in rows}


def _key_of(row: dict[str, Any]) -> ApiKey:
    limits = KeyLimits(row["requests_per_minute"], row["tokens_per_minute"], row["concurrency"])
    return ApiKey(row["key_id"], row["name"], frozenset(row["scopes"]), limits, row["created_at"], row["revoked_at"])


def sent_secret(authorization: str | None, x_api_key: str | None = None) -> str:
    """The secret in an Authorization header, else in x-api-key (Anthropic's). Raises Unauthenticated without one."""
    scheme, _, secret = (authorization or "").partition(" ")
    if scheme.lower() == "bearer" and secret.strip():
        return secret.strip()
    if x_api_key and x_api_key.strip():
        return x_api_key.strip()
    raise Unauthenticated(
        "No API key was sent. Send it as the header `Authorization: Bearer fw-…`.", code="missing_api_key"
    )


def check(keys: Mapping[str, ApiKey], secret: str, scope: str) -> ApiKey:
    """The key of `secret` if it has `scope`. Raises Unauthenticated or MissingScope."""
    key = keys.get(digest_of(secret))
    if key is None:
        raise Unauthenticated("The API key is not known, or was revoked.")
    if scope not in key.scopes:
        raise MissingScope(f"The API key lacks the scope `{scope}`.")
    return key
