"""Small LoRA adapters with a visible effect, written as the trainer would: weights, manifest, canaries."""

from pathlib import Path
from typing import Any

from serving.registry import Checkpoint
from storage.artifacts import digest, read_manifest, write_artifact


def build_adapter(
    base_model: Path, out: Path, *, parent_id: str, name: str, seed: int, scale: float = 0.02
) -> Checkpoint:
    """A random rank-8 adapter whose B is not zero, with its canaries by transformers; returns its checkpoint."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from serving.canary import canary_token_ids, manifest_canaries, reference_log_probabilities

    def fill(folder: Path) -> dict[str, Any]:
        torch.manual_seed(seed)
        token_ids = canary_token_ids(AutoTokenizer.from_pretrained(base_model))
        base = AutoModelForCausalLM.from_pretrained(base_model, dtype=torch.bfloat16)
        parent = reference_log_probabilities(base, token_ids)
        targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=targets))
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name:
                torch.nn.init.normal_(parameter, std=scale)
        own = reference_log_probabilities(model, token_ids)
        model.save_pretrained(folder)
        weights = digest(folder.glob("*.safetensors"))
        return {"kind": "adapter", "digest": weights, "canaries": manifest_canaries(token_ids, own, parent)}

    manifest = read_manifest(write_artifact(out / name, fill))
    return Checkpoint(
        checkpoint_id=f"{name}-{manifest['digest'][:6]}",
        kind="adapter",
        parent_id=parent_id,
        digest=manifest["digest"],
        path=str((out / name).resolve()),
        manifest=manifest,
    )
