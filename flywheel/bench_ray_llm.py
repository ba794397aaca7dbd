"""Ray Serve LLM as a process, for `flywheel bench serving`: `python -m flywheel.bench_ray_llm <settings> <port>`.

The peer's own application with the engine arguments that this platform uses; it serves "base" until SIGTERM.
"""

import signal
import sys
import threading

from serving.engine import engine_dtype
from serving.settings import ServingSettings


def main(settings: ServingSettings, port: int) -> None:
    """Serve until SIGTERM or SIGINT."""
    import ray
    from ray import serve
    from ray.serve.config import HTTPOptions
    from ray.serve.llm import LLMConfig, build_openai_app

    stop = threading.Event()
    ray.init(address="local", include_dashboard=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    config = LLMConfig(
        model_loading_config={"model_id": "base", "model_source": str(settings.model.resolve())},
        engine_kwargs={
            "dtype": engine_dtype(settings),
            "max_model_len": settings.max_model_len,
            "max_num_seqs": settings.max_num_seqs,
            "enable_lora": True,
            "max_loras": settings.max_loras,
            "max_cpu_loras": max(settings.max_cpu_loras, settings.max_loras),
            "max_lora_rank": settings.max_lora_rank,
            "lora_target_modules": list(settings.lora_modules),
            "generation_config": "vllm",
            "enforce_eager": settings.enforce_eager,
        },
        deployment_config={"num_replicas": 1, "max_ongoing_requests": 512},
        placement_group_config={"bundles": [{"CPU": 1}]},
    )
    serve.start(http_options=HTTPOptions(host="127.0.0.1", port=port))
    serve.run(build_openai_app({"llm_configs": [config]}), route_prefix="/")
    stop.wait()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main(ServingSettings.model_validate_json(sys.argv[1]), int(sys.argv[2]))
