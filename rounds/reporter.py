"""Makes the reports of experiments that somebody asked the API for, in a thread of the controller's process.

A request waits in the table experiment_reports. Guarantees: a report is begun after it was asked for; a database that
is away is asked again. Several reporters do no harm: they make the same report.
"""

import logging
import threading
import time
from typing import Any

from rounds.experiment_report import make_report
from serving.database import HeldConnection
from storage.errors import DatabaseUnreachable
from storage.postgres import Connection, storable_json

log = logging.getLogger(__name__)
_POLL_S = 0.3
_WAIT_S = 2.0


class Reporter:
    """Begin with `start`, end with `close`."""

    def __init__(self, dsn: str) -> None:
        self._database = HeldConnection(dsn)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reporter", daemon=True)

    def start(self) -> None:
        """Go on in the background."""
        self._thread.start()

    def close(self) -> None:
        """Stop after the report that is being made."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=30)

    def _run(self) -> None:
        pause = _POLL_S
        while not self._stop.wait(pause):
            pause = _POLL_S
            try:
                self.answer_requests()
            except DatabaseUnreachable as error:
                log.warning("no reports at the moment: %s", error)
                pause = _WAIT_S
        self._database.close()

    def answer_requests(self) -> int:
        """Make what was asked for and not made since; returns how many. Raises DatabaseUnreachable."""
        asked = self._database.run(_asked)
        for row in asked:
            began = time.monotonic()
            experiment_id = row["experiment_id"]
            report = self._database.run(lambda connection, name=experiment_id: make_report(connection, name))
            text = storable_json(report, unknown_as_null=True)
            self._database.run(lambda connection, row=row, text=text: _keep(connection, row, text))
            log.info("the report of %s took %.1f s", experiment_id, time.monotonic() - began)
        return len(asked)


def _asked(connection: Connection) -> list[dict[str, Any]]:
    return connection.execute(
        "select experiment_id, now() as begun_at from experiment_reports "
        "where begun_at is null or begun_at < wanted_at order by wanted_at"
    ).fetchall()


def _keep(connection: Connection, row: dict[str, Any], report: str) -> None:
    connection.execute(
        "update experiment_reports set begun_at = %s, report = %s where experiment_id = %s",
        (row["begun_at"], report, row["experiment_id"]),
    )
