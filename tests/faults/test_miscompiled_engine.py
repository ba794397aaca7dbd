"""The canaries against a fault that vLLM really has: its CPU engine, compiled, answers fluent nonsense."""

from pathlib import Path

import pytest

from serving.registry import proofs, resolve_alias
from tests.helpers.platform import Platform, wait_for
from tests.helpers.servers import Postgres

pytestmark = [pytest.mark.real, pytest.mark.engine, pytest.mark.long]


def a_miscompiled_engine_never_becomes_ready_and_the_report_says_which_sequences_differ(
    tmp_path: Path, postgres: Postgres, base_model: Path
) -> None:
    platform = Platform.launch(tmp_path, postgres.new_database(), model=base_model, enforce_eager=False)
    try:
        wait_for(lambda: platform.process.poll() is not None or platform.is_ready(), 400, "it neither serves nor ends")
        assert not platform.is_ready()
        assert "the engine does not serve" in platform.log
        with platform.database() as connection:
            [proof] = proofs(connection, resolve_alias(connection, "flash"))
    finally:
        platform.stop()
    print(proof.proof["reason"], [one["mean_nats"] for one in proof.proof["sequences"]])
    assert proof.status == "refused"
    assert max(one["mean_nats"] for one in proof.proof["sequences"]) > platform.settings.canary_tolerance.mean_nats
