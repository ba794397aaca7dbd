"""Processes that a fault test kills, pauses and starts again."""

import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Victim:
    """A Python process. `lines` collects what it printed, whole lines only, over all its lives."""

    arguments: list[str]
    lines: list[str] = field(default_factory=list)
    lives: int = 0
    process: subprocess.Popen[str] | None = None
    _reader: threading.Thread | None = None

    def start(self, **environment: str) -> "Victim":
        """environment: further variables, for this life."""
        self.process = subprocess.Popen(
            [sys.executable, *self.arguments],
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | environment,
        )
        self._reader = threading.Thread(target=self._read, args=(self.process,))
        self._reader.start()
        self.lives += 1
        return self

    def kill(self) -> None:
        """SIGKILL, and wait for the end; harmless when it has ended."""
        self._end(signal.SIGKILL, 10)

    def pause(self) -> None:
        """It stands still until `resume`."""
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.signal(signal.SIGCONT)

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def wait(self, within_s: float = 30) -> int:
        """The exit status, once it has ended by itself."""
        assert self.process is not None
        status = self.process.wait(within_s)
        assert self._reader is not None
        self._reader.join(10)
        return status

    def terminate(self, within_s: float = 30) -> int:
        """SIGTERM; returns the exit status. Fails when it does not end in time."""
        return self._end(signal.SIGTERM, within_s)

    def _end(self, number: int, within_s: float) -> int:
        self.signal(number)
        try:
            return self.wait(within_s)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            self.wait(10)
            raise

    def _read(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        with process.stdout as stream:
            for line in stream:
                if line.endswith("\n"):
                    self.lines.append(line.rstrip("\n"))
