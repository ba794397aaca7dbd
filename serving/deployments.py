"""The Ray Serve deployments: the gateway (ingress), and the engines of each model. Imports Ray, so import it late.

They are applications of their own: engines come and go without a change to the gateway.

Serve's defaults are replaced where they hurt: max_ongoing_requests (5) would queue a sixth stream, and a
refused engine would be started three times over.
"""

import asyncio
import logging
from pathlib import Path
from typing import Any

import grpc
import ray.exceptions
from ray import serve
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from feedback.events import uuid7
from feedback.outbox import Outbox
from feedback.settings import FeedbackSettings
from serving.app import GATEWAY
from serving.asgi import Head
from serving.engine import EngineReplica
from serving.errors import UpstreamError
from serving.evaluations import tell_through
from serving.exchange import EngineCall
from serving.experiment_store import ExperimentStore
from serving.gateway import Gateway, build_app
from serving.recorder import Recorder
from serving.registry import Checkpoint
from serving.routing import Router
from serving.settings import ServingSettings
from serving.vote_store import VoteStore
from telemetry.evaluations import EvaluationLog
from telemetry.logs import set_up_logs
from telemetry.metrics import GatewayMetrics

log = logging.getLogger(__name__)

ENGINE = "engine"
ENGINE_APPLICATION = "engine-"  # what the names of their applications begin with
_STOPPED = "The engine stopped while it worked on this request."
_QUIET = {"enable_access_log": False}


def listen_locally() -> None:
    """Bind this replica's own gRPC server, by which Serve may reach it, to 127.0.0.1.

    Ray Serve 2.60 writes `[::]` into its code and has no setting for it, so the one function that binds is
    wrapped here. Call it in a deployment's constructor: the server starts after that.
    """
    from ray.serve._private import replica

    bind = replica.add_port_to_grpc_server

    def bind_locally(server: Any, address: str) -> int:
        return int(bind(server, address.replace("[::]", "127.0.0.1")))

    replica.add_port_to_grpc_server = bind_locally


class RayCall:
    """A running call of an engine replica.

    By value: the replica's own gRPC server sends each piece, where Ray's object store would take several messages.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._cancelled = False

    def __aiter__(self) -> "RayCall":
        return self

    async def __anext__(self) -> Head | bytes:
        try:
            return await anext(self._stream)
        except (ray.exceptions.RayError, RayServeException, grpc.aio.AioRpcError) as error:
            if self._cancelled:
                raise StopAsyncIteration from error
            log.warning("the engine failed: %s", error)
            raise UpstreamError(_STOPPED) from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if self._cancelled or (task is not None and task.cancelling()):
                raise
            raise UpstreamError(_STOPPED) from error  # the replica's task was cancelled, not this one

    def cancel(self) -> None:
        """Abort the replica's task, and with it the engine's request; harmless after the end."""
        self._cancelled = True
        self._stream.cancel()


class RayEngines:
    """Reaches the engines of each model through the handle of its deployment."""

    def __init__(self) -> None:
        self._handles: dict[str, DeploymentHandle] = {}

    def call(self, base_id: str, path: str, headers: list[tuple[str, str]], body: bytes | None) -> EngineCall:
        """POST `body` (GET without one) to the application of an engine replica that runs `base_id`."""
        handle = self._handles.get(base_id)
        if handle is None:
            handle = serve.get_deployment_handle(ENGINE, app_name=engine_application_name(base_id))
            self._handles[base_id] = handle = handle.options(method_name="call", stream=True, _by_reference=False)
        return RayCall(handle.remote(path, headers, body))


@serve.ingress()
class GatewayReplica:
    """One gateway process: it owns an outbox file and a routing table. Serve awaits constructor and destructor."""

    async def __init__(self, settings: ServingSettings, feedback: FeedbackSettings, dsn: str) -> None:
        set_up_logs()
        if not settings.ray_address:
            listen_locally()
        self._outbox = Outbox.open(
            feedback.outbox, max_pending=feedback.outbox_max_pending, max_queued=feedback.outbox_max_queued
        )
        self._router = Router(dsn, settings)
        await asyncio.to_thread(self._router.start)
        self._recorder = Recorder(self._outbox, GatewayMetrics(f"gateway-{uuid7().hex[-12:]}"))
        self._votes = VoteStore(dsn)
        self._experiments = ExperimentStore(dsn, settings.replica_timeout_s)
        self._evaluations = EvaluationLog(settings.otlp_logs_endpoint) if settings.otlp_logs_endpoint else None
        tell_vote = tell_through(self._evaluations) if self._evaluations else None
        self._gateway = Gateway(
            settings, RayEngines(), self._router, self._recorder, self._votes, self._experiments, tell_vote
        )

    def __serve_build_asgi_app__(self) -> Any:
        """Ray Serve asks for the application after the constructor."""
        return build_app(self._gateway)

    def check_health(self) -> None:
        """Ray Serve's health check."""
        self._router.check()

    async def __del__(self) -> None:
        self._gateway.shadows.close()
        await self._gateway.shadows.settle()
        await asyncio.to_thread(self._router.close)
        await asyncio.to_thread(self._outbox.close)
        self._votes.close()
        self._experiments.close()
        if self._evaluations is not None:
            await asyncio.to_thread(self._evaluations.close)
        log.info(
            "gateway stopped: %d interactions recorded, %d dropped; outbox %s",
            self._recorder.recorded,
            self._recorder.dropped,
            dict(self._outbox.counters),
        )


