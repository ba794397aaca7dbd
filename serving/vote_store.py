"""What the API asks of the store of votes: to read some, to erase. One connection, one question at a time, few wait."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from feedback.erasure import erase
from feedback.votes import votes_on
from serving.database import HeldConnection
from serving.errors import Overloaded
from storage.errors import DatabaseUnreachable
from storage.postgres import Connection

Result = TypeVar("Result")
_MOST_WAITING = 16


class VoteStore:
    """Asks PostgreSQL. Close it when nobody asks any more. Raises Overloaded when the store is away."""

    def __init__(self, dsn: str) -> None:
        self._database = HeldConnection(dsn)
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._asking: set[asyncio.Task[Any]] = set()

    async def votes_on(self, response_id: str, api_key_id: str) -> list[dict[str, Any]]:
        """The stored votes of that key on a response, oldest first."""
        return await self._ask(lambda connection: votes_on(connection, response_id, api_key_id))

    async def erase(self, name: str) -> dict[str, Any]:
        """Erase a person's answers and votes: what went, and what had used it (feedback.erasure.Erased)."""
        return await self._ask(lambda connection: erase(connection, name).model_dump(mode="json"))

    async def _ask(self, question: Callable[[Connection], Result]) -> Result:
        if self._waiting >= _MOST_WAITING:
            raise Overloaded("Too many wait for the store of votes.", retry_after_s=1)
        # A client that leaves cancels its request, and not the thread that is asking: nobody else may ask meanwhile.
        asking = asyncio.create_task(self._ask_in_turn(question))
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)
        try:
            return await asyncio.shield(asking)
        except DatabaseUnreachable as error:
            raise Overloaded("The store of votes is away; sending more votes works.", retry_after_s=2) from error

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
