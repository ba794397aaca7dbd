"""Lock files: one process holds one, and the kernel frees it when that process dies, however it dies."""

import fcntl
import os
from pathlib import Path


def take_lock(path: Path) -> int | None:
    """Hold the lock file `path` (made if need be) for as long as the returned handle is open; None when taken.

    Close the handle with `os.close`. A child that inherits the handle holds the lock too. Raises OSError when
    the file can't be made.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    return handle
