"""The checkpoint gate: does the new adapter earn more reward, and stay readable, on prompts nobody trained on?

`judge_checkpoint` samples both sides and measures; `judge` is a pure function of the measurements. A win rate
proves nothing by itself (a policy can buy votes with nonsense), so the gate looks at the base's
log-probability of the answers and at the share of degenerate and of unfinished ones.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from peft import PeftModel
from pydantic import BaseModel, ConfigDict

from reward.evaluation import Interval, clustered_mean
from reward.scoring import RewardModel
from rounds.adapters import PARENT, POLICY, check_adapter, load_base
from rounds.errors import NoPrompts
from rounds.likelihood import divergence, token_log_probabilities
from rounds.readability import is_degenerate, words_in
from rounds.sampling import Answer, Messages, sample
from rounds.settings import CheckpointGateSettings

Array = npt.NDArray[np.float64]


class AnswerPair(BaseModel):
    """One held-out prompt (its last message) with the parent's and the checkpoint's answer."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt: str
    old: str
    new: str


class CheckpointGateReport(BaseModel):
    """The verdict, why, and the numbers: base_nll_* in nats a token, kl_per_answer in nats, shares 0 to 1.

    `_old` is the parent, `_new` the checkpoint; `_low` and `_high` bound the difference new − old.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    passed: bool
    reason: str
    numbers: dict[str, float]
    answers: list[AnswerPair]


class Side(BaseModel):
    """One side's measurements, a value per prompt, in the same order on both sides.

    reward: standardised score; base_nll: nats under the base, summed; tokens: of the answer; kl: nats to the base.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    reward: list[float]
    base_nll: list[float]
    tokens: list[int]
    words: list[int]
    degenerate: list[bool]
    unfinished: list[bool]
    kl: list[float]


def judge(old: Side, new: Side, settings: CheckpointGateSettings) -> tuple[bool, str, dict[str, float]]:
    """(passed, reason in words, numbers) from both sides' measurements. Pure."""
    numbers = _numbers(old, new, settings)
    faults = _faults(numbers, settings)
    reward = f"held-out reward {numbers['reward_old']:+.2f} → {numbers['reward_new']:+.2f}"
    reading = (
        f"{numbers['mean_words_old']:.0f} → {numbers['mean_words_new']:.0f} words, "
        f"{numbers['base_nll_old']:.2f} → {numbers['base_nll_new']:.2f} nats a token under the base, "
        f"degenerate {numbers['degenerate_share_old']:.0%} → {numbers['degenerate_share_new']:.0%}, "
        f"unfinished {numbers['unfinished_share_old']:.0%} → {numbers['unfinished_share_new']:.0%}"
    )
    if faults:
        return False, f"refused: {'; '.join(faults)} ({reward}; {reading})", numbers
    return True, f"passed: {reward}, and the answers stay readable: {reading}", numbers


def _numbers(old: Side, new: Side, settings: CheckpointGateSettings) -> dict[str, float]:
    def difference(mine: Any, theirs: Any, confidence: float) -> Interval:
        values = np.asarray(mine, np.float64) - np.asarray(theirs, np.float64)
        return clustered_mean(values, np.arange(len(values)), confidence)

    two_sided = settings.confidence
    one_sided = 2 * settings.confidence - 1  # the two-sided level whose lower end is the one-sided bound
    reward = difference(new.reward, old.reward, two_sided)
    return {
        "prompts": float(len(new.reward)),
        "reward_old": float(np.mean(old.reward)),
        "reward_new": float(np.mean(new.reward)),
        "reward_gain_low": reward.low,
        "reward_gain_high": reward.high,
        "base_nll_old": sum(old.base_nll) / sum(old.tokens),
        "base_nll_new": sum(new.base_nll) / sum(new.tokens),
        "degenerate_share_old": float(np.mean(old.degenerate)),
        "degenerate_share_new": float(np.mean(new.degenerate)),
        "degenerate_growth_low": difference(new.degenerate, old.degenerate, one_sided).low,
        "unfinished_share_old": float(np.mean(old.unfinished)),
        "unfinished_share_new": float(np.mean(new.unfinished)),
        "unfinished_growth_low": difference(new.unfinished, old.unfinished, one_sided).low,
        "mean_words_old": float(np.mean(old.words)),
        "mean_words_new": float(np.mean(new.words)),
        "kl_per_answer": float(np.mean(new.kl)),
        "kl_per_answer_old": float(np.mean(old.kl)),
    }


