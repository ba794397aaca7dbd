"""A trained reward model, ready to score.

On disk: `reward.safetensors` (a linear map over the features) and the manifest; nothing is pickled.
Loading refuses another base model. Scores of one artifact mean nothing beside those of another.
"""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file
from scipy.special import expit

from reward.errors import RewardModelMismatch
from reward.features import LENGTH, FeatureExtractor
from reward.head import LinearHead
from reward.pairs import Messages
from reward.settings import RewardSettings
from storage.artifacts import digest, read_manifest

LAYOUT = 1
WEIGHTS = "reward.safetensors"


def base_digest(base_model: Path) -> str:
    """sha256 (hex) over the base model's weight files."""
    return digest(base_model.glob("*.safetensors"))


class RewardModel:
    """Scores answers. preference_scale: sigmoid(preference_scale × (score a − score b)) is P(a is preferred)."""

    def __init__(self, extractor: FeatureExtractor, head: LinearHead, manifest: dict[str, Any]) -> None:
        self.extractor = extractor
        self.head = head
        self.manifest = manifest
        self.preference_scale: float = manifest["preference_scale"]

    @classmethod
    def load(cls, path: Path, base_model: Path, extractor: FeatureExtractor | None = None) -> "RewardModel":
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
        extractor = extractor or FeatureExtractor(base_model, settings)
        groups = {name: [part.start, part.stop] for name, part in extractor.groups.items()}
        if groups != manifest["groups"]:
            raise RewardModelMismatch(f"{path} has features {manifest['groups']}, the extractor has {groups}")
        return cls(extractor, LinearHead(load_file(path / WEIGHTS), extractor.groups[LENGTH]), manifest)

    def score(self, prompts: list[Messages], answers: list[str]) -> npt.NDArray[np.float32]:
        """float32 [n], mean 0 and standard deviation 1 over the training answers."""
        return self.head(self.extractor(prompts, answers))

    def prefers(self, prompts: list[Messages], first: list[str], second: list[str]) -> npt.NDArray[np.float64]:
        """float64 [n]: the calibrated probability that people prefer `first`."""
        margin = self.score(prompts, first).astype(np.float64) - self.score(prompts, second)
        return np.asarray(expit(self.preference_scale * margin))
