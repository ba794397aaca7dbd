"""From a directory of weights to a Checkpoint that can be registered.

Two kinds: a model directory (config.json) and a LoRA adapter (adapter_config.json, PEFT's layout) on a
registered base. Weights are safetensors only: nothing is unpickled. A manifest.json with canaries is taken as it
is (the trainer wrote it); without one the canaries are computed here with transformers.
Guarantees: nothing in the directory is changed.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from serving.canary import base_manifest, manifest_canaries, read_canaries, reference_log_probabilities
from serving.errors import CanariesUnreadable, CheckpointUnreadable
from serving.registry import Checkpoint, get_checkpoint, resolve_alias
from storage.artifacts import digest
from storage.postgres import Connection

# What transformers, PEFT and safetensors raise for files that are not what they should be.
_CAN_NOT_LOAD = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError)
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def read_checkpoint(
    connection: Connection, path: Path, *, alias: str, checkpoint_id: str | None = None, parent_id: str | None = None
) -> Checkpoint:
    """The checkpoint in `path`, named `checkpoint_id` or else after alias, directory and digest.

    parent_id: of an adapter; the model under the alias when it is not given. Raises CheckpointUnreadable for a
    directory that is neither kind, CheckpointUnknown for an unknown parent.
    """
    path = path.resolve()
    weights = sorted(path.glob("*.safetensors"))
    if not weights:
        raise CheckpointUnreadable(f"{path} holds no .safetensors files; other formats are not loaded")
    weights_digest = digest(weights)
    name = checkpoint_id or f"{alias}-{re.sub(r'[^A-Za-z0-9._-]+', '-', path.name)}-{weights_digest[:6]}"
    if not _ID.fullmatch(name):
        raise CheckpointUnreadable(f"{name!r} is no checkpoint id: letters, digits, dot, dash, underscore; up to 100")
    if (path / "adapter_config.json").is_file():
        parent = get_checkpoint(
            connection, parent_id or get_checkpoint(connection, resolve_alias(connection, alias)).base_id
        )
        base = get_checkpoint(connection, parent.base_id)
        manifest = _own_manifest(path) or _computed(
            path, lambda: _adapter_manifest(path, weights_digest, Path(base.path), parent)
        )
        kind, parent_of = "adapter", parent.checkpoint_id
    elif (path / "config.json").is_file():
        if parent_id is not None:
            get_checkpoint(connection, parent_id)
        manifest, kind, parent_of = (
            _own_manifest(path) or _computed(path, lambda: base_manifest(path)),
            "model",
            parent_id,
        )
    else:
        raise CheckpointUnreadable(f"{path} has neither config.json (a model) nor adapter_config.json (an adapter)")
    return Checkpoint(
        checkpoint_id=name, kind=kind, parent_id=parent_of, digest=weights_digest, path=str(path), manifest=manifest
    )


def _computed(path: Path, manifest: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A manifest that transformers and PEFT compute. Raises CheckpointUnreadable when they can't load `path`."""
    try:
        return manifest()
    except _CAN_NOT_LOAD as error:
        said = str(error).partition("\n")[0][:300]
        raise CheckpointUnreadable(f"{path} can't be loaded: {type(error).__name__}: {said}") from error


def _own_manifest(path: Path) -> dict[str, Any] | None:
    """The manifest in the directory, if it has canaries."""
    file = path / "manifest.json"
    if not file.is_file():
        return None
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointUnreadable(f"{file} is not JSON: {error}") from error
    if not isinstance(manifest, dict) or "canaries" not in manifest:
        return None
    try:
        read_canaries(manifest)
    except CanariesUnreadable as error:
        raise CheckpointUnreadable(f"{file}: {error}") from error
    return manifest


def _adapter_manifest(path: Path, weights_digest: str, base: Path, parent: Checkpoint) -> dict[str, Any]:
    """Canaries of an adapter that came without: the parent's sequences, read through adapter and base."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    token_ids = [canary["token_ids"] for canary in parent.manifest["canaries"]]
    before = [canary["log_probabilities"] for canary in parent.manifest["canaries"]]
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16), str(path))
    return {
        "kind": "adapter",
        "digest": weights_digest,
        "canaries": manifest_canaries(token_ids, reference_log_probabilities(model, token_ids), before),
    }
