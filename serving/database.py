"""One PostgreSQL connection kept open for a poller, opened again after trouble.

Not thread-safe: one poller, one thread at a time.
"""

from collections.abc import Callable
from typing import TypeVar

import psycopg

from storage.errors import DatabaseUnreachable
from storage.postgres import Connection, connect

Result = TypeVar("Result")


class HeldConnection:
    """Runs functions in a transaction each, on a connection that is reused while it works."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._connection: Connection | None = None

    def run(self, work: Callable[[Connection], Result]) -> Result:
        """Call work(connection) and commit. Raises DatabaseUnreachable when the server is away."""
        if self._connection is None:
            self._connection = connect(self._dsn)
        try:
            with self._connection.transaction():
                return work(self._connection)
        except psycopg.OperationalError as error:
            self.close()
            raise DatabaseUnreachable(f"the connection to PostgreSQL broke: {error}") from error

    def close(self) -> None:
        """Close the connection; the next run opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
