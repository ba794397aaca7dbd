"""The state of a running platform, in `<home>/run/state.json`: written by the supervisor, read by everybody.

Written to a temporary file and renamed, so a reader sees a whole one. Tests and the demo find processes here:
`read_state(home).components["relay"].pid`. A pid is only meaningful together with its start time
(`processes.is_alive`), and changes when the component is started again.
"""

import json
import os
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

Phase = Literal["starting", "ready", "draining", "stopped", "failed"]
TERMINAL: frozenset[str] = frozenset({"stopped", "failed"})


class ProcessState(BaseModel):
    """A process: its pid and `processes.start_ticks`; null when it does not run."""

    model_config = ConfigDict(extra="forbid")

    pid: int | None = None
    start_ticks: int | None = None


class ComponentState(ProcessState):
    """One component. restarts: how often it died and was started again. log: its log file."""

    state: Literal["waiting", "starting", "running", "backoff", "stopping", "stopped"] = "waiting"
    restarts: int = 0
    last_exit_code: int | None = None
    log: str = ""


class StepState(BaseModel):
    """One set-up step. note: the last line that it wrote. seconds: how long it took."""

    model_config = ConfigDict(extra="forbid")

    state: Literal["waiting", "running", "done", "failed"] = "waiting"
    note: str = ""
    seconds: float | None = None
    log: str = ""


class PlatformState(BaseModel):
    """Everything about the running platform. Times in Unix seconds."""

    model_config = ConfigDict(extra="forbid")

    phase: Phase = "starting"
    error: str | None = None
    url: str = ""
    api_key_file: str = ""
    bootstrap_servers: str = ""
    began_at: float
    ready_at: float | None = None
    guardian: ProcessState
    supervisor: ProcessState = Field(default_factory=ProcessState)
    steps: dict[str, StepState] = Field(default_factory=dict)
    components: dict[str, ComponentState] = Field(default_factory=dict)


def state_file(home: Path) -> Path:
    """Where the state of the platform under `home` is kept."""
    return home / "run" / "state.json"


def announce(home: Path) -> None:
    """A component says that it has read its settings and imported its code, and begins its work."""
    target = home / "run" / f"begun-{os.getpid()}"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.touch()


def has_begun(home: Path, pid: int) -> bool:
    """Whether the component with this pid announced its begin."""
    return (home / "run" / f"begun-{pid}").exists()


def forget_begin(home: Path, pid: int) -> None:
    """Remove the announcement of a component that has ended, before its pid is used again."""
    (home / "run" / f"begun-{pid}").unlink(missing_ok=True)


def forget_all_begins(home: Path) -> None:
    """Remove every announcement: nothing of this home runs."""
    for left in (home / "run").glob("begun-*"):
        left.unlink(missing_ok=True)


def read_state(home: Path) -> PlatformState | None:
    """The last state written under `home`, or None when there is none, or one of another version."""
    try:
        return PlatformState.model_validate_json(state_file(home).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValidationError, json.JSONDecodeError):
        return None


def write_state(home: Path, state: PlatformState) -> None:
    """Replace the state under `home`."""
    target = state_file(home)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".state.{os.getpid()}")
    temporary.write_text(state.model_dump_json(indent=2), encoding="utf-8")
    temporary.replace(target)