def _faults(numbers: dict[str, float], settings: CheckpointGateSettings) -> list[str]:
    """What speaks against the checkpoint. Comparisons are written so that a NaN is a fault."""
    faults = []
    if not numbers["reward_gain_low"] > settings.minimum_reward_gain:
        faults.append(
            f"the reward did not rise beyond noise (the gain's interval starts at {numbers['reward_gain_low']:+.2f})"
        )
    growth = numbers["base_nll_new"] - numbers["base_nll_old"]
    if not growth <= settings.base_nll_margin:
        faults.append(
            f"the base finds the answers {growth:.2f} nats a token less likely than the parent's; "
            f"{settings.base_nll_margin:g} are allowed"
        )
    if not numbers["degenerate_growth_low"] <= settings.degenerate_margin:
        faults.append("beyond noise more answers are empty, repeating or not words than the parent's")
    if not numbers["degenerate_share_new"] <= settings.degenerate_maximum:
        faults.append(f"{numbers['degenerate_share_new']:.0%} of the answers are empty, repeating or not words")
    if not numbers["unfinished_growth_low"] <= settings.unfinished_margin:
        faults.append("beyond noise more answers are unfinished than the parent's")
    allowed = numbers["kl_per_answer_old"] + settings.kl_maximum
    if not numbers["kl_per_answer"] <= allowed:
        faults.append(f"KL {numbers['kl_per_answer']:.1f} nats an answer; {allowed:.1f} are allowed")
    return faults


def judge_checkpoint(
    *,
    base_model: Path,
    parent_adapter: Path | None,
    adapter: Path,
    reward_model: Path,
    prompts: list[Messages],
    settings: CheckpointGateSettings,
    seed: int,
    progress: Callable[[str, float], None] = lambda what, share: None,
) -> CheckpointGateReport:
    """Answer held-out `prompts` with the parent (None: the base) and with `adapter`, and judge.

    Both sides draw from the same random state. Raises NoPrompts under four prompts, AdapterUnknown, and what
    loading the reward model raises.
    """
    prompts = prompts[: settings.prompts]
    if len(prompts) < 4:
        raise NoPrompts(f"{len(prompts)} held-out prompts; the gate needs at least 4")
    progress("loading the models", 0.0)
    check_adapter(adapter)
    scorer = RewardModel.load(reward_model, base_model)
    base, tokenizer = load_base(base_model, settings.precision)
    model = PeftModel.from_pretrained(base, adapter, adapter_name=POLICY).eval()
    if parent_adapter is not None:
        check_adapter(parent_adapter)
        model.load_adapter(parent_adapter, adapter_name=PARENT)

    def answers() -> list[Answer]:
        torch.manual_seed(seed)
        return sample(
            model,
            tokenizer,
            prompts,
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
            batch_size=settings.batch_size,
        )

    progress("the parent answers", 0.1)
    if parent_adapter is None:
        with model.disable_adapter():
            old_answers = answers()
    else:
        model.set_adapter(PARENT)
        old_answers = answers()
    progress("the checkpoint answers", 0.4)
    model.set_adapter(POLICY)
    new_answers = answers()
    progress("measuring", 0.7)
    with model.disable_adapter():
        old, new = (_measure(model, tokenizer, scorer, side, settings) for side in (old_answers, new_answers))
    passed, reason, numbers = judge(old, new, settings)
    progress("judged", 1.0)
    return CheckpointGateReport(
        passed=passed,
        reason=reason,
        numbers=numbers,
        answers=[
            AnswerPair(prompt=str(before.prompt[-1]["content"]), old=before.text, new=after.text)
            for before, after in zip(old_answers, new_answers, strict=True)
        ],
    )


def _measure(
    base: Any, tokenizer: Any, scorer: RewardModel, answers: list[Answer], settings: CheckpointGateSettings
) -> Side:
    likelihoods = token_log_probabilities(
        base, answers, pad_token_id=tokenizer.pad_token_id, temperatures=[1.0, settings.temperature]
    )
    return Side(
        reward=scorer.score([a.prompt for a in answers], [a.text for a in answers]).astype(float).tolist(),
        base_nll=[-float(values[0].sum()) for values in likelihoods],
        tokens=[len(answer.token_ids) for answer in answers],
        words=[len(words_in(answer.text)) for answer in answers],
        degenerate=[is_degenerate(answer.text) for answer in answers],
        unfinished=[not answer.finished for answer in answers],
        kl=[
            divergence(np.asarray(answer.log_probabilities), values[1])
            for answer, values in zip(answers, likelihoods, strict=True)
        ],
    )
