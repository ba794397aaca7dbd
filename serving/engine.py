"""The engine replica: vLLM's own OpenAI application, driven in process inside a Ray Serve deployment.

Nothing of vLLM's surface is rewritten: a request is handed to its ASGI application and the answer is
streamed back over the deployment's handle. vLLM names the answer after the header X-Request-Id and the
served model, so ids come out right without touching the chunks.
Guarantees: the replica becomes ready only after it has proven its base and tried every active adapter
(a base that fails its canaries never becomes ready). Cancelling a call aborts the engine's request.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from feedback.events import uuid7
from serving.adapters import Reconciler
from serving.asgi import Head, call_asgi
from serving.errors import EngineRefused, ServingError
from serving.settings import ServingSettings

log = logging.getLogger(__name__)


class VllmEngine:
    """AsyncLLM and its OpenAI application. Build with `await VllmEngine.start(...)`."""

    def __init__(self, engine: Any, app: Any) -> None:
        self._engine = engine
        self.app = app

    @classmethod
    async def start(cls, settings: ServingSettings, served_name: str) -> "VllmEngine":
        """Load the model and build the application; `served_name` is the base's checkpoint id."""
        for name, value in engine_environment(settings).items():
            os.environ.setdefault(name, value)
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        from vllm.v1.engine.async_llm import AsyncLLM

        args = make_arg_parser(FlexibleArgumentParser()).parse_args(engine_arguments(settings, served_name))
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(args))
        _refuse_tokens_without_embedding(engine)
        tasks = await engine.get_supported_tasks()
        app = build_app(args, tasks, engine.model_config)
        await init_app_state(engine, app.state, args, tasks)
        return cls(engine, app)

    async def load_adapter(self, checkpoint_id: str, path: str) -> None:
        """Load a LoRA adapter under its checkpoint id. Raises EngineRefused."""
        from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest

        answer = await self.app.state.openai_serving_models.load_lora_adapter(
            LoadLoRAAdapterRequest(lora_name=checkpoint_id, lora_path=path)
        )
        if not isinstance(answer, str):
            raise EngineRefused(f"vLLM did not load {checkpoint_id}: {answer.error.message}")

    async def unload_adapter(self, checkpoint_id: str) -> None:
        """Forget an adapter; harmless when it is not loaded. Requests that run on it finish first."""
        models = self.app.state.openai_serving_models
        if checkpoint_id in models.lora_requests:
            from vllm.entrypoints.serve.lora.protocol import UnloadLoRAAdapterRequest

            await models.unload_lora_adapter(UnloadLoRAAdapterRequest(lora_name=checkpoint_id))

    async def log_probabilities(self, token_ids: list[list[int]], checkpoint_id: str | None) -> list[list[float]]:
        """Natural-log probability of each token after the first, as the engine computes it for prompts.

        Raises EngineRefused for a sequence that vLLM does not take: too long, or with an unknown token.
        """
        from vllm import SamplingParams
        from vllm.exceptions import VLLMValidationError

        adapter = None if checkpoint_id is None else self.app.state.openai_serving_models.lora_requests[checkpoint_id]

        async def one(ids: list[int]) -> list[float]:
            parameters = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
            final = None
            async for output in self._engine.generate(
                {"prompt_token_ids": ids}, parameters, f"canary-{uuid7().hex}", lora_request=adapter
            ):
                final = output
            if final is None or final.prompt_logprobs is None:
                raise EngineRefused("vLLM gave no log-probabilities for the canaries")
            return [final.prompt_logprobs[i][ids[i]].logprob for i in range(1, len(ids))]

        try:
            return list(await asyncio.gather(*(one(ids) for ids in token_ids)))
        except VLLMValidationError as error:
            raise EngineRefused(f"vLLM does not take a canary: {error}") from error

    @property
    def alive(self) -> bool:
        """False once the engine's process is gone."""
        return not self._engine.errored

    async def check_health(self) -> None:
        """Raises vLLM's EngineDeadError when the engine's process is gone."""
        await self._engine.check_health()

    def close(self) -> None:
        """Stop the engine's process."""
        self._engine.shutdown()


