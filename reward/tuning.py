"""Fine-tune a backbone on preference pairs: Bradley-Terry with a scalar head, LoRA or every weight.

The loop, the schedule, the checkpoints and the logging are transformers' Trainer; the step is ours: a batch is a
number of prompts with all their pairs, computed as strips (reward.strips), so that no prompt and no answer is computed
twice and nothing is padded. The loss of a pair is weight × cross-entropy of sigmoid(score difference − margin) against
1, or against 0.5 for a tie (Bradley & Terry 1952; margins as in Touvron et al. 2023, "Llama 2", eq. 2), over the
batch's total weight. Guarantees: the same model for the same seed, also when it was killed and went on from its last
checkpoint; training goes on only from a checkpoint of the same data and settings. Does not judge the result:
reward.training does.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import (
    AutoModelForSequenceClassification,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging as transformers_logging

from reward.pairs import Comparisons
from reward.precision import compute_dtype
from reward.settings import RewardSettings
from reward.strips import ChatSequences, Strip, Tokens, grouped, pack

Progress = Callable[[str, float], None]
RUN_FILE = "run.json"


@dataclass(frozen=True)
class Tuned:
    """A tuned network on the CPU or the GPU. validation: bool [n_pairs], the pairs that chose the checkpoint, not
    trained on.

    history: the trainer's log. epochs: those that the kept weights have had.
    """

    network: Any
    validation: npt.NDArray[np.bool_]
    history: list[dict[str, float]]
    epochs: float


@dataclass
class Batch:
    """Pairs of some prompts. chosen, rejected: int64 [n_pairs], places in the strips' scores, one after the other.

    target, weight, margin: float32 [n_pairs].
    """

    strips: list[Strip]
    chosen: torch.Tensor
    rejected: torch.Tensor
    target: torch.Tensor
    weight: torch.Tensor
    margin: torch.Tensor

    @property
    def tokens(self) -> int:
        """Tokens computed."""
        return sum(strip.input_ids.shape[1] for strip in self.strips)


def load_network(base_model: Path, settings: RewardSettings, *, seed: int) -> Any:
    """The base with a scalar head, drawn with `seed`, ready to train; with LoRA unless settings.mode is `full`."""
    torch.manual_seed(seed)
    lora = settings.mode == "lora"
    dtype = compute_dtype(settings.precision) if lora else torch.float32
    with quiet():
        network = AutoModelForSequenceClassification.from_pretrained(base_model, num_labels=1, dtype=dtype)
    network.score = _FloatHead(network.score)
    network.config.use_cache = False
    if not lora:
        return network
    tuning = settings.tuning
    return get_peft_model(
        network,
        LoraConfig(
            r=tuning.lora_rank,
            lora_alpha=tuning.lora_alpha,
            lora_dropout=0.0,
            target_modules="all-linear",
            exclude_modules=["score"],
            modules_to_save=["score"],
            task_type="SEQ_CLS",
        ),
    )


class _FloatHead(torch.nn.Linear):
    """A head in float32, whatever the backbone computes in: its small updates would be lost in bfloat16."""

    def __init__(self, head: torch.nn.Linear) -> None:
        super().__init__(head.in_features, head.out_features, bias=False)
        self.weight.data.copy_(head.weight.data)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return super().forward(states.float())


def parts_of(network: Any) -> tuple[Any, Any]:
    """(backbone, head) of a sequence classifier, tuned by PEFT or not."""
    classifier = network.get_base_model() if hasattr(network, "get_base_model") else network
    return getattr(classifier, classifier.base_model_prefix), classifier.score


def tune(
    pairs: Comparisons,
    base_model: Path,
    scratch: Path,
    settings: RewardSettings,
    encode: ChatSequences,
    run_id: str,
    progress: Progress = lambda what, share: None,
) -> Tuned:
    """Train on `pairs`, keeping the checkpoint with the least loss on the validation prompts.

    scratch: where checkpoints go, and where a killed run is found again: one of the same `run_id` (the data's name) and
    settings goes on, another is started afresh. The caller removes it.
    """
    sequences = [encode(prompt, answer) for prompt, answer in zip(pairs.prompts, pairs.answers, strict=True)]
    validation = validation_pairs(pairs, settings)
    train = _items(pairs, ~validation, settings)
    network = load_network(base_model, settings, seed=settings.tuning.seed)
    collate = Collator(pairs, sequences, settings.tuning.strip_tokens)
    held = _items(pairs, validation, settings)
    _same_run(scratch, run_id, settings)
    trainer = PairTrainer(
        model=network,
        args=arguments(scratch, settings, evaluates=bool(held)),
        train_dataset=train,
        eval_dataset=held or None,
        data_collator=collate,
        callbacks=[_Told(progress)],
    )
    trainer.remove_callback(PrinterCallback)
    with quiet():
        trainer.train(resume_from_checkpoint=last_whole_checkpoint(scratch))
    history = [{k: float(v) for k, v in row.items() if isinstance(v, int | float)} for row in trainer.state.log_history]
    best = trainer.state.best_global_step or trainer.state.global_step
    epochs = trainer.state.num_train_epochs * best / max(trainer.state.max_steps, 1)
    return Tuned(trainer.model.eval(), validation, history, float(epochs))


def validation_pairs(pairs: Comparisons, settings: RewardSettings) -> npt.NDArray[np.bool_]:
    """bool [n_pairs]: those of the prompts that choose the checkpoint; whole prompts, drawn with the seed."""
    groups = np.unique(pairs.group)
    count = round(settings.tuning.validation_share * len(groups))
    chosen = np.random.default_rng(settings.tuning.seed).permutation(groups)[:count]
    return np.isin(pairs.group, chosen)


def _items(pairs: Comparisons, which: npt.NDArray[np.bool_], settings: RewardSettings) -> list[list[int]]:
    """Numbers of pairs, together by prompt, at most `pairs_per_prompt` of them at once."""
    numbers = np.flatnonzero(which)
    most = settings.tuning.pairs_per_prompt
    items = []
    for places in grouped([int(pairs.group[number]) for number in numbers]):
        whole = [int(numbers[place]) for place in places]
        items += [whole[start : start + most] for start in range(0, len(whole), most)]
    return items


class Collator:
    """Batches of pairs as strips. tokens: computed so far; pairs: in those batches."""

    def __init__(self, pairs: Comparisons, sequences: Sequence[Tokens], strip_tokens: int) -> None:
        self.pairs, self.sequences, self.strip_tokens = pairs, sequences, strip_tokens
        self.tokens = self.count = 0

    def __call__(self, items: Sequence[Sequence[int]]) -> dict[str, Batch]:
        numbers = [number for item in items for number in item]
        pairs = self.pairs
        answers: dict[int, list[int]] = {}
        for number in numbers:
            group = answers.setdefault(int(pairs.group[number]), [])
            group += [a for a in (int(pairs.chosen[number]), int(pairs.rejected[number])) if a not in group]
        strips = pack(list(answers.values()), self.sequences, self.strip_tokens)
        place = {sequence: at for at, sequence in enumerate(s for strip in strips for s in strip.sequences)}
        batch = Batch(
            strips,
            torch.tensor([place[int(pairs.chosen[number])] for number in numbers]),
            torch.tensor([place[int(pairs.rejected[number])] for number in numbers]),
            torch.tensor(pairs.target[numbers], dtype=torch.float32),
            torch.tensor(pairs.weight[numbers], dtype=torch.float32),
            torch.tensor(pairs.margin[numbers], dtype=torch.float32),
        )
        self.tokens += batch.tokens
        self.count += len(numbers)
        return {"batch": batch}


class PairTrainer(Trainer):
    """transformers' Trainer with a step over strips; batches come from a `Collator`."""

    def training_step(self, model: Any, inputs: dict[str, Batch], num_items_in_batch: Any = None) -> torch.Tensor:
        """One batch, strip after strip: each strip's graph is gone before the next is built."""
        model.train()
        batch = inputs["batch"]
        total = torch.zeros((), device=self.args.device)
        left = len(batch.strips)
        for strip, pairs in _by_strip(batch):
            left -= 1
            scores = self._scores(model, strip)
            loss = _losses(scores, pairs, self.args.device).sum() / batch.weight.sum()
            if left and hasattr(model, "no_sync"):
                with model.no_sync():
                    self.accelerator.backward(loss)
            else:
                self.accelerator.backward(loss)
            total += loss.detach()
        return total

    def evaluate(self, *_: Any, metric_key_prefix: str = "eval", **__: Any) -> dict[str, float]:
        """Loss (nats a pair) and accuracy on the validation pairs, by weight."""
        assert self.data_collator is not None
        loss = right = weight = 0.0
        self.model.eval()
        with torch.inference_mode():
            for item in self.eval_dataset:
                batch = self.data_collator([item])["batch"]
                for strip, pairs in _by_strip(batch):
                    scores = self._scores(self.model, strip)
                    difference = (scores[pairs.chosen] - scores[pairs.rejected]).cpu()
                    loss += float(_losses(scores, pairs, self.args.device).sum())
                    right += float((pairs.weight * (0.5 + 0.5 * difference.sign()))[pairs.target != 0.5].sum())
                    weight += float(pairs.weight[pairs.target != 0.5].sum())
        numbers = {f"{metric_key_prefix}_loss": loss / max(weight, 1e-9)}
        numbers[f"{metric_key_prefix}_accuracy"] = right / max(weight, 1e-9)
        self.log(numbers)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, numbers)
        return numbers

    def _scores(self, model: Any, strip: Strip) -> torch.Tensor:
        """float32 [n], of the strip's sequences; through the wrapper's forward, where workers' gradients meet."""
        on_device = strip.to(self.args.device)
        out = model(
            input_ids=on_device.input_ids,
            position_ids=on_device.position_ids,
            attention_mask=on_device.mask,
            output_hidden_states=True,
        )
        _, head = parts_of(self.accelerator.unwrap_model(model))
        scores: torch.Tensor = head(out.hidden_states[-1][0, on_device.last])[:, 0]
        return scores


