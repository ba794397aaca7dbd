"""PostgreSQL connections (psycopg 3, synchronous).

Guarantees: every connection has a connect time-out and a statement time-out; rows come back as dicts.
Does not retry: a caller that can retry knows how often.
"""

from typing import Any

import psycopg
from psycopg.rows import DictRow, dict_row

from storage.errors import DatabaseUnreachable

Connection = psycopg.Connection[DictRow]
STATEMENT_TIMEOUT_MS = 60_000


def connect(dsn: str, *, autocommit: bool = False, connect_timeout_s: int = 10) -> Connection:
    """Open one connection; usable as a context manager that commits on success and closes.

    Raises DatabaseUnreachable when the server does not answer within connect_timeout_s seconds.
    """
    options: dict[str, Any] = {"options": f"-c statement_timeout={STATEMENT_TIMEOUT_MS}"}
    try:
        return psycopg.connect(
            dsn,
            autocommit=autocommit,
            connect_timeout=connect_timeout_s,
            row_factory=dict_row,
            application_name="flywheel",
            **options,
        )
    except psycopg.OperationalError as error:
        raise DatabaseUnreachable(f"PostgreSQL did not accept a connection: {error}") from error
