"""Train a reward model on a frozen snapshot: a linear head on features of the base as it is, or of a fine-tuned
network.

Guarantees: the head never sees a held-out prompt, neither in fitting, nor in choosing the penalty, nor in
calibrating; the artifact is written whole or not at all. Does not decide about release: reward.gate does.
"""

import importlib.metadata
import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from reward.baselines import word_margins
from reward.errors import FeaturesDiffer, RewardModelMismatch, TooFewPairs
from reward.evaluation import Interval, calibration_error, clustered_mean, correct, correlation
from reward.features import LENGTH, FeatureExtractor, Features
from reward.head import FittedHead, adopt_head, fit_head
from reward.judging import Evaluation, judge
from reward.pairs import Comparisons, PairLike, compare
from reward.report import RewardReport
from reward.scoring import LAYOUT, WEIGHTS, Extractor, RewardModel, base_digest, template_digest
from reward.settings import RewardSettings
from reward.strips import ChatSequences
from reward.tricks import TrickResult, try_tricks
from reward.tuned import TunedExtractor
from reward.tuning import tune
from storage.artifacts import read_manifest, write_artifact

Array = npt.NDArray[np.float64]
Progress = Callable[[str, float], None]
_VERSIONS = ("flywheel", "torch", "transformers", "peft")


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

    learnt = (_frozen if settings.mode == "frozen" else _tuned)(
        train_pairs, heldout_pairs, base_model, out, settings, snapshot.snapshot_id, progress
    )
    extractor, fitted, heldout = learnt.extractor, learnt.fitted, learnt.heldout
    feature_seconds = learnt.feature_seconds

    margins = heldout.margins(fitted.head)
    group = heldout.decided_group
    right = correct(margins)
    right_by_length = correct(heldout.margins(fitted.length_head))
    accuracy = clustered_mean(right, group, settings.confidence)
    by_length = clustered_mean(right_by_length, group, settings.confidence)
    gain = clustered_mean(right - right_by_length, group, settings.confidence)
    digest = base_digest(base_model)
    tokens = heldout.features[:, extractor.groups[LENGTH].start].astype(np.float64)
    manifest = {
        "kind": "reward_model",
        "layout": LAYOUT,
        "reward_model_id": out.name,
        "snapshot_id": snapshot.snapshot_id,
        "base_digest": digest,
        "chat_template_digest": template_digest(base_model),
        "previous": previous.name if previous else None,
        "settings": settings.model_dump(mode="json"),
        "groups": {name: [part.start, part.stop] for name, part in extractor.groups.items()},
        "preference_scale": fitted.preference_scale,
        "versions": {name: importlib.metadata.version(name) for name in _VERSIONS},
    }
    model = RewardModel(extractor, fitted.head, manifest)
    by_words = clustered_mean(
        correct(word_margins(train_pairs, heldout_pairs, settings.folds)), group, settings.confidence
    )
    report = RewardReport(
        reward_model_id=out.name,
        mode=settings.mode,
        epochs=learnt.epochs,
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
        linear_accuracy=by_words.mean,
        linear_low=by_words.low,
        linear_high=by_words.high,
        plain_accuracy=float(correct(heldout.margins(fitted.plain_head)).mean()),
        plain_correlation=correlation(fitted.plain_head(heldout.features).astype(np.float64), tokens),
        controlled_accuracy=float(correct(heldout.margins(fitted.controlled_head)).mean()),
        controlled_correlation=correlation(fitted.controlled_head(heldout.features).astype(np.float64), tokens),
        calibration_error=calibration_error(fitted.preference_scale * margins),
        out_of_fold_loss=fitted.loss,
        group_gains=fitted.group_gains,
        penalty=fitted.choice.penalty if fitted.choice else None,
        length_scale=fitted.choice.length_scale if fitted.choice else None,
        evaluation=_evaluation(model, snapshot.heldout, heldout, settings),
        tricks=_tricks(model, heldout_pairs, settings, progress),
        counters=_counters(train_pairs, heldout_pairs, extractor),
        seconds=time.monotonic() - started,
        feature_seconds=feature_seconds,
        **_against_previous(previous, base_model, extractor, heldout, right, settings),
    )

    def fill(folder: Path) -> dict[str, Any]:
        save_file(fitted.head.tensors, folder / WEIGHTS)
        if isinstance(extractor, TunedExtractor):
            extractor.save(folder, base_model)
        return manifest | {"report": report.model_dump(mode="json"), "history": learnt.history}

    write_artifact(out, fill)
    if learnt.scratch is not None:
        shutil.rmtree(learnt.scratch)
    return report


@dataclass
class _Learnt:
    """What was learnt in one of the modes. scratch: a killed run's files, of no use any more."""

    extractor: Extractor
    fitted: FittedHead
    heldout: _Side
    feature_seconds: float
    epochs: float | None = None
    history: list[dict[str, float]] = field(default_factory=list)
    scratch: Path | None = None


