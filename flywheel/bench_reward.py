"""`flywheel bench reward`: one reward model, trained by TRL's RewardTrainer and by ours, in turns.

Both start from the same weights, with the same LoRA, optimiser and schedule, and see the same pairs in the same
batches; TRL is given them already tokenised. Each training has a process of its own, whose memory is read at its end.
A training's first step is not timed.
"""

import multiprocessing
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PrinterCallback, TrainerCallback

from reward.errors import PairsInvalid
from reward.evaluation import clustered_mean, correct
from reward.pair_files import FilePair, read_pairs
from reward.pairs import Comparisons, compare
from reward.settings import RewardSettings
from reward.strips import ChatSequences, grouped
from reward.tuned import HIDDEN, TunedExtractor
from reward.tuning import Collator, PairTrainer, arguments, load_network, quiet

TRL, OURS = "trl", "flywheel"
COMPARED_STEPS = 3
MADE_HELD_OUT = 60
MOST_HELD_OUT = 400
_WORDS = (
    "the a one some their our river market teacher garden window letter winter music engine doctor bread summer city "
    "question answer story paper morning holiday train price water answer light street village school open close carry "
    "write read build learn find keep give ask move small large early quiet bright cold simple common often never "
    "always near under between because while after before"
).split()


@dataclass(frozen=True)
class Work:
    """What a training's process is told."""

    base_model: Path
    settings: RewardSettings
    train: list[FilePair]
    heldout: list[FilePair]
    steps: int
    pairs_per_step: int


