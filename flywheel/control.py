"""Starting, watching and stopping the platform from another process: what `up`, `status`, `down` and the demo use.

`start` returns as soon as the guardian runs; `wait_until_ready` follows the state file. `stop` asks for a
drain, waits, and then sweeps: whatever still carries the tag of the home is killed.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import psutil

from flywheel import processes
from flywheel.errors import AlreadyRunning, NotRunning, StartFailed, StopTimedOut
from flywheel.guardian import LOCK_HELD
from flywheel.settings import Settings
from flywheel.state import TERMINAL, PlatformState, ProcessState, read_state

_POLL_S = 0.2
_LOCK_ANSWER_S = 15


def start(
    settings: Settings, arguments: Sequence[str] = (), only: Sequence[str] = (), *, tied: bool = True
) -> subprocess.Popen[bytes]:
    """Start guardian and supervisor and return the guardian's process.

    arguments: the `--set` options of this command line, handed on. only: the components to start; all if empty.
    tied: the platform drains when the calling process dies; call it from the main thread then.
    Raises AlreadyRunning, StartFailed.
    """
    supervisor = [*arguments, "supervise", *(f"--only={name}" for name in only)]
    try:
        settings.logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartFailed(
            f"the home folder {settings.home} can't be used: {error}; set another with --set home=…"
        ) from error
    with (settings.logs / "supervisor.log").open("ab") as log:
        command = [sys.executable, "-m", "flywheel.guardian", str(settings.home), *supervisor]
        guardian = (
            processes.spawn(command, log=log, death_signal=signal.SIGTERM)
            if tied
            else subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        )
    deadline = time.monotonic() + _LOCK_ANSWER_S
    while (state := read_state(settings.home)) is None or state.guardian.pid != guardian.pid:
        code = guardian.poll()
        if code == LOCK_HELD:
            raise AlreadyRunning(_where_it_runs(settings))
        if code is not None or time.monotonic() > deadline:
            guardian.kill()
            raise StartFailed(f"the guardian did not start; see {settings.logs / 'supervisor.log'}")
        time.sleep(0.05)
    return guardian


def wait_until_ready(
    settings: Settings, guardian: subprocess.Popen[bytes], progress: Callable[[PlatformState], None] = lambda _: None
) -> PlatformState:
    """Follow the start until the platform is ready. Raises StartFailed with the supervisor's reason."""
    while True:
        state = read_state(settings.home)
        if state is not None:
            progress(state)
            if state.phase == "ready":
                return state
            if state.phase in TERMINAL and guardian.poll() is not None:
                raise StartFailed(state.error or "the start was stopped")
        if guardian.poll() is not None and (state is None or state.phase not in TERMINAL):
            raise StartFailed(f"the supervisor is gone; see {settings.logs / 'supervisor.log'}")
        time.sleep(_POLL_S)


def running_state(settings: Settings) -> PlatformState | None:
    """The state, if guardian or supervisor of this home are alive; else None."""
    state = read_state(settings.home)
    if state is not None and (_alive(state.guardian) or _alive(state.supervisor)):
        return state
    return None


def stop(settings: Settings, progress: Callable[[PlatformState], None] = lambda _: None) -> None:
    """Drain and stop the platform of this home, then make sure that nothing of it is left.

    Raises NotRunning when there was nothing to stop, StopTimedOut when something survived.
    """
    state = running_state(settings)
    if state is not None:
        _ask(state)
        policy = settings.supervisor
        deadline = time.monotonic() + policy.drain_timeout_s + 7 * policy.stop_timeout_s
        while time.monotonic() < deadline and (now := running_state(settings)) is not None:
            progress(now)
            time.sleep(_POLL_S)
    left_over = sweep(settings)
    if state is None and not left_over:
        raise NotRunning(f"nothing runs under {settings.home}")


def redeploy(settings: Settings) -> None:
    """Ask the serving component to replace every replica. Raises NotRunning."""
    state = running_state(settings)
    serving = state.components.get("serving") if state else None
    if serving is None or serving.pid is None:
        raise NotRunning(f"nothing serves under {settings.home}; `flywheel up` starts it")
    os.kill(serving.pid, signal.SIGHUP)


def sweep(settings: Settings) -> int:
    """Kill whatever of this home still runs. Returns how many there were. Raises StopTimedOut if some survived."""
    found = {process.pid for process in _all_processes(settings)}
    if found and processes.kill_until_gone(lambda: _all_processes(settings)):
        raise StopTimedOut(f"some processes could not be killed: {sorted(p.pid for p in _all_processes(settings))}")
    return len(found)


def _all_processes(settings: Settings) -> list[psutil.Process]:
    state = read_state(settings.home)
    chiefs = [chief for chief in (state.guardian, state.supervisor) if _alive(chief)] if state else []
    trees = [process for chief in chiefs if chief.pid for process in processes.tree(chief.pid)]
    alive = [*trees, *processes.tagged(processes.home_tag(settings.home))]
    return [process for process in alive if process.pid != os.getpid() and processes.is_alive(process.pid, None)]


def _ask(state: PlatformState) -> None:
    chief = state.supervisor if _alive(state.supervisor) else state.guardian
    with contextlib.suppress(ProcessLookupError):
        if chief.pid:
            os.kill(chief.pid, signal.SIGTERM)


def _alive(process: ProcessState) -> bool:
    return process.pid is not None and processes.is_alive(process.pid, process.start_ticks)


def _where_it_runs(settings: Settings) -> str:
    state = read_state(settings.home)
    where = f" at {state.url}" if state and state.url else ""
    who = f" (supervisor {state.supervisor.pid})" if state and state.supervisor.pid else ""
    return f"flywheel is already running{where}{who}, home {settings.home}; `flywheel down` stops it"
