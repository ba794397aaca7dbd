"""What the relay and the ingest share: running until told to stop, and trying again with growing pauses."""

import threading
from collections import Counter


class Backoff:
    """Pauses between tries: 0.1 s, doubled up to `longest_s`; `reset` after a success."""

    def __init__(self, stop: threading.Event, longest_s: float) -> None:
        self._stop = stop
        self._longest_s = longest_s
        self._next_s = 0.1

    def wait(self) -> None:
        """Sleep until it is time for the next try, or until the stop."""
        self._stop.wait(self._next_s)
        self._next_s = min(2 * self._next_s, self._longest_s)

    def reset(self) -> None:
        self._next_s = 0.1


def summary(name: str, counters: Counter[str]) -> str:
    """The line that a process says at its end: every counter, zeros too."""
    return f"{name} stopped: " + ", ".join(f"{key} {value}" for key, value in sorted(counters.items()))
