"""Reads votes back from the store for the API: one connection, one reader at a time, few in the queue."""

import asyncio
from typing import Any

from feedback.votes import votes_on
from serving.database import HeldConnection
from serving.errors import Overloaded
from storage.errors import DatabaseUnreachable

_MOST_WAITING = 16


class VoteReader:
    """Asks PostgreSQL. Close it when nobody reads any more."""

    def __init__(self, dsn: str) -> None:
        self._database = HeldConnection(dsn)
        self._turn = asyncio.Lock()
        self._waiting = 0

    async def votes_on(self, response_id: str, api_key_id: str) -> list[dict[str, Any]]:
        """The stored votes of that key on a response, oldest first. Raises Overloaded when the store is away."""
        if self._waiting >= _MOST_WAITING:
            raise Overloaded("Too many are reading votes.", retry_after_s=1)
        self._waiting += 1
        try:
            async with self._turn:
                return await asyncio.to_thread(self._database.run, lambda c: votes_on(c, response_id, api_key_id))
        except DatabaseUnreachable as error:
            raise Overloaded("The votes can't be read now; sending more works.", retry_after_s=2) from error
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """Close the connection."""
        self._database.close()
