"""Starts HAProxy for Ray Serve so that it listens where the settings say only, and dies with its parent.

Ray renders two listeners (metrics and statistics) that bind to all interfaces and offers no setting for
them, and leaves HAProxy running when its parent is killed. Ray calls this file in place of HAProxy
(RAY_SERVE_HAPROXY_BINARY_PATH), with the port that may be public, the real binary, and HAProxy's own arguments.
It runs as a script at every reload, so it imports a little of the standard library and nothing else.
"""

import ctypes
import os
import re
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_ALL_INTERFACES = re.compile(r"^(\s*bind )(?:\*|0\.0\.0\.0|\[?::\]?)?:(\d+)", re.MULTILINE)


def bind_locally(configuration: str, public_port: str = "") -> str:
    """The same HAProxy configuration with every listener on all interfaces moved to 127.0.0.1.

    public_port: the one that stays, because the settings ask for it (in a container, say); empty for none.
    """

    def _move(found: re.Match[str]) -> str:
        return found[0] if found[2] == public_port else f"{found[1]}127.0.0.1:{found[2]}"

    return _ALL_INTERFACES.sub(_move, configuration)


def main() -> None:
    """Rewrite the configuration named by -f, then become HAProxy: `<this> <public port> <binary> <arguments…>`."""
    public_port, binary, *arguments = sys.argv[1:]
    if "-f" in arguments:
        file = Path(arguments[arguments.index("-f") + 1])
        file.write_text(bind_locally(file.read_text(encoding="utf-8"), public_port), encoding="utf-8")
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    os.execv(binary, [binary, *arguments])


if __name__ == "__main__":
    main()
