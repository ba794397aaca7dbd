"""Which arm of an experiment a unit sees: a pure function, so nothing needs to be stored.

Guarantees: the same (salt, unit) always draws the same point in [0, 1); the candidate takes the points
below its weight. Hence a unit keeps its arm while the weight stays, and raising or lowering the weight
moves only the units between the two weights. Another salt draws independent points.
"""

import hashlib
from typing import Literal

Arm = Literal["control", "candidate"]


def point_of(salt: str, unit: str) -> float:
    """The unit's place in [0, 1): the first 53 bits of sha256 over (length of salt, salt, unit)."""
    digest = hashlib.sha256(f"{len(salt)}:{salt}{unit}".encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / (1 << 53)


def assign(salt: str, unit: str, candidate_weight: float) -> tuple[Arm, float]:
    """(arm, propensity): the arm of `unit`, and the probability (0 to 1) with which a unit gets that arm."""
    if point_of(salt, unit) < candidate_weight:
        return "candidate", candidate_weight
    return "control", 1 - candidate_weight
