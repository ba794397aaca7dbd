"""Strengths from paired comparisons: Bradley-Terry, with three ways to treat ties.

The chance that i beats j depends on their strengths p alone:
- `half`: p_i / (p_i + p_j); a tie is half a win for each (Bradley & Terry 1952).
- `davidson`: proportional to p_i, p_j and nu sqrt(p_i p_j) for win, loss and tie (Davidson 1970).
- `rao-kupper`: win p_i / (p_i + theta p_j), loss p_j / (p_j + theta p_i), tie the rest, theta >= 1 (Rao & Kupper 1967).
Fitted by maximum likelihood (Newton's method on log strengths, for which all three are concave or nearly so). Data that
leave strengths undefined are refused by name, unless a ridge makes them finite. Guarantees nothing about why a model
wins; see `rounds.statistics.lengths` for length.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import optimize, sparse
from scipy.sparse import csgraph

Ties = Literal["half", "davidson", "rao-kupper"]
TIES: tuple[Ties, ...] = ("half", "davidson", "rao-kupper")
_GRADIENT = 1e-10  # of the log-likelihood for each unit of weight, at the maximum
_STEPS = 200


class Undefined(ValueError):
    """The data leave some strengths undefined: the best-fitting ones are infinite."""


@dataclass(frozen=True)
class Comparisons:
    """Who met whom. a, b: int64[n], indices of models, a != b; outcome: float64[n], 1 where a won, 0 where b did, .5
    for a tie; weight: float64[n], above 0; models: their names, k of them.
    """

    models: Sequence[str]
    a: np.ndarray
    b: np.ndarray
    outcome: np.ndarray
    weight: np.ndarray

    def __post_init__(self) -> None:
        if not len(self.a) == len(self.b) == len(self.outcome) == len(self.weight):
            raise ValueError("a, b, outcome and weight must be of one length")
        if len(self.a) == 0:
            raise ValueError("there are no comparisons")
        if np.any(self.a == self.b):
            raise ValueError("a model can't be compared with itself")
        if not np.all(np.isfinite(self.weight)) or np.any(self.weight <= 0):
            raise ValueError("weights must be finite and above 0")

    @property
    def wins(self) -> np.ndarray:
        """float64[k, k]: the weight with which the row's model beat the column's."""
        return np.asarray(self._table(1.0) + self._table(0.0).T)

    @property
    def tied(self) -> np.ndarray:
        """float64[k, k], symmetric: the weight with which the two tied."""
        one_way = self._table(0.5)
        return np.asarray(one_way + one_way.T)

    def _table(self, outcome: float) -> np.ndarray:
        chosen = self.outcome == outcome
        size = len(self.models)
        cells = self.a[chosen] * size + self.b[chosen]
        return np.bincount(cells, self.weight[chosen], size * size).reshape(size, size)


@dataclass(frozen=True)
class Fit:
    """Fitted strengths.

    log_strengths: float64[k], natural logarithms with mean 0, so strengths have geometric mean 1. tie_parameter: nu or
    theta, null for `half`. log_likelihood: natural; half a win counts as half a term.
    """

    ties: Ties
    ridge: float
    log_strengths: np.ndarray
    tie_parameter: float | None
    log_likelihood: float

    @property
    def strengths(self) -> np.ndarray:
        """float64[k], geometric mean 1."""
        return np.asarray(np.exp(self.log_strengths))

    @property
    def parameters(self) -> np.ndarray:
        """float64[k] or [k + 1]: log strengths, then log nu or log (theta - 1) where ties have a finite one."""
        inner = _inner(self.ties, self.tie_parameter)
        return self.log_strengths if inner is None else np.append(self.log_strengths, inner)

    def win_probability(self, first: int, second: int) -> float:
        """The chance (0 to 1) that the first beats the second, given that they don't tie."""
        wins, losses, _ = probabilities(
            self.ties, self.log_strengths[[first]], self.log_strengths[[second]], self.inner
        )
        return float(wins[0] / (wins[0] + losses[0]))

    @property
    def inner(self) -> float | None:
        """log nu, or log (theta - 1); null where there is no tie parameter or it is at its boundary."""
        return _inner(self.ties, self.tie_parameter)


def elo(log_strength: np.ndarray) -> np.ndarray:
    """Points as chess players read them: 1000 for the average model, 400 more for ten times the strength."""
    return np.asarray(1000 + 400 / np.log(10) * log_strength)


