"""Settings of the serving room."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class CanaryTolerance(BaseModel):
    """How far the engine's log-probabilities (nats a token) may lie from the manifest's.

    The noise floor, measured with SmolLM2-135M on one CPU: the bfloat16 engine lay 0.044 from bfloat16
    transformers on average and 0.26 at most, and bfloat16 transformers 0.052 and 0.34 from float32. With the
    chat sequences, whose tokens are less likely, an adapter lay 0.061 and 0.63 away.
    mean_nats, max_nats: bounds on the average and on the largest absolute difference.
    min_effect_nats: an adapter that moves the canaries by less than this (mean absolute difference from
    its parent, by its own manifest) can't be told from its parent, so it can't be proven.
    min_slope: how much of the manifest's difference from the parent the engine must show (1 is all of it).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    mean_nats: float = Field(default=0.15, gt=0)
    max_nats: float = Field(default=2.0, gt=0)
    min_effect_nats: float = Field(default=0.02, ge=0)
    min_slope: float = Field(default=0.5, ge=0, le=1)


class ServingSettings(BaseModel):
    """How the API and the engines run.

    host, port: where the API listens. alias: the name that people use for the current checkpoint.
    model: directory of the base model (safetensors and a manifest.json with canaries).
    dtype: number format of the engine; auto takes bfloat16 on a GPU or a CPU with tile units (AMX), else float32,
    which is faster there. max_model_len: context in tokens. kv_cache_gib: cache of the CPU engine, GiB.
    max_num_seqs: sequences the engine works on at once. max_loras: adapters in one batch;
    max_cpu_loras: adapters kept in memory; lora_modules: the layers that an adapter may change.
    extra_engine_arguments: further options of vLLM's own command line; by default those that tools need, with the
    parser of the Hermes format (another family of models may need another).
    max_models: whole models that have engines at once. engine_replicas, gateway_replicas: of each model, and of the
    API; with the `_max` of either above it Ray Serve scales between the two, adding one for each
    target_ongoing_requests under way.
    engine_cpus, engine_gpus: logical CPUs and GPUs that an engine replica reserves in Ray; tensor_parallel_size:
    GPUs that share one copy of the model; accelerator: the kind of GPU as Ray names it, such as H200, or empty;
    gpu_memory_utilization: share (0 to 1) of a GPU's memory that an engine may take.
    request_timeout_s: longest answer. body_timeout_s: a request's body must have arrived by then.
    max_body_bytes: largest request; what it asks and what is answered
    must fit in one record of the log. max_concurrency: requests under way in one gateway; more are
    answered with 503. shadows_at_once: answers that nobody is shown, under way in one gateway; more are dropped.
    poll_interval_s: how old a key, alias or experiment may be in a gateway or engine.
    unload_after_s: how long a retired checkpoint is still served to gateways that have not read of it.
    replica_timeout_s: an engine replica without a heartbeat for so long counts as gone.
    feedback_token_s: how long the token in an answer's headers lets a browser vote on it; 0: no tokens.
    key_votes_per_minute, rater_votes_per_minute: votes that one API key, and one rater or feedback token, may send; 0:
    any number. Raters of a key with the scope `evaluate` are not limited.
    otlp_logs_endpoint: where accepted votes are told on as OpenTelemetry's evaluation events, such as
    http://127.0.0.1:4318/v1/logs; empty: nowhere.
    cors_origins: the web pages (such as https://example.org) whose scripts may call the API; none by default.
    drain_timeout_s: how long running streams may go on after stop. start_timeout_s: for the engine's start.
    ray_address: an existing Ray; empty starts a local one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65535)
    alias: str = "flash"
    model: Path = Path(".flywheel/models/smollm2-135m-instruct")
    dtype: Literal["bfloat16", "float16", "float32", "auto"] = "auto"
    enforce_eager: bool = True
    max_model_len: int = Field(default=1024, ge=16)
    kv_cache_gib: int = Field(default=1, ge=1)
    max_num_seqs: int = Field(default=32, ge=1)
    max_loras: int = Field(default=2, ge=1)
    max_cpu_loras: int = Field(default=16, ge=1)
    max_lora_rank: int = Field(default=16, ge=1)
    lora_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    extra_engine_arguments: tuple[str, ...] = ("--enable-auto-tool-choice", "--tool-call-parser=hermes")
    engine_replicas: int = Field(default=1, ge=1)
    engine_replicas_max: int = Field(default=1, ge=1)
    max_models: int = Field(default=2, ge=1)
    engine_cpus: float = Field(default=1, gt=0)
    engine_gpus: float = Field(default=0, ge=0)
    tensor_parallel_size: int = Field(default=1, ge=1)
    accelerator: str = ""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    gateway_replicas: int = Field(default=1, ge=1)
    gateway_replicas_max: int = Field(default=1, ge=1)
    target_ongoing_requests: float = Field(default=16, gt=0)
    request_timeout_s: float = Field(default=300, gt=0)
    body_timeout_s: float = Field(default=10, gt=0)
    max_body_bytes: int = Field(default=1 << 19, ge=1)
    max_concurrency: int = Field(default=256, ge=1)
    shadows_at_once: int = Field(default=4, ge=0)
    poll_interval_s: float = Field(default=0.5, gt=0)
    unload_after_s: float = Field(default=5, ge=0)
    replica_timeout_s: float = Field(default=15, gt=0)
    feedback_token_s: float = Field(default=86400, ge=0)
    key_votes_per_minute: int = Field(default=0, ge=0)
    rater_votes_per_minute: int = Field(default=120, ge=0)
    otlp_logs_endpoint: str = Field(default="", pattern="^(https?://.*)?$")
    cors_origins: tuple[str, ...] = ()
    drain_timeout_s: float = Field(default=30, ge=0)
    start_timeout_s: float = Field(default=300, gt=0)
    canary_tolerance: CanaryTolerance = CanaryTolerance()
    ray_address: str = ""

    @model_validator(mode="after")
    def _gpus_fit(self) -> "ServingSettings":
        if self.tensor_parallel_size > 1 and self.engine_gpus != self.tensor_parallel_size:
            raise ValueError(
                f"tensor_parallel_size {self.tensor_parallel_size} needs engine_gpus {self.tensor_parallel_size}: "
                "an engine replica reserves the GPUs that share its model"
            )
        if self.accelerator and not self.engine_gpus:
            raise ValueError("accelerator names a kind of GPU, and engine_gpus is 0")
        return self
