"""What must not be noticed by users, or be told truthfully: swaps, a redeploy, an engine that is killed."""

import json
import re
import signal
import threading
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from serving.errors import CheckpointNotProven
from serving.registry import Checkpoint, move_alias, register_checkpoint
from tests.helpers.adapters import build_adapter
from tests.helpers.platform import Platform, wait_for

pytestmark = [pytest.mark.real, pytest.mark.engine]

LONG: dict[str, Any] = {
    "model": "flash",
    "messages": [{"role": "user", "content": "Tell me all."}],
    "max_tokens": 400,
    "ignore_eos": True,
    "stream": True,
}
SWAPS = 10


def a_swap_of_adapters_under_load_fails_no_request_and_mixes_no_answer(
    platform: Platform, base_id: str, base_model: Path
) -> None:
    with platform.database() as connection:
        adapters = [
            build_adapter(base_model, platform.home, parent_id=base_id, name=f"flash-swap-{number}", seed=number)
            for number in (7, 8)
        ]
        for adapter in adapters:
            register_checkpoint(connection, adapter)
    with Load(platform) as (served, failures):
        swap(platform, [*adapters, None], base_id, served, failures)
    assert not failures
    assert len(set(served)) == 3


def swap(
    platform: Platform, targets: list[Checkpoint | None], base_id: str, served: list[str], failures: list[str]
) -> None:
    """Move the alias SWAPS times, each time until somebody was served by where it points."""
    for number in range(SWAPS):
        chosen = targets[number % len(targets)]
        target = chosen.checkpoint_id if chosen else base_id
        wait_for(lambda name=target: moved(platform, name), 60, f"{target} is not proven")
        seen = len(served)
        wait_for(lambda name=target, at=seen: name in served[at:], 60, f"nobody got {target}: {failures}")


def moved(platform: Platform, target: str) -> bool:
    """Whether the alias could be pointed there; not while an engine has yet to prove it."""
    try:
        with platform.database() as connection:
            move_alias(connection, "flash", target, "a test")
    except CheckpointNotProven:
        return False
    return True


class Load:
    """Three users who stream, with a breath between answers; `(served checkpoint ids, failures)`."""

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self._stop = threading.Event()
        self.served: list[str] = []
        self.failures: list[str] = []
        self._threads = [threading.Thread(target=self._chat, args=(number,), daemon=True) for number in range(3)]

    def __enter__(self) -> tuple[list[str], list[str]]:
        for thread in self._threads:
            thread.start()
        return self.served, self.failures

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _chat(self, number: int) -> None:
        body = {**LONG, "max_tokens": 12, "user": f"u{number}"}
        with self._platform.client() as client:
            while not self._stop.wait(0.2):
                try:
                    answer = client.post("/v1/chat/completions", json=body)
                except httpx.TransportError as error:
                    self.failures.append(repr(error))
                    continue
                checkpoint_id = answer.headers.get("x-flywheel-checkpoint", "")
                models = set(re.findall(r'"model":"([^"]+)"', answer.text))
                if answer.status_code != 200 or '"error"' in answer.text or not answer.text.endswith("[DONE]\n\n"):
                    self.failures.append(f"{answer.status_code} {answer.text[-300:]}")
                elif models != {checkpoint_id}:
                    self.failures.append(f"mixed: {models} under {checkpoint_id}")
                else:
                    self.served.append(checkpoint_id)


@pytest.mark.long
def a_redeploy_under_load_fails_no_request(platform: Platform) -> None:
    before = {process.pid for process in engines_of(platform)}
    with Load(platform) as (served, failures):
        wait_for(lambda: len(served) > 3, 60, f"no load: {failures}")
        platform.process.send_signal(signal.SIGHUP)
        wait_for(lambda: bool(now := {p.pid for p in engines_of(platform)}) and not now & before, 240, "not replaced")
        seen = len(served)
        wait_for(lambda: len(served) > seen + 3, 60, f"no answers after the redeploy: {failures}")
    assert not failures


def engines_of(platform: Platform) -> list[psutil.Process]:
    return [process for process in platform.family() if process.is_running() and "EngineCore" in process.name()]


def an_engine_killed_while_it_streams_is_told_recorded_and_comes_back(platform: Platform) -> None:
    with platform.client() as client, client.stream("POST", "/v1/chat/completions", json=LONG) as answer:
        response_id = answer.headers["x-flywheel-response-id"]
        lines = answer.iter_lines()
        for _, _line in zip(range(6), lines, strict=False):
            pass
        [engine] = engines_of(platform)
        engine.kill()
        text = "\n".join(lines)
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert set(events[-1]["error"]) == {"message", "type", "param", "code"}
    record = platform.wait_for_interaction(response_id)
    assert record.status == "upstream_error"
    assert record.text
    wait_for(lambda: not platform.is_ready(), 5, "it says that it is ready without an engine")
    with platform.client() as client:
        refused = client.post("/v1/chat/completions", json={**LONG, "stream": False, "max_tokens": 4})
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
    wait_for(lambda: platform.is_ready(), 200, "the engine did not come back")
    with platform.client() as client:
        assert client.post("/v1/chat/completions", json={**LONG, "stream": False, "max_tokens": 4}).status_code == 200
