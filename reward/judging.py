"""What a reward model is worth on any pairs: how often right, how sure, and on what it leans.

Guarantees: intervals are clustered by prompt; the length-only baseline is judged on the same pairs; ties are left out
of accuracies and counted. Does not fit anything but the one temperature that it reports.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict
from scipy import special
from scipy.optimize import minimize_scalar
from scipy.special import expit

from reward.errors import PairsInvalid
from reward.evaluation import Interval, calibration_error, clustered_mean, correct, correlation
from reward.features import LENGTH, Features
from reward.pairs import Comparisons, PairLike, compare
from reward.scoring import RewardModel

Array = npt.NDArray[np.float64]
_BINS = 10
_FEWEST = 10
_SLICES = 8


class Slice(BaseModel):
    """Accuracy (0 to 1) on some of the pairs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    pairs: int
    accuracy: float
    low: float
    high: float


class BestOf(BaseModel):
    """The answer that the model likes best of n. kl: nats from a random one, log n − (n − 1) / n (Gao et al. 2023,
    "Scaling laws for reward model overoptimization"). score: the model's; win_share: people's, of its votes.

    peak: whether people like this n best; beyond it, what the model gains they lose.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    n: int
    kl: float
    score: float
    win_share: float
    peak: bool


class Evaluation(BaseModel):
    """Numbers of one reward model on one set of pairs. Accuracies are shares of decided pairs.

    longer_wins: accuracy of the rule that the longer answer is better. calibration_error: expected, with the model's
    own temperature; best_temperature: the factor on its probabilities' log odds that would fit these pairs best (1:
    none). reliability: for bins of equal count of the favourite's probability, that probability and how often it was
    right. sure_accuracy, unsure_accuracy: of the half of the pairs on whose score difference the ensemble agrees more,
    and of the other. best_of_n: the over-optimisation curve, if at least half of the prompts have two answers with
    votes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    reward_model_id: str
    pairs: int
    ties: int
    prompts: int
    accuracy: float
    low: float
    high: float
    longer_wins: float
    gain_over_longer: float
    gain_over_longer_low: float
    gain_over_longer_high: float
    correlation_with_length: float
    loss: float
    calibration_error: float
    best_temperature: float
    reliability: list[tuple[float, float]]
    by_length_difference: list[Slice]
    by_kind: list[Slice]
    by_rater: list[Slice]
    cut_prompts: int
    by_position: list[Slice] = []
    sure_accuracy: float | None = None
    unsure_accuracy: float | None = None
    best_of_n: list[BestOf] = []


def evaluate(model: RewardModel, pairs: Sequence[PairLike], confidence: float = 0.95) -> Evaluation:
    """Judge `model` on pairs that it has not learnt from. Raises PairsInvalid when none is decided."""
    listed = compare([pair for pair in pairs if not pair.tie], tie_weight=0.0)
    if not len(listed.target):
        raise PairsInvalid("there is no decided pair to judge by")
    return judge(model, pairs, listed, model.extractor(listed.prompts, listed.answers), confidence)


def judge(
    model: RewardModel, pairs: Sequence[PairLike], listed: Comparisons, features: Features, confidence: float
) -> Evaluation:
    """The same with the features [n_answers, n_features] at hand. listed: the decided ones of `pairs`."""
    scores = np.asarray(model.head(features), np.float64)
    tokens = features[:, model.extractor.groups[LENGTH].start].astype(np.float64)
    margins = scores[listed.chosen] - scores[listed.rejected]
    longer = tokens[listed.chosen] - tokens[listed.rejected]
    right, right_longer = correct(margins), correct(longer)
    accuracy = clustered_mean(right, listed.group, confidence)
    gain = clustered_mean(right - right_longer, listed.group, confidence)
    sure = model.preference_scale * margins
    agreed = model.head.disagreement(features[listed.chosen], features[listed.rejected])
    halves = np.array_split(np.argsort(agreed), 2)
    used = [pair for pair in pairs if not pair.tie and pair.chosen != pair.rejected and pair.weight > 0]

    def sliced(names: Sequence[str]) -> list[Slice]:
        return _slices(names, right, listed.group, confidence)

    return Evaluation(
        reward_model_id=model.manifest["reward_model_id"],
        pairs=len(margins),
        ties=sum(pair.tie for pair in pairs),
        prompts=len(np.unique(listed.group)),
        accuracy=accuracy.mean,
        low=accuracy.low,
        high=accuracy.high,
        longer_wins=float(right_longer.mean()),
        gain_over_longer=gain.mean,
        gain_over_longer_low=gain.low,
        gain_over_longer_high=gain.high,
        correlation_with_length=correlation(scores, tokens),
        loss=float(np.logaddexp(0.0, -sure).mean()),
        calibration_error=calibration_error(sure),
        best_temperature=_best_temperature(sure),
        reliability=_reliability(sure),
        by_length_difference=sliced(_length_names(longer)),
        by_kind=sliced([str(getattr(pair, "kind", "")) for pair in used]),
        by_rater=sliced([str(getattr(pair, "rater", "")) for pair in used]),
        cut_prompts=model.extractor.truncated,
        by_position=sliced([str(getattr(pair, "position", "")) for pair in used]),
        sure_accuracy=float(right[halves[0]].mean()),
        unsure_accuracy=float(right[halves[-1]].mean()) if len(halves[-1]) else None,
        best_of_n=_best_of_n(scores, listed),
    )


