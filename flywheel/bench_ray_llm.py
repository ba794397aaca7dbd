"""Ray Serve LLM as a process, for `flywheel bench serving`: `python -m flywheel.bench_ray_llm <settings> <port>`.

The peer's own application with the engine arguments that this platform uses; it serves "base" until SIGTERM.
"""

import dataclasses
import signal
import sys
import threading
from typing import Any

from serving.engine import engine_arguments
from serving.settings import ServingSettings


def main(settings: ServingSettings, port: int) -> None:
    """Serve until SIGTERM or SIGINT."""
    import ray
    from ray import serve
    from ray.serve.config import HTTPOptions
    from ray.serve.llm import LLMConfig, build_openai_app

    stop = threading.Event()
    # Logical: the engine and the ingress reserve more than a small machine has.
    ray.init(address="local", num_cpus=16, include_dashboard=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    config = LLMConfig(
        model_loading_config={"model_id": "base", "model_source": str(settings.model.resolve())},
        engine_kwargs=engine_options(settings),
        deployment_config={"num_replicas": 1, "max_ongoing_requests": 512},
        placement_group_config={"bundles": [{"CPU": 1}]},
    )
    serve.start(http_options=HTTPOptions(host="127.0.0.1", port=port))
    serve.run(build_openai_app({"llm_configs": [config]}), route_prefix="/")
    stop.wait()
    serve.shutdown()
    ray.shutdown()


def engine_options(settings: ServingSettings) -> dict[str, Any]:
    """`engine_arguments` as keyword arguments of vLLM's engine: those that differ from its defaults, by name."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser()).parse_args(engine_arguments(settings, "base"))
    wanted, plain = AsyncEngineArgs.from_cli_args(args), AsyncEngineArgs()
    names = {one.name for one in dataclasses.fields(plain)} - {"model", "served_model_name"}
    return {name: getattr(wanted, name) for name in names if getattr(wanted, name) != getattr(plain, name)}


if __name__ == "__main__":
    main(ServingSettings.model_validate_json(sys.argv[1]), int(sys.argv[2]))