def fit_strengths(data: Comparisons, ties: Ties = "half", ridge: float = 0.0) -> Fit:
    """Maximum likelihood, scaled to geometric mean 1.

    ridge: half of it times the sum of squared log strengths is taken from the log-likelihood, as if each had been seen
    before with a normal prior of variance 1/ridge. Raises Undefined without a ridge unless the models can't be split
    into two groups of which one never won or tied against the other (Ford 1957).
    """
    if ties not in TIES:
        raise ValueError(f"ties are treated as one of {', '.join(TIES)}, not {ties}")
    if not ridge >= 0:
        raise ValueError(f"a ridge is not negative: {ridge}")
    wins, tied = data.wins, data.tied
    if ridge == 0:
        _check_defined(data.models, wins, tied, ties)
    if ties == "half":
        wins, tied = wins + tied / 2, np.zeros_like(tied)
    has_ties = bool(tied.any())
    if has_ties and not wins.any():
        raise Undefined("every comparison is a tie: that says nothing about ties beside wins; use --ties half")
    size = len(data.models)
    start = np.zeros(size + has_ties)
    parameters = _maximise(start, ties, wins, tied, ridge)
    logs = parameters[:size] - parameters[:size].mean()
    inner = float(parameters[size]) if has_ties else None
    return Fit(
        ties=ties,
        ridge=ridge,
        log_strengths=logs,
        tie_parameter=_outer(ties, inner),
        log_likelihood=-_loss(parameters, ties, wins, tied, 0.0)[0],
    )


