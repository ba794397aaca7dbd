"""A real OpenTelemetry Collector for tests: takes OTLP/HTTP, writes what it got to a file and sends it on.

From what FLYWHEEL_OTELCOL names: a command that starts a Collector with the receiver and exporters `otlp`, `otlp_http`
and `file`.
"""

import os
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flywheel.embedded import listens
from tests.helpers.servers import ROOT, free_port, wait_until_up

_SHARED = ROOT.parent / "shared" / "tools" / "run"


def collector_command() -> list[str]:
    """How to start one. Skips the test when there is none."""
    if "FLYWHEEL_OTELCOL" in os.environ:
        return shlex.split(os.environ["FLYWHEEL_OTELCOL"])
    if not _SHARED.exists():
        pytest.skip("no OpenTelemetry Collector: let FLYWHEEL_OTELCOL say how to start one")
    return [str(_SHARED), "otelcol"]


@contextmanager
def collector(folder: Path, *, send_to: str, key: str) -> Iterator[tuple[str, Path]]:
    """One at work: its endpoint for logs, and the file (a line of JSON for each batch). send_to: base URL of an API."""
    port, told = free_port(), folder / "told.jsonl"
    (folder / "collector.yaml").write_text(
        f"""
receivers:
  otlp:
    protocols:
      http: {{endpoint: 127.0.0.1:{port}}}
exporters:
  file: {{path: {told}}}
  otlp_http:
    endpoint: {send_to}
    headers: {{authorization: Bearer {key}}}
    compression: gzip
service:
  telemetry: {{metrics: {{level: none}}}}
  pipelines:
    logs: {{receivers: [otlp], exporters: [file, otlp_http]}}
""",
        encoding="utf-8",
    )
    with (folder / "collector.log").open("wb") as log:
        process = subprocess.Popen(
            [*collector_command(), "--config", str(folder / "collector.yaml")], stdout=log, stderr=log
        )
    try:
        wait_until_up(process, lambda: listens("127.0.0.1", port))
        yield f"http://127.0.0.1:{port}/v1/logs", told
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
