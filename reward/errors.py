"""Errors of the reward room.

RewardError
├── TooFewPairs          the snapshot has too little to train or to judge on (more votes help, not a retry)
├── PairsInvalid         a file of pairs can't be read, or has nothing to judge by (no retry)
├── RewardModelUnknown   no reward model has this id (no retry)
└── RewardModelMismatch  the artifact was made for another base model or by another layout (no retry)
    └── FeaturesDiffer   the features at hand are not those of the artifact (load it with its own)
"""


class RewardError(Exception):
    """Base of the room."""


class TooFewPairs(RewardError):
    """Not enough decided pairs, on the training side or on the held-out side."""


class PairsInvalid(RewardError):
    """A file of pairs can't be read; the message says where and why."""


class RewardModelUnknown(RewardError):
    """No reward model has this id, or none is released yet."""


class RewardModelMismatch(RewardError):
    """A stored reward model does not fit the base model or this version's features."""


class FeaturesDiffer(RewardModelMismatch):
    """The extractor at hand has other features than the stored reward model."""
