"""What the command modules share, and the commands that run one component each, alone or under the supervisor.

A component runs until SIGTERM or SIGINT, then drains within its own bounds and ends with exit code 0.
"""

import json
import logging
import signal
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flywheel.errors import SettingsInvalid
from telemetry.logs import set_up_logs

if TYPE_CHECKING:
    from flywheel.settings import Settings
    from serving.settings import ServingSettings
    from storage.postgres import Connection

log = logging.getLogger(__name__)


def settings_of(context: typer.Context) -> "Settings":
    """The resolved settings of this command line. Raises SettingsInvalid."""
    from flywheel.settings import load_settings, parse_assignments

    return load_settings(**parse_assignments(context.obj))


Json = Annotated[bool, typer.Option("--json", help="Print JSON for a script.")]


def print_rows(title: str, rows: Sequence[dict[str, Any]], *, as_json: bool) -> None:
    """Rows as a table for people, or as JSON."""
    if as_json:
        typer.echo(json.dumps(rows, default=str))
        return
    from flywheel import terminal

    terminal.print_rows(title, rows)


def connect_to(context: typer.Context) -> "Connection":
    """A connection to the database of this command line's settings. Raises DatabaseUnreachable."""
    from storage.postgres import connect

    return connect(settings_of(context).storage.dsn)


def set_options(context: typer.Context) -> list[str]:
    """The `--set` options of this command line, to hand on to another process."""
    return [f"--set={assignment}" for assignment in context.obj]


def begin(settings: "Settings") -> threading.Event:
    """Tell the supervisor that the imports are done; returns an event that SIGTERM and SIGINT set.

    The handler leaves the setting to a thread: it may interrupt the very code that holds the event's lock.
    """
    from flywheel.state import announce

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: threading.Thread(target=stop.set).start())
    announce(settings.home)
    return stop


def add_to(app: typer.Typer) -> None:
    """Register the commands on `app`."""
    app.command(rich_help_panel="Components")(serve)
    app.command(rich_help_panel="Components")(relay)
    app.command(rich_help_panel="Components")(ingest)
    app.command(rich_help_panel="Components")(controller)
    app.command(rich_help_panel="Components")(postgres)
    app.command(rich_help_panel="Components")(broker)
    app.command(rich_help_panel="Set-up")(migrate)
    app.command(rich_help_panel="Set-up")(topics)
    app.command(hidden=True)(supervise)


def serve(context: typer.Context) -> None:
    """Run the API and the engines. SIGHUP replaces every replica by one with the settings as they are then."""
    from serving.app import run

    settings = settings_of(context)
    asked = threading.Event()
    signal.signal(signal.SIGHUP, lambda *_: threading.Thread(target=asked.set).start())

    def redeploy() -> "ServingSettings | None":
        if not asked.is_set():
            return None
        asked.clear()
        try:
            return settings_of(context).serving
        except SettingsInvalid as error:
            log.error("no redeploy, the settings are wrong: %s", error)
            return None

    run(
        settings.serving,
        settings.feedback,
        settings.storage.dsn,
        begin(settings),
        run_dir=settings.run,
        redeploy=redeploy,
    )


def relay(context: typer.Context) -> None:
    """Carry events from the outbox to the log."""
    from feedback.relay import run

    settings = settings_of(context)
    set_up_logs()
    run(settings.feedback, begin(settings), settings.storage.dsn)


def ingest(context: typer.Context) -> None:
    """Carry events from the log to the store."""
    from feedback.ingest import run

    settings = settings_of(context)
    set_up_logs()
    run(settings.feedback, settings.storage.dsn, begin(settings))


def controller(context: typer.Context) -> None:
    """Turn the wheel whenever enough new votes are in."""
    from rounds.controller import run
    from serving.app import ADDRESS_FILE

    settings = settings_of(context)
    set_up_logs()
    run(
        settings.rounds,
        settings.reward,
        dsn=settings.storage.dsn,
        artifacts=settings.storage.artifacts,
        base_model=settings.serving.model,
        alias=settings.serving.alias,
        ray_address_file=settings.run / ADDRESS_FILE,
        stop=begin(settings),
    )


def postgres(context: typer.Context) -> None:
    """Run the embedded PostgreSQL under the home folder."""
    from flywheel.embedded import run_postgres

    run_postgres(settings_of(context).home)


def broker(context: typer.Context) -> None:
    """Run the embedded Kafka-compatible broker; it keeps everything in memory."""
    from flywheel.embedded import run_broker

    run_broker(settings_of(context).feedback.bootstrap_servers)


def migrate(context: typer.Context) -> None:
    """Bring the database up to this version; makes the embedded one when it is missing."""
    from flywheel.setup import migrate_database

    for name in migrate_database(settings_of(context)):
        typer.echo(f"applied {name}")


def topics(context: typer.Context) -> None:
    """Create the topics that are missing."""
    from feedback.topics import ensure_topics

    ensure_topics(settings_of(context).feedback)


def supervise(
    context: typer.Context, only: Annotated[list[str] | None, typer.Option(help="Components to run.")] = None
) -> None:
    """Run as the supervisor, under its guardian; `flywheel up` starts both."""
    from flywheel.supervisor import Supervisor

    raise typer.Exit(Supervisor(settings_of(context), set_options(context), frozenset(only or ())).run())
