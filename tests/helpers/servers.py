"""Real servers for tests: PostgreSQL and a Kafka-compatible broker, each a process of its own.

They are the ones that `flywheel up` starts (flywheel.embedded), in a process that dies with this one.
"""

import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from flywheel.embedded import embedded_dsn, listens, wait_for_database
from flywheel.handle import free_ports
from storage.errors import DatabaseUnreachable
from storage.migrations import migrate, read_migrations
from storage.postgres import connect

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("serving", "feedback", "reward", "rounds")
START_WITHIN_S = 60.0


def free_port() -> int:
    """A TCP port on 127.0.0.1 that nobody listens on right now."""
    [port] = free_ports(1)
    return port


def wait_until_up(process: "subprocess.Popen[bytes]", is_up: Callable[[], bool]) -> None:
    """Return once `is_up()` is true. Fails when the process ends, or after START_WITHIN_S."""
    deadline = time.monotonic() + START_WITHIN_S
    while not is_up():
        assert process.poll() is None, f"{process.args} ended at its start"
        assert time.monotonic() < deadline, f"{process.args} does not come up"
        time.sleep(0.05)


@dataclass
class Broker:
    """The embedded broker on one port. `restart_empty` kills it and starts it anew: it keeps nothing."""

    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def bootstrap_servers(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> "Broker":
        code = f"from flywheel.embedded import run_broker; run_broker({self.bootstrap_servers!r})"
        self.process = _start(code)
        wait_until_up(self.process, lambda: listens("127.0.0.1", self.port))
        return self

    def kill(self) -> None:
        """SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)
            self.process = None

    def restart_empty(self) -> None:
        self.kill()
        self.start()


@dataclass
class Postgres:
    """The embedded PostgreSQL with its data under `home`. `new_database` gives a migrated one to each test."""

    home: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> "Postgres":
        code = (
            "from pathlib import Path; from flywheel.embedded import run_postgres; "
            f"run_postgres(Path({str(self.home)!r}))"
        )
        deadline = time.monotonic() + START_WITHIN_S
        self.process = _start(code)
        while True:
            try:
                wait_for_database(embedded_dsn(self.home, "postgres"), within_s=1)
                return self
            except DatabaseUnreachable:
                assert time.monotonic() < deadline, "PostgreSQL does not start"
            if self.process.poll() is not None:
                # After a SIGKILL it refuses to start until the last child of the old one has noticed.
                self.process = _start(code)

    def kill(self) -> None:
        """SIGKILL the postmaster; its children notice and end."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)
            self.process = None

    def stop(self) -> None:
        """Immediate shutdown: the data are not wanted any more, and syncing those of many databases takes long."""
        if self.process is not None:
            self.process.send_signal(signal.SIGQUIT)
            self.process.wait(20)
            self.process = None

    def new_database(self) -> str:
        """The DSN of a fresh, migrated database."""
        name = f"test_{uuid.uuid4().hex[:12]}"
        with connect(embedded_dsn(self.home, "postgres"), autocommit=True) as connection:
            connection.execute(f"create database {name}")
        dsn = embedded_dsn(self.home, name)
        migrate(dsn, read_migrations([ROOT / room / "migrations" for room in ROOMS]))
        return dsn


def _start(code: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
