"""A trained reward model, ready to score.

On disk: `reward.safetensors` (a linear map over the features), the fine-tuned network if there is one, and the
manifest; nothing is pickled. Loading refuses another base model. Scores of one artifact mean nothing beside those of
another.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file
from scipy.special import expit
from transformers import AutoTokenizer

from reward.errors import FeaturesDiffer, RewardModelMismatch
from reward.features import LENGTH, FeatureExtractor, Features
from reward.head import LinearHead
from reward.pairs import Messages
from reward.settings import RewardSettings
from storage.artifacts import digest, read_manifest

LAYOUT = 2
WEIGHTS = "reward.safetensors"


def base_digest(base_model: Path) -> str:
    """sha256 (hex) over the base model's weight files."""
    return digest(base_model.glob("*.safetensors"))


def template_digest(base_model: Path) -> str:
    """sha256 (hex) of the chat template that prompts and answers are put into."""
    template = AutoTokenizer.from_pretrained(base_model).chat_template or ""
    return hashlib.sha256(template.encode()).hexdigest()


class Extractor(Protocol):
    """What a head sees of answers: a FeatureExtractor's or a TunedExtractor's.

    groups: name → columns. truncated: how many texts lost the front of their prompt.
    """

    groups: dict[str, slice]

    @property
    def truncated(self) -> int: ...

    def __call__(
        self, prompts: list[Messages], answers: list[str], progress: Callable[[float], None] = ...
    ) -> Features: ...


class RewardModel:
    """Scores answers. preference_scale: sigmoid(preference_scale × (score a − score b)) is P(a is preferred)."""

    def __init__(self, extractor: Extractor, head: LinearHead, manifest: dict[str, Any]) -> None:
        self.extractor = extractor
        self.head = head
        self.manifest = manifest
        self.preference_scale: float = manifest["preference_scale"]

    @classmethod
    def load(cls, path: Path, base_model: Path, extractor: Extractor | None = None) -> "RewardModel":
        """Read a complete artifact. `extractor` saves loading the backbone a second time.

        Raises RewardModelMismatch when it was made for another base model or layout, or when the extractor
        given has other features, and storage.errors.ArtifactIncomplete when it was not written to the end.
        """
        manifest = read_manifest(path)
        if manifest.get("layout") != LAYOUT:
            raise RewardModelMismatch(f"{path}: layout {manifest.get('layout')!r}; this version reads {LAYOUT}")
        actual = base_digest(base_model)
        if manifest["base_digest"] != actual:
            raise RewardModelMismatch(
                f"{path} was trained on base {manifest['base_digest'][:12]}, but {base_model} is {actual[:12]}"
            )
        settings = RewardSettings.model_validate(manifest["settings"])
        if extractor is None:
            extractor = extractor_of(path, base_model, settings)
        groups = {name: [part.start, part.stop] for name, part in extractor.groups.items()}
        if groups != manifest["groups"]:
            raise FeaturesDiffer(f"{path} has features {manifest['groups']}, the extractor has {groups}")
        return cls(extractor, LinearHead(load_file(path / WEIGHTS), extractor.groups[LENGTH]), manifest)

    def score(self, prompts: list[Messages], answers: list[str]) -> npt.NDArray[np.float32]:
        """float32 [n], mean 0 and standard deviation 1 over the training answers."""
        return self.head(self.extractor(prompts, answers))

    def uncertainty(self, prompts: list[Messages], answers: list[str]) -> npt.NDArray[np.float32]:
        """float32 [n]: how far the ensemble's heads disagree about each score, a standard deviation in its unit."""
        return self.head.uncertainty(self.extractor(prompts, answers))

    def prefers(self, prompts: list[Messages], first: list[str], second: list[str]) -> npt.NDArray[np.float64]:
        """float64 [n]: the calibrated probability that people prefer `first`."""
        margin = self.score(prompts, first).astype(np.float64) - self.score(prompts, second)
        return np.asarray(expit(self.preference_scale * margin))


def extractor_of(path: Path, base_model: Path, settings: RewardSettings) -> Extractor:
    """The extractor of the artifact `path`."""
    if settings.mode == "frozen":
        return FeatureExtractor(base_model, settings)
    from reward.tuned import TunedExtractor

    return TunedExtractor.load(path, base_model, settings)
