"""The policy update: GRPO with LoRA (TRL) against a reward model, under a KL budget.

An answer's advantage is what it earns (rounds.objective) minus the mean over the answers to its prompt. KL is always
against the base, whatever the parent; the budget is what an update may add to the parent's. Guarantees: the adapter
kept is the last one whose measured KL lay within the budget, never one that was not measured; it is written whole or
not at all, with canaries of itself and of its parent. Does not judge the result: rounds.checkpoint_gate does.
"""

import importlib.metadata
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from pydantic import BaseModel, ConfigDict
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from reward.scoring import RewardModel, base_digest
from rounds.adapters import PARENT, POLICY, load_policy, save_adapter
from rounds.errors import NoPrompts, PolicyDiverged
from rounds.likelihood import divergence, token_log_probabilities
from rounds.objective import rewards
from rounds.readability import is_degenerate, words_in
from rounds.sampling import Answer, Messages, encode_prompt, sample
from rounds.settings import PolicySettings
from serving.canary import canary_token_ids, manifest_canaries, reference_log_probabilities
from storage.artifacts import digest, write_artifact

Progress = Callable[[str, float], None]


class StepReport(BaseModel):
    """Means over the answers sampled before update number `step` (from 0). seconds: of the step, wall time.

    reward: score minus penalties; score: the reward model's, standardised; kl: nats an answer to the base.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int
    reward: float
    score: float
    kl: float
    words: float
    finished_share: float
    degenerate_share: float
    seconds: float


class PolicyReport(BaseModel):
    """What the update did. stopped: why it ended, in words. kept_step: updates that the kept adapter has had.

    kl: nats an answer, measured for the kept adapter.
    prompts, skipped_prompts: used, and left out as too long. seconds: wall time.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    checkpoint_id: str
    digest: str
    stopped: str
    kept_step: int
    kl: float
    prompts: int
    skipped_prompts: int
    history: list[StepReport]
    seconds: float


def update_policy(
    *,
    base_model: Path,
    parent_adapter: Path | None,
    reward_model: Path,
    prompts: list[Messages],
    out: Path,
    settings: PolicySettings,
    seed: int,
    lineage: dict[str, Any],
    progress: Progress = lambda what, share: None,
) -> PolicyReport:
    """Improve the policy on `prompts` and write the adapter artifact `out` (PEFT's files and a manifest).

    parent_adapter: where to continue from; None starts at the base. lineage: copied into the manifest.
    Raises NoPrompts, AdapterUnknown, PolicyDiverged, and what loading the reward model raises.
    """
    started = time.monotonic()
    progress("loading the models", 0.0)
    scorer = RewardModel.load(reward_model, base_model)
    model, tokenizer = load_policy(base_model, parent_adapter, settings, seed)
    usable = [p for p in prompts if len(encode_prompt(tokenizer, p)) <= settings.max_prompt_tokens]
    if len(usable) < settings.prompts_per_step:
        raise NoPrompts(f"{len(usable)} usable prompts; one step needs {settings.prompts_per_step}")

    loop = _Loop(model, tokenizer, scorer, settings, progress, continues=parent_adapter is not None)
    with tempfile.TemporaryDirectory(prefix="flywheel-policy-") as scratch, warnings.catch_warnings():
        # TRL is pinned: that rollout functions may change, and its own deprecated calls, are known.
        warnings.simplefilter("ignore")
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=loop.reward,
            args=_arguments(settings, seed, scratch, bf16=model.dtype == torch.bfloat16),
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in usable]),
            processing_class=tokenizer,
            callbacks=[loop],
            rollout_func=loop.rollout,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    kept_step, kl = loop.restore()

    def fill(folder: Path) -> dict[str, Any]:
        save_adapter(model, base_model, folder)
        token_ids = canary_token_ids(tokenizer)
        own = reference_log_probabilities(model, token_ids)
        if parent_adapter is None:
            with model.disable_adapter():
                parent = reference_log_probabilities(model, token_ids)
        else:
            model.set_adapter(PARENT)
            parent = reference_log_probabilities(model, token_ids)
        return {
            "kind": "adapter",
            "checkpoint_id": out.name,
            "base_digest": base_digest(base_model),
            "parent_adapter": parent_adapter.name if parent_adapter else None,
            "reward_model_id": reward_model.name,
            "lineage": lineage,
            "settings": settings.model_dump(mode="json") | _lora_of(model),
            "seed": seed,
            "digest": digest(folder.glob("*.safetensors")),
            "kept_step": kept_step,
            "stopped": loop.stopped,
            "history": [step.model_dump(mode="json") for step in loop.history],
            "versions": {name: importlib.metadata.version(name) for name in ("trl", "peft", "transformers", "torch")},
            "canaries": manifest_canaries(token_ids, own, parent),
        }

    write_artifact(out, fill)
    return PolicyReport(
        checkpoint_id=out.name,
        digest=digest(out.glob("*.safetensors")),
        stopped=loop.stopped,
        kept_step=kept_step,
        kl=kl,
        prompts=len(usable),
        skipped_prompts=len(prompts) - len(usable),
        history=loop.history,
        seconds=time.monotonic() - started,
    )


