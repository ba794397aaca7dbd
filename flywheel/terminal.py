"""What the commands show: progress while the platform starts and stops, tables, settings."""

import json
import signal
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from flywheel import control
from flywheel.components import api_is_ready
from flywheel.settings import Settings, masked
from flywheel.state import PlatformState, read_state

_QUIET_S = 15.0  # without a line, while something starts
_COLOURS = {"running": "green", "done": "green", "starting": "yellow", "backoff": "red", "failed": "red"}


class _Interrupted(Exception):
    """SIGINT, SIGTERM or SIGHUP came."""


def up(settings: Settings, arguments: Sequence[str], only: Sequence[str], *, detach: bool) -> int:
    """Start; attached, stay until a signal or the platform's end. Returns the exit code."""
    console = Console()
    guardian = control.start(settings, arguments, only, tied=not detach)
    _raise_on_signals()
    try:
        with _Progress(console) as progress:
            state = control.wait_until_ready(settings, guardian, progress.show)
        console.print(_ready_table(state))
        if detach:
            console.print("Runs in the background; `flywheel status` shows it, `flywheel down` stops it.")
            return 0
        console.print("Ctrl-C drains and stops.")
        code = guardian.wait()
    except _Interrupted:
        console.print("Draining; once more to hurry.")
        guardian.terminate()
        code = _wait_for_the_end(guardian)
    final = read_state(settings.home)
    console.print(f"[red]{final.error}[/red]" if final and final.error else "Stopped; nothing is left running.")
    return code


def down(settings: Settings) -> None:
    """Drain and stop with progress. Raises NotRunning, StopTimedOut."""
    console = Console()
    with _Progress(console) as progress:
        control.stop(settings, progress.show)
    console.print("Stopped; nothing is left running.")


def redeploy(settings: Settings) -> None:
    """Ask serving to replace its replicas. Raises NotRunning, SettingsInvalid for settings that could not be used."""
    control.redeploy(settings)
    print("Replicas are being replaced; the serving log tells when each one is done.")


def status(settings: Settings, *, as_json: bool) -> int:
    """Print what runs. Returns 0 when something does, else 1."""
    state = control.running_state(settings)
    ready = bool(state and state.url and api_is_ready(settings))
    if as_json:
        shown = state.model_dump(mode="json") if state else {"phase": "stopped", "components": {}}
        print(json.dumps({"running": state is not None, "api_ready": ready, **shown}))
    elif state is None:
        last = read_state(settings.home)
        print(f"Nothing runs under {settings.home}." + (f" Last time: {last.error}" if last and last.error else ""))
    else:
        console = Console()
        console.print(_components_table(state))
        if state.url:
            console.print(f"API {state.url}: {'ready' if ready else 'not ready'}; key in {state.api_key_file}")
    return 0 if state else 1


def print_settings(settings: Settings, *, as_json: bool) -> None:
    """The resolved settings, as JSON or in the form of a flywheel.toml."""
    tree = masked(settings)
    if as_json:
        print(json.dumps(tree, indent=2))
        return
    _print_toml(tree, ())


def print_rows(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """A table of database rows."""
    table = Table(title=title)
    for place, name in enumerate(rows[0] if rows else ()):
        table.add_column(name, overflow="fold", no_wrap=place == 0)  # an id that is cut is no use
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    Console().print(table if rows else f"{title}: none yet")


def print_fields(title: str, fields: dict[str, Any]) -> None:
    """A table of names and values."""
    table = Table("", "", title=title, show_header=False)
    for name, value in fields.items():
        table.add_row(name, _cell(value))
    Console().print(table)


class _Progress:
    """A live table on a terminal; anywhere else a line for each change, and one after each quiet while."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None
        self._seen: dict[str, str] = {}
        self._spoke_at = time.monotonic()

    def __enter__(self) -> "_Progress":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def show(self, state: PlatformState) -> None:
        if self._live:
            self._live.update(_components_table(state))
            return
        now = {name: _one_line(record.state, record.note) for name, record in state.steps.items()}
        now |= {name: record.state for name, record in state.components.items()}
        if not self._seen and state.phase != "starting":
            self._seen = now  # what stands already is no news
        for name, text in now.items():
            if text != self._seen.get(name, "waiting"):
                self._say(f"{name}: {text}")
        self._seen = now
        waiting_for = [name for name, component in state.components.items() if component.state == "starting"]
        if waiting_for and time.monotonic() - self._spoke_at > _QUIET_S:
            self._say(f"{', '.join(waiting_for)}: still starting after {time.time() - state.began_at:.0f} s")

    def _say(self, text: str) -> None:
        self._console.print(f"{time.strftime('%H:%M:%S')} {text}", markup=False, highlight=False)
        self._spoke_at = time.monotonic()


def _components_table(state: PlatformState) -> Table:
    age = f", {time.time() - state.began_at:.0f} s" if state.phase == "starting" else ""
    table = Table("part", "state", "pid", "restarts", title=f"flywheel: {state.phase}{age}")
    table.add_column("", overflow="fold")  # a path cut short is no use
    for name, step in state.steps.items():
        detail = f"{step.seconds} s" if step.seconds is not None else step.note
        table.add_row(name, _coloured(step.state), "", "", detail)
    for name, component in state.components.items():
        pid = str(component.pid or "")
        table.add_row(name, _coloured(component.state), pid, str(component.restarts or ""), component.log)
    return table


def _ready_table(state: PlatformState) -> Table:
    seconds = (state.ready_at or time.time()) - state.began_at
    table = Table("", "", title=f"flywheel is up after {seconds:.0f} s", show_header=False)
    if state.url:
        table.add_row("API", state.url)
        table.add_row("API key", state.api_key_file)
    if "broker" in state.components:
        table.add_row("Kafka", state.bootstrap_servers)
    for name, component in state.components.items():
        table.add_row(name, f"pid {component.pid}, log {component.log}")
    return table


def _coloured(text: str) -> str:
    return f"[{_COLOURS.get(text, 'default')}]{text}[/]"


def _one_line(state: str, note: str) -> str:
    return f"{state}: {note}" if note and state == "running" else state


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(str(item) for item in value)
    return "" if value is None else str(value)


def _print_toml(tree: dict[str, Any], path: tuple[str, ...]) -> None:
    plain = {name: value for name, value in tree.items() if not isinstance(value, dict)}
    if path and plain:
        print(f"\n[{'.'.join(path)}]")
    for name, value in plain.items():
        # JSON's scalars and lists are TOML's; TOML has no null, so an unset value is a comment.
        print(f"# {name} is not set" if value is None else f"{name} = {json.dumps(value, ensure_ascii=False)}")
    for name, value in tree.items():
        if isinstance(value, dict):
            _print_toml(value, (*path, name))


def _raise_on_signals() -> None:
    def _raise(*_: object) -> None:
        raise _Interrupted

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _raise)


def _wait_for_the_end(guardian: Any) -> int:
    while True:
        try:
            return int(guardian.wait())
        except _Interrupted:
            guardian.terminate()
