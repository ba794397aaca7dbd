"""Serving as a process of its own: real Ray, HAProxy, gateway and vLLM engine over a real database."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil

from feedback.events import Interaction
from feedback.outbox_file import OutboxFile, list_files
from feedback.records import from_record
from serving.keys import SCOPES, create_key
from serving.settings import ServingSettings
from storage.postgres import Connection, connect
from tests.helpers.servers import ROOT, free_port

START_WITHIN_S = 280.0
ASK: dict[str, Any] = {
    "model": "flash",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 16,
}
_RUN = """
import json, signal, sys, threading
from pathlib import Path
from feedback.settings import FeedbackSettings
from serving.app import run
from serving.settings import ServingSettings

stop = threading.Event()
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: stop.set())
asked = threading.Event()
signal.signal(signal.SIGHUP, lambda *_: asked.set())
given = json.loads(sys.argv[1])
settings, feedback = ServingSettings(**given["serving"]), FeedbackSettings(outbox=given["outbox"])


def redeploy():
    if not asked.is_set():
        return None
    asked.clear()
    return settings


run(settings, feedback, given["dsn"], stop, run_dir=Path(given["run"]), redeploy=redeploy)
"""


def wait_for(condition: Callable[[], bool], within_s: float, what: str) -> float:
    """Seconds that it took. Fails saying `what` when it did not happen."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < within_s, what
        time.sleep(0.02)
    return time.monotonic() - began


@dataclass
class Platform:
    """A running serving process. `home` holds its outbox, its log and its temporary files."""

    home: Path
    dsn: str
    settings: ServingSettings
    secret: str
    process: "subprocess.Popen[bytes]"
    temporary: Path

    @classmethod
    def start(cls, home: Path, dsn: str, **serving: Any) -> "Platform":
        """Start and wait until it is ready."""
        platform = cls.launch(home, dsn, **serving)
        try:
            platform.wait_until_ready()
        except AssertionError:
            platform.stop()
            raise
        return platform

    @classmethod
    def launch(cls, home: Path, dsn: str, **serving: Any) -> "Platform":
        """Start and wait for nothing."""
        settings = ServingSettings(port=free_port(), **serving)
        with connect(dsn) as connection:
            _, secret = create_key(connection, "test", SCOPES)
        given = {
            "serving": settings.model_dump(mode="json"),
            "outbox": str(home / "outbox"),
            "dsn": dsn,
            "run": str(home / "run"),
        }
        temporary = Path(tempfile.mkdtemp(prefix="fwt"))
        with (home / "serving.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", _RUN, json.dumps(given)],
                cwd=ROOT,
                env={**os.environ, "TMPDIR": str(temporary)},  # of its own: it shows what is left behind
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        return cls(home, dsn, settings, secret, process, temporary)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.settings.port}"

    @property
    def log(self) -> str:
        return (self.home / "serving.log").read_text(errors="replace")

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_WITHIN_S
        while not self.is_ready():
            assert self.process.poll() is None, f"serving ended at its start:\n{self.log[-3000:]}"
            assert time.monotonic() < deadline, f"serving is not ready:\n{self.log[-3000:]}"
            time.sleep(0.5)

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health/ready", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"authorization": f"Bearer {self.secret}"}, timeout=120)

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.secret, timeout=120, max_retries=0)

    def running_in_the_engine(self) -> int:
        """Requests that the engine works on, as it says itself."""
        with self.client() as client:
            found = re.findall(r"^vllm:num_requests_running\{.*\} (\S+)$", client.get("/metrics").text, re.MULTILINE)
        assert found
        return int(sum(float(value) for value in found))

    def database(self) -> Connection:
        return connect(self.dsn, autocommit=True)

    def interactions(self) -> dict[str, Interaction]:
        """What is in the outbox, by response id."""
        found = {}
        for path in list_files(self.home / "outbox"):
            file = OutboxFile(path, durable=False)
            for row in file.pending(100_000):
                event = from_record(row.topic, row.value)
                if isinstance(event, Interaction):
                    found[event.response_id] = event
            file.close()
        return found

    def wait_for_interaction(self, response_id: str, within_s: float = 20) -> Interaction:
        deadline = time.monotonic() + within_s
        while response_id not in (found := self.interactions()):
            assert time.monotonic() < deadline, f"{response_id} was not recorded"
            time.sleep(0.1)
        return found[response_id]

    def family(self) -> list[psutil.Process]:
        """The serving process and everything below it."""
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def names(self) -> list[str]:
        """What the processes call themselves; one that ends meanwhile is left out."""
        found = []
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(" ".join(process.cmdline()))
        return found

    def stop(self, within_s: float = 90) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(within_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
                raise
