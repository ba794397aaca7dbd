"""Length-controlled win rate: what would be preferred if the two answers were of one length?

A logistic regression of each preference on a constant and on the difference of lengths, squeezed by tanh, as in
AlpacaEval 2 (Dubois, Galambosi, Liang & Hashimoto 2024, §3; without its term for the difficulty of the item, which
needs many models). Describes; it does not prove that length is the cause.
"""

from dataclasses import dataclass

import numpy as np

_RIDGE = 1e-6  # for each row: keeps the coefficients finite when one side always wins
_STEPS = 100


@dataclass(frozen=True)
class LengthControlled:
    """rate: 0 to 1, at equal length; error: its standard error. plain: the mean preference.

    length_effect: the change of the log odds when the difference goes from 0 to one standard deviation (tanh 1 = .76 of
    the coefficient); null when lengths never differ, then rate is plain.
    """

    rate: float
    error: float
    plain: float
    length_effect: float | None


def length_controlled_rate(
    preference: np.ndarray, length: np.ndarray, reference_length: np.ndarray, clusters: np.ndarray | None = None
) -> LengthControlled:
    """Of one model against one reference.

    preference: float64[n], 0 to 1, 1 where the model's answer is preferred; length, reference_length: float64[n] in any
    unit; clusters: int64[n], rows of one item or rater. The error is cluster-robust, by the delta method. Raises
    ValueError for fewer than two rows, or preferences outside of 0 to 1.
    """
    if len(preference) < 2 or not len(preference) == len(length) == len(reference_length):
        raise ValueError("a length-controlled rate needs at least two rows, each with a preference and two lengths")
    if np.any(~((preference >= 0) & (preference <= 1))):
        raise ValueError("preferences lie between 0 and 1")
    difference = np.asarray(length, dtype=float) - np.asarray(reference_length, dtype=float)
    spread = float(np.std(difference))
    squeezed = np.tanh(difference / spread) if spread > 0 else np.zeros(len(difference))
    design = np.column_stack([np.ones(len(preference)), squeezed]) if spread > 0 else np.ones((len(preference), 1))
    coefficients, curvature = _logistic(design, preference)
    rate = 1 / (1 + float(np.exp(-coefficients[0])))
    residual = preference - 1 / (1 + np.exp(-design @ coefficients))
    label = np.arange(len(preference)) if clusters is None else np.unique(clusters, return_inverse=True)[1]
    groups = int(label.max()) + 1
    sums = np.stack([np.bincount(label, design[:, j] * residual, groups) for j in range(design.shape[1])], axis=1)
    bread = np.linalg.inv(curvature)
    variance = bread @ (sums.T @ sums) @ bread * groups / max(1, groups - 1)
    return LengthControlled(
        rate=rate,
        error=rate * (1 - rate) * float(np.sqrt(variance[0, 0])),
        plain=float(np.mean(preference)),
        length_effect=float(coefficients[1] * np.tanh(1.0)) if spread > 0 else None,
    )


def _logistic(design: np.ndarray, outcome: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The coefficients that fit best (a quasi-likelihood, so outcomes may be fractions), and the curvature there."""
    penalty = _RIDGE * len(outcome) * np.eye(design.shape[1])
    coefficients = np.zeros(design.shape[1])
    curvature = penalty
    for _ in range(_STEPS):
        chance = 1 / (1 + np.exp(-design @ coefficients))
        curvature = design.T @ (design * (chance * (1 - chance))[:, None]) + penalty
        step = np.linalg.solve(curvature, design.T @ (outcome - chance) - penalty @ coefficients)
        coefficients = coefficients + np.clip(step, -2, 2)
        if np.max(np.abs(step)) < 1e-10:
            break
    return coefficients, curvature
