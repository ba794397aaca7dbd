"""Laws of the connection to the log."""

import socket
import threading
from pathlib import Path

import pytest

from feedback.errors import LogUnreachable
from feedback.topics import Logs, make_producer
from tests.helpers.ledger import ledger_settings


@pytest.mark.parametrize("connect", [Logs, make_producer])
def a_broker_that_accepts_and_does_not_answer_leaves_no_thread_behind(connect: type[Logs], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        settings = ledger_settings(tmp_path, f"127.0.0.1:{mute.getsockname()[1]}", request_timeout_s=0.3)
        before = threading.active_count()
        for _ in range(3):
            with pytest.raises(LogUnreachable):
                connect(settings)
        assert threading.active_count() == before
