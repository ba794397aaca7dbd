"""A read-only view of one round, for people who watch: its state, progress, reports, and the experiment's path."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from feedback.preferences import count_decided
from rounds.experiments import evidence_path, tally
from rounds.settings import ExperimentSettings
from rounds.states import FIRST, TERMINAL
from rounds.store import Round, list_rounds, transitions
from storage.postgres import connect


@dataclass
class Watch:
    """What a background task last saw."""

    state: str = FIRST
    decided: int = 0


class Wheel:
    """Round `number` as the database at `dsn` has it; before the controller made it, a round in the first state."""

    def __init__(self, dsn: str, artifacts: Path, number: int = 1) -> None:
        self.dsn, self.artifacts, self.number = dsn, artifacts, number

    def round(self) -> Round:
        with connect(self.dsn) as connection:
            found = [round_ for round_ in list_rounds(connection) if round_.number == self.number]
        return found[0] if found else Round(round_id="", number=self.number, state=FIRST)

    def ended(self) -> bool:
        return self.round().state in TERMINAL

    def progress(self) -> str:
        """The step's own words and share done, such as "step 3 of 8 (38 %)"; empty when it has said nothing."""
        file = self.artifacts / "rounds" / f"{self.number:04d}" / "progress.json"
        with contextlib.suppress(FileNotFoundError):
            said = json.loads(file.read_text(encoding="utf-8"))
            return f"{said['text']} ({said['fraction']:.0%})"
        return ""

    def steps(self) -> list[dict[str, Any]]:
        """The transitions so far: from_state, to_state, reason, moved_at (ISO 8601)."""
        return [
            {
                "from": row["from_state"],
                "to": row["to_state"],
                "reason": row["reason"],
                "moved_at": row["moved_at"].isoformat(),
            }
            for row in self._transitions()
        ]

    def reports(self) -> dict[str, dict[str, Any]]:
        """The report that each state left when it was done, by state."""
        return {row["from_state"]: row["report"] for row in self._transitions()}

    def reason(self) -> str:
        """Why the round is where it is."""
        rows = self._transitions()
        return str(rows[-1]["reason"]) if rows else "nothing has happened yet"

    def experiment_path(self) -> list[dict[str, float | int]]:
        """The confidence sequence after each vote of the round's experiment; empty without one."""
        context = self.round().context
        if "experiment_id" not in context:
            return []
        with connect(self.dsn) as connection:
            row = connection.execute(
                "select report from experiments where experiment_id = %s", (context["experiment_id"],)
            ).fetchone()
            report = row["report"] if row and row["report"] else {}
            settings = ExperimentSettings(**report.get("settings", {}))
            votes = tally(connection, context["experiment_id"], "candidate")
        return evidence_path(votes.outcomes, settings.alpha)

    @asynccontextmanager
    async def watching(self, every_s: float = 1.0) -> AsyncIterator[Watch]:
        """Keep a Watch fresh in the background for the length of the block."""
        watch = Watch()

        def look() -> None:
            with connect(self.dsn) as connection:
                watch.decided = count_decided(connection)
            watch.state = self.round().state

        async def keep_looking() -> None:
            while True:
                await asyncio.sleep(every_s)
                await asyncio.to_thread(look)

        await asyncio.to_thread(look)
        task = asyncio.create_task(keep_looking())
        try:
            yield watch
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def _transitions(self) -> list[dict[str, Any]]:
        round_id = self.round().round_id
        with connect(self.dsn) as connection:
            return transitions(connection, round_id)
