"""The canary proof: an engine serves a checkpoint only if it gives the log-probabilities that the trainer wrote.

Fixed texts, tokenised once and written with their log-probabilities into the checkpoint's manifest:
`canaries: [{token_ids, log_probabilities, parent_log_probabilities | null}]`. `log_probabilities[i]` is the
natural logarithm of the probability of `token_ids[i + 1]` given those before it, so one shorter than the ids.
Guarantees: a proven checkpoint matches its manifest within the tolerance, and an adapter shows the
manifest's difference from its parent. Does not judge whether the checkpoint answers well.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from serving.errors import BaseNotPrepared, CanariesUnreadable
from serving.settings import CanaryTolerance

CANARIES = (
    "The capital of France is Paris, and the capital of Japan is Tokyo. Water boils at one hundred degrees.",
    "To make tea, boil the water, pour it over the leaves, wait for four minutes and then take the leaves out.",
    "def add(first, second):\n    return first + second\n\nprint(add(2, 3))",
    "Dear Anna, thank you for your letter. I am sorry to hear that you were ill last week; I hope that you feel "
    "better now.",
    "One two three four five six seven eight nine ten. Monday Tuesday Wednesday Thursday Friday.",
    "I do not know the answer, but I can tell you how to find it: ask a librarian, or read the manual.",
)

# In the chat format, where an adapter of a chat model shows most of its effect.
CHAT_CANARIES = (
    ("What is the capital of France?", "The capital of France is Paris, a city on the river Seine."),
    ("How do I boil an egg?", "Put the egg in boiling water for seven minutes, then cool it under cold water."),
    ("Give me a reason to take a walk.", "A walk clears your head, and it is good for your heart and your sleep."),
)


class Canary(BaseModel):
    """One entry of a manifest's `canaries`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=2)]
    log_probabilities: list[float]
    parent_log_probabilities: list[float] | None = None

    @model_validator(mode="after")
    def _one_for_each_token_after_the_first(self) -> "Canary":
        for row in (self.log_probabilities, self.parent_log_probabilities):
            if row is not None and len(row) != len(self.token_ids) - 1:
                raise ValueError("each token after the first needs one log-probability")
        return self


_CANARIES: TypeAdapter[list[Canary]] = TypeAdapter(list[Canary])


def read_canaries(manifest: dict[str, Any]) -> list[Canary]:
    """The canaries of a manifest. Raises CanariesUnreadable when there are none or they are malformed."""
    try:
        canaries = _CANARIES.validate_python(manifest.get("canaries") or [])
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise CanariesUnreadable(f"its canaries are malformed at {place or 'the top'}: {first['msg']}") from error
    if not canaries:
        raise CanariesUnreadable("its manifest holds no canaries")
    return canaries


class CanarySequence(BaseModel):
    """One sequence's differences, nats a token."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mean_nats: float
    max_nats: float


class CanaryReport(BaseModel):
    """The verdict in words and numbers. Differences are absolute, in nats a token.

    effect_nats: how far the manifest says the checkpoint lies from its parent (null for a base);
    slope: how much of that difference the engine shows (1: all, 0: none; null for a base).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    passed: bool
    reason: str
    mean_nats: float
    max_nats: float
    effect_nats: float | None
    slope: float | None
    sequences: list[CanarySequence]


def judge_canaries(
    reference: Sequence[Sequence[float]],
    served: Sequence[Sequence[float]],
    parent: Sequence[Sequence[float]] | None,
    tolerance: CanaryTolerance,
) -> CanaryReport:
    """Compare what the engine served with the manifest's `reference`, and with the `parent`'s (null for a base).

    Raises ValueError when the shapes differ. The slope is the least-squares coefficient of
    (served - parent) on (reference - parent) through the origin.
    """
    if [len(row) for row in reference] != [len(row) for row in served] or not reference:
        raise ValueError("the engine's canaries and the manifest's do not have the same shape")
    differences = [np.abs(np.subtract(s, r)) for s, r in zip(served, reference, strict=True)]
    sequences = [CanarySequence(mean_nats=float(d.mean()), max_nats=float(d.max())) for d in differences]
    together = np.concatenate(differences)
    mean_nats, max_nats = float(together.mean()), float(together.max())
    effect = slope = None
    if parent is not None:
        wanted = np.concatenate([np.subtract(r, p) for r, p in zip(reference, parent, strict=True)])
        shown = np.concatenate([np.subtract(s, p) for s, p in zip(served, parent, strict=True)])
        effect = float(np.abs(wanted).mean())
        slope = float(wanted @ shown / max(float(wanted @ wanted), 1e-12))
    reason = "; ".join(_faults(mean_nats, max_nats, effect, slope, tolerance))
    return CanaryReport(
        passed=not reason,
        reason=reason or f"matches its manifest: {mean_nats:.3f} nats a token on average, {max_nats:.2f} at most",
        mean_nats=mean_nats,
        max_nats=max_nats,
        effect_nats=effect,
        slope=slope,
        sequences=sequences,
    )