@dataclass
class _StripPairs:
    """The pairs of one strip: places within its own scores."""

    chosen: torch.Tensor
    rejected: torch.Tensor
    target: torch.Tensor
    weight: torch.Tensor
    margin: torch.Tensor


def _by_strip(batch: Batch) -> list[tuple[Strip, _StripPairs]]:
    """Each strip with its pairs: both answers of a pair lie in one strip, since prompts are packed whole."""
    found, start = [], 0
    for strip in batch.strips:
        mine = (batch.chosen >= start) & (batch.chosen < start + len(strip.sequences))
        found.append(
            (
                strip,
                _StripPairs(
                    batch.chosen[mine] - start,
                    batch.rejected[mine] - start,
                    batch.target[mine],
                    batch.weight[mine],
                    batch.margin[mine],
                ),
            )
        )
        start += len(strip.sequences)
    return found


def _losses(scores: torch.Tensor, pairs: _StripPairs, device: torch.device) -> torch.Tensor:
    """Weighted cross-entropies [n_pairs]."""
    difference = scores[pairs.chosen.to(device)] - scores[pairs.rejected.to(device)] - pairs.margin.to(device)
    return pairs.weight.to(device) * binary_cross_entropy_with_logits(
        difference, pairs.target.to(device), reduction="none"
    )


