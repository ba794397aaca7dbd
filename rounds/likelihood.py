"""Sampling from a transformers causal model, and the likelihood of answers under two of its states.

Guarantees: log-probabilities and KL are of the model's distribution divided by the temperature, in float32;
special tokens that the model wrote (its end of turn) count as tokens of the answer. Answers are never
re-tokenised: what was sampled is what is measured.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Messages = list[dict[str, Any]]
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Answer:
    """One sampled answer. token_ids: with its end-of-turn token, if it wrote one. finished: it did."""

    prompt: Messages
    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    finished: bool


@dataclass(frozen=True)
class Likelihood:
    """Per answer: log-probability under the policy and under the base, and the exact KL(policy ‖ base).

    All float64 [n], nats, summed over the answer's tokens. `kl` sums the full-vocabulary KL at each position
    (a lower-variance estimate of the same mean as policy − base: Amini et al. 2025).
    """

    policy: Array
    base: Array
    kl: Array


def encode_prompt(tokenizer: Any, prompt: Messages) -> list[int]:
    """Token ids up to the point where the assistant speaks."""
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _padded(rows: Sequence[list[int]], fill: int, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(row) for row in rows)
    ids = torch.full((len(rows), width), fill)
    mask = torch.zeros((len(rows), width), dtype=torch.long)
    for place, row in enumerate(rows):
        part = slice(width - len(row), width) if left else slice(0, len(row))
        ids[place, part] = torch.tensor(row, dtype=torch.long)
        mask[place, part] = 1
    return ids, mask


@torch.inference_mode()
def sample(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Messages],
    *,
    max_new_tokens: int,
    temperature: float,
    batch_size: int,
) -> list[Answer]:
    """One answer to each prompt, left-padded in batches. Uses torch's global random state."""
    answers: list[Answer] = []
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        rows = [encode_prompt(tokenizer, prompt) for prompt in batch]
        ids, mask = _padded(rows, tokenizer.pad_token_id, left=True)
        output = model.generate(
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            do_sample=True,
            temperature=temperature,
            top_k=0,
            top_p=1.0,
            max_new_tokens=max_new_tokens,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
        for prompt, row, tokens in zip(batch, rows, output[:, ids.shape[1] :].tolist(), strict=True):
            finished = tokenizer.eos_token_id in tokens
            kept = tokens[: tokens.index(tokenizer.eos_token_id) + 1] if finished else tokens
            text = tokenizer.decode(kept, skip_special_tokens=True)
            answers.append(Answer(prompt, row, kept, text, finished))
    return answers


@torch.inference_mode()
def likelihood(
    model: Any,
    base: Callable[[], AbstractContextManager[Any]],
    prompt_ids: Sequence[list[int]],
    answer_ids: Sequence[list[int]],
    *,
    pad_token_id: int,
    temperature: float = 1.0,
    rows: int = 8,
) -> Likelihood:
    """Measure answers under `model` and, inside a context that `base()` makes, under the base."""
    policy, reference, kl = [], [], []
    order = sorted(range(len(answer_ids)), key=lambda place: len(prompt_ids[place]) + len(answer_ids[place]))
    for start in range(0, len(order), rows):
        batch = order[start : start + rows]
        front, front_mask = _padded([prompt_ids[place] for place in batch], pad_token_id, left=True)
        back, back_mask = _padded([answer_ids[place] for place in batch], pad_token_id, left=False)
        inputs = {
            "input_ids": torch.cat([front, back], 1).to(model.device),
            "attention_mask": torch.cat([front_mask, back_mask], 1).to(model.device),
        }
        mine = _log_softmax(model, inputs, back.shape[1], temperature)
        with base():
            theirs = _log_softmax(model, inputs, back.shape[1], temperature)
        chosen = back.to(mine.device)[..., None]
        mask = back_mask.to(mine.device)
        policy += ((mine.gather(2, chosen)[..., 0] * mask).sum(1)).tolist()
        reference += ((theirs.gather(2, chosen)[..., 0] * mask).sum(1)).tolist()
        kl += (((mine.exp() * (mine - theirs)).sum(2) * mask).sum(1)).tolist()
    back_in_order = np.argsort(order)
    return Likelihood(*(np.asarray(values, np.float64)[back_in_order] for values in (policy, reference, kl)))


def _log_softmax(model: Any, inputs: dict[str, torch.Tensor], answer_width: int, temperature: float) -> torch.Tensor:
    """float32 [rows, answer_width, vocabulary]: the distribution that each token of the answer was drawn from."""
    logits = model(**inputs, use_cache=False, logits_to_keep=answer_width + 1).logits[:, :-1]
    return torch.log_softmax(logits.float() / temperature, dim=-1)
