"""How serving stops. Sorts behind the other tests of this folder: it stops what they share."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from tests.helpers.platform import ASK, Platform, wait_for
from tests.helpers.servers import Postgres

pytestmark = [pytest.mark.real, pytest.mark.engine]


def assert_gone(family: Sequence[psutil.Process]) -> None:
    deadline = time.monotonic() + 10
    while left := [process.name() for process in family if process.is_running()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def a_stop_lets_streams_end_and_leaves_nothing_behind(platform: Platform) -> None:
    family = platform.family()
    with platform.client() as client:
        long = {**ASK, "stream": True, "max_tokens": 40, "ignore_eos": True}
        with client.stream("POST", "/v1/chat/completions", json=long) as answer:
            lines = answer.iter_lines()
            first = next(lines)
            stopping = threading.Thread(target=platform.stop)
            stopping.start()
            text = "\n".join([first, *lines])
        assert text.rstrip().endswith("data: [DONE]")
    stopping.join(100)
    assert platform.process.returncode == 0, platform.log[-3000:]
    assert_gone(family)
    left_behind = [path.name for path in platform.temporary.iterdir()]
    others = ("torchinductor_", "vllm_dist_")  # torch's cache, and a file of the engine that another test killed
    assert [name for name in left_behind if not name.startswith(others)] == []
    assert not (platform.home / "run" / "ray_address").exists()
    assert "0 dropped" in platform.log


def a_stop_during_the_start_waits_for_no_engine(tmp_path: Path, postgres: Postgres, base_model: Path) -> None:
    starting = Platform.launch(tmp_path, postgres.new_database(), model=base_model, drain_timeout_s=60)
    try:
        wait_for(lambda: any("engine-" in name for name in starting.names()), 120, "no engine was started")
        family = starting.family()
    finally:
        starting.stop(30)
    assert starting.process.returncode == 0, starting.log[-3000:]
    assert_gone(family)
