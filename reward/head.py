"""The head on top of the frozen features: a linear map, fitted to votes.

Guarantees: scores are standardised on the training answers (mean 0, standard deviation 1); a length beyond the
tails of the training answers counts as the tail's, in fitting and in scoring, so that no answer earns by
being shorter or longer than what raters have judged often enough.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from reward.features import LENGTH, Features
from reward.logistic import Choice, calibrate, choose, fit, log_loss, out_of_fold, reduce_features
from reward.pairs import Comparisons
from reward.settings import RewardSettings

Array = npt.NDArray[np.float64]

# The length-only baseline has two features and needs no more than a whiff of shrinkage.
_BASELINE_PENALTY = 0.1


class LinearHead:
    """score = (features − mean) · weight, in float64.

    tensors: `mean` and `weight` [n_features], `length_low` and `length_high` [n length features], all float64.
    """

    def __init__(self, tensors: dict[str, npt.NDArray[Any]], length: slice) -> None:
        self.tensors = tensors
        self.length = length

    def __call__(self, features: Features) -> npt.NDArray[np.float32]:
        """float32 [n] for features [n, n_features]."""
        values = features.astype(np.float64)
        low, high = self.tensors["length_low"], self.tensors["length_high"]
        values[:, self.length] = np.clip(values[:, self.length], low, high)
        return ((values - self.tensors["mean"]) @ self.tensors["weight"]).astype(np.float32)


@dataclass(frozen=True)
class FittedHead:
    """head: the model; length_head: the baseline that sees the length alone; controlled_head: the model less what its
    scores of the training answers owe, linearly, to their lengths.

    preference_scale: sigmoid(preference_scale × score difference) is the calibrated probability of a vote.
    group_gains: group of features → nats per vote that the out-of-fold loss grows by without it.
    """

    head: LinearHead
    length_head: LinearHead
    controlled_head: LinearHead
    choice: Choice
    preference_scale: float
    group_gains: dict[str, float]


def fit_head(features: Features, pairs: Comparisons, groups: dict[str, slice], settings: RewardSettings) -> FittedHead:
    """Fit on features [n_answers, n_features] of `pairs`. Deterministic."""
    length = groups[LENGTH]
    values = features.astype(np.float64)
    tails = (settings.length_tail, 1 - settings.length_tail)
    low, high = np.quantile(values[:, length], tails, axis=0)
    limits = {"length_low": low, "length_high": high}
    values[:, length] = np.clip(values[:, length], low, high)
    mean, spread = values.mean(0), values.std(0)
    spread[spread == 0] = 1.0
    standard = (values - mean) / spread
    differences = standard[pairs.chosen] - standard[pairs.rejected]
    root = np.sqrt(length.start)
    choice = choose(
        differences[:, : length.start] / root,
        differences[:, length] / np.sqrt(length.stop - length.start),
        pairs.target,
        pairs.weight,
        pairs.group,
        penalties=settings.penalties,
        length_scales=settings.length_scales,
        folds=settings.folds,
    )
    scale = np.full(values.shape[1], 1 / root)
    scale[length] = choice.length_scale / np.sqrt(length.stop - length.start)

    def linear(scale: Array, penalty: float, *, controlled: bool = False) -> tuple[LinearHead, float]:
        beta = scale * fit(differences * scale, pairs.target, pairs.weight, penalty)
        raw = standard @ beta
        if controlled:
            beta[length] -= np.linalg.lstsq(standard[:, length], raw, rcond=None)[0]
            raw = standard @ beta
        unit = float(raw.std()) or 1.0
        tensors = {"weight": beta / spread / unit, "mean": mean, **limits}
        return LinearHead(tensors, length), unit

    head, unit = linear(scale, choice.penalty)
    controlled_head, controlled_unit = linear(scale, choice.penalty, controlled=True)
    only_length = np.zeros(values.shape[1])
    only_length[length] = 1.0
    length_head, _ = linear(only_length, _BASELINE_PENALTY)
    gains = {
        name: _loss_without(part, differences * scale, pairs, choice.penalty, settings.folds) - choice.loss
        for name, part in groups.items()
    }
    if settings.length_control:
        head, unit = controlled_head, controlled_unit
    return FittedHead(head, length_head, controlled_head, choice, choice.temperature * unit, gains)


def _loss_without(part: slice, differences: Array, pairs: Comparisons, penalty: float, folds: int) -> float:
    kept = np.delete(differences, np.arange(part.start, part.stop), axis=1)
    margins = out_of_fold(reduce_features(kept), pairs.target, pairs.weight, pairs.group, penalty, folds)
    temperature = calibrate(margins, pairs.target, pairs.weight)
    return log_loss(temperature * margins, pairs.target, pairs.weight)
