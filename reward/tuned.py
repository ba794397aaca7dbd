"""What a fine-tuned network sees in an answer: its hidden state at the end, and the answer's length.

On disk (inside a reward model's artifact) a LoRA is PEFT's two files, a whole network is transformers' own; both load
with AutoModelForSequenceClassification, whose logit is the score before it is standardised. Guarantees: the features
of a text do not depend on what else is computed with it, beyond rounding.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForSequenceClassification

from reward.features import LENGTH, Features, length_features
from reward.pairs import Messages
from reward.precision import compute_dtype
from reward.settings import RewardSettings
from reward.strips import ChatSequences, grouped, pack, split
from reward.tuning import parts_of, quiet

HIDDEN = "hidden"
ADAPTER_CONFIG = "adapter_config.json"
_STRIPS_AT_ONCE = 64


class TunedExtractor:
    """Features of a network that `reward.tuning` made; as a FeatureExtractor's, to put a linear head on."""

    def __init__(self, network: Any, encode: ChatSequences, strip_tokens: int) -> None:
        self.network, self.encode, self.strip_tokens = network.eval(), encode, strip_tokens
        self.backbone, self.head = parts_of(network)
        self.device = self.head_weight.device
        width = int(self.head_weight.shape[1])
        self.groups = {HIDDEN: slice(0, width), LENGTH: slice(width, width + 4)}

    @classmethod
    def load(cls, path: Path, base_model: Path, settings: RewardSettings) -> "TunedExtractor":
        """Read the network that `save` wrote to `path`; a LoRA goes on `base_model`."""
        is_lora = (path / ADAPTER_CONFIG).exists()
        dtype = compute_dtype(settings.precision)
        with quiet():
            network = AutoModelForSequenceClassification.from_pretrained(
                base_model if is_lora else path, num_labels=1, dtype=dtype
            )
            if is_lora:
                network = PeftModel.from_pretrained(network, path)
        network = network.to("cuda" if torch.cuda.is_available() else "cpu")
        parts_of(network)[1].float()
        encode = ChatSequences(base_model if is_lora else path, settings.max_length)
        return cls(network, encode, settings.tuning.strip_tokens)

    @property
    def head_weight(self) -> torch.Tensor:
        """float [1, width]: the score before it is standardised is hidden · this."""
        weight: torch.Tensor = self.head.weight
        return weight

    @property
    def truncated(self) -> int:
        """How many texts lost their front."""
        return self.encode.truncated

    def save(self, folder: Path, base_model: Path) -> None:
        """Write the network; no machine path is written."""
        self.network.save_pretrained(folder)
        (folder / "README.md").unlink(missing_ok=True)
        if (folder / ADAPTER_CONFIG).exists():
            config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
            config["base_model_name_or_path"] = base_model.name
            (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
        else:
            self.encode.tokenizer.save_pretrained(folder)

    def __call__(
        self,
        prompts: Sequence[Messages],
        answers: Sequence[str],
        progress: Callable[[float], None] = lambda share: None,
    ) -> Features:
        """float32 [n, n_features] for n answers. progress gets the share that is done, 0 to 1."""
        sequences = [self.encode(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
        keys: dict[str, int] = {}
        groups = list(grouped([keys.setdefault(json.dumps(prompt), len(keys)) for prompt in prompts]))
        result = np.empty((len(answers), self.groups[LENGTH].stop), np.float32)
        for start in range(0, len(groups), _STRIPS_AT_ONCE):
            self._forward(groups[start : start + _STRIPS_AT_ONCE], sequences, result)
            progress(min(1.0, (start + _STRIPS_AT_ONCE) / len(groups)))
        tokens = [len(ids) for ids in self.encode.tokenizer(list(answers), add_special_tokens=False)["input_ids"]]
        most = self.encode.max_length - 1
        result[:, self.groups[LENGTH]] = length_features([min(max(t, 1), most) for t in tokens], answers)
        return result

    @torch.inference_mode()
    def _forward(self, groups: list[list[int]], sequences: list[list[int]], result: Features) -> None:
        parts = [part for group in groups for part in split(group, sequences, self.strip_tokens)]
        for strip in pack(parts, sequences, self.strip_tokens):
            there = strip.to(self.device)
            states = self.backbone(
                input_ids=there.input_ids, position_ids=there.position_ids, attention_mask=there.mask, use_cache=False
            ).last_hidden_state
            result[strip.sequences, self.groups[HIDDEN]] = states[0, there.last].float().cpu().numpy()
