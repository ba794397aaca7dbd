"""The head on top of the frozen features: a linear map, fitted to votes.

Guarantees: scores are standardised on the training answers (mean 0, standard deviation 1); a length beyond the
tails of the training answers counts as the tail's, in fitting and in scoring, so that no answer earns by
being shorter or longer than what raters have judged often enough.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
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

    tensors: `mean` and `weight` [n_features], `length_low` and `length_high` [n length features], and `ensemble`
    [n_heads, n_features], the weights of the heads that disagree where votes were few; all float64.
    """

    def __init__(self, tensors: dict[str, npt.NDArray[Any]], length: slice) -> None:
        self.tensors = tensors
        self.length = length

    def __call__(self, features: Features) -> npt.NDArray[np.float32]:
        """float32 [n] for features [n, n_features]."""
        return (self._centred(features) @ self.tensors["weight"]).astype(np.float32)

    def uncertainty(self, features: Features) -> npt.NDArray[np.float32]:
        """float32 [n]: standard deviation, over the heads of the ensemble, of the score; in the score's own unit."""
        return (self._centred(features) @ self.tensors["ensemble"].T).std(axis=1).astype(np.float32)

    def disagreement(self, first: Features, second: Features) -> npt.NDArray[np.float32]:
        """float32 [n]: the ensemble's standard deviation of the score difference of two answers."""
        difference = self._centred(first) - self._centred(second)
        return (difference @ self.tensors["ensemble"].T).std(axis=1).astype(np.float32)

    def _centred(self, features: Features) -> Array:
        values = features.astype(np.float64)
        low, high = self.tensors["length_low"], self.tensors["length_high"]
        values[:, self.length] = np.clip(values[:, self.length], low, high)
        return np.asarray(values - self.tensors["mean"])


@dataclass(frozen=True)
class FittedHead:
    """head: the model; length_head: the baseline that sees the length alone; controlled_head: the model less what its
    scores of the training answers owe, linearly, to their lengths; plain_head: the model without that.

    preference_scale: sigmoid(preference_scale × score difference) is the calibrated probability of a vote. loss: nats
    per vote that was not fitted on. choice: what cross-validation chose; null for a fine-tuned network's head.
    group_gains: group of features → nats per vote that the out-of-fold loss grows by without it.
    """

    head: LinearHead
    length_head: LinearHead
    controlled_head: LinearHead
    plain_head: LinearHead
    preference_scale: float
    loss: float
    choice: Choice | None = None
    group_gains: dict[str, float] = field(default_factory=dict)


def fit_head(features: Features, pairs: Comparisons, groups: dict[str, slice], settings: RewardSettings) -> FittedHead:
    """Fit a linear map of the features [n_answers, n_features] to the votes of `pairs`. Deterministic."""
    space = _Space(features, pairs, groups[LENGTH], settings)
    hidden, length = groups[LENGTH].start, groups[LENGTH]
    root = np.sqrt(hidden)
    narrow = np.sqrt(length.stop - length.start)
    choice = choose(
        space.differences[:, :hidden] / root,
        space.differences[:, length] / narrow,
        pairs.target,
        pairs.weight,
        pairs.group,
        penalties=settings.penalties,
        length_scales=settings.length_scales,
        folds=settings.folds,
    )
    scale = np.full(features.shape[1], 1 / root)
    scale[length] = choice.length_scale / narrow
    scaled = space.differences * scale
    beta = scale * fit(scaled, pairs.target, pairs.weight, choice.penalty)
    ensemble = [
        scale * fit(scaled, pairs.target, pairs.weight * times, choice.penalty)
        for times in _bootstrap(pairs.group, settings)
    ]
    gains = {
        name: _loss_without(part, scaled, pairs, choice.penalty, settings.folds) - choice.loss
        for name, part in groups.items()
    }
    return space.fitted(beta, np.stack(ensemble), choice.temperature, choice.loss, choice, gains)


