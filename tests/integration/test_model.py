"""Laws of the base model: whole, named by its digest, carrying canaries, made once."""

import json
from pathlib import Path

import pytest

from flywheel import model
from flywheel.errors import PartMissing
from flywheel.model import prepare_base_model, prepare_tiny_model
from flywheel.settings import load_settings
from storage.artifacts import digest, read_manifest

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


def a_tiny_model_is_the_same_wherever_it_is_made_and_serves_as_a_users_own(tmp_path: Path) -> None:
    tiny = prepare_tiny_model(tmp_path / "tiny")
    manifest = read_manifest(tiny)
    assert manifest == read_manifest(prepare_tiny_model(tmp_path / "again"))

    (tiny / "COMPLETE").unlink()
    (tiny / "manifest.json").unlink()
    settings = load_settings(home=str(tmp_path / "home"), serving={"model": str(tiny)})
    assert prepare_base_model(settings, lambda text: None) == tiny
    adopted = json.loads((tiny / "manifest.json").read_text())
    assert adopted["digest"] == manifest["digest"]
    assert adopted["canaries"] == manifest["canaries"]


def a_model_that_is_not_there_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = load_settings(serving={"model": str(tmp_path / "nowhere")})
    with pytest.raises(PartMissing, match="nowhere"):
        prepare_base_model(elsewhere, lambda text: None)
    monkeypatch.setattr(model, "GGUF_FILE", "missing.gguf")
    with pytest.raises(PartMissing, match="make setup"):
        prepare_base_model(load_settings(home=str(tmp_path / "home")), lambda text: None)
    assert not (tmp_path / "home").exists()
