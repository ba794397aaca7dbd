"""One Ray, HAProxy, gateway and vLLM engine for all tests of this folder; test_shutdown.py, the last, stops it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from serving.registry import resolve_alias
from serving.settings import ServingSettings
from tests.helpers.platform import Platform
from tests.helpers.servers import Postgres


@pytest.fixture(scope="package")
def platform(tmp_path_factory: pytest.TempPathFactory, postgres: Postgres, base_model: Path) -> Iterator[Platform]:
    """The running platform (its start takes about 40 s)."""
    small_steps = "--max-num-batched-tokens=128"  # a prefill in several, so that a test can look in between
    running = Platform.start(
        tmp_path_factory.mktemp("serving"),
        postgres.new_database(),
        model=base_model,
        extra_engine_arguments=(*ServingSettings().extra_engine_arguments, small_steps),
    )
    yield running
    running.stop()


@pytest.fixture(scope="package")
def base_id(platform: Platform) -> str:
    with platform.database() as connection:
        return resolve_alias(connection, "flash")
