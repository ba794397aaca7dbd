"""What `flywheel up` runs, as a table: the steps and the components, in stages, and the order of stopping.

Each entry runs `python -m flywheel <command>` in a process of its own, so each can be run alone as well.
Entries of one stage start together; a stage begins when all of the one before are ready. A step runs to
its end and must succeed; a component keeps running and is started again when it dies.
"""

import signal
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass

from flywheel.embedded import broker_address, embedded_dsn, listens, refuse_taken_port
from flywheel.errors import SettingsInvalid
from flywheel.settings import Settings


@dataclass(frozen=True)
class Step:
    """Runs once at every start, before the components in `used_by`; skipped when none of them runs."""

    name: str
    command: tuple[str, ...]
    used_by: frozenset[str]


@dataclass(frozen=True)
class Component:
    """Runs for good.

    ready: whether it does its work by now; asked a few times a second until it says so once. Without one it
        is ready when it has begun (`state.announce`) and did not fail at once.
    stop_signal: asks it to drain and end. death_signal: what the kernel sends when the supervisor dies.
    """

    name: str
    command: tuple[str, ...]
    ready: Callable[[Settings], bool] | None = None
    stop_signal: int = signal.SIGTERM
    death_signal: int = signal.SIGKILL


def database_answers(settings: Settings) -> bool:
    """Whether the embedded PostgreSQL accepts connections."""
    from storage.errors import DatabaseUnreachable
    from storage.postgres import connect

    try:
        connect(embedded_dsn(settings.home, "postgres"), connect_timeout_s=2).close()
    except DatabaseUnreachable:
        return False
    return True


def broker_answers(settings: Settings) -> bool:
    """Whether the broker accepts connections."""
    return listens(*broker_address(settings.feedback.bootstrap_servers))


def api_is_ready(settings: Settings) -> bool:
    """Whether GET /health/ready answers 200 within two seconds."""
    try:
        with urllib.request.urlopen(f"{settings.url}/health/ready", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError, ValueError):
        return False


STAGES: tuple[tuple[Step | Component, ...], ...] = (
    (
        # Fast shutdown on stop; an immediate one (the log is replayed at the next start) if the supervisor dies.
        Component("postgres", ("postgres",), database_answers, signal.SIGINT, signal.SIGQUIT),
        Component("broker", ("broker",), broker_answers),
    ),
    (Step("migrations", ("migrate",), frozenset({"serving", "ingest", "controller"})),),
    (
        Step("base model", ("model", "prepare"), frozenset({"serving", "controller"})),
        Step("topics", ("topics",), frozenset({"relay", "ingest"})),
        Step("first API key", ("key", "first"), frozenset({"serving"})),
    ),
    (
        Component("relay", ("relay",)),
        Component("ingest", ("ingest",)),
        Component("serving", ("serve",), api_is_ready),
    ),
    (Component("controller", ("controller",)),),
)

# Who asks first, then who carries: nothing is stopped while somebody still hands it work.
STOP_ORDER = ("controller", "serving", "relay", "ingest", "broker", "postgres")
NAMES = tuple(entry.name for stage in STAGES for entry in stage if isinstance(entry, Component))


def plan(settings: Settings, only: frozenset[str] = frozenset()) -> list[list[Step | Component]]:
    """The stages for these settings: components in `only` (all when empty), less those that run elsewhere.

    Raises SettingsInvalid for a name that is not in the table.
    """
    unknown = sorted(only - set(NAMES))
    if unknown:
        raise SettingsInvalid(f"no component is called {', '.join(unknown)}; there are {', '.join(NAMES)}")
    wanted = set(only or NAMES)
    if not settings.embedded_postgres:
        wanted.discard("postgres")
    if not settings.feedback.embedded_broker:
        wanted.discard("broker")
    stages = [
        [entry for entry in stage if (entry.used_by & wanted if isinstance(entry, Step) else entry.name in wanted)]
        for stage in STAGES
    ]
    return [stage for stage in stages if stage]


def check_ports(settings: Settings, names: set[str]) -> None:
    """Raise PortTaken before anything starts if a component in `names` could not listen."""
    if "broker" in names:
        host, port = broker_address(settings.feedback.bootstrap_servers)
        refuse_taken_port(host, port, "feedback.bootstrap_servers")
    if "serving" in names:
        refuse_taken_port(settings.serving.host, settings.serving.port, "serving.port")
