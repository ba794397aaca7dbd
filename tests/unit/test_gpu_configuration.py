"""Laws of the GPU configuration, as far as they can be told without a GPU."""

from pathlib import Path

import pytest

from flywheel.errors import SettingsInvalid
from flywheel.settings import Settings, load_settings, parse_assignments
from serving.engine import engine_arguments, engine_environment
from serving.registry import Checkpoint

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "gpu.toml"


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("FLYWHEEL_CONFIG", str(EXAMPLE))
    return load_settings()


def the_example_is_valid_and_reaches_vllm(settings: Settings) -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    arguments = engine_arguments(settings.serving, "flash-base-000000")
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    assert (parsed.tensor_parallel_size, parsed.dtype, parsed.max_num_seqs) == (2, "bfloat16", 256)
    assert parsed.gpu_memory_utilization == 0.9
    assert parsed.enforce_eager is False
    assert not [name for name in engine_environment(settings.serving) if "CPU" in name]


def the_example_reserves_its_gpus_and_scales_between_its_bounds(settings: Settings) -> None:
    from serving.deployments import build_engines, build_gateway

    model = Checkpoint(checkpoint_id="big", kind="model", parent_id=None, digest="", path="/models/big", manifest={})
    engines = build_engines(settings.serving, model, "dsn", {})._bound_deployment
    options = engines.ray_actor_options
    assert (options["num_gpus"], options["num_cpus"], options["accelerator_type"]) == (2, 4, "H200")
    scaling = engines._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (1, 4, 64)
    gateway = build_gateway(settings.serving, settings.feedback, "dsn", {})._bound_deployment
    assert gateway._deployment_config.autoscaling_config.max_replicas == 8
    assert settings.serving.ray_address == "ray-head:6379"
    assert settings.rounds.controller.work_gpus == 1


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("serving.engine_gpus=1", "tensor_parallel_size 2 needs engine_gpus 2"),
        ("serving.gpu_memory_utilization=1.5", "gpu_memory_utilization"),
    ],
)
def a_configuration_that_can_not_be_is_refused(settings: Settings, wrong: str, words: str) -> None:
    with pytest.raises(SettingsInvalid, match=words):
        load_settings(**parse_assignments([wrong]))