def _arguments(settings: PolicySettings, seed: int, scratch: str, *, bf16: bool) -> GRPOConfig:
    answers = settings.prompts_per_step * settings.completions_per_prompt
    micro_batch = next(size for size in range(min(settings.micro_batch, answers), 0, -1) if answers % size == 0)
    return GRPOConfig(
        output_dir=scratch,
        use_cpu=not torch.cuda.is_available(),
        bf16=bf16,
        seed=seed,
        max_steps=settings.max_steps + 1,  # each begins with measuring; the last is there for that alone
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=answers // micro_batch,
        num_generations=settings.completions_per_prompt,
        max_completion_length=settings.max_new_tokens,
        temperature=settings.temperature,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="constant",
        max_grad_norm=settings.max_grad_norm,
        # The penalty is part of the reward, where it is measured against the base even with a parent.
        beta=0.0,
        loss_type="dr_grpo",
        scale_rewards=settings.advantage_scale,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        save_strategy="no",
        report_to="none",
        logging_strategy="no",
        disable_tqdm=True,
    )


class _Loop(TrainerCallback):
    """TRL's three hooks around one set of weights: sample, reward, and after the update stop or go on."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        scorer: RewardModel,
        settings: PolicySettings,
        progress: Progress,
        *,
        continues: bool,
    ) -> None:
        self.model = model
        self._continues = continues
        self.tokenizer = tokenizer
        self.scorer = scorer
        self.settings = settings
        self.progress = progress
        self.history: list[StepReport] = []
        self.stopped = f"all {settings.max_steps} updates were done"
        self._answers: list[Answer] = []
        self._kept: tuple[int, float, dict[str, torch.Tensor]] | None = None
        self._over_budget = False
        self._clock = time.monotonic()

    @property
    def budget(self) -> float:
        """Nats an answer to the base: the setting on top of what the parent has, as measured before any update."""
        return self.settings.kl_budget + (self.history[0].kl if self._continues else 0.0)

    def rollout(self, prompts: list[Messages], trainer: Any) -> dict[str, Any]:
        """Sample an answer to each of `prompts`, in which TRL lists a prompt once for each answer of its group."""
        was_training = self.model.training
        self.model.eval()
        self._answers = sample(
            self.model,
            self.tokenizer,
            prompts[:: self.settings.completions_per_prompt],
            answers_per_prompt=self.settings.completions_per_prompt,
            max_new_tokens=self.settings.max_new_tokens,
            temperature=self.settings.temperature,
            batch_size=len(prompts),
        )
        self.model.train(was_training)
        return {
            "prompt_ids": [answer.prompt_ids for answer in self._answers],
            "completion_ids": [answer.token_ids for answer in self._answers],
            "logprobs": None,
        }

    def reward(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        """TRL's reward function: one value per answer of the last rollout."""
        answers = self._answers
        policy = [np.asarray(answer.log_probabilities) for answer in answers]
        with self.model.disable_adapter():
            base = token_log_probabilities(
                self.model,
                answers,
                pad_token_id=self.tokenizer.pad_token_id,
                temperatures=[self.settings.temperature],
            )
        gaps = np.array([mine.sum() - theirs[0].sum() for mine, theirs in zip(policy, base, strict=True)])
        kl = float(np.mean([divergence(mine, theirs[0]) for mine, theirs in zip(policy, base, strict=True)]))
        finished_share = sum(answer.finished for answer in answers) / len(answers)
        parents_share = self.history[0].finished_share if self.history else finished_share
        scores = self.scorer.score([a.prompt for a in answers], [a.text for a in answers]).astype(float)
        earned, scores = rewards(answers, scores, gaps, parents_share, self.settings)
        now = time.monotonic()
        step = StepReport(
            step=len(self.history),
            reward=float(earned.mean()),
            score=float(scores.mean()),
            kl=kl,
            words=sum(len(words_in(answer.text)) for answer in answers) / len(answers),
            finished_share=finished_share,
            degenerate_share=sum(is_degenerate(answer.text) for answer in answers) / len(answers),
            seconds=now - self._clock,
        )
        self._clock = now
        self.history.append(step)
        if kl <= self.budget:
            self._kept = (step.step, kl, _trainable(self.model))
        else:
            self._over_budget = True
            self.stopped = f"KL {kl:.2f} nats an answer passed the budget of {self.budget:.2f}"
        share = min(0.99, len(self.history) / (self.settings.max_steps + 1))
        self.progress(f"step {step.step}: score {step.score:+.2f}, KL {kl:.2f}, {step.words:.0f} words", share)
        return [float(value) for value in earned]

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """After an update: stop when the answers that it was made from were over budget."""
        control.should_training_stop = control.should_training_stop or self._over_budget
        return control

    def restore(self) -> tuple[int, float]:
        """Leave the weights to keep in the model; (updates they have had, their KL in nats)."""
        if self._kept is None or self._kept[0] == 0:
            raise PolicyDiverged(f"no update stayed within the KL budget of {self.budget:.2f} nats")
        step, kl, weights = self._kept
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if name in weights:
                    parameter.copy_(weights[name])
        return step, kl


def _lora_of(model: Any) -> dict[str, int]:
    """Rank and alpha that the adapter really has: one that continues its parent's has the parent's."""
    config = model.peft_config[POLICY]
    return {"lora_rank": config.r, "lora_alpha": config.lora_alpha}


def _trainable(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