def adopt_head(
    weight: Array,
    features: Features,
    pairs: Comparisons,
    unseen: npt.NDArray[np.bool_],
    groups: dict[str, slice],
    settings: RewardSettings,
) -> FittedHead:
    """The head of a fine-tuned network, `weight` [n hidden features], standardised and calibrated.

    unseen: bool [n_pairs], those that the network was not tuned on; they calibrate (all do where there are none).
    The ensemble's heads start at this one, and each goes where its bootstrap sample of the prompts pulls it.
    """
    space = _Space(features, pairs, groups[LENGTH], settings)
    hidden = slice(0, groups[LENGTH].start)
    beta = np.zeros(features.shape[1])
    beta[hidden] = weight * space.spread[hidden]
    margins = space.differences @ beta
    used = unseen & pairs.decided if (unseen & pairs.decided).any() else pairs.decided
    temperature = calibrate(margins[used], pairs.target[used], pairs.weight[used])
    loss = log_loss(temperature * margins[used], pairs.target[used], pairs.weight[used])
    scale = np.zeros(features.shape[1])
    scale[hidden] = 1 / np.sqrt(hidden.stop)
    scaled = space.differences * scale
    penalty = float(np.median(settings.penalties))
    ensemble = [
        beta + scale * fit(scaled, pairs.target, pairs.weight * times, penalty, offset=margins)
        for times in _bootstrap(pairs.group, settings)
    ]
    return space.fitted(beta, np.stack(ensemble), temperature, loss)


class _Space:
    """Features of the training answers, lengths cut at the tails, standardised; and their differences by pair."""

    def __init__(self, features: Features, pairs: Comparisons, length: slice, settings: RewardSettings) -> None:
        values = features.astype(np.float64)
        tails = (settings.length_tail, 1 - settings.length_tail)
        low, high = np.quantile(values[:, length], tails, axis=0)
        values[:, length] = np.clip(values[:, length], low, high)
        self.pairs, self.length, self.settings = pairs, length, settings
        self.limits = {"length_low": low, "length_high": high}
        self.mean, self.spread = values.mean(0), values.std(0)
        self.spread[self.spread == 0] = 1.0
        self.standard = (values - self.mean) / self.spread
        self.differences = self.standard[pairs.chosen] - self.standard[pairs.rejected]

    def fitted(
        self,
        beta: Array,
        ensemble: Array,
        temperature: float,
        loss: float,
        choice: Choice | None = None,
        gains: dict[str, float] | None = None,
    ) -> FittedHead:
        """Heads of the weights on standardised features, `beta` [n_features] and `ensemble` [n_heads, n_features]."""
        plain, unit = self._head(beta, ensemble)
        controlled, controlled_unit = self._head(self._controlled(beta), self._controlled(ensemble.T).T)
        only_length = np.zeros(len(beta))
        only_length[self.length] = 1.0
        by_length = only_length * fit(
            self.differences * only_length, self.pairs.target, self.pairs.weight, _BASELINE_PENALTY
        )
        length_head, _ = self._head(by_length, by_length[None])
        head, unit = (controlled, controlled_unit) if self.settings.length_control else (plain, unit)
        return FittedHead(head, length_head, controlled, plain, temperature * unit, loss, choice, gains or {})

    def _head(self, beta: Array, ensemble: Array) -> tuple[LinearHead, float]:
        unit = float((self.standard @ beta).std()) or 1.0
        tensors = {
            "weight": beta / self.spread / unit,
            "ensemble": ensemble / self.spread / unit,
            "mean": self.mean,
            **self.limits,
        }
        return LinearHead(tensors, self.length), unit

    def _controlled(self, beta: Array) -> Array:
        """Weights whose scores of the training answers are, linearly, independent of the lengths."""
        without = beta.copy()
        without[self.length] -= np.linalg.lstsq(self.standard[:, self.length], self.standard @ beta, rcond=None)[0]
        return without


def _bootstrap(group: npt.NDArray[np.int64], settings: RewardSettings) -> Iterator[Array]:
    """How often each pair counts, [n_pairs] for each head: a Poisson number a prompt (Oza & Russell 2001)."""
    generator = np.random.default_rng(settings.tuning.seed)
    numbers = np.unique(group, return_inverse=True)[1]
    for _ in range(settings.heads):
        yield generator.poisson(1.0, int(numbers.max()) + 1)[numbers].astype(float)


def _loss_without(part: slice, differences: Array, pairs: Comparisons, penalty: float, folds: int) -> float:
    kept = np.delete(differences, np.arange(part.start, part.stop), axis=1)
    margins = out_of_fold(reduce_features(kept), pairs.target, pairs.weight, pairs.group, penalty, folds)
    temperature = calibrate(margins, pairs.target, pairs.weight)
    return log_loss(temperature * margins, pairs.target, pairs.weight)
