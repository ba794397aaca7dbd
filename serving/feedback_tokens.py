"""Feedback tokens: they let a browser vote on one answer without an API key.

A token is `fwt-<expires>.<key id>.<target>.<signature>`: until `expires` (Unix seconds) it may send feedback on
`target`, a response or comparison id, in the name of the key that asked for the answer. The signature is HMAC-SHA256
(RFC 2104) with the key's own digest as the secret, so a token ends with its key and nothing else has to be kept.
"""

import base64
import hashlib
import hmac
import time
from collections.abc import Mapping
from dataclasses import dataclass

from serving.errors import MissingScope, Unauthenticated
from serving.keys import ApiKey

PREFIX = "fwt-"
HEADER = "x-flywheel-feedback-token"


@dataclass(frozen=True)
class Grant:
    """Who may vote, and on what: everything where `target` is None."""

    key: ApiKey
    target: str | None = None


def make_token(key: ApiKey, digest: str, target: str, lifetime_s: float) -> str:
    """A token for `target`. digest: of the key's secret."""
    told = f"{int(time.time() + lifetime_s)}.{key.key_id}.{target}"
    return f"{PREFIX}{told}.{_signature(digest, told)}"


def read_token(token: str, keys: Mapping[str, ApiKey], digests: Mapping[str, str]) -> Grant:
    """What the token allows. keys: the live ones by digest; digests: theirs by id.

    Raises Unauthenticated, MissingScope.
    """
    told, _, signature = token.removeprefix(PREFIX).rpartition(".")
    expires, _, rest = told.partition(".")
    key_id, _, target = rest.partition(".")
    digest = digests.get(key_id)
    if digest is None or not hmac.compare_digest(signature.encode(), _signature(digest, told).encode()):
        raise Unauthenticated("The feedback token is not valid, or its API key was revoked.", code="invalid_token")
    if int(expires) < time.time():
        raise Unauthenticated("The feedback token has expired.", code="expired_token")
    key = keys[digest]
    if "feedback" not in key.scopes:
        raise MissingScope("The API key that asked for this answer lacks the scope `feedback`.")
    return Grant(key, target)


def _signature(digest: str, told: str) -> str:
    signed = hmac.digest(bytes.fromhex(digest), f"flywheel feedback token\n{told}".encode(), hashlib.sha256)
    return base64.urlsafe_b64encode(signed).decode().rstrip("=")