def _refuse_tokens_without_embedding(engine: Any) -> None:
    """Have vLLM answer 400 to the token id `vocab_size`.

    vLLM 0.29 bounds ids by its tokenizer's `max_token_id`, which for many models is the number of tokens: one too
    many. The id passes the check, the engine's process dies of an index error, and every request with it.
    """
    from vllm.exceptions import VLLMValidationError

    processor, rows = engine.input_processor, engine.model_config.get_vocab_size()
    check = processor._validate_model_input

    def check_more(prompt_input: Any, prompt_type: str) -> None:
        check(prompt_input, prompt_type)
        largest = max(prompt_input.get("prompt_token_ids") or (0,))
        if largest >= rows:
            raise VLLMValidationError(f"Token id {largest} is out of vocabulary")

    processor._validate_model_input = check_more


def engine_environment(settings: ServingSettings) -> dict[str, str]:
    """What vLLM reads from the environment of an engine's process.

    On a CPU the engine's process runs the model itself: vLLM's worker process would cost another start and a hop for
    every token, for a binding of threads to cores that two cores don't need.
    vLLM compiles a few functions of its sampler even when the model runs eagerly, half a minute at each start: torch
    keeps them, and the headers that it precompiles for them, in the temporary folder, which ends with the platform.
    Here they go to the user's cache, and no headers are precompiled.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flywheel" / "torchinductor"
    environment = {
        "VLLM_NO_USAGE_STATS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
    }
    if not settings.engine_gpus:
        environment["VLLM_CPU_KVCACHE_SPACE"] = str(settings.kv_cache_gib)
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return environment


def engine_dtype(settings: ServingSettings) -> str:
    """The number format to serve in: the one that the settings name, or this machine's faster one."""
    if settings.dtype != "auto":
        return settings.dtype
    import torch

    tiles = torch.cpu.get_capabilities().get("amx_bf16", False)
    return "bfloat16" if torch.cuda.is_available() or tiles else "float32"


def engine_arguments(settings: ServingSettings, served_name: str) -> list[str]:
    """vLLM's command-line arguments for these settings."""
    arguments = [
        f"--model={settings.model.resolve()}",
        f"--served-model-name={served_name}",
        f"--dtype={engine_dtype(settings)}",
        f"--max-model-len={settings.max_model_len}",
        f"--max-num-seqs={settings.max_num_seqs}",
        "--enable-lora",
        f"--max-loras={settings.max_loras}",
        f"--max-cpu-loras={max(settings.max_cpu_loras, settings.max_loras)}",
        f"--max-lora-rank={settings.max_lora_rank}",
        # Not lm_head: its LoRA layer on CPU dies of prompt log-probabilities as soon as two requests share a
        # batch, and takes the engine along.
        "--lora-target-modules",
        *settings.lora_modules,
        "--generation-config=vllm",
    ]
    if settings.engine_gpus:
        arguments += [
            f"--tensor-parallel-size={settings.tensor_parallel_size}",
            f"--gpu-memory-utilization={settings.gpu_memory_utilization}",
        ]
    if settings.enforce_eager:
        arguments.append("--enforce-eager")
    return [*arguments, *settings.extra_engine_arguments]


class EngineReplica:
    """The Ray Serve deployment class. Serve awaits the constructor and the destructor."""

    # Serve calls the destructor of a replica that was stopped while it was still being constructed, too.
    _loop: asyncio.Task[None] | None = None

    async def __init__(self, settings: ServingSettings, base_checkpoint_id: str, dsn: str) -> None:
        self._engine = await VllmEngine.start(settings, base_checkpoint_id)
        self._reconciler = Reconciler(
            self._engine,
            dsn=dsn,
            replica_id=f"engine-{uuid7().hex}",
            base_checkpoint_id=base_checkpoint_id,
            tolerance=settings.canary_tolerance,
            unload_after_s=settings.unload_after_s,
        )
        try:
            await self._reconciler.prove_base()
            await self._reconciler.reconcile()
        except ServingError:
            self._engine.close()
            raise
        self._loop = asyncio.create_task(self._reconciler.run(settings.poll_interval_s))

    async def check_health(self) -> None:
        """Ray Serve's health check: raises when the engine's process or the reconciliation has died."""
        await self._engine.check_health()
        if self._loop is not None and self._loop.done():
            self._loop.result()

    async def call(self, path: str, headers: list[tuple[str, str]], body: bytes | None) -> AsyncIterator[Head | bytes]:
        """POST `body` (GET without one) to vLLM's application; yields (status, headers), then the body's pieces."""
        method = "GET" if body is None else "POST"
        async for message in call_asgi(self._engine.app, method, path, headers, body or b""):
            yield message

    async def __del__(self) -> None:
        if self._loop is None:
            return
        self._loop.cancel()
        await asyncio.wait([self._loop])
        await asyncio.to_thread(self._reconciler.leave)
        self._engine.close()
