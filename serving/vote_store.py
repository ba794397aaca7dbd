"""What the API asks of the store of votes: to read some, to erase."""

from typing import Any

from feedback.erasure import erase
from feedback.votes import votes_on
from serving.database import Questions


class VoteStore:
    """Asks PostgreSQL. Close it when nobody asks any more. Raises Overloaded when the store is away."""

    def __init__(self, dsn: str) -> None:
        self._questions = Questions(dsn, "the store of votes")

    async def votes_on(self, response_id: str, api_key_id: str) -> list[dict[str, Any]]:
        """The stored votes of that key on a response, oldest first."""
        return await self._questions.ask(lambda connection: votes_on(connection, response_id, api_key_id))

    async def erase(self, name: str) -> dict[str, Any]:
        """Erase a person's answers and votes: what went, and what had used it (feedback.erasure.Erased)."""
        return await self._questions.ask(lambda connection: erase(connection, name).model_dump(mode="json"))

    def close(self) -> None:
        """Close the connection."""
        self._questions.close()
