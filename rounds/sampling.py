"""Sample answers from a transformers causal model, several to a prompt.

A loop of its own because `generate` is the slowest part of a policy update on a CPU: here a prompt is read once
for all its answers, an answer that has ended leaves the batch, and a draw takes one random number a row
instead of one a vocabulary entry. Guarantees: plain ancestral sampling from softmax(logits / temperature), no
truncation of the distribution; deterministic given torch's global random state. Answers are never
re-tokenised: what was sampled is what is trained on and measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Answer:
    """One sampled answer. token_ids: with its end-of-turn token, if it wrote one (`finished`).

    log_probabilities: of each of token_ids under the sampling distribution, nats.
    """

    prompt: Messages
    prompt_ids: list[int]
    token_ids: list[int]
    log_probabilities: list[float]
    text: str
    finished: bool


def encode_prompt(tokenizer: Any, prompt: Messages) -> list[int]:
    """Token ids up to the point where the assistant speaks."""
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def padded(rows: Sequence[list[int]], fill: int, *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, mask), both int64 [rows, longest]: `rows` padded with `fill` on one side; the mask is 1 on real tokens."""
    width = max(len(row) for row in rows)
    ids = torch.full((len(rows), width), fill)
    mask = torch.zeros((len(rows), width), dtype=torch.long)
    for place, row in enumerate(rows):
        part = slice(width - len(row), width) if left else slice(0, len(row))
        ids[place, part] = torch.tensor(row, dtype=torch.long)
        mask[place, part] = 1
    return ids, mask


def sample(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Messages],
    *,
    answers_per_prompt: int = 1,
    max_new_tokens: int,
    temperature: float,
    batch_size: int,
) -> list[Answer]:
    """answers_per_prompt answers to each prompt, those to one prompt next to each other.

    batch_size: answers sampled at a time (at least those to one prompt).
    """
    answers: list[Answer] = []
    step = max(1, batch_size // answers_per_prompt)
    for start in range(0, len(prompts), step):
        batch = prompts[start : start + step]
        rows = [encode_prompt(tokenizer, prompt) for prompt in batch]
        drawn = _draw(model, tokenizer, rows, answers_per_prompt, max_new_tokens, temperature)
        for place, (tokens, log_probabilities) in enumerate(drawn):
            prompt = batch[place // answers_per_prompt]
            text = tokenizer.decode(tokens, skip_special_tokens=True)
            finished = tokens[-1] == tokenizer.eos_token_id
            row = rows[place // answers_per_prompt]
            answers.append(Answer(prompt, row, tokens, log_probabilities, text, finished))
    return answers


@torch.inference_mode()
def _draw(
    model: Any, tokenizer: Any, rows: list[list[int]], repeats: int, max_new_tokens: int, temperature: float
) -> list[tuple[list[int], list[float]]]:
    """(token ids, log-probabilities) of `repeats` answers to each row."""
    ids, mask = (part.to(model.device) for part in padded(rows, tokenizer.pad_token_id, left=True))
    cache = DynamicCache(config=model.config)
    logits = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=(mask.cumsum(1) - 1).clamp(min=0),
        cache=cache,
        use_cache=True,
        logits_to_keep=1,
    ).logits[:, -1]
    cache.batch_repeat_interleave(repeats)
    logits, mask = logits.repeat_interleave(repeats, 0), mask.repeat_interleave(repeats, 0)
    drawn: list[tuple[list[int], list[float]]] = [([], []) for _ in range(len(rows) * repeats)]
    places = torch.arange(len(drawn))  # which answer each row of the batch belongs to
    for _ in range(max_new_tokens):
        tokens, log_probabilities = _choose(logits, temperature)
        pairs = zip(places.tolist(), tokens.tolist(), log_probabilities.tolist(), strict=True)
        for place, token, log_probability in pairs:
            drawn[place][0].append(token)
            drawn[place][1].append(log_probability)
        open_rows = (tokens != tokenizer.eos_token_id).nonzero()[:, 0]
        if len(open_rows) == 0 or len(drawn[int(places[open_rows[0].cpu()])][0]) == max_new_tokens:
            break
        if len(open_rows) < len(tokens):
            cache.batch_select_indices(open_rows)
            tokens, mask, places = tokens[open_rows], mask[open_rows], places[open_rows.cpu()]
        mask = torch.cat([mask, mask.new_ones(len(tokens), 1)], 1)
        logits = model(
            input_ids=tokens[:, None],
            attention_mask=mask,
            position_ids=mask.sum(1, keepdim=True) - 1,
            cache=cache,
            use_cache=True,
        ).logits[:, -1]
    return drawn


def _choose(logits: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(token ids, their log-probabilities), [rows] each: one draw from every row by inversion of its distribution."""
    log_probabilities = torch.log_softmax(logits.float() / temperature, -1)
    cumulative = log_probabilities.exp().cumsum(-1)
    # Scaled by the last sum, which rounding leaves near 1 but not at it.
    threshold = torch.rand(len(logits), 1, device=logits.device) * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, threshold, right=True).clamp(max=logits.shape[-1] - 1)
    return tokens[:, 0], log_probabilities.gather(1, tokens)[:, 0]
