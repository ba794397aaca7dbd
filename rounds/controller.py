"""The controller: drives a round from "enough new votes" to promoted or rejected, by itself.

Whoever holds the lease works; the others wait. Guarantees: killed anywhere and started again it goes on
with the step it was in; a step that fails for a reason outside (database, Ray, engine) is tried again with
a growing pause; a step whose work fails by its own fault is tried `maximum_attempts` times, once if the work
says that it can't be done, and then ends the round as rejected with that error as the reason.
"""

import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psycopg

from feedback.errors import FeedbackError
from reward.errors import RewardError
from reward.settings import RewardSettings
from rounds.errors import LeaseLost, RoundsError, WorkFailed, WorkLost, WorkRefused
from rounds.reporter import Reporter
from rounds.settings import RoundsSettings
from rounds.steps import STEPS, Outcome, Workbench
from rounds.store import Round, advance, count_failure, current_round, release_lease, take_lease
from rounds.work import run_on_ray
from serving.errors import CheckpointNotProven, ServingError
from serving.experiments import get_experiment, stop_experiment
from storage.errors import DatabaseUnreachable, StorageError
from storage.postgres import Connection, connect

log = logging.getLogger(__name__)


class Stopping(RoundsError):
    """The controller was told to stop while a step was at work; the step is run again later."""


class Controller:
    """One process's view of the wheel.

    run_work: calls `function(**arguments)` where there is room for it, and `keep_alive` about once a second.
    """

    def __init__(
        self,
        rounds: RoundsSettings,
        reward: RewardSettings,
        *,
        dsn: str,
        artifacts: Path,
        base_model: Path,
        alias: str,
        stop: threading.Event,
        run_work: Callable[[Callable[..., Any], dict[str, Any], Callable[[], None]], Any],
    ) -> None:
        self.rounds, self.reward = rounds, reward
        self.dsn, self.artifacts, self.base_model, self.alias = dsn, artifacts, base_model, alias
        self.stop = stop
        self.run_work = run_work
        self.steps = STEPS
        self.holder = f"{socket.gethostname()}:{os.getpid()}"
        self.failures = 0
        self._done_at: dict[str, float] = {}

    def run(self) -> None:
        """Turn the wheel until `stop` is set."""
        while not self.stop.is_set():
            try:
                with connect(self.dsn) as connection:
                    self._work(connection)
            except (psycopg.OperationalError, DatabaseUnreachable, LeaseLost, WorkLost, CheckpointNotProven) as error:
                self.failures += 1
                pause = min(self.rounds.controller.poll_interval_s * 2 ** min(self.failures, 10), 30.0)
                log.warning("trying again in %.1f s: %s", pause, error)
                self.stop.wait(pause)
            except Stopping:
                break

    def _work(self, connection: Connection) -> None:
        """Advance rounds on one connection until it breaks or `stop` is set."""
        try:
            while not self.stop.is_set():
                moved = self.turn_once(connection)
                if not moved:
                    self.stop.wait(self.rounds.controller.poll_interval_s)
        finally:
            if not connection.broken:
                connection.rollback()
                release_lease(connection, self.holder)

    def turn_once(self, connection: Connection) -> bool:
        """Run the current round's step once; True when the round moved."""
        if not take_lease(connection, self.holder, self.rounds.controller.lease_s):
            return False
        round_ = current_round(connection)
        try:
            outcome = self._step(connection, round_)
            connection.commit()
        except CheckpointNotProven:  # an engine is away: wait
            raise
        except (WorkFailed, FeedbackError, RewardError, ServingError, StorageError, psycopg.DataError) as error:
            if isinstance(error, DatabaseUnreachable):
                raise
            connection.rollback()
            outcome = self._after_failure(connection, round_, error)
        if outcome is None:
            return False
        moved = advance(
            connection,
            self.holder,
            round_,
            outcome.to_state,
            reason=outcome.reason,
            report=outcome.report,
            context=outcome.context,
        )
        self.failures = 0
        log.info("round %d: %s → %s: %s", moved.number, round_.state, moved.state, outcome.reason)
        return True

    def _after_failure(self, connection: Connection, round_: Round, error: Exception) -> Outcome | None:
        attempts = count_failure(connection, round_)
        log.error("round %d: %s, attempt %d: %s", round_.number, round_.state, attempts, error)
        if attempts < self.rounds.controller.maximum_attempts and not isinstance(error, WorkRefused):
            return None
        self._withdraw_candidate(connection, round_)
        reason = f"{round_.state} ended with an error at attempt {attempts}: {error}"
        return Outcome("rejected", reason, {"attempts": attempts})

    def _withdraw_candidate(self, connection: Connection, round_: Round) -> None:
        """A round that ends by an error leaves no experiment running."""
        experiment_id = round_.context.get("experiment_id")
        if experiment_id is not None and get_experiment(connection, experiment_id).state == "running":
            stop_experiment(connection, experiment_id, "rejected", {"reason": "its round ended with an error"})

    def _step(self, connection: Connection, round_: Round) -> Outcome | None:
        bench = Workbench(
            connection=connection,
            dsn=self.dsn,
            rounds=self.rounds,
            reward=self.reward,
            artifacts=self.artifacts,
            base_model=self.base_model,
            alias=self.alias,
            run=partial(self._run, connection),
            due=self._due,
        )
        return self.steps[round_.state](bench, round_)

    def _due(self, what: str, every_s: float) -> bool:
        """Whether `what` was not done in the last every_s seconds; then it counts as done now."""
        now = time.monotonic()
        if now - self._done_at.get(what, -math.inf) < every_s:
            return False
        self._done_at[what] = now
        return True

    def _run(self, connection: Connection, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        connection.commit()
        renewed = time.monotonic()

        def keep_alive() -> None:
            nonlocal renewed
            if self.stop.is_set():
                raise Stopping("told to stop")
            if time.monotonic() - renewed > self.rounds.controller.lease_s / 4:
                if not take_lease(connection, self.holder, self.rounds.controller.lease_s):
                    raise LeaseLost("another controller took the lease while work was under way")
                renewed = time.monotonic()

        return self.run_work(function, arguments, keep_alive)


def run(
    rounds: RoundsSettings,
    reward: RewardSettings,
    *,
    dsn: str,
    artifacts: Path,
    base_model: Path,
    alias: str,
    ray_address_file: Path,
    stop: threading.Event,
) -> None:
    """Run a controller, and a reporter, until `stop` is set. ray_address_file: where the platform wrote its Ray's
    address.
    """
    reporter = Reporter(dsn)
    reporter.start()
    try:
        Controller(
            rounds,
            reward,
            dsn=dsn,
            artifacts=artifacts,
            base_model=base_model,
            alias=alias,
            stop=stop,
            run_work=partial(run_on_ray, settings=rounds.controller, address_file=ray_address_file),
        ).run()
    finally:
        reporter.close()
