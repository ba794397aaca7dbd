"""Starts HAProxy for Ray Serve so that it listens where the settings say only, says when the API is not there yet,
notices clients that leave, and dies with its parent.

Ray renders two listeners (metrics and statistics) that bind to all interfaces and offers no setting for
them, answers 404 while no application is deployed (a client takes that for final), splices (then HAProxy does not
see that a client left before its answer began, and an engine works on for nobody), and leaves HAProxy running
when its parent is killed. Ray calls this file in place of HAProxy
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
_SPLICE = re.compile(r"^\s*option splice-\w+\s*$\n?", re.MULTILINE)
_NOT_FOUND = re.compile(r"^(\s*)http-request return status 404 .*$", re.MULTILINE)
_NOT_READY = (
    "http-request return status 503 content-type application/json hdr Retry-After 2 string "
    """'{"error":{"message":"the platform is starting; try again",'"""
    """'"type":"server_error","param":null,"code":"not_ready"}}'"""
)


def without_splicing(configuration: str) -> str:
    """The same configuration, in which bytes pass through HAProxy, so that it sees when they end."""
    return _SPLICE.sub("", configuration)


def say_not_ready(configuration: str) -> str:
    """The same configuration, in which a request that no application takes is answered 503 with Retry-After.

    The gateway takes every path and answers 404 itself, so HAProxy gets here only while there is no gateway.
    """
    return _NOT_FOUND.sub(lambda found: found[1] + _NOT_READY, configuration)


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
        configuration = bind_locally(file.read_text(encoding="utf-8"), public_port)
        file.write_text(say_not_ready(without_splicing(configuration)), encoding="utf-8")
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    os.execv(binary, [binary, *arguments])


if __name__ == "__main__":
    main()
