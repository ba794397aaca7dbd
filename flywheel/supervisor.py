"""The supervisor: brings the components up in stages, keeps them up, and drains them in order.

Guarantees: a component that dies is started again, after a pause that grows while it keeps dying; at the end,
however it comes, every process that was started is gone (the guardian covers the supervisor's own death).
A start that fails stops what had started and says why. SIGTERM and SIGINT drain; a second one hurries.
One thread, one loop: processes are started from it (see `processes.spawn`), and probes are short.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from flywheel import processes
from flywheel.child import Child
from flywheel.components import STOP_ORDER, Component, Step, check_ports, plan
from flywheel.errors import FlywheelError, StartFailed
from flywheel.settings import Settings
from flywheel.state import ComponentState, PlatformState, ProcessState, StepState, read_state, write_state

_TICK_S = 0.2
_CALM_TICK_S = 1.0
_AUDIT_TIMEOUT_S = 15


class _StopAsked(Exception):
    """The stop signal came while something was being waited for."""


class Supervisor:
    """Runs the platform of one home. `arguments` are the `--set` options that every component gets too."""

    def __init__(self, settings: Settings, arguments: Sequence[str], only: frozenset[str]) -> None:
        self._settings = settings
        self._arguments = list(arguments)
        self._stages = [[Child(entry, settings, arguments) for entry in stage] for stage in plan(settings, only)]
        children = [child for stage in self._stages for child in stage]
        self._components = {child.name: child for child in children if isinstance(child.entry, Component)}
        self._stops_asked = 0
        self._written = ""
        self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        me = os.getpid()
        before = read_state(settings.home)
        self.state = PlatformState(
            began_at=before.began_at if before else time.time(),
            guardian=before.guardian if before else ProcessState(),
            supervisor=ProcessState(pid=me, start_ticks=processes.start_ticks(me)),
            url=settings.url if "serving" in self._components else "",
            api_key_file=str(settings.api_key_file),
            bootstrap_servers=settings.feedback.bootstrap_servers,
            steps={child.name: StepState() for child in children if isinstance(child.entry, Step)},
            components={name: ComponentState() for name in self._components},
        )

    def run(self) -> int:
        """Start, watch until asked to stop, drain. Returns the exit code."""
        processes.become_subreaper()
        self._install_signals()
        code = 0
        try:
            self._start()
            self._say("ready")
            while not self._stops_asked:
                self._tick()
        except _StopAsked:
            pass
        except FlywheelError as error:
            self.state.error = str(error)
            self._say(f"failed: {error}")
            code = 1
        finally:
            self._stop()
        self.state.phase = "failed" if code else "stopped"
        self._write()
        self._say(self.state.phase)
        return code

    def _start(self) -> None:
        check_ports(self._settings, set(self._components))
        for stage in self._stages:
            for child in stage:
                self._say(f"starting {child.name}")
                child.start()
                if isinstance(child.entry, Component):
                    self.state.components[child.name].state = "starting"
                else:
                    self.state.steps[child.name].state = "running"
            deadline = time.monotonic() + self._settings.supervisor.start_timeout_s
            while not all(self._is_done(child) for child in stage):
                self._tick()
                if self._stops_asked:
                    raise _StopAsked
                if time.monotonic() > deadline:
                    late = next(child for child in stage if not self._is_done(child))
                    raise StartFailed(f"{late.name} was not ready in time. {_end_of_log(late)}")
        self.state.phase = "ready"
        self.state.ready_at = time.time()
        self._write()

    def _is_done(self, child: Child) -> bool:
        if isinstance(child.entry, Component):
            return self.state.components[child.name].state == "running"
        record = self.state.steps[child.name]
        if record.state == "running" and (code := child.exit_code()) is not None:
            record.state = "failed" if code else "done"
            record.seconds = round(child.runs_for_s, 1)
            if code:
                raise StartFailed(_describe_death(child, code))
        return record.state == "done"

    def _tick(self) -> None:
        """Wait a moment or for a signal, then look after every component and publish the state."""
        self._pause(_CALM_TICK_S if self._all_is_well() else _TICK_S)
        for name, child in self._components.items():
            self._look_after(child, self.state.components[name])
        processes.reap_orphans(keep=[child.pid for stage in self._stages for child in stage if child.pid])
        self._write()

    def _pause(self, seconds: float) -> None:
        select.select([self._wake[0]], [], [], seconds)
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake[0], 4096)

    def _all_is_well(self) -> bool:
        running = all(record.state == "running" for record in self.state.components.values())
        return running and self.state.phase == "ready"

    def _look_after(self, child: Child, record: ComponentState) -> None:
        if record.state in ("starting", "running"):
            code = child.exit_code()
            if code is not None:
                self._mourn(child, record, code)
            elif record.state == "starting" and child.is_ready():
                record.state = "running"
                self._say(f"{child.name} is up after {child.runs_for_s:.1f} s")
        elif record.state == "backoff" and time.monotonic() >= child.next_start:
            child.start()
            record.state = "starting"

    def _mourn(self, child: Child, record: ComponentState, code: int) -> None:
        """A component died: kill what it left, then plan its restart, or give the start up."""
        self._say(f"{child.name} died: {_ending(code)}")
        record.last_exit_code = code
        child.kill()
        if self.state.phase == "starting":
            child.deaths += 1
            if child.deaths >= self._settings.supervisor.start_attempts:
                raise StartFailed(_describe_death(child, code))
        record.restarts += 1
        record.state = "backoff"
        child.schedule_restart()

    def _stop(self) -> None:
        """Drain in order; kill what does not end in time; then make sure that nothing is left."""
        if not self.state.error:
            self.state.phase = "draining"
        for name in STOP_ORDER:
            child = self._components.get(name)
            if child is None:
                continue
            if name == "relay":
                self._drain_ledger()
            self._stop_child(child, self.state.components[name])
        processes.kill_until_gone(lambda: processes.descendants(os.getpid()))
        processes.reap_orphans(keep=())

    def _stop_child(self, child: Child, record: ComponentState) -> None:
        if child.exit_code() is None:
            record.state = "stopping"
            self._write()
            child.ask_to_stop()
            if not self._wait(lambda: child.exit_code() is not None, self._settings.supervisor.stop_timeout_s):
                self._say(f"{child.name} did not end in time and is killed")
        record.last_exit_code = child.exit_code()
        child.kill()
        record.state = "stopped"
        self._write()

    def _drain_ledger(self) -> None:
        """Wait, within bounds, until every acknowledged vote is in the store."""
        running = all(
            name in self._components and self._components[name].exit_code() is None for name in ("relay", "ingest")
        )
        if running and not self.state.error:
            self._wait(self._nothing_is_pending, self._settings.supervisor.drain_timeout_s)

    def _nothing_is_pending(self) -> bool:
        command = [sys.executable, "-m", "flywheel", *self._arguments, "feedback", "audit", "--json"]
        try:
            audit = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=_AUDIT_TIMEOUT_S, check=False
            )
            pending = json.loads(audit.stdout)["pending"]
        except (subprocess.TimeoutExpired, json.JSONDecodeError, KeyError, TypeError):
            return False
        self._say(f"votes and answers on their way: {pending}")
        return pending == 0

    def _wait(self, condition: Callable[[], bool], within_s: float) -> bool:
        deadline = time.monotonic() + within_s
        while not condition():
            if time.monotonic() > deadline or self._stops_asked > 1:
                return False
            self._pause(_TICK_S)
        return True

    def _install_signals(self) -> None:
        def _ask(*_: object) -> None:
            self._stops_asked += 1

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _ask)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # so that a death wakes the loop
        signal.set_wakeup_fd(self._wake[1], warn_on_full_buffer=False)

    def _write(self) -> None:
        for stage in self._stages:
            for child in stage:
                child.fill(
                    self.state.components[child.name]
                    if isinstance(child.entry, Component)
                    else self.state.steps[child.name]
                )
        text = self.state.model_dump_json()
        if text != self._written:
            write_state(self._settings.home, self.state)
            self._written = text

    def _say(self, text: str) -> None:
        print(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} supervisor: {text}", flush=True)


def _ending(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


def _describe_death(child: Child, code: int) -> str:
    return f"{child.name} ended during the start ({_ending(code)}). {_end_of_log(child)}"


def _end_of_log(child: Child) -> str:
    lines = "\n".join(f"  {line}" for line in child.last_lines(8))
    return f"The end of {child.log}:\n{lines}"
