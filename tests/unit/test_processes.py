"""Laws of processes: who is alive, whatever the clock on the wall says."""

import os
import subprocess
import sys
from pathlib import Path

import psutil

from flywheel.processes import is_alive, start_ticks


def a_process_is_named_by_its_start_since_boot() -> None:
    ticks = start_ticks(os.getpid())
    assert ticks is not None
    assert is_alive(os.getpid(), ticks)
    assert is_alive(os.getpid(), None)
    assert not is_alive(os.getpid(), ticks - 1)  # another that had this pid before


def the_start_does_not_move_with_the_clock_on_the_wall() -> None:
    uptime_s = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    age_s = uptime_s - (start_ticks(os.getpid()) or 0) / os.sysconf("SC_CLK_TCK")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        later = (start_ticks(child.pid) or 0) - (start_ticks(os.getpid()) or 0)
        assert 0 <= later / os.sysconf("SC_CLK_TCK") <= age_s + 5
        child.kill()
    assert 0 <= age_s < 3600 * 24


def a_process_that_ended_is_not_alive_even_before_it_is_reaped() -> None:
    with subprocess.Popen([sys.executable, "-c", "pass"]) as child:
        ticks = start_ticks(child.pid)
        while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:
            pass
        assert start_ticks(child.pid) == ticks
        assert not is_alive(child.pid, ticks)
    assert start_ticks(child.pid) is None
    assert not is_alive(child.pid, ticks)
