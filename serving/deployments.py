"""The two Ray Serve deployments: gateway (ingress) and engine. Imports Ray, so import it late.

Serve's defaults are replaced where they hurt: max_ongoing_requests (5) would queue a sixth stream, and a
refused engine would be started three times over.
"""

import asyncio
import logging
from typing import Any

import ray.exceptions
from ray import serve
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from feedback.outbox import Outbox
from feedback.settings import FeedbackSettings
from serving.asgi import Head
from serving.engine import EngineReplica
from serving.errors import UpstreamError
from serving.exchange import EngineCall
from serving.gateway import Gateway, build_app
from serving.recorder import Recorder
from serving.routing import Router
from serving.settings import ServingSettings
from telemetry.logs import set_up_logs

log = logging.getLogger(__name__)


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
    """A running call of an engine replica."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._cancelled = False

    def __aiter__(self) -> "RayCall":
        return self

    async def __anext__(self) -> Head | bytes:
        try:
            return await anext(self._stream)
        except (ray.exceptions.RayError, RayServeException) as error:
            if self._cancelled:
                raise StopAsyncIteration from error
            log.warning("the engine failed: %s", error)
            raise UpstreamError("The engine stopped while it worked on this request.") from error

    def cancel(self) -> None:
        """Abort the replica's task, and with it the engine's request; harmless after the end."""
        self._cancelled = True
        self._stream.cancel()


class RayEngine:
    """Reaches the engine deployment through its handle."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle.options(method_name="call", stream=True)

    def call(self, path: str, headers: list[tuple[str, str]], body: bytes) -> EngineCall:
        """POST `body` to an engine replica's application."""
        return RayCall(self._handle.remote(path, headers, body))


@serve.ingress()
class GatewayReplica:
    """One gateway process: it owns an outbox file and a routing table. Serve awaits constructor and destructor."""

    async def __init__(
        self, engine: DeploymentHandle, settings: ServingSettings, feedback: FeedbackSettings, dsn: str
    ) -> None:
        set_up_logs()
        if not settings.ray_address:
            listen_locally()
        self._outbox = Outbox.open(
            feedback.outbox, max_pending=feedback.outbox_max_pending, max_queued=feedback.outbox_max_queued
        )
        self._router = Router(dsn, settings)
        await asyncio.to_thread(self._router.start)
        self._recorder = Recorder(self._outbox)
        self._gateway = Gateway(settings, RayEngine(engine), self._router, self._recorder)

    def __serve_build_asgi_app__(self) -> Any:
        """Ray Serve asks for the application after the constructor."""
        return build_app(self._gateway)

    def check_health(self) -> None:
        """Ray Serve's health check."""
        self._router.check()

    async def __del__(self) -> None:
        await asyncio.to_thread(self._router.close)
        await asyncio.to_thread(self._outbox.close)
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


def build_application(
    settings: ServingSettings, feedback: FeedbackSettings, base_checkpoint_id: str, dsn: str, omp_threads: int
) -> Any:
    """The bound Serve application. omp_threads: threads of the CPU engine."""
    quiet = {"enable_access_log": False}
    engine = serve.deployment(
        EngineDeployment,
        name="engine",
        num_replicas=settings.engine_replicas,
        max_ongoing_requests=2 * settings.max_concurrency * settings.gateway_replicas,
        max_constructor_retry_count=1,
        graceful_shutdown_timeout_s=settings.drain_timeout_s,
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=2,
        health_check_timeout_s=30,
        logging_config=quiet,
        ray_actor_options={
            "num_cpus": settings.engine_cpus,
            # Ray would set it to num_cpus, which is a share and not a number of threads.
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(omp_threads)}},
        },
    ).bind(settings, base_checkpoint_id, dsn)
    return serve.deployment(
        GatewayReplica,
        name="gateway",
        num_replicas=settings.gateway_replicas,
        max_ongoing_requests=2 * settings.max_concurrency,
        graceful_shutdown_timeout_s=settings.drain_timeout_s,
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=2,
        health_check_timeout_s=30,
        logging_config=quiet,
        ray_actor_options={"num_cpus": 0},
    ).bind(engine, settings, feedback, dsn)
