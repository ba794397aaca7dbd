"""Laws of the benches: whatever they start ends with them."""

import sys
import time
from pathlib import Path

import psutil

from flywheel.bench import peer_process
from flywheel.settings import Settings

_DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); signal.pause()"
_PARENT = (
    f"import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', {_DEAF!r}], stdout=subprocess.PIPE); "
    f"child.stdout.readline(); exec({_DEAF!r})"
)


def a_peer_that_does_not_hear_sigterm_is_killed_with_its_children(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with peer_process([sys.executable, "-c", _PARENT], Settings(), log, patience_s=0.1) as peer:
        deadline = time.monotonic() + 20
        while b"deaf" not in log.read_bytes():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        children = psutil.Process(peer.pid).children()
    assert children
    assert peer.returncode is not None
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
