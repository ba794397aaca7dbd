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
from scipy.optimize import minimize_scalar
from scipy.special import expit

from reward.errors import PairsInvalid
from reward.evaluation import Interval, calibration_error, clustered_mean, correct, correlation
from reward.features import LENGTH
from reward.pairs import PairLike, compare
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


class Evaluation(BaseModel):
    """Numbers of one reward model on one set of pairs. Accuracies are shares of decided pairs.

    longer_wins: accuracy of the rule that the longer answer is better. calibration_error: expected, with the model's
    own temperature; best_temperature: the factor on its probabilities' log odds that would fit these pairs best (1:
    none). reliability: for bins of equal count of the favourite's probability, that probability and how often it was
    right.
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


def evaluate(model: RewardModel, pairs: Sequence[PairLike], confidence: float = 0.95) -> Evaluation:
    """Judge `model` on pairs that it has not learnt from. Raises PairsInvalid when none is decided."""
    listed = compare([pair for pair in pairs if not pair.tie], tie_weight=0.0)
    if not len(listed.target):
        raise PairsInvalid("there is no decided pair to judge by")
    features = model.extractor(listed.prompts, listed.answers)
    scores = np.asarray(model.head(features), np.float64)
    tokens = features[:, model.extractor.groups[LENGTH].start].astype(np.float64)
    margins = scores[listed.chosen] - scores[listed.rejected]
    longer = tokens[listed.chosen] - tokens[listed.rejected]
    right, right_longer = correct(margins), correct(longer)
    accuracy = clustered_mean(right, listed.group, confidence)
    gain = clustered_mean(right - right_longer, listed.group, confidence)
    sure = model.preference_scale * margins
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
    )


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
