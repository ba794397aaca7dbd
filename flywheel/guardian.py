"""The guardian: parent of the supervisor, there for the case that the supervisor itself is killed.

`python -m flywheel.guardian <home> <arguments of the supervisor…>` takes the lock of the home, starts the
supervisor and waits. Both are child subreapers and know of each other's death: when the supervisor dies,
the guardian kills all that it left; when the guardian dies, the supervisor drains and ends. The lock is
held through a file that both have open, so it is free only when both are gone.
Exit codes: 0 after an orderly stop, 1 after a failure, 3 when another guardian holds the lock.
"""

import os
import shutil
import signal
import sys
import time
from pathlib import Path

from flywheel import processes
from flywheel.state import TERMINAL, PlatformState, ProcessState, forget_all_begins, read_state, write_state
from storage.locks import take_lock

LOCK_HELD = 3


def guard(home: Path, arguments: list[str]) -> int:
    """Run the supervisor to its end and leave nothing behind. Returns the exit code."""
    (home / "run").mkdir(parents=True, exist_ok=True)
    lock = take_lock(home / "run" / "lock")
    if lock is None:
        return LOCK_HELD
    processes.become_subreaper()
    _sweep(home)
    forget_all_begins(home)
    scratch = processes.scratch_directory(home)
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(mode=0o700)
    me = os.getpid()
    write_state(
        home, PlatformState(began_at=time.time(), guardian=ProcessState(pid=me, start_ticks=processes.start_ticks(me)))
    )
    supervisor = processes.spawn(
        [sys.executable, "-m", "flywheel", *arguments],
        log=sys.stdout.fileno(),
        death_signal=signal.SIGTERM,
        environment={"TMPDIR": str(scratch)},
        keep_open=(lock,),
    )
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: supervisor.send_signal(signal.SIGTERM))
    code = supervisor.wait()
    _sweep(home)
    shutil.rmtree(scratch, ignore_errors=True)
    state = read_state(home)
    if state is not None and state.phase not in TERMINAL:
        state.phase = "failed"
        state.error = f"the supervisor ended unexpectedly ({_ending(code)}); everything it ran was killed"
        for component in state.components.values():
            component.pid, component.start_ticks, component.state = None, None, "stopped"
        write_state(home, state)
    return 0 if code == 0 else 1


def _sweep(home: Path) -> None:
    """Kill all below us, and whatever carries the tag of this home and is not below us."""
    tag = processes.home_tag(home)
    left = processes.kill_until_gone(lambda: [*processes.descendants(os.getpid()), *processes.tagged(tag)])
    processes.reap_orphans(keep=())
    if left:
        print(f"guardian: {left} processes could not be killed", flush=True)


def _ending(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


if __name__ == "__main__":
    sys.exit(guard(Path(sys.argv[1]), sys.argv[2:]))
