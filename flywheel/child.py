"""One supervised process: started, watched until ready, started again after a pause when it dies, stopped whole.

Killing a child means killing everything it ever started: what is below it now, and daemons that detached
themselves, which carry its tag and generation in their environment.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import psutil

from flywheel import processes
from flywheel.components import Component, Step
from flywheel.settings import Settings
from flywheel.state import ComponentState, StepState, forget_begin, has_begun

_WORKING_IS_READY_AFTER_S = 1.0
_LOG_BYTES_BEFORE_ROTATION = 16 << 20


class Child:
    """The process of one entry of the table. `deaths` counts the failures of this start."""

    def __init__(self, entry: Step | Component, settings: Settings, arguments: Sequence[str]) -> None:
        self.entry = entry
        self.name = entry.name
        self._settings = settings
        self._command = [sys.executable, "-m", "flywheel", *arguments, *entry.command]
        self.log = settings.logs / f"{entry.name.replace(' ', '-')}.log"
        self._generation = 0
        self._began = 0.0
        self._seen_at: float | None = None  # when it was first seen at its work
        self._process: subprocess.Popen[bytes] | None = None
        self._backoff_s = settings.supervisor.backoff_first_s
        self.next_start = 0.0
        self.deaths = 0

    @property
    def pid(self) -> int | None:
        """The pid of the process that runs, or ran last until `exit_code` was seen."""
        return self._process.pid if self._process else None

    @property
    def runs_for_s(self) -> float:
        return time.monotonic() - self._began

    def start(self) -> None:
        """Start it; its output is appended to its log."""
        self._generation += 1
        self._began = time.monotonic()
        self._seen_at = None
        death_signal = self.entry.death_signal if isinstance(self.entry, Component) else signal.SIGKILL
        with _open_log(self.log) as log:
            self._process = processes.spawn(
                self._command, log=log, death_signal=death_signal, environment={processes.TAG: self._tag}
            )

    def exit_code(self) -> int | None:
        """None while it runs; else how it ended (negative: the signal)."""
        return self._process.poll() if self._process else 0

    def is_ready(self) -> bool:
        """Whether it does its work: its own probe, or that it began to work and did not fail at once."""
        assert isinstance(self.entry, Component)
        assert self._process is not None
        if self.entry.ready is None:
            if self._seen_at is None and has_begun(self._settings.home, self._process.pid):
                self._seen_at = time.monotonic()
            return self._seen_at is not None and time.monotonic() - self._seen_at > _WORKING_IS_READY_AFTER_S
        return self.entry.ready(self._settings)

    def ask_to_stop(self) -> None:
        """Send the stop signal to the main process."""
        if self._process and self._process.poll() is None:
            number = self.entry.stop_signal if isinstance(self.entry, Component) else signal.SIGTERM
            self._process.send_signal(number)

    def kill(self) -> int:
        """Kill it and all it started, detached or not. Returns how many could not be killed."""
        if not self._process:
            return 0
        left = processes.kill_until_gone(self._whole)
        self._process.poll()
        forget_begin(self._settings.home, self._process.pid)
        self._process = None
        return left

    def schedule_restart(self) -> None:
        """Set `next_start` after a pause that doubles as long as the process keeps dying young."""
        policy = self._settings.supervisor
        if self.runs_for_s > policy.stable_after_s:
            self._backoff_s = policy.backoff_first_s
        self.next_start = time.monotonic() + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, policy.backoff_most_s)

    def last_lines(self, count: int) -> list[str]:
        """The end of its log."""
        try:
            with self.log.open("rb") as stream:
                stream.seek(max(0, self.log.stat().st_size - 8192))
                return stream.read().decode(errors="replace").splitlines()[-count:]
        except FileNotFoundError:
            return []

    def fill(self, record: ComponentState | StepState) -> None:
        """Write what a reader of the state wants to know into `record`."""
        record.log = str(self.log)
        if isinstance(record, StepState):
            if self._process and self._process.poll() is None:
                record.note = next(iter(self.last_lines(1)), "")
        else:
            record.pid = self.pid
            record.start_ticks = processes.start_ticks(self.pid) if self.pid else None

    @property
    def _tag(self) -> str:
        return f"{processes.home_tag(self._settings.home)}:{self.name}:{self._generation}"

    def _whole(self) -> list[psutil.Process]:
        assert self._process is not None
        # The main process may be dead and reaped already, its pid given to another: poll() tells.
        below = processes.tree(self._process.pid) if self._process.poll() is None else []
        return [*below, *(found for found in processes.tagged(self._tag) if processes.tag_of(found) == self._tag)]


def _open_log(path: Path) -> IO[bytes]:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.stat().st_size > _LOG_BYTES_BEFORE_ROTATION:
        path.replace(path.with_suffix(".log.1"))
    return path.open("ab")
