"""What should run on Ray Serve: the gateway, and one application of engines for each active model in the registry.

The registry is the desired state, as it is for adapters: a model that was added gets its engines, those of a
retired one drain and end. Guarantees: a model whose engines do not come up harms no other; at most `max_models`
run at once, the oldest first; a redeploy starts each new replica before its predecessor drains. Use from one
thread.
"""

import logging
import os
import time
from typing import Any

from ray import serve
from ray.serve import RunTarget

from feedback.settings import FeedbackSettings
from serving.app import GATEWAY
from serving.database import HeldConnection
from serving.deployments import build_engines, build_gateway, engine_application_name
from serving.registry import Checkpoint, active_models
from serving.settings import ServingSettings

log = logging.getLogger(__name__)


class Fleet:
    """The applications of this platform. first_id: the model that `settings.model` names."""

    def __init__(self, settings: ServingSettings, feedback: FeedbackSettings, dsn: str, first_id: str) -> None:
        self.settings = settings
        self._feedback = feedback
        self._dsn = dsn
        self._first_id = first_id
        self._database = HeldConnection(dsn)
        self._models: dict[str, Checkpoint] = {}  # application name → the model that its engines run
        self._retired_at: dict[str, float] = {}  # application name → monotonic seconds
        self._told: set[str] = set()
        self._generation = 0

    @property
    def first_engines(self) -> str:
        """The application without which nothing can be answered."""
        return engine_application_name(self._first_id)

    def deploy_gateway(self) -> None:
        """Deploy the gateway, or replace its replicas by ones with the present settings."""
        application = build_gateway(self.settings, self._feedback, self._dsn, self._environment())
        _run([RunTarget(application, name=GATEWAY, route_prefix="/")])

    def sync(self) -> None:
        """Bring the engines in line with the registry. Raises DatabaseUnreachable."""
        models = self._database.run(active_models)
        for left_out in models[self.settings.max_models :]:
            if left_out.checkpoint_id not in self._told:
                log.warning("no engine for %s: max_models is %d", left_out.checkpoint_id, self.settings.max_models)
                self._told.add(left_out.checkpoint_id)
        wanted = {engine_application_name(m.checkpoint_id): m for m in models[: self.settings.max_models]}
        for name in self._models.keys() & wanted.keys():
            self._retired_at.pop(name, None)
        for name in self._models.keys() - wanted.keys():
            # Gateways read the registry in their own time; a request for an application that is gone would wait.
            if time.monotonic() - self._retired_at.setdefault(name, time.monotonic()) >= self.settings.unload_after_s:
                del self._retired_at[name]
                log.info("the engines of %s drain and end: it was retired", self._models.pop(name).checkpoint_id)
                serve.delete(name, _blocking=False)
        fresh = {name: model for name, model in wanted.items() if name not in self._models}
        if fresh:
            _run([self._engines(name, model) for name, model in fresh.items()])
            self._models |= fresh

    def redeploy(self, settings: ServingSettings) -> None:
        """Replace every replica by one with these settings, without an outage."""
        self.settings = settings
        self._generation += 1
        _run([self._engines(name, model) for name, model in self._models.items()])
        self.deploy_gateway()

    def close(self) -> None:
        """Let go of the database; the applications run on."""
        self._database.close()

    def _engines(self, name: str, model: Checkpoint) -> RunTarget:
        environment = self._environment()
        # Ray would set it to num_cpus, which is a share and not a number of threads.
        environment["OMP_NUM_THREADS"] = str(self._threads(model))
        return RunTarget(build_engines(self.settings, model, self._dsn, environment), name=name, route_prefix=None)

    def _threads(self, model: Checkpoint) -> int:
        """Of a CPU engine: one on each core; one less beside others, who would wait for it at every barrier."""
        cores = len(os.sched_getaffinity(0))
        alone = max(self.settings.engine_replicas, self.settings.engine_replicas_max) == 1
        return cores if alone and model.checkpoint_id == self._first_id else max(1, cores - 1)

    def _environment(self) -> dict[str, str]:
        """Of a replica. Serve replaces replicas when it changes, so a redeploy changes it."""
        return {"FLYWHEEL_GENERATION": str(self._generation)}


def _run(targets: list[Any]) -> None:
    serve.run_many(targets, wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