def _best_of_n(scores: Array, listed: Comparisons) -> list[BestOf]:
    """Expected over all draws of n of a prompt's answers; prompts with fewer than the largest n are left out."""
    won, votes = np.zeros(len(scores)), np.zeros(len(scores))
    np.add.at(won, listed.chosen, listed.weight)
    np.add.at(votes, listed.chosen, listed.weight)
    np.add.at(votes, listed.rejected, listed.weight)
    prompt = np.zeros(len(scores), np.int64)
    prompt[listed.chosen] = prompt[listed.rejected] = listed.group
    by_prompt = [np.flatnonzero(prompt == group) for group in np.unique(listed.group)]
    most = int(np.median([len(answers) for answers in by_prompt]))
    used = [answers for answers in by_prompt if len(answers) >= most]
    found = []
    for n in range(1, most + 1 if most >= 2 else 0):
        picked = [_picked(scores[answers], n) for answers in used]
        score = np.mean([chance @ scores[answers] for chance, answers in zip(picked, used, strict=True)])
        share = np.mean([chance @ (won / votes)[answers] for chance, answers in zip(picked, used, strict=True)])
        found.append((n, float(np.log(n) - (n - 1) / n), float(score), float(share)))
    peak = max((share for *_, share in found), default=0.0)
    return [BestOf(n=n, kl=kl, score=score, win_share=share, peak=share == peak) for n, kl, score, share in found]


def _picked(scores: Array, n: int) -> Array:
    """The chance of each answer to be the best scored of n that are drawn without replacement."""
    below = np.argsort(np.argsort(scores))
    return np.asarray(special.comb(below, n - 1) / special.comb(len(scores), n))


def _length_names(longer: Array) -> list[str]:
    """Thirds of the pairs by how much longer, in tokens, the chosen answer is."""
    low, high = np.quantile(longer, [1 / 3, 2 / 3])
    names = (f"chosen shorter, or less than {low:+.0f}", f"{low:+.0f} to {high:+.0f} tokens", f"more than {high:+.0f}")
    return [names[int(difference >= low) + int(difference > high)] for difference in longer]


def _slices(names: Sequence[str], right: Array, group: npt.NDArray[np.int64], confidence: float) -> list[Slice]:
    """The largest groups of one name, if there are at least two names."""
    counts = Counter(name for name in names if name)
    if len(counts) < 2:
        return []
    found = []
    for name, count in counts.most_common(_SLICES):
        if count >= _FEWEST:
            chosen = np.array([one == name for one in names])
            mean: Interval = clustered_mean(right[chosen], group[chosen], confidence)
            found.append(Slice(name=name, pairs=count, accuracy=mean.mean, low=mean.low, high=mean.high))
    return found


def _best_temperature(margins: Array) -> float:
    def loss(log_factor: float) -> float:
        return float(np.logaddexp(0.0, -np.exp(log_factor) * margins).mean())

    return float(np.exp(minimize_scalar(loss, bounds=(-5.0, 5.0), method="bounded").x))


def _reliability(margins: Array) -> list[tuple[float, float]]:
    favourite, right = expit(np.abs(margins)), correct(margins)
    parts: list[Any] = np.array_split(np.argsort(favourite), min(_BINS, len(margins)))
    return [(float(favourite[part].mean()), float(right[part].mean())) for part in parts]
