"""What the API asks of the registry of experiments; what that refuses becomes a 4xx.

Reports are made by a controller (rounds/reporter.py), for that may take seconds: a request asks for one in the table
experiment_reports and waits until it is there.
"""

import asyncio
from collections.abc import Callable
from datetime import datetime
from typing import Any, TypeVar

from serving import experiments
from serving.database import Questions
from serving.errors import (
    CheckpointNotProven,
    CheckpointUnknown,
    Conflict,
    ExperimentConflict,
    ExperimentInvalid,
    ExperimentUnknown,
    InvalidRequest,
    NotFound,
    Overloaded,
)
from serving.experiment_plan import Experiment, Start, State
from storage.postgres import Connection

Result = TypeVar("Result")
_POLL_S = 0.1


class ExperimentStore:
    """Asks PostgreSQL. Close it when nobody asks any more. Each method raises ApiError.

    replica_timeout_s: how old an engine's heartbeat may be. report_timeout_s: how long to wait for a report.
    """

    def __init__(self, dsn: str, replica_timeout_s: float, report_timeout_s: float = 20.0) -> None:
        self._questions = Questions(dsn, "the registry")
        self._replica_timeout_s = replica_timeout_s
        self._report_timeout_s = report_timeout_s

    async def start(self, start: Start) -> Experiment:
        """Begin it."""
        return await self._ask(lambda c: experiments.start_experiment(c, start, timeout_s=self._replica_timeout_s))

    async def ramp(self, experiment_id: str, weights: dict[str, float] | None, share: float | None) -> Experiment:
        """Change weights or share."""
        return await self._ask(lambda c: experiments.ramp_experiment(c, experiment_id, weights=weights, share=share))

    async def stop(self, experiment_id: str, reason: str) -> Experiment:
        """End it without a decision."""

        def stopped(connection: Connection) -> Experiment:
            experiments.stop_experiment(connection, experiment_id, "stopped", {"reason": reason})
            return experiments.get_experiment(connection, experiment_id)

        return await self._ask(stopped)

    async def get(self, experiment_id: str) -> Experiment:
        """One of them."""
        return await self._ask(lambda c: experiments.get_experiment(c, experiment_id))

    async def changes(self, experiment_id: str) -> list[dict[str, Any]]:
        """What was done to it, oldest first."""
        return await self._ask(lambda c: experiments.changes(c, experiment_id))

    async def report(self, experiment_id: str) -> dict[str, Any]:
        """A report that was begun after this call. Raises Overloaded when none comes in time."""
        wanted: datetime = await self._ask(lambda c: experiments.want_report(c, experiment_id))
        deadline = asyncio.get_running_loop().time() + self._report_timeout_s
        while asyncio.get_running_loop().time() < deadline:
            report = await self._ask(lambda c: experiments.report_since(c, experiment_id, wanted))
            if report is not None:
                return report
            await asyncio.sleep(_POLL_S)
        raise Overloaded("No controller made the report in time; is one running?", retry_after_s=5)

    async def list(self, alias: str | None, state: State | None) -> list[Experiment]:
        """All of them, oldest first."""
        return await self._ask(lambda c: experiments.list_experiments(c, alias=alias, state=state))

    async def _ask(self, question: Callable[[Connection], Result]) -> Result:
        try:
            return await self._questions.ask(question)
        except ExperimentUnknown as error:
            raise NotFound(_sentence(error), param="experiment_id", code="experiment_not_found") from error
        except (ExperimentInvalid, CheckpointUnknown) as error:
            raise InvalidRequest(_sentence(error)) from error
        except (ExperimentConflict, CheckpointNotProven) as error:
            raise Conflict(_sentence(error)) from error

    def close(self) -> None:
        """Close the connection."""
        self._questions.close()


def _sentence(error: Exception) -> str:
    text = str(error)
    return f"{text[:1].upper()}{text[1:]}."
