"""Process trees: parent-death signals, child subreapers, tags, and killing whole trees. Linux.

Guarantees: a process started through `spawn` dies with its parent, even if the parent is killed with SIGKILL;
everything below it, daemons that detached themselves included, is re-parented to the nearest subreaper
and can be found there, or anywhere on the machine by the tag in its environment.
Does not guarantee: to find a process that both detached and wiped its environment after all subreapers died.
"""

import contextlib
import ctypes
import hashlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import psutil

TAG = "FLYWHEEL_PROCESS_TAG"
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed: this operating system is not a Linux that we know")


def become_subreaper() -> None:
    """From now on orphaned descendants of this process become its children instead of init's."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(death_signal: int, parent: int | None = None) -> None:
    """Ask the kernel to send `death_signal` to this process when its parent dies.

    parent: the pid that the parent had before the fork, to close the race in which it died since.
    """
    _prctl(_PR_SET_PDEATHSIG, death_signal)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), death_signal)


def spawn(
    arguments: Sequence[str],
    *,
    log: IO[Any] | int,
    death_signal: int = signal.SIGKILL,
    environment: Mapping[str, str] | None = None,
    keep_open: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, its output in `log`, that dies with us.

    Call it from a process with one thread only: the child runs Python between fork and exec.
    """
    parent = os.getpid()

    def _before_exec() -> None:
        die_with_parent(death_signal, parent)

    return subprocess.Popen(
        list(arguments),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env={**os.environ, **(environment or {})},
        start_new_session=True,
        pass_fds=tuple(keep_open),
        preexec_fn=_before_exec,
    )


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot (proc(5), `starttime`), or None if there is none.

    With the pid it names a process for good. Not psutil's `create_time`: that is wall-clock time, and moves when the
    machine's clock is set.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(stat.rpartition(")")[2].split()[19])


def is_alive(pid: int, start: int | None) -> bool:
    """Whether the very process that had this pid and `start_ticks` still runs (a zombie does not)."""
    try:
        same = start is None or start_ticks(pid) == start
        return same and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def home_tag(home: Path) -> str:
    """What the tags of all components under `home` begin with."""
    return hashlib.sha256(str(home.resolve()).encode()).hexdigest()[:16]


def scratch_directory(home: Path) -> Path:
    """The components' temporary folder: removed when the platform ends. Short, because sockets lie in it."""
    return Path("/tmp") / f"fw-{home_tag(home)[:8]}"


def tag_of(process: psutil.Process) -> str:
    """The tag in a process's environment; empty if it has none, or we may not look."""
    try:
        return process.environ().get(TAG, "")
    except (psutil.Error, OSError):
        return ""


def tagged(prefix: str) -> list[psutil.Process]:
    """Every process on the machine whose tag begins with `prefix`, this one excepted."""
    me = os.getpid()
    return [process for process in psutil.process_iter() if process.pid != me and tag_of(process).startswith(prefix)]


def descendants(pid: int) -> list[psutil.Process]:
    """All processes below `pid`, those re-parented to it included."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def tree(pid: int) -> list[psutil.Process]:
    """The process and all below it; empty if it is gone."""
    try:
        return [psutil.Process(pid), *descendants(pid)]
    except psutil.Error:
        return []


def kill_until_gone(find: Callable[[], Iterable[psutil.Process]], *, within_s: float = 10.0) -> int:
    """SIGKILL what `find` returns, again until it returns nothing alive. Returns how many are still alive then.

    Repeats, because a process may fork while its parent is being killed.
    """
    deadline = time.monotonic() + within_s
    while True:
        alive = [process for process in find() if _kill(process)]
        if not alive or time.monotonic() > deadline:
            return len(alive)
        time.sleep(0.05)


def _kill(process: psutil.Process) -> bool:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        process.send_signal(signal.SIGKILL)
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True
    return True


def reap_orphans(keep: Iterable[int]) -> None:
    """Collect the exit status of dead children until one in `keep` comes up (that one has an owner who waits)."""
    kept = set(keep)
    with contextlib.suppress(ChildProcessError):
        while True:
            dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if dead is None or dead.si_pid in kept:
                return
            os.waitpid(dead.si_pid, os.WNOHANG)
