"""Laws of `flywheel checkpoint …` on running engines: both kinds come and go without a restart."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.adapters import build_adapter
from tests.helpers.platform import ASK, Platform, wait_for
from tests.helpers.servers import ROOT
from tests.helpers.tiny_model import build_tiny_model

pytestmark = [pytest.mark.real, pytest.mark.engine]


def flywheel(platform: Platform, *words: str, code: int = 0) -> str:
    """What the command prints; its error when another exit code than 0 is expected."""
    options = [f"--set=storage.dsn={platform.dsn}", f"--set=home={platform.home}"]
    ran = subprocess.run(
        [sys.executable, "-m", "flywheel", *options, *words], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert ran.returncode == code, ran.stdout + ran.stderr
    return ran.stdout if code == 0 else ran.stderr


def served_by(platform: Platform, model: str) -> str | None:
    with platform.client() as client:
        answer = client.post("/v1/chat/completions", json={**ASK, "model": model, "max_tokens": 2})
    return answer.headers.get("x-flywheel-checkpoint")


def a_whole_model_gets_engines_of_its_own_serves_and_goes_again(
    platform: Platform, base_id: str, tmp_path: Path
) -> None:
    tiny = build_tiny_model(tmp_path / "tiny", seed=3)
    added = json.loads(flywheel(platform, "checkpoint", "add", str(tiny), "--id=tiny", "--wait-s=240", "--json"))
    assert (added["kind"], added["servable"], added["live_replicas"]) == ("model", True, 1)
    wait_for(lambda: served_by(platform, "tiny") == "tiny", 20, "it can't be asked")
    assert served_by(platform, "flash") == base_id
    flywheel(platform, "checkpoint", "promote", "tiny")
    wait_for(lambda: served_by(platform, "flash") == "tiny", 20, "the alias did not move")
    assert "serves the alias flash" in flywheel(platform, "checkpoint", "retire", "tiny", code=1)
    assert base_id in flywheel(platform, "checkpoint", "rollback")
    wait_for(lambda: served_by(platform, "flash") == base_id, 20, "the alias did not move back")
    flywheel(platform, "checkpoint", "retire", "tiny")
    wait_for(lambda: served_by(platform, "tiny") is None, 20, "it is still asked")
    rows: list[dict[str, Any]] = json.loads(flywheel(platform, "checkpoint", "list", "--json"))
    assert {row["checkpoint_id"]: row["state"] for row in rows if row["kind"] == "model"} == {
        base_id: "active",
        "tiny": "retired",
    }


def an_adapter_without_a_manifest_gets_its_canaries_when_it_is_added(
    platform: Platform, base_id: str, base_model: Path, tmp_path: Path
) -> None:
    build_adapter(base_model, tmp_path, parent_id=base_id, name="bare", seed=5)
    (tmp_path / "bare" / "manifest.json").unlink()
    added = json.loads(flywheel(platform, "checkpoint", "add", str(tmp_path / "bare"), "--json"))
    assert (added["kind"], added["parent_id"], added["servable"]) == ("adapter", base_id, True)
    shown = json.loads(flywheel(platform, "checkpoint", "show", added["checkpoint_id"], "--json"))
    assert all(sequence["mean_nats"] < 0.3 for sequence in shown["proofs"][0]["sequences"])
    flywheel(platform, "checkpoint", "retire", added["checkpoint_id"])


def what_is_no_checkpoint_is_refused_with_a_reason(platform: Platform, tmp_path: Path) -> None:
    assert "no .safetensors" in flywheel(platform, "checkpoint", "add", str(tmp_path), code=1)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "can't be loaded" in flywheel(platform, "checkpoint", "add", str(tmp_path), code=1)
    (tmp_path / "manifest.json").write_text('{"canaries": "yes"}')
    assert "canaries are malformed" in flywheel(platform, "checkpoint", "add", str(tmp_path), code=1)
    assert "nobody" in flywheel(platform, "checkpoint", "promote", "nobody", "--wait-s=0", code=1)
    assert "nobody" in flywheel(platform, "checkpoint", "show", "nobody", code=1)