def arguments(
    scratch: Path,
    settings: RewardSettings,
    *,
    evaluates: bool,
    kind: type[TrainingArguments] = TrainingArguments,
    **more: Any,
) -> Any:
    """The Trainer's arguments for these settings, of a `kind` of its own if need be, with `more` of them."""
    tuning = settings.tuning
    gpu = torch.cuda.is_available()
    told: dict[str, Any] = {
        "output_dir": str(scratch),
        "use_cpu": not gpu,
        "bf16": settings.mode == "full" and compute_dtype(settings.precision) == torch.bfloat16,
        "seed": tuning.seed,
        "num_train_epochs": tuning.epochs,
        "per_device_train_batch_size": tuning.prompts_per_step,
        "learning_rate": tuning.learning_rate,
        "lr_scheduler_type": "cosine",
        "warmup_steps": tuning.warmup_share,
        "weight_decay": tuning.weight_decay,
        "max_grad_norm": tuning.max_grad_norm,
        "eval_strategy": "steps" if evaluates else "no",
        "eval_steps": tuning.checkpoint_steps,
        "save_steps": tuning.checkpoint_steps,
        "save_total_limit": 2,
        "load_best_model_at_end": evaluates,
        "metric_for_best_model": "eval_loss" if evaluates else None,
        "greater_is_better": False if evaluates else None,
        "logging_steps": 1,
        "report_to": list(tuning.report_to) or "none",
        "remove_unused_columns": False,
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
    }
    return kind(**(told | more))


def _same_run(scratch: Path, run_id: str, settings: RewardSettings) -> None:
    """Leave a killed run of the same data and settings as it is; make room for another."""
    told = json.dumps([run_id, settings.model_dump(mode="json")], sort_keys=True)
    mark = hashlib.sha256(told.encode()).hexdigest()
    file = scratch / RUN_FILE
    if scratch.exists() and not (file.exists() and file.read_text() == mark):
        shutil.rmtree(scratch)
    scratch.mkdir(parents=True, exist_ok=True)
    file.write_text(mark)


def last_whole_checkpoint(scratch: Path) -> str | None:
    """The newest checkpoint that was written to its end (its state is written last); others are removed."""
    found = sorted(scratch.glob(f"{PREFIX_CHECKPOINT_DIR}-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    whole = []
    for folder in found:
        try:
            json.loads((folder / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            shutil.rmtree(folder)
        else:
            whole.append(folder)
    return str(whole[-1]) if whole else None


class quiet:
    """No warnings of transformers: that a head is new, and what Trainer deprecates of its own."""

    def __enter__(self) -> None:
        self._before = transformers_logging.get_verbosity()
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()

    def __exit__(self, *_: object) -> None:
        transformers_logging.set_verbosity(self._before)
        transformers_logging.enable_progress_bar()


class _Told(TrainerCallback):
    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if logs and "loss" in logs:
            share = state.global_step / max(state.max_steps, 1)
            self.progress(f"tuning, step {state.global_step} of {state.max_steps}: loss {logs['loss']:.3f}", share)