def _faults(
    mean_nats: float, max_nats: float, effect: float | None, slope: float | None, tolerance: CanaryTolerance
) -> list[str]:
    """All that speaks against the checkpoint. Comparisons are written so that a NaN is a fault."""
    faults = []
    if slope is not None and not slope >= tolerance.min_slope:
        faults.append(
            f"shows {slope:.2f} of the difference from its parent that its manifest states; at least "
            f"{tolerance.min_slope} is needed: the adapter's weights did not apply"
        )
    if effect is not None and not effect >= tolerance.min_effect_nats:
        faults.append(
            f"differs from its parent by only {effect:.4f} nats a token by its own manifest, "
            f"under the {tolerance.min_effect_nats} that can be told from noise"
        )
    if not mean_nats <= tolerance.mean_nats:
        faults.append(f"differs from its manifest by {mean_nats:.3f} nats a token; {tolerance.mean_nats} are allowed")
    if not max_nats <= tolerance.max_nats:
        faults.append(f"one token differs from the manifest by {max_nats:.2f} nats; {tolerance.max_nats} are allowed")
    return faults


def canary_token_ids(tokenizer: Any) -> list[list[int]]:
    """CANARIES, and CHAT_CANARIES if there is a chat template, as token ids of a transformers tokenizer."""
    sequences = [list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in CANARIES]
    if tokenizer.chat_template:
        for question, answer in CHAT_CANARIES:
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            sequences.append(list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)))
    return sequences


def reference_log_probabilities(model: Any, token_ids: list[list[int]]) -> list[list[float]]:
    """The trainer's side: natural-log probabilities of each sequence's tokens after the first.

    model: a transformers causal model (or PEFT's), used in evaluation mode; the softmax is in float32.
    """
    import torch

    was_training = model.training
    model.eval()
    rows = []
    with torch.inference_mode():
        for ids in token_ids:
            tensor = torch.tensor([ids], device=model.device)
            logits = model(input_ids=tensor, use_cache=False).logits[0, :-1].float()
            chosen = torch.log_softmax(logits, dim=-1).gather(1, tensor[0, 1:, None])[:, 0]
            rows.append([round(value, 6) for value in chosen.tolist()])
    model.train(was_training)
    return rows


def manifest_canaries(
    token_ids: list[list[int]],
    log_probabilities: list[list[float]],
    parent_log_probabilities: list[list[float]] | None,
) -> list[dict[str, Any]]:
    """The manifest's field `canaries`."""
    parents: Sequence[list[float] | None] = parent_log_probabilities or [None] * len(token_ids)
    return [
        {"token_ids": ids, "log_probabilities": own, "parent_log_probabilities": parent}
        for ids, own, parent in zip(token_ids, log_probabilities, parents, strict=True)
    ]


def base_manifest(model_dir: Path) -> dict[str, Any]:
    """Make the manifest of a base model: its kind, the digest of its weights, and its canaries.

    Loads the model with transformers in bfloat16 (a few seconds for a small one). The caller writes it as
    `manifest.json` into the directory.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from storage.artifacts import digest

    token_ids = canary_token_ids(AutoTokenizer.from_pretrained(model_dir))
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
    return {
        "kind": "model",
        "digest": digest(model_dir.glob("*.safetensors")),
        "canaries": manifest_canaries(token_ids, reference_log_probabilities(model, token_ids), None),
    }


def read_model_manifest(model_dir: Path) -> dict[str, Any]:
    """The base model's manifest. Raises BaseNotPrepared when there is none or it holds no canaries."""
    path = model_dir / "manifest.json"
    if not path.exists():
        raise BaseNotPrepared(f"{path} is missing: write serving.canary.base_manifest(model_dir) there first")
    manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if not manifest.get("canaries"):
        raise BaseNotPrepared(f"{path} holds no canaries, so no engine could prove that it serves this model")
    return manifest
