"""A handle on a platform of one's own: started, asked and stopped from Python, as the demo and the tests do.

Guarantees: leaving the `with` block stops everything that `start` started, however the block ends.
"""

import contextlib
import random
import socket
import time
from pathlib import Path
from typing import Any

from feedback.audit import AuditReport, audit
from flywheel import control
from flywheel.errors import NotRunning, PortTaken
from flywheel.settings import load_settings, parse_assignments

DRAIN_S = 60.0
_PORTS = range(20_000, 32_768)


class Platform:
    """A platform with its own home and free ports. assignments: further settings, such as `serving.alias=flash`."""

    def __init__(self, home: Path, *assignments: str) -> None:
        api_port, broker_port = free_ports(2)
        assigned = [
            f"home={home}",
            f"serving.port={api_port}",
            f"feedback.bootstrap_servers=127.0.0.1:{broker_port}",
            # Whatever a file or the environment says, it writes to its own home only.
            "storage.dsn=",
            f"storage.artifacts={home / 'artifacts'}",
            f"feedback.outbox={home / 'outbox'}",
            "feedback.embedded_broker=true",
            *assignments,
        ]
        self.settings = load_settings(**parse_assignments(assigned))
        self._arguments = [f"--set={assignment}" for assignment in assigned]
        self._started = False

    def __enter__(self) -> "Platform":
        return self

    def __exit__(self, *_: object) -> None:
        if self._started:
            with contextlib.suppress(NotRunning):  # a failed start has stopped what it started
                self.stop()

    def start(self, *only: str) -> None:
        """Start the components in `only` (all when empty) and wait until they are ready. Raises StartFailed."""
        self._started = True
        control.wait_until_ready(self.settings, control.start(self.settings, self._arguments, only))

    def stop(self) -> None:
        """Drain and stop; nothing is left running."""
        self._started = False
        control.stop(self.settings)

    @property
    def url(self) -> str:
        """Where the API is."""
        return self.settings.url

    @property
    def key(self) -> str:
        """The first API key; it has every scope."""
        return self.settings.api_key_file.read_text(encoding="utf-8").strip()

    @property
    def dsn(self) -> str:
        """The connection string of its database."""
        return self.settings.storage.dsn

    @property
    def artifacts(self) -> Path:
        """Where its snapshots, reward models and checkpoints are."""
        return self.settings.storage.artifacts

    def audit_when_drained(self) -> dict[str, Any]:
        """The ledger audit as JSON values, once nothing is pending or after a minute."""
        deadline = time.monotonic() + DRAIN_S
        report = self._audit()
        while report.pending and time.monotonic() < deadline:
            time.sleep(0.5)
            report = self._audit()
        return report.model_dump(mode="json") | {"clean": report.clean}

    def _audit(self) -> AuditReport:
        return audit(self.settings.feedback, self.dsn)


def free_ports(count: int) -> list[int]:
    """`count` different TCP ports of the loopback interface that nobody listens on right now.

    None is of the range that systems give to outgoing connections (from 32768 on): one of those could be taken by
    somebody's connection before it is listened on.
    """
    found: list[int] = []
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        if len(found) == count:
            return found
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        found.append(port)
    raise PortTaken(f"fewer than {count} ports from {_PORTS.start} to {_PORTS.stop - 1} are free on 127.0.0.1")
