"""API keys: made once, shown once, kept as a sha256 digest.

A secret is `fw-` and 43 characters of 256 random bits, so a plain digest is enough at rest (nobody can
guess it, hence no slow hash). Gateways hold all live digests in memory and refresh them by polling, so a
revoked key stops within poll_interval_s. Does not limit rates.
"""

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from feedback.events import uuid7
from serving.errors import MissingScope, Unauthenticated
from storage.postgres import Connection

SCOPES = ("inference", "feedback", "evaluate", "admin")


@dataclass(frozen=True)
class ApiKey:
    """A key without its secret."""

    key_id: str
    name: str
    scopes: frozenset[str]


def digest_of(secret: str) -> str:
    """sha256 (hex) of the secret."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def create_key(connection: Connection, name: str, scopes: Sequence[str]) -> tuple[str, str]:
    """Make a key and return (key_id, secret); the secret can't be read again. Raises ValueError for a bad scope."""
    unknown = sorted(set(scopes) - set(SCOPES))
    if unknown or not scopes:
        raise ValueError(f"scopes must be some of {', '.join(SCOPES)}; got {', '.join(scopes) or 'none'}")
    key_id, secret = f"key-{uuid7().hex}", f"fw-{secrets.token_urlsafe(32)}"
    connection.execute(
        "insert into api_keys (key_id, name, sha256, scopes) values (%s, %s, %s, %s)",
        (key_id, name, digest_of(secret), sorted(set(scopes))),
    )
    return key_id, secret


def revoke_key(connection: Connection, key_id: str) -> bool:
    """Stop a key for good; False when there is no live key of that id."""
    statement = "update api_keys set revoked_at = now() where key_id = %s and revoked_at is null"
    return connection.execute(statement, (key_id,)).rowcount == 1


def load_keys(connection: Connection) -> dict[str, ApiKey]:
    """All live keys by digest."""
    rows = connection.execute("select key_id, name, sha256, scopes from api_keys where revoked_at is null")
    return {row["sha256"]: ApiKey(row["key_id"], row["name"], frozenset(row["scopes"])) for row in rows}


def bearer_secret(authorization: str | None) -> str:
    """The secret in an Authorization header. Raises Unauthenticated when there is none."""
    scheme, _, secret = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not secret.strip():
        raise Unauthenticated(
            "No API key was sent. Send it as the header `Authorization: Bearer fw-…`.", code="missing_api_key"
        )
    return secret.strip()


def check(keys: Mapping[str, ApiKey], secret: str, scope: str) -> ApiKey:
    """The key of `secret` if it has `scope`. Raises Unauthenticated or MissingScope."""
    key = keys.get(digest_of(secret))
    if key is None:
        raise Unauthenticated("The API key is not known, or was revoked.")
    if scope not in key.scopes:
        raise MissingScope(f"The API key lacks the scope `{scope}`.")
    return key
