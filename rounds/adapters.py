"""LoRA adapters on the base: load a policy to train, load two to compare, save one for the engine.

An adapter on disk is PEFT's own two files (`adapter_model.safetensors`, `adapter_config.json`), in bfloat16 as
the engine runs it. No machine path is written: the base is named, and its digest is in the manifest.
"""

import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from reward.precision import compute_dtype
from reward.settings import Precision
from rounds.errors import AdapterUnknown
from rounds.settings import PolicySettings
from storage.artifacts import read_manifest

POLICY = "default"
PARENT = "parent"
CONFIG = "adapter_config.json"


def load_base(base_model: Path, precision: Precision = "auto") -> tuple[Any, Any]:
    """(model, tokenizer): the base in the number format that `precision` means here, in evaluation mode."""
    tokenizer = AutoTokenizer.from_pretrained(base_model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(base_model, dtype=compute_dtype(precision))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return model.eval().to(device), tokenizer


def load_policy(base_model: Path, parent_adapter: Path | None, settings: PolicySettings, seed: int) -> tuple[Any, Any]:
    """(PEFT model, tokenizer), ready to train: float32 LoRA weights on the frozen base.

    With a parent the weights start as its own, and it is also there frozen under the adapter name PARENT.
    Raises AdapterUnknown when the parent is not a complete adapter.
    """
    torch.manual_seed(seed)
    model, tokenizer = load_base(base_model, settings.precision)
    if parent_adapter is None:
        config = LoraConfig(
            r=settings.lora_rank,
            lora_alpha=settings.lora_alpha,
            lora_dropout=0.0,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
        return get_peft_model(model, config), tokenizer
    check_adapter(parent_adapter)
    policy = PeftModel.from_pretrained(model, parent_adapter, adapter_name=POLICY, is_trainable=True)
    policy.load_adapter(parent_adapter, adapter_name=PARENT, is_trainable=False)
    policy.set_adapter(POLICY)
    return policy, tokenizer


def check_adapter(adapter: Path) -> None:
    """Raises AdapterUnknown, or storage.errors.ArtifactIncomplete, unless `adapter` is a complete LoRA adapter."""
    kind = read_manifest(adapter).get("kind")
    if kind != "adapter" or not (adapter / CONFIG).exists():
        raise AdapterUnknown(f"{adapter} is not an adapter (kind {kind!r})")


def save_adapter(policy: Any, base_model: Path, folder: Path) -> None:
    """Round the weights of adapter POLICY to bfloat16, in the model too, and write them to `folder`."""
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if f".{POLICY}." in name:
                parameter.data = parameter.data.to(torch.bfloat16)
    # Without the flag PEFT would look the base up on a hub, to see whether its vocabulary has grown.
    policy.save_pretrained(folder, selected_adapters=[POLICY], save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = base_model.name
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
