"""Heavy work in a process of its own, started through Ray.

`run_on_ray` submits a function with the resources that settings name and waits, calling `keep_alive`
about once a second, so that the caller can renew its lease and leave when it is told to stop.
Guarantees: the worker ends with its task or with this process, whichever is first; a task that died with
its worker or its node raises WorkLost, which a retry can cure; an error that the function itself raised
comes back with its text: as WorkRefused when it is one of our rooms' own, else as WorkFailed.
"""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from feedback.errors import FeedbackError
from reward.errors import RewardError
from rounds.errors import RoundsError, WorkFailed, WorkLost, WorkRefused
from rounds.settings import ControllerSettings
from serving.app import TOKEN_FILE


def run_on_ray(
    function: Callable[..., Any],
    arguments: dict[str, Any],
    keep_alive: Callable[[], None],
    *,
    settings: ControllerSettings,
    address_file: Path,
) -> Any:
    """Call `function(**arguments)` in a fresh Ray worker and return its result.

    address_file: where the platform wrote the address of its Ray. Raises WorkLost, WorkFailed, WorkRefused.
    """
    address = _read_address(address_file)
    import ray
    from ray.exceptions import RayError, RayTaskError

    try:
        _connect(address)
        # One call a worker: torch's memory is given back, and no state leaks from one round to the next.
        task = ray.remote(max_calls=1, max_retries=0, num_cpus=settings.work_cpus, num_gpus=settings.work_gpus)(
            function
        )
        threads = str(settings.work_threads or os.cpu_count() or 1)
        reference = task.options(runtime_env={"env_vars": {"OMP_NUM_THREADS": threads}}).remote(**arguments)
        finished = False
        try:
            while not (finished := bool(ray.wait([reference], timeout=1.0)[0])):
                keep_alive()
        finally:
            # Cancelling a task whose answer is just being taken in ends this process: Ray 2.60 aborts in its C++.
            if not finished:
                ray.cancel(reference, force=True)
        return ray.get(reference)
    except RayTaskError as error:
        kind = WorkRefused if isinstance(error.cause, FeedbackError | RewardError | RoundsError) else WorkFailed
        raise kind(f"{function.__name__} failed: {type(error.cause).__name__}: {error.cause}") from error
    except (RayError, ConnectionError) as error:
        raise WorkLost(f"{function.__name__} was lost with its worker: {error}") from error


def _read_address(address_file: Path) -> str:
    """The address of the platform's Ray; prepares this process for one on the loopback interface."""
    if not address_file.exists():
        raise WorkLost(f"Ray is not up yet: {address_file} is missing")
    address = address_file.read_text(encoding="utf-8").strip()
    if address.startswith("127."):
        # Read when ray is imported; otherwise it replaces a loopback address by the machine's own.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(address_file.with_name(TOKEN_FILE)))
    return address


def _connect(address: str) -> None:
    """Join the platform's Ray; again when it was restarted under another address."""
    import ray

    if ray.is_initialized():
        if ray.get_runtime_context().gcs_address == address:
            return
        ray.shutdown()
    handler = signal.getsignal(signal.SIGTERM)
    ray.init(address=address, log_to_driver=False, configure_logging=False)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)  # Ray put one there that exits at once
