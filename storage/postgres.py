"""PostgreSQL connections (psycopg 3, synchronous).

Also what PostgreSQL's text and jsonb can hold: no U+0000, which becomes U+FFFD (models do say it).
Guarantees: every connection has a connect time-out and a statement time-out; rows come back as dicts.
Does not retry: a caller that can retry knows how often.
"""

import json
import math
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import DictRow, dict_row

from storage.errors import DatabaseUnreachable

Connection = psycopg.Connection[DictRow]
STATEMENT_TIMEOUT_MS = 60_000
CONNECT_TIMEOUT_S = 10


def connect(dsn: str, *, autocommit: bool = False, connect_timeout_s: int | None = None) -> Connection:
    """Open one connection; usable as a context manager that commits on success and closes.

    Raises DatabaseUnreachable when the server does not answer in time: connect_timeout_s seconds, or what the DSN
    says, or CONNECT_TIMEOUT_S.
    """
    options: dict[str, Any] = {"options": f"-c statement_timeout={STATEMENT_TIMEOUT_MS}"}
    try:
        told = conninfo_to_dict(dsn).get("connect_timeout", CONNECT_TIMEOUT_S)
        return psycopg.connect(
            dsn,
            autocommit=autocommit,
            connect_timeout=told if connect_timeout_s is None else connect_timeout_s,
            row_factory=dict_row,
            application_name="flywheel",
            **options,
        )
    except psycopg.OperationalError as error:
        raise DatabaseUnreachable(f"PostgreSQL did not accept a connection: {error}") from error


def storable_text(text: str) -> str:
    """`text` without U+0000."""
    return text.replace("\0", "\ufffd")


def storable_json(value: Any, *, unknown_as_null: bool = False) -> str:
    """JSON text of `value` without U+0000 in any name or string.

    unknown_as_null: NaN and infinity become null; else they raise ValueError.
    """
    return json.dumps(_storable(value, unknown_as_null), ensure_ascii=False, allow_nan=False)


def _storable(value: Any, unknown_as_null: bool) -> Any:
    if isinstance(value, str):
        return storable_text(value)
    if isinstance(value, dict):
        return {_storable(name, False): _storable(inner, unknown_as_null) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_storable(inner, unknown_as_null) for inner in value]
    if unknown_as_null and isinstance(value, float) and not math.isfinite(value):
        return None
    return value