def probabilities(
    ties: Ties, first: np.ndarray, second: np.ndarray, inner: float | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(win, loss, tie) of each pair of log strengths, float64[n] each; inner as in Fit."""
    shape = np.broadcast(first, second).shape
    if ties == "half" or inner is None:
        win = _sigmoid(first - second)
        return win, 1 - win, np.zeros(shape)
    if ties == "davidson":
        top = np.maximum(np.maximum(first, second), inner + (first + second) / 2)
        parts = [np.exp(first - top), np.exp(second - top), np.exp(inner + (first + second) / 2 - top)]
        total = parts[0] + parts[1] + parts[2]
        return parts[0] / total, parts[1] / total, parts[2] / total
    log_theta = np.logaddexp(0.0, inner)
    win, loss = _sigmoid(first - second - log_theta), _sigmoid(second - first - log_theta)
    return win, loss, np.expm1(2 * log_theta) * win * loss


def scores(fit: Fit, data: Comparisons) -> np.ndarray:
    """float64[n, p]: the gradient of each row's log-likelihood in `Fit.parameters`, weights not applied."""
    size, rows = len(data.models), np.arange(len(data.a))
    first, second = fit.log_strengths[data.a], fit.log_strengths[data.b]
    d_first, d_second, d_inner = _row_gradients(fit.ties, first, second, data.outcome, fit.inner)
    gradient = np.zeros((len(data.a), size + (fit.inner is not None)))
    gradient[rows, data.a] = d_first
    gradient[rows, data.b] = d_second
    if fit.inner is not None:
        gradient[:, size] = d_inner
    return gradient


def information(fit: Fit, data: Comparisons) -> np.ndarray:
    """float64[p, p]: minus the Hessian of the penalised log-likelihood at the fit, in `Fit.parameters`."""
    wins, tied = data.wins, data.tied
    if fit.ties == "half":
        wins, tied = wins + tied / 2, np.zeros_like(tied)
    return _hessian(fit.parameters, fit.ties, wins, tied, fit.ridge)


def _maximise(start: np.ndarray, ties: Ties, wins: np.ndarray, tied: np.ndarray, ridge: float) -> np.ndarray:
    """Newton's method with the flat direction (all strengths times one factor) held, and halved steps where needed."""
    size = len(wins)
    total = wins.sum() + tied.sum() / 2
    parameters = start
    loss, gradient = _loss(parameters, ties, wins, tied, ridge)
    for _ in range(_STEPS):
        if np.max(np.abs(gradient)) <= _GRADIENT * total:
            return parameters
        hessian = _hessian(parameters, ties, wins, tied, ridge)
        hessian[:size, :size] += total / size  # lifts the flat direction, and leaves the others as they are
        hessian[np.diag_indices_from(hessian)] += 1e-12 * total
        step = np.linalg.solve(hessian, gradient)
        length = 1.0
        while length > 1e-9:
            tried = parameters - length * step
            tried_loss, tried_gradient = _loss(tried, ties, wins, tied, ridge)
            if tried_loss <= loss + 1e-13 * abs(loss):
                break
            length /= 2
        else:
            break
        parameters, loss, gradient = tried, tried_loss, tried_gradient
    found = optimize.minimize(
        _loss, parameters, args=(ties, wins, tied, ridge), jac=True, method="BFGS", options={"gtol": 1e-9 * total}
    )
    if np.max(np.abs(_loss(found.x, ties, wins, tied, ridge)[1])) > 1e-6 * total:
        raise Undefined("the strengths do not converge: the data hardly determine them; use a ridge")
    return np.asarray(found.x)


def _loss(
    parameters: np.ndarray, ties: Ties, wins: np.ndarray, tied: np.ndarray, ridge: float
) -> tuple[float, np.ndarray]:
    """Minus the penalised log-likelihood of the tables, and its gradient."""
    size = len(wins)
    logs, inner = parameters[:size], float(parameters[size]) if len(parameters) > size else None
    first, second = logs[:, None], logs[None, :]
    win, _, tie = probabilities(ties, first, second, inner)
    value = _weighted_log(wins, win)
    gradient = np.zeros_like(parameters)
    d_first, d_second, d_inner = _row_gradients(ties, first, second, np.ones((size, size)), inner)
    gradient[:size] = (wins * d_first).sum(axis=1) + (wins * d_second).sum(axis=0)
    if inner is not None:
        value += _weighted_log(tied, tie) / 2
        t_first, t_second, t_inner = _row_gradients(ties, first, second, np.full((size, size), 0.5), inner)
        gradient[:size] += ((tied * t_first).sum(axis=1) + (tied * t_second).sum(axis=0)) / 2
        gradient[size] = (wins * d_inner).sum() + (tied * t_inner).sum() / 2
    centred = logs - logs.mean()
    value -= ridge / 2 * float(centred @ centred)
    gradient[:size] -= ridge * centred
    return -value, -gradient


def _row_gradients(
    ties: Ties, first: np.ndarray, second: np.ndarray, outcome: np.ndarray, inner: float | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The derivatives of each outcome's log-probability in the first's log strength, the second's, and `inner`."""
    win, loss, tie = probabilities(ties, first, second, inner)
    if ties == "half" or inner is None:
        return outcome - win, win - outcome, np.zeros(np.shape(outcome))
    is_tie = outcome == 0.5
    if ties == "davidson":
        points = np.where(is_tie, 0.5, outcome)
        d_first = points - (win + tie / 2)
        return d_first, -d_first, is_tie - tie
    # Rao-Kupper: log tie = log(theta^2 - 1) + log win + log loss, and d log win = (1 - win) in (first - second - log
    # theta)
    slope = _sigmoid(np.asarray(inner))  # of log theta in inner
    up, down = np.where(outcome == 0.0, 0.0, 1 - win), np.where(outcome == 1.0, 0.0, 1 - loss)
    theta_squared = np.exp(2 * np.logaddexp(0.0, inner))
    d_log_theta = np.where(is_tie, 2 * theta_squared / (theta_squared - 1), 0.0) - up - down
    return up - down, down - up, d_log_theta * slope


def _hessian(parameters: np.ndarray, ties: Ties, wins: np.ndarray, tied: np.ndarray, ridge: float) -> np.ndarray:
    """Of `_loss`: exact for `half`, central differences of the exact gradient where ties have a parameter."""
    size = len(wins)
    if len(parameters) == size:
        win = _sigmoid(parameters[:, None] - parameters[None, :])
        weight = (wins + wins.T) * win * (1 - win)
        hessian = np.diag(weight.sum(axis=1)) - weight
        return np.asarray(hessian + ridge * (np.eye(size) - 1 / size))
    hessian = np.empty((len(parameters), len(parameters)))
    for index in range(len(parameters)):
        step = np.zeros(len(parameters))
        step[index] = 1e-5
        after = _loss(parameters + step, ties, wins, tied, ridge)[1]
        before = _loss(parameters - step, ties, wins, tied, ridge)[1]
        hessian[index] = (after - before) / 2e-5
    return np.asarray((hessian + hessian.T) / 2)


def _check_defined(models: Sequence[str], wins: np.ndarray, tied: np.ndarray, ties: Ties) -> None:
    """Raises Undefined unless everyone can be reached from everyone along wins and ties."""
    beaten = wins + tied > 0
    weakly, island = csgraph.connected_components(sparse.csr_matrix(beaten), connection="weak")
    if weakly > 1:
        one = ", ".join(_names(models, island == island[0]))
        other = ", ".join(_names(models, island != island[0]))
        raise Undefined(f"no comparison connects {one} with {other}: compare them, rate them apart, or use a ridge")
    strongly, group = csgraph.connected_components(sparse.csr_matrix(beaten), connection="strong")
    if strongly > 1:
        # A group that nobody outside beat or tied.
        top = next(one for one in range(strongly) if not beaten[np.ix_(group != one, group == one)].any())
        names = ", ".join(_names(models, group == top))
        raise Undefined(f"{names} never lost to any other model: the strength is infinite; use a ridge")


def _names(models: Sequence[str], chosen: np.ndarray) -> list[str]:
    found = [model for model, is_chosen in zip(models, chosen, strict=True) if is_chosen]
    return found if len(found) <= 5 else [*found[:5], f"{len(found) - 5} more"]


def _inner(ties: Ties, outer: float | None) -> float | None:
    if outer is None or ties == "half":
        return None
    value = outer if ties == "davidson" else outer - 1
    return float(np.log(value)) if value > 0 else None


def _outer(ties: Ties, inner: float | None) -> float | None:
    if ties == "half":
        return None
    if inner is None:  # no tie at all: at the boundary, where the model is Bradley and Terry's
        return 0.0 if ties == "davidson" else 1.0
    return float(np.exp(inner)) if ties == "davidson" else 1 + float(np.exp(inner))


def _weighted_log(weight: np.ndarray, probability: np.ndarray) -> float:
    chosen = weight > 0
    return float(np.sum(weight[chosen] * np.log(probability[chosen])))


def _sigmoid(value: np.ndarray) -> np.ndarray:
    return np.asarray(np.exp(-np.logaddexp(0.0, -value)))
