"""Train a reward model on a frozen snapshot: features of the frozen backbone, a linear head on top.

Guarantees: the head never sees a held-out prompt, neither in fitting, nor in choosing the penalty, nor in
calibrating; the artifact is written whole or not at all. Does not decide about release: reward.gate does.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from reward.errors import RewardModelMismatch, TooFewPairs
from reward.evaluation import Interval, calibration_error, clustered_mean, correct, correlation
from reward.features import LENGTH, FeatureExtractor, Features
from reward.head import fit_head
from reward.pairs import Comparisons, PairLike, compare
from reward.report import RewardReport
from reward.scoring import LAYOUT, WEIGHTS, RewardModel, base_digest
from reward.settings import RewardSettings
from storage.artifacts import write_artifact

Array = npt.NDArray[np.float64]
Progress = Callable[[str, float], None]


class SnapshotLike(Protocol):
    """What training reads of feedback.snapshots.Snapshot."""

    snapshot_id: str

    @property
    def train(self) -> Sequence[PairLike]: ...

    @property
    def heldout(self) -> Sequence[PairLike]: ...


@dataclass
class _Side:
    """One side of the split: its comparisons, and float32 [n_answers, n_features]."""

    pairs: Comparisons
    features: Features

    def margins(self, head: Callable[[Features], npt.NDArray[Any]]) -> Array:
        """Score differences [n decided pairs] under `head`."""
        scores = np.asarray(head(self.features), np.float64)
        decided = self.pairs.decided
        return np.asarray(scores[self.pairs.chosen[decided]] - scores[self.pairs.rejected[decided]])

    @property
    def decided_group(self) -> npt.NDArray[np.int64]:
        return self.pairs.group[self.pairs.decided]


def train_reward_model(
    snapshot: SnapshotLike,
    base_model: Path,
    out: Path,
    settings: RewardSettings,
    previous: Path | None,
    progress: Progress = lambda what, share: None,
) -> RewardReport:
    """Fit on snapshot.train, measure on snapshot.heldout, write the artifact `out`, and report.

    previous: the artifact of the reward model in use, measured on the same held-out votes. Raises TooFewPairs
    below the settings' minima, and RewardModelMismatch when `previous` belongs to another base.
    """
    started = time.monotonic()
    train_pairs = compare(snapshot.train, settings.tie_weight)
    heldout_pairs = compare(snapshot.heldout, settings.tie_weight)
    _require(train_pairs, settings.minimum_train_pairs, "training")
    _require(heldout_pairs, settings.minimum_heldout_pairs, "held-out")

    extractor = FeatureExtractor(base_model, settings)
    train, heldout = _extract(extractor, train_pairs, heldout_pairs, progress)
    feature_seconds = time.monotonic() - started
    progress("fitting the head", 0.0)
    fitted = fit_head(train.features, train_pairs, extractor.groups, settings)
    progress("fitting the head", 1.0)

    margins = heldout.margins(fitted.head)
    group = heldout.decided_group
    right = correct(margins)
    right_by_length = correct(heldout.margins(fitted.length_head))
    accuracy = clustered_mean(right, group, settings.confidence)
    by_length = clustered_mean(right_by_length, group, settings.confidence)
    gain = clustered_mean(right - right_by_length, group, settings.confidence)
    digest = base_digest(base_model)
    tokens = heldout.features[:, extractor.groups[LENGTH].start].astype(np.float64)
    report = RewardReport(
        reward_model_id=out.name,
        snapshot_id=snapshot.snapshot_id,
        base_digest=digest,
        train_pairs=len(train_pairs.target),
        train_prompts=len(np.unique(train_pairs.group)),
        held_out_votes=len(margins),
        held_out_prompts=len(np.unique(group)),
        held_out_accuracy=accuracy.mean,
        held_out_low=accuracy.low,
        held_out_high=accuracy.high,
        length_only_accuracy=by_length.mean,
        length_only_low=by_length.low,
        length_only_high=by_length.high,
        gain_over_length=gain.mean,
        gain_over_length_low=gain.low,
        gain_over_length_high=gain.high,
        length_sentence=length_sentence(accuracy, by_length, gain),
        correlation_with_length=correlation(fitted.head(heldout.features).astype(np.float64), tokens),
        controlled_accuracy=float(correct(heldout.margins(fitted.controlled_head)).mean()),
        controlled_correlation=correlation(fitted.controlled_head(heldout.features).astype(np.float64), tokens),
        calibration_error=calibration_error(fitted.preference_scale * margins),
        out_of_fold_loss=fitted.choice.loss,
        group_gains=fitted.group_gains,
        penalty=fitted.choice.penalty,
        length_scale=fitted.choice.length_scale,
        counters=_counters(train_pairs, heldout_pairs, extractor),
        seconds=time.monotonic() - started,
        feature_seconds=feature_seconds,
        **_against_previous(previous, base_model, extractor, heldout, right, settings),
    )
    groups = {name: [part.start, part.stop] for name, part in extractor.groups.items()}

    def fill(folder: Path) -> dict[str, Any]:
        save_file(fitted.head.tensors, folder / WEIGHTS)
        return {
            "kind": "reward_model",
            "layout": LAYOUT,
            "reward_model_id": out.name,
            "snapshot_id": snapshot.snapshot_id,
            "base_digest": digest,
            "previous": previous.name if previous else None,
            "settings": settings.model_dump(mode="json"),
            "groups": groups,
            "preference_scale": fitted.preference_scale,
            "report": report.model_dump(mode="json"),
        }

    write_artifact(out, fill)
    return report


def length_sentence(accuracy: Interval, by_length: Interval, gain: Interval) -> str:
    """Whether length alone would explain the votes, in words."""
    numbers = f"length alone is right on {by_length}, the model on {accuracy}; the difference is {gain}"
    if gain.low > 0:
        return f"Length alone does not explain the votes: {numbers}."
    if by_length.low > 0.5:
        return f"Length alone would explain the votes nearly as well: {numbers}."
    return f"Length alone tells little, and the model is not better than it beyond noise: {numbers}."


def _require(pairs: Comparisons, minimum: int, side: str) -> None:
    decided = int(pairs.decided.sum())
    if decided < minimum:
        raise TooFewPairs(f"{decided} decided pairs on the {side} side; {minimum} are needed: collect more votes")


def _extract(
    extractor: FeatureExtractor, train: Comparisons, heldout: Comparisons, progress: Progress
) -> tuple[_Side, _Side]:
    """Both sides in one pass, so that batches of equal length fill well."""
    features = extractor(
        train.prompts + heldout.prompts,
        train.answers + heldout.answers,
        lambda share: progress("reading the answers", share),
    )
    border = len(train.answers)
    return _Side(train, features[:border]), _Side(heldout, features[border:])


def _against_previous(
    previous: Path | None,
    base_model: Path,
    extractor: FeatureExtractor,
    heldout: _Side,
    right: Array,
    settings: RewardSettings,
) -> dict[str, float]:
    if previous is None:
        return {}
    try:
        head = RewardModel.load(previous, base_model, extractor).head
    except RewardModelMismatch:  # of another base or other layers: there is nothing to compare with
        return {}
    earlier = correct(heldout.margins(head))
    gain = clustered_mean(right - earlier, heldout.decided_group, settings.confidence)
    return {
        "previous_accuracy": float(earlier.mean()),
        "previous_gain": gain.mean,
        "previous_gain_low": gain.low,
        "previous_gain_high": gain.high,
    }


def _counters(train: Comparisons, heldout: Comparisons, extractor: FeatureExtractor) -> dict[str, int]:
    counts = {f"train_{name}": value for name, value in train.counters.items()}
    counts |= {f"held_out_{name}": value for name, value in heldout.counters.items()}
    return counts | {"cut_prompts": extractor.truncated}
