"""Starts HAProxy for Ray Serve so that it listens where the settings say only, and dies with its parent.

Ray renders two listeners (metrics and statistics) that bind to all interfaces and offers no setting for
them, and leaves HAProxy running when its parent is killed. Ray calls this file in place of HAProxy
(RAY_SERVE_HAPROXY_BINARY_PATH), with the real binary and HAProxy's own arguments. It runs as a script at
every reload, so it imports a little of the standard library and nothing else.
"""

import ctypes
import os
import re
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_ALL_INTERFACES = re.compile(r"^(\s*bind )\*?:(\d+)", re.MULTILINE)


def bind_locally(configuration: str) -> str:
    """The same HAProxy configuration with every listener that names no address moved to 127.0.0.1.

    The API's own listener names the host in the settings, which may be 0.0.0.0 in a container; it is kept.
    """
    return _ALL_INTERFACES.sub(r"\g<1>127.0.0.1:\2", configuration)


def main() -> None:
    """Rewrite the configuration named by -f, then become HAProxy: `<this> <binary> <arguments…>`."""
    binary, *arguments = sys.argv[1:]
    if "-f" in arguments:
        file = Path(arguments[arguments.index("-f") + 1])
        file.write_text(bind_locally(file.read_text(encoding="utf-8")), encoding="utf-8")
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    os.execv(binary, [binary, *arguments])


if __name__ == "__main__":
    main()