def _frozen(
    train_pairs: Comparisons,
    heldout_pairs: Comparisons,
    base_model: Path,
    out: Path,
    settings: RewardSettings,
    snapshot_id: str,
    progress: Progress,
) -> _Learnt:
    started = time.monotonic()
    extractor = FeatureExtractor(base_model, settings)
    train, heldout = _extract(extractor, train_pairs, heldout_pairs, progress)
    feature_seconds = time.monotonic() - started
    progress("fitting the head", 0.0)
    fitted = fit_head(train.features, train_pairs, extractor.groups, settings)
    progress("fitting the head", 1.0)
    return _Learnt(extractor, fitted, heldout, feature_seconds)


def _tuned(
    train_pairs: Comparisons,
    heldout_pairs: Comparisons,
    base_model: Path,
    out: Path,
    settings: RewardSettings,
    snapshot_id: str,
    progress: Progress,
) -> _Learnt:
    scratch = out.with_name(f".{out.name}.tuning")
    encode = ChatSequences(base_model, settings.max_length)
    tuned = tune(train_pairs, base_model, scratch, settings, encode, snapshot_id, progress)
    started = time.monotonic()
    encode.truncated = 0
    extractor = TunedExtractor(tuned.network, encode, settings.tuning.strip_tokens)
    train, heldout = _extract(extractor, train_pairs, heldout_pairs, progress)
    weight = extractor.head_weight.detach().double().cpu().numpy()[0]
    fitted = adopt_head(weight, train.features, train_pairs, tuned.validation, extractor.groups, settings)
    return _Learnt(extractor, fitted, heldout, time.monotonic() - started, tuned.epochs, tuned.history, scratch)


def _evaluation(model: RewardModel, pairs: Sequence[PairLike], heldout: _Side, settings: RewardSettings) -> Evaluation:
    listed = compare([pair for pair in pairs if not pair.tie], tie_weight=0.0)
    places = {
        (group_prompt, answer): place
        for place, (group_prompt, answer) in enumerate(
            zip(map(json.dumps, heldout.pairs.prompts), heldout.pairs.answers, strict=True)
        )
    }
    keys = zip(map(json.dumps, listed.prompts), listed.answers, strict=True)
    return judge(model, pairs, listed, heldout.features[[places[key] for key in keys]], settings.confidence)


def _tricks(
    model: RewardModel, heldout: Comparisons, settings: RewardSettings, progress: Progress
) -> list[TrickResult]:
    """On the first answers that won a held-out vote, one a prompt."""
    winners = dict(zip(heldout.group[heldout.decided], heldout.chosen[heldout.decided], strict=True))
    places = list(winners.values())[: settings.trick_answers]
    if not places:
        return []
    progress("trying the cheapest tricks", 0.0)
    prompts, answers = [heldout.prompts[place] for place in places], [heldout.answers[place] for place in places]
    results = try_tricks(model, prompts, answers)
    progress("trying the cheapest tricks", 1.0)
    return results


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


def _extract(extractor: Extractor, train: Comparisons, heldout: Comparisons, progress: Progress) -> tuple[_Side, _Side]:
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
    extractor: Extractor,
    heldout: _Side,
    right: Array,
    settings: RewardSettings,
) -> dict[str, float]:
    if previous is None:
        return {}
    try:
        model = _load_previous(previous, base_model, extractor)
    except RewardModelMismatch:  # of another base or another version: there is nothing to compare with
        return {}
    features = heldout.features
    if model.extractor is not extractor:
        features = model.extractor(heldout.pairs.prompts, heldout.pairs.answers)
    margins = _Side(heldout.pairs, features).margins(model.head)
    earlier = correct(margins)
    gain = clustered_mean(right - earlier, heldout.decided_group, settings.confidence)
    return {
        "previous_accuracy": float(earlier.mean()),
        "previous_gain": gain.mean,
        "previous_gain_low": gain.low,
        "previous_gain_high": gain.high,
        "previous_disagreement": float((earlier != right).mean()),
    }


def _load_previous(previous: Path, base_model: Path, extractor: Extractor) -> RewardModel:
    """With the features at hand, if those are its own: only frozen ones can be."""
    if isinstance(extractor, FeatureExtractor) and read_manifest(previous).get("settings", {}).get("mode") == "frozen":
        try:
            return RewardModel.load(previous, base_model, extractor)
        except FeaturesDiffer:
            pass
    return RewardModel.load(previous, base_model)


def _counters(train: Comparisons, heldout: Comparisons, extractor: Extractor) -> dict[str, int]:
    counts = {f"train_{name}": value for name, value in train.counters.items()}
    counts |= {f"held_out_{name}": value for name, value in heldout.counters.items()}
    return counts | {"cut_prompts": extractor.truncated}
