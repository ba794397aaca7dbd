"""Bradley–Terry by L2-penalised logistic regression on differences of features.

P(a beats b) = sigmoid(score(a) − score(b)), score linear in the features (Bradley & Terry 1952). Penalty and
the length features' scale are chosen by cross-validation in which the votes on one prompt stay together.
Deterministic: folds follow the order of the prompts' numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize, minimize_scalar
from scipy.special import expit

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Choice:
    """What cross-validation chose. out_of_fold: float [n_pairs], score differences of pairs not fitted on.

    loss: weighted nats per vote of those. temperature: factor that calibrates a score difference.
    """

    penalty: float
    length_scale: float
    loss: float
    temperature: float
    out_of_fold: Array


def log_loss(margin: Array, target: Array, weight: Array) -> float:
    """Weighted mean of the cross-entropy of sigmoid(margin) against target, in nats."""
    return float(np.average(np.logaddexp(0.0, margin) - target * margin, weights=weight))


def fit(differences: Array, target: Array, weight: Array, penalty: float, offset: Array | float = 0.0) -> Array:
    """Weights [n_features] that minimise Σ weight × cross-entropy + penalty/2 × |weights|².

    differences: [n_pairs, n_features], chosen minus rejected; target: [n_pairs], 1 or 0.5 for a tie.
    offset: [n_pairs], a margin that is there already.
    """

    def objective(beta: Array) -> tuple[float, Array]:
        margin = differences @ beta + offset
        losses = np.logaddexp(0.0, margin) - target * margin
        gradient = differences.T @ (weight * (expit(margin) - target)) + penalty * beta
        return float(weight @ losses + penalty / 2 * beta @ beta), gradient

    start = np.zeros(differences.shape[1])
    return np.asarray(minimize(objective, start, jac=True, method="L-BFGS-B", options={"maxiter": 500}).x)


def reduce_features(differences: Array) -> Array:
    """The same pairs in at most n_pairs dimensions: a rotation, which an L2 penalty does not feel."""
    if differences.shape[1] <= differences.shape[0]:
        return differences
    left, sizes, _ = np.linalg.svd(differences, full_matrices=False)
    return np.asarray(left * sizes)


def folds_of(group: npt.NDArray[np.int64], folds: int) -> list[npt.NDArray[np.bool_]]:
    """Masks [n_pairs] of the test side of each fold; a group is on one side only."""
    return [mask for mask in (group % folds == number for number in range(folds)) if mask.any() and not mask.all()]


def out_of_fold(
    differences: Array, target: Array, weight: Array, group: npt.NDArray[np.int64], penalty: float, folds: int
) -> Array:
    """Score differences [n_pairs], each from a fit that saw no vote on that prompt."""
    margins = np.zeros(len(target))
    for test in folds_of(group, folds):
        beta = fit(differences[~test], target[~test], weight[~test], penalty)
        margins[test] = differences[test] @ beta
    return margins


def choose(
    hidden: Array,
    length: Array,
    target: Array,
    weight: Array,
    group: npt.NDArray[np.int64],
    *,
    penalties: Sequence[float],
    length_scales: Sequence[float],
    folds: int,
) -> Choice:
    """Penalty and length scale with the least out-of-fold loss.

    hidden, length: [n_pairs, …] differences of standardised features, each divided by the root of its width.
    """
    best: Choice | None = None
    for length_scale in length_scales:
        both = reduce_features(np.hstack([hidden, length_scale * length]))
        for penalty in penalties:
            margins = out_of_fold(both, target, weight, group, penalty, folds)
            temperature = calibrate(margins, target, weight)
            # Compared after calibration: a strong penalty shrinks the margins but can rank as well.
            loss = log_loss(temperature * margins, target, weight)
            if best is None or loss < best.loss:
                best = Choice(penalty, length_scale, loss, temperature, margins)
    assert best is not None
    return best


def calibrate(margins: Array, target: Array, weight: Array) -> float:
    """The factor on score differences that makes sigmoid(factor × margin) fit the votes best (0.01 to 100)."""
    result = minimize_scalar(
        lambda power: log_loss(10.0**power * margins, target, weight), bounds=(-2.0, 2.0), method="bounded"
    )
    return float(10.0**result.x)
