"""Laws of `flywheel up` on real processes: PostgreSQL, the broker, the relay and the ingest."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from feedback.outbox import Outbox
from flywheel import control, processes
from flywheel.errors import AlreadyRunning, NotRunning, StartFailed
from flywheel.handle import Platform
from flywheel.state import PlatformState, read_state
from storage.postgres import connect
from tests.helpers.events_built import build_thumb

pytestmark = pytest.mark.real

SERVERS = ("postgres", "broker")
LEDGER = (*SERVERS, "relay", "ingest")


@pytest.fixture
def platform(tmp_path: Path) -> Iterator[Platform]:
    one = Platform(tmp_path / "home", "supervisor.stop_timeout_s=10")
    yield one
    with contextlib.suppress(NotRunning):
        control.stop(one.settings)


def state_of(platform: Platform) -> PlatformState:
    state = read_state(platform.settings.home)
    assert state is not None
    return state


def everything_of(platform: Platform) -> list[psutil.Process]:
    """Guardian, supervisor and every process below or tagged, as they are now."""
    state = state_of(platform)
    chiefs = [
        process for chief in (state.guardian, state.supervisor) if chief.pid for process in processes.tree(chief.pid)
    ]
    return [*chiefs, *processes.tagged(processes.home_tag(platform.settings.home))]


def wait_until(condition: Callable[[], bool], within_s: float = 120.0) -> bool:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def all_gone(found: list[psutil.Process]) -> bool:
    return not any(process.is_running() and processes.is_alive(process.pid, None) for process in found)


def flywheel(platform: Platform, *arguments: str) -> list[str]:
    options = ["--set", f"home={platform.settings.home}", "--set", f"serving.port={platform.settings.serving.port}"]
    broker = f"feedback.bootstrap_servers={platform.settings.feedback.bootstrap_servers}"
    return [sys.executable, "-m", "flywheel", *options, "--set", broker, *arguments]


def a_second_up_is_refused_and_says_where_the_first_runs(platform: Platform) -> None:
    platform.start("postgres")
    with pytest.raises(AlreadyRunning, match=str(state_of(platform).supervisor.pid)):
        control.start(platform.settings, (), ("postgres",))
    again = subprocess.run(flywheel(platform, "up"), capture_output=True, text=True, timeout=60, check=False)
    assert again.returncode == 3
    assert "already running" in again.stderr
    assert "Traceback" not in again.stderr


def a_stop_leaves_no_process_behind(platform: Platform) -> None:
    platform.start(*LEDGER)
    found = everything_of(platform)
    assert len(found) > len(LEDGER)
    platform.stop()
    assert all_gone(found)
    assert state_of(platform).phase == "stopped"
    with pytest.raises(NotRunning):
        control.stop(platform.settings)


def a_killed_supervisor_leaves_no_process_behind(platform: Platform) -> None:
    platform.start(*LEDGER)
    found = everything_of(platform)
    os.kill(state_of(platform).supervisor.pid or 0, signal.SIGKILL)
    assert wait_until(lambda: all_gone(found))
    assert wait_until(lambda: state_of(platform).phase == "failed")
    assert control.running_state(platform.settings) is None


def a_killed_guardian_makes_the_supervisor_drain_and_end(platform: Platform) -> None:
    platform.start(*SERVERS)
    found = everything_of(platform)
    os.kill(state_of(platform).guardian.pid or 0, signal.SIGKILL)
    assert wait_until(lambda: all_gone(found))
    assert state_of(platform).phase == "stopped"


def a_killed_command_line_takes_the_platform_with_it(platform: Platform) -> None:
    with subprocess.Popen(flywheel(platform, "up", "--only", "postgres"), stdout=subprocess.DEVNULL) as command_line:
        try:
            assert wait_until(lambda: control.running_state(platform.settings) is not None)
            assert wait_until(lambda: state_of(platform).phase == "ready")
            found = everything_of(platform)
        finally:
            command_line.kill()
    assert wait_until(lambda: all_gone(found))
    assert state_of(platform).phase == "stopped"


def a_start_that_fails_leaves_no_process_behind_and_says_why(platform: Platform) -> None:
    host, port = platform.settings.feedback.bootstrap_servers.split(":")
    with socket.create_server((host, int(port))), pytest.raises(StartFailed, match=f"port {port} .* is taken"):
        platform.start(*LEDGER)
    assert control.running_state(platform.settings) is None
    assert not processes.tagged(processes.home_tag(platform.settings.home))


def a_component_that_can_not_start_fails_the_start_with_the_end_of_its_log(
    platform: Platform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CALF_TANSU_BIN", str(tmp_path / "missing"))
    with pytest.raises(StartFailed, match=r"broker ended during the start(.|\n)*does not point at an executable"):
        platform.start(*SERVERS)
    assert not processes.tagged(processes.home_tag(platform.settings.home))


def every_component_that_is_killed_comes_back(platform: Platform) -> None:
    platform.start(*LEDGER)
    before = state_of(platform).components
    for record in before.values():
        os.kill(record.pid or 0, signal.SIGKILL)

    def _is_back() -> bool:
        now = state_of(platform).components
        return all(now[name].restarts >= 1 and now[name].state == "running" for name in LEDGER)

    assert wait_until(_is_back)
    after = state_of(platform).components
    assert all(after[name].pid not in (None, before[name].pid) for name in LEDGER)


def what_waits_in_the_outbox_is_stored_before_the_platform_stops(platform: Platform) -> None:
    platform.start(*LEDGER)
    outbox = Outbox.open(platform.settings.feedback.outbox)
    votes = [build_thumb() for _ in range(200)]
    outbox.append(votes).result(timeout=30)
    outbox.close()
    platform.stop()
    platform.start("postgres")
    with connect(platform.dsn) as connection:
        rows = connection.execute("select event_id from feedback").fetchall()
    assert {str(row["event_id"]) for row in rows} == {vote.event_id for vote in votes}
