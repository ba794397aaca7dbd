"""How serving stops. Sorts behind the other tests of this folder: it stops what they share."""

import threading
import time

import pytest

from tests.helpers.platform import ASK, Platform

pytestmark = [pytest.mark.real, pytest.mark.engine]


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
    deadline = time.monotonic() + 10
    while left := [process.name() for process in family if process.is_running()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)
    left_behind = [path.name for path in platform.temporary.iterdir()]
    others = ("torchinductor_", "vllm_dist_")  # torch's cache, and a file of the engine that another test killed
    assert [name for name in left_behind if not name.startswith(others)] == []
    assert not (platform.home / "run" / "ray_address").exists()
    assert "0 dropped" in platform.log