def run(
    base_model: Path,
    settings: RewardSettings,
    *,
    pairs: Path | None,
    steps: int,
    pairs_per_step: int,
    rounds: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Train in turns, `rounds` times each; figures are medians. pairs: a file, else pairs are made.

    pairs_per_s, tokens_per_s: decided pairs, and the tokens of both their sequences without padding, a second.
    peak_memory_mib: of the whole process, up to the end of training. heldout_accuracy: of the first training, on at
    most 400 held-out pairs, scored by the same code.
    largest_loss_difference: between the two, nats, over the first steps.
    """
    data = read_pairs(pairs) if pairs else None
    train = [pair for pair in (data.train if data else made_pairs(600, seed=1)) if not pair.tie]
    heldout = [pair for pair in (data.heldout if data else made_pairs(MADE_HELD_OUT, seed=2)) if not pair.tie]
    heldout = heldout[:MOST_HELD_OUT]
    if len(train) < pairs_per_step * 2:
        raise PairsInvalid(f"{len(train)} decided training pairs; two steps need {pairs_per_step * 2}")
    steps = min(steps, len(train) // pairs_per_step)
    work = Work(base_model, settings, _in_batches(train, settings.tuning.seed), heldout, steps, pairs_per_step)
    found: dict[str, list[dict[str, Any]]] = {TRL: [], OURS: []}
    for number in range(rounds):
        for name in (TRL, OURS) if number % 2 == 0 else (OURS, TRL):
            say(f"round {number + 1} of {rounds}: {name}, {steps} steps of {pairs_per_step} pairs")
            found[name].append(_in_process(name, work, judged=number == 0))
    sides = {name: _medians(runs) for name, runs in found.items()}
    first = [found[name][0]["losses"][:COMPARED_STEPS] for name in (TRL, OURS)]
    return {
        "ratio_pairs_per_s": round(sides[OURS]["pairs_per_s"] / sides[TRL]["pairs_per_s"], 3),
        "ratios": [
            round(ours["pairs_per_s"] / trl["pairs_per_s"], 3)
            for trl, ours in zip(found[TRL], found[OURS], strict=True)
        ],
        "largest_loss_difference": float(np.abs(np.subtract(*first)).max()),
        "sides": sides,
        "steps": steps,
        "pairs_per_step": pairs_per_step,
        "rounds": rounds,
        "mode": settings.mode,
        "precision": settings.precision,
        "tokens_per_pair": round(found[OURS][0]["pair_tokens"] / (steps * pairs_per_step), 1),
        "pairs": pairs.name if pairs else "made",
    }


def made_pairs(count: int, seed: int) -> list[FilePair]:
    """One pair a prompt: prompts of 60 to 300 words, as of a talk so far; answers of 20 to 140, the shorter wins."""
    generator = random.Random(seed)

    def text(low: int, high: int) -> str:
        return " ".join(generator.choice(_WORDS) for _ in range(generator.randint(low, high)))

    found = []
    for number in range(count):
        answers = sorted((text(20, 140), text(20, 140)), key=len)
        prompt = [{"role": "user", "content": text(60, 300)}]
        found.append(FilePair(prompt, answers[0], answers[1], 1.0, 0.0, False, f"{seed}-{number}"))
    return found


def _in_batches(pairs: Sequence[FilePair], seed: int) -> list[FilePair]:
    """Pairs of one prompt together, prompts in a drawn order."""
    numbers: dict[str, int] = {}
    groups = list(grouped([numbers.setdefault(pair.prompt_hash, len(numbers)) for pair in pairs]))
    random.Random(seed).shuffle(groups)
    return [pairs[place] for group in groups for place in group]


def _in_process(name: str, work: Work, *, judged: bool) -> dict[str, Any]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(train_once, name, work, judged=judged).result()


def _medians(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    names = ("pairs_per_s", "tokens_per_s", "computed_tokens_per_pair", "peak_memory_mib")
    medians = {name: round(statistics.median(run[name] for run in runs), 3) for name in names}
    accuracy = runs[0]["accuracy"]
    return medians | {
        "heldout_accuracy": round(accuracy.mean, 4),
        "heldout_low": round(accuracy.low, 4),
        "heldout_high": round(accuracy.high, 4),
        "first_losses": [round(loss, 5) for loss in runs[0]["losses"][:COMPARED_STEPS]],
        "last_loss": round(runs[0]["losses"][-1], 5),
    }


class _Clock(TrainerCallback):
    """Seconds from the end of the first step to the end of the last."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter())


def train_once(name: str, work: Work, *, judged: bool) -> dict[str, Any]:
    """One training by `name`, in this process; figures as `run` tells them, and the loss of each step."""
    settings = work.settings
    used = compare(work.train[: work.steps * work.pairs_per_step], 0.0)
    encode = ChatSequences(work.base_model, settings.max_length)
    sequences = [encode(prompt, answer) for prompt, answer in zip(used.prompts, used.answers, strict=True)]
    network = load_network(work.base_model, settings, seed=settings.tuning.seed)
    clock = _Clock()
    with tempfile.TemporaryDirectory(prefix="flywheel-bench-") as scratch:
        build = _trl_trainer if name == TRL else _our_trainer
        trainer, computed = build(network, used, sequences, encode, Path(scratch), work)
        trainer.add_callback(clock)
        trainer.remove_callback(PrinterCallback)
        with quiet():
            trainer.train()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    timed = len(clock.ends) - 1
    seconds = clock.ends[-1] - clock.ends[0]
    lengths = np.array([len(sequence) for sequence in sequences])
    pair_tokens = lengths[used.chosen] + lengths[used.rejected]
    return {
        "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
        "pairs_per_s": timed * work.pairs_per_step / seconds,
        "tokens_per_s": float(pair_tokens[work.pairs_per_step :].sum()) / seconds,
        "pair_tokens": int(pair_tokens.sum()),
        "computed_tokens_per_pair": computed() / len(used.target),
        "peak_memory_mib": memory,
        "accuracy": _accuracy(network, encode, work) if judged else None,
    }


def _accuracy(network: Any, encode: ChatSequences, work: Work) -> Any:
    extractor = TunedExtractor(network, encode, work.settings.tuning.strip_tokens)
    pairs = compare(work.heldout, 0.0)
    hidden = extractor(pairs.prompts, pairs.answers)[:, extractor.groups[HIDDEN]]
    scores = hidden @ extractor.head_weight.detach().float().cpu().numpy()[0]
    right = correct((scores[pairs.chosen] - scores[pairs.rejected]).astype(np.float64))
    return clustered_mean(right, pairs.group, work.settings.confidence)


def _our_trainer(
    network: Any, pairs: Comparisons, sequences: list[list[int]], encode: ChatSequences, scratch: Path, work: Work
) -> tuple[Any, Callable[[], int]]:
    collate = Collator(pairs, sequences, work.settings.tuning.strip_tokens)
    numbers = list(range(len(pairs.target)))
    most = work.pairs_per_step
    trainer = PairTrainer(
        model=network,
        args=_arguments(scratch, work.settings, per_device_train_batch_size=1),
        train_dataset=[numbers[start : start + most] for start in range(0, len(numbers), most)],
        data_collator=collate,
    )
    return trainer, lambda: collate.tokens


def _trl_trainer(
    network: Any, pairs: Comparisons, sequences: list[list[int]], encode: ChatSequences, scratch: Path, work: Work
) -> tuple[Any, Callable[[], int]]:
    from datasets import Dataset
    from trl import RewardConfig, RewardTrainer
    from trl.trainer.reward_trainer import DataCollatorForPreference

    computed = [0]

    class Counting(DataCollatorForPreference):
        def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
            batch: dict[str, Any] = super().torch_call(examples)
            computed[0] += batch["input_ids"].numel()
            return batch

    rows = {
        "chosen_ids": [sequences[place] for place in pairs.chosen],
        "rejected_ids": [sequences[place] for place in pairs.rejected],
        "margin": pairs.margin.tolist(),
    }
    bf16 = work.settings.precision == "bfloat16"
    trainer = RewardTrainer(
        model=network,
        args=_arguments(
            scratch,
            work.settings,
            kind=RewardConfig,
            per_device_train_batch_size=work.pairs_per_step,
            max_length=None,
            bf16=bf16,
            gradient_checkpointing=False,
            remove_unused_columns=True,
        ),
        train_dataset=Dataset.from_dict(rows),
        processing_class=encode.tokenizer,
        data_collator=Counting(pad_token_id=encode.tokenizer.pad_token_id),
    )
    return trainer, lambda: computed[0]


def _arguments(scratch: Path, settings: RewardSettings, **more: Any) -> Any:
    """Of both: one epoch over batches in the order given."""
    same = {"num_train_epochs": 1, "train_sampling_strategy": "sequential", "save_strategy": "no"}
    return arguments(scratch, settings, evaluates=False, **same, **more)
