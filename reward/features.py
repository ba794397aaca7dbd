"""Features of an answer: hidden states of the frozen backbone, and the answer's length (tokens, words, squares).

Both sides of a pair use the model's chat format. The language-model head is never computed (it would halve
the speed). Guarantees: an over-long prompt loses its front, never the answer, and is counted; the features
of a text do not depend on what else is in its batch, beyond rounding. Does not train the backbone.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModel, AutoTokenizer

from reward.pairs import Messages
from reward.precision import compute_dtype
from reward.settings import RewardSettings

Features = npt.NDArray[np.float32]
LENGTH = "length"


def length_features(tokens: Sequence[int], answers: Sequence[str]) -> Features:
    """float32 [n, 4]: tokens, their square, words, their square."""
    rows = [
        (t, t * t, words, words * words) for t, words in zip(tokens, (len(a.split()) for a in answers), strict=True)
    ]
    return np.asarray(rows, np.float32).reshape(len(rows), 4)


class FeatureExtractor:
    """The frozen backbone, on the CPU or on the first GPU.

    groups: name → columns of the feature matrix. truncated: how many texts lost the front of their prompt.
    """

    def __init__(self, base_model: Path, settings: RewardSettings) -> None:
        self.settings = settings
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.tokenizer = AutoTokenizer.from_pretrained(base_model)
        backbone = AutoModel.from_pretrained(base_model, dtype=compute_dtype(settings.precision))
        self.depth: int = backbone.config.num_hidden_layers
        self.mean_layers = self._within_depth(settings.mean_layers)
        self.last_layers = self._within_depth(settings.last_layers)
        deepest = max(self.mean_layers + self.last_layers)
        # Later blocks are not read: dropping them saves their share of the forward pass.
        backbone.layers = backbone.layers[:deepest]
        self.backbone = backbone.eval().to(self.device)
        self.truncated = 0
        width: int = backbone.config.hidden_size
        names = [f"mean_layer_{layer}" for layer in self.mean_layers]
        names += [f"last_layer_{layer}" for layer in self.last_layers]
        self.groups = {name: slice(place * width, (place + 1) * width) for place, name in enumerate(names)}
        self.groups[LENGTH] = slice(len(names) * width, len(names) * width + 4)

    def __call__(
        self,
        prompts: list[Messages],
        answers: list[str],
        progress: Callable[[float], None] = lambda share: None,
    ) -> Features:
        """float32 [n, n_features] for n answers. progress gets the share that is done, 0 to 1."""
        encoded = [self._encode(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
        order = sorted(range(len(encoded)), key=lambda place: len(encoded[place][0]))
        columns = max(part.stop for part in self.groups.values())
        result = np.empty((len(encoded), columns), np.float32)
        result[:, self.groups[LENGTH]] = length_features([tokens for _, tokens in encoded], answers)
        done = 0
        while done < len(order):
            batch = self._next_batch(order[done:], encoded)
            result[batch, : self.groups[LENGTH].start] = self._forward([encoded[place] for place in batch])
            done += len(batch)
            progress(done / len(order))
        return result

    def _within_depth(self, layers: tuple[int, ...]) -> list[int]:
        scale = min(1.0, self.depth / max(max(layers), 1))
        return sorted({max(1, round(layer * scale)) for layer in layers})

    def _encode(self, prompt: Messages, answer: str) -> tuple[list[int], int]:
        """(token ids, number of the answer's tokens). Empty answers count their end-of-turn token."""
        text = self.tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        front = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        back = self.tokenizer(answer, add_special_tokens=False)["input_ids"] or [self.tokenizer.eos_token_id]
        back = back[: self.settings.max_length - 1]
        room = self.settings.max_length - len(back)
        if len(front) > room:
            self.truncated += 1
            front = front[-room:]
        return front + back, len(back)

    def _next_batch(self, order: list[int], encoded: list[tuple[list[int], int]]) -> list[int]:
        batch: list[int] = []
        for place in order:
            # `order` is by length, so this text is the longest of the batch so far.
            if batch and len(encoded[place][0]) * (len(batch) + 1) > self.settings.batch_tokens:
                break
            batch.append(place)
        return batch

    @torch.inference_mode()
    def _forward(self, batch: list[tuple[list[int], int]]) -> Features:
        width = max(len(ids) for ids, _ in batch)
        ids = torch.full((len(batch), width), self.tokenizer.pad_token_id)
        attention = torch.zeros((len(batch), width), dtype=torch.long)
        answer = torch.zeros((len(batch), width), dtype=torch.bool)
        for row, (tokens, length) in enumerate(batch):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            attention[row, : len(tokens)] = 1
            answer[row, len(tokens) - length : len(tokens)] = True
        states = self._hidden_states(ids, attention)
        counts = answer.sum(1, keepdim=True)
        last = attention.sum(1) - 1
        parts = [
            (states[layer].float() * answer[..., None].to(self.device)).sum(1).cpu() / counts
            for layer in self.mean_layers
        ]
        parts += [states[layer][torch.arange(len(batch)), last].float().cpu() for layer in self.last_layers]
        values: Features = torch.cat(parts, 1).numpy()
        return values

    def _hidden_states(self, ids: torch.Tensor, attention: torch.Tensor) -> dict[int, Any]:
        """Output of each wanted block, before the final norm: layer number → [batch, width, hidden]."""
        kept: dict[int, Any] = {}
        hooks = []
        for layer in {*self.mean_layers, *self.last_layers}:

            def keep(module: Any, args: Any, output: Any, layer: int = layer) -> None:
                kept[layer] = output[0] if isinstance(output, tuple) else output

            hooks.append(self.backbone.layers[layer - 1].register_forward_hook(keep))
        try:
            self.backbone(input_ids=ids.to(self.device), attention_mask=attention.to(self.device), use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        return kept
