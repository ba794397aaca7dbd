"""The ledger's processes for fault tests: `python -m tests.helpers.ledger_process ROLE …`.

`writer OUTBOX` stands in for the gateway: it accepts events and prints each id once it is acknowledged.
`relay SETTINGS` and `ingest SETTINGS DSN` run the real ones (settings as JSON) until SIGTERM.
"""

import signal
import sys
import threading
import time
from pathlib import Path

PAUSE_S = 0.02


def write(outbox: Path) -> None:
    """Answers and votes on them, the vote first every other time, as fast as the pauses allow."""
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
            future.result(timeout=30)
            print(event.event_id, flush=True)
        time.sleep(PAUSE_S)


def main(role: str, *arguments: str) -> None:
    """Run one role."""
    stop = threading.Event()
    if role == "writer":
        write(Path(arguments[0]))
        return
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    from feedback.settings import FeedbackSettings

    settings = FeedbackSettings.model_validate_json(arguments[0])
    if role == "relay":
        from feedback import relay

        relay.run(settings, stop)
    else:
        from feedback import ingest

        ingest.run(settings, arguments[1], stop)


if __name__ == "__main__":
    main(*sys.argv[1:])
