"""Processes that a fault test kills and starts again."""

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
    _process: subprocess.Popen[str] | None = None
    _reader: threading.Thread | None = None

    def start(self) -> "Victim":
        self._process = subprocess.Popen(
            [sys.executable, *self.arguments], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self._reader = threading.Thread(target=self._read, args=(self._process,))
        self._reader.start()
        self.lives += 1
        return self

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self._end(signal.SIGKILL, 10)

    def terminate(self, within_s: float = 30) -> int:
        """SIGTERM; returns the exit status. Fails when it does not end in time."""
        return self._end(signal.SIGTERM, within_s)

    def _end(self, number: int, within_s: float) -> int:
        assert self._process is not None
        assert self._reader is not None
        self._process.send_signal(number)
        try:
            status = self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
            raise
        self._reader.join(10)
        return status

    def _read(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        with process.stdout as stream:
            self.lines += [line.rstrip("\n") for line in stream if line.endswith("\n")]
