"""One PostgreSQL connection kept open, opened again after trouble: for a poller, or for requests that ask in turn."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import psycopg

from serving.errors import Overloaded
from storage.errors import DatabaseUnreachable
from storage.postgres import Connection, connect

Result = TypeVar("Result")
_MOST_WAITING = 16


class HeldConnection:
    """Runs functions in a transaction each, on a connection that is reused while it works. One thread at a time."""

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


class Questions:
    """What requests ask of the database: one question at a time in a thread, few wait. what: is away, in messages."""

    def __init__(self, dsn: str, what: str) -> None:
        self._database = HeldConnection(dsn)
        self._what = what
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._asking: set[asyncio.Task[Any]] = set()

    async def ask(self, question: Callable[[Connection], Result]) -> Result:
        """question(connection) in a transaction of its own. Raises Overloaded when the database is away."""
        if self._waiting >= _MOST_WAITING:
            raise Overloaded(f"Too many wait for {self._what}.", retry_after_s=1)
        # A client that leaves cancels its request, and not the thread that is asking: nobody else may ask meanwhile.
        asking = asyncio.create_task(self._ask_in_turn(question))
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)
        try:
            return await asyncio.shield(asking)
        except DatabaseUnreachable as error:
            raise Overloaded(f"{self._what.capitalize()} can't be reached at the moment.", retry_after_s=2) from error

    async def _ask_in_turn(self, question: Callable[[Connection], Result]) -> Result:
        self._waiting += 1
        try:
            async with self._turn:
                return await asyncio.to_thread(self._database.run, question)
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """Close the connection."""
        self._database.close()
