"""The ledger's processes for fault tests: `python -m tests.helpers.ledger_process ROLE …`.

`writer OUTBOX` accepts events without pause and prints each id once it is acknowledged.
`gateway OUTBOX PORT` is the REST API with the real outbox, on a scripted engine.
`relay SETTINGS [DSN]` and `ingest SETTINGS DSN` run the real ones (settings as JSON) until SIGTERM.

With LEDGER_AT=`file.py:function:call|return:number:signal` in its environment the process sends itself that signal when
the function is entered (or left) for the number-th time: a fault at a named point, without a change of the code.
LEDGER_FILE_BYTES bounds the size of a file that the process may write, until SIGUSR1 lifts it: a full disk.
"""

import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

PAUSE_S = 0.02


def arm(point: str) -> None:
    """Watch every thread for the named point."""
    file, function, event, number, name = point.split(":")
    left = int(number)

    def watch(frame: FrameType, what: str, _: Any) -> None:
        nonlocal left
        if what == event and frame.f_code.co_name == function and frame.f_code.co_filename.endswith(f"/{file}"):
            left -= 1
            if not left:
                os.kill(os.getpid(), getattr(signal, name))

    threading.setprofile(watch)
    sys.setprofile(watch)


def bound_files(size: int) -> None:
    """Writing past `size` fails, as on a full disk, until SIGUSR1."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, lambda *_: resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard)))


def write(outbox: Path) -> None:
    """Answers and votes on them, the vote first every other time; what can't be accepted is tried again."""
    from feedback.errors import OutboxUnavailable
    from feedback.outbox import Outbox
    from tests.helpers.events_built import build_interaction, build_thumb

    box = Outbox.open(outbox)
    flip = False
    while True:
        answer = build_interaction()
        events = [answer, build_thumb(answer.response_id)]
        flip = not flip
        futures = [(event, box.append([event])) for event in (reversed(events) if flip else events)]
        for event, future in futures:
            try:
                future.result(timeout=30)
            except OutboxUnavailable:
                print("refused", flush=True)
            else:
                print(event.event_id, flush=True)
        time.sleep(PAUSE_S)


def serve(outbox: Path, port: int) -> None:
    """The API on a port of 127.0.0.1."""
    import uvicorn

    from feedback.outbox import Outbox
    from tests.helpers.serving import Bench

    bench = Bench(outbox=Outbox.open(outbox))  # type: ignore[arg-type]
    uvicorn.run(bench.app, host="127.0.0.1", port=port, log_level="error")


def main(role: str, *arguments: str) -> None:
    """Run one role."""
    if "LEDGER_FILE_BYTES" in os.environ:
        bound_files(int(os.environ["LEDGER_FILE_BYTES"]))
    if "LEDGER_AT" in os.environ:
        arm(os.environ["LEDGER_AT"])
    if role == "writer":
        write(Path(arguments[0]))
        return
    if role == "gateway":
        serve(Path(arguments[0]), int(arguments[1]))
        return
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    from feedback.settings import FeedbackSettings

    settings = FeedbackSettings.model_validate_json(arguments[0])
    if role == "relay":
        from feedback import relay

        relay.run(settings, stop, *arguments[1:])
    else:
        from feedback import ingest

        ingest.run(settings, arguments[1], stop)


if __name__ == "__main__":
    main(*sys.argv[1:])