class EngineDeployment(EngineReplica):
    """The engine replica, with what only a Serve replica needs."""

    async def __init__(self, settings: ServingSettings, base_checkpoint_id: str, dsn: str) -> None:
        set_up_logs()
        if not settings.ray_address:
            listen_locally()
        await super().__init__(settings, base_checkpoint_id, dsn)  # type: ignore[misc]


def engine_application_name(base_id: str) -> str:
    """The Serve application that runs the engines of a model."""
    return f"{ENGINE_APPLICATION}{base_id}"


def build_engines(settings: ServingSettings, model: Checkpoint, dsn: str, environment: dict[str, str]) -> Any:
    """The bound Serve application of one model's engines. environment: of their processes."""
    return serve.deployment(
        EngineDeployment,
        name=ENGINE,
        **_replicas(settings.engine_replicas, settings.engine_replicas_max, settings),
        max_ongoing_requests=2
        * settings.max_concurrency
        * max(settings.gateway_replicas, settings.gateway_replicas_max),
        max_surge_percent=100,
        max_constructor_retry_count=1,
        graceful_shutdown_timeout_s=settings.drain_timeout_s,
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=2,
        health_check_timeout_s=30,
        logging_config=_QUIET,
        ray_actor_options={
            "num_cpus": settings.engine_cpus,
            "num_gpus": settings.engine_gpus,
            "runtime_env": {"env_vars": environment},
            **({"accelerator_type": settings.accelerator} if settings.accelerator else {}),
        },
    ).bind(settings.model_copy(update={"model": Path(model.path)}), model.checkpoint_id, dsn)


def _replicas(least: int, most: int, settings: ServingSettings) -> dict[str, Any]:
    """A fixed number of replicas, or bounds between which Serve scales."""
    if most <= least:
        return {"num_replicas": least}
    return {
        "autoscaling_config": {
            "min_replicas": least,
            "max_replicas": most,
            "target_ongoing_requests": settings.target_ongoing_requests,
        }
    }


def build_gateway(settings: ServingSettings, feedback: FeedbackSettings, dsn: str, environment: dict[str, str]) -> Any:
    """The bound Serve application of the REST API; it scales apart from the engines. environment: of its processes."""
    return serve.deployment(
        GatewayReplica,
        name=GATEWAY,
        max_surge_percent=100,
        **_replicas(settings.gateway_replicas, settings.gateway_replicas_max, settings),
        max_ongoing_requests=2 * settings.max_concurrency,
        graceful_shutdown_timeout_s=settings.drain_timeout_s,
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=2,
        health_check_timeout_s=30,
        logging_config=_QUIET,
        ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": environment}},
    ).bind(settings, feedback, dsn)
