"""Boundaries that a sum of centred observations passes at any time with a chance of at most alpha.

Howard, Ramdas, McAuliffe & Sekhon 2021, "Time-uniform, nonparametric, nonasymptotic confidence sequences" (HRMS below):
`s` is the sum, `v` its intrinsic time (a variance), both in the units of the data and their square. Each mixture's
exp(log_mixture(s, v)) is at most a supermartingale that begins at 1 when the sum is sub-psi for its psi; the bound is
the s at which it reaches 1/alpha (Ville's inequality). A mixture is tightest near the v_opt for which it was tuned
and valid at every v. All functions take arrays; a bound raises ValueError unless alpha lies between 0 and 1.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import special
from scipy.optimize import elementwise

_HALVINGS = 55
_PRECISION = 1e-11  # relative, of a bound
_TINY = 1e-250  # an incomplete gamma function below it is taken from another formula
_FRACTIONS = 100  # terms of that one


def normal_rho(v_opt: float, alpha_opt: float, *, one_sided: bool = False) -> float:
    """The tuning parameter at which the normal mixture is tightest at v_opt (HRMS §3.5); for the others it is near it.

    Raises ValueError unless v_opt > 0 and 0 < alpha_opt < 1 (one-sided: 1/2).
    """
    alpha = 2 * alpha_opt if one_sided else alpha_opt
    if not v_opt > 0 or not 0 < alpha < 1:
        raise ValueError(f"v_opt must be above 0 and alpha between 0 and 1: {v_opt}, {alpha_opt}")
    level = 2 * math.log(1 / alpha)
    return v_opt / (level + math.log1p(level))


@dataclass(frozen=True)
class TwoSidedNormal:
    """Sub-Gaussian sums, |s| (HRMS equation 14)."""

    rho: float

    def log_mixture(self, s: np.ndarray, v: np.ndarray) -> np.ndarray:
        """log m(s, v)."""
        return np.asarray(0.5 * np.log(self.rho / (v + self.rho)) + s**2 / (2 * (v + self.rho)))

    def bound(self, v: np.ndarray, alpha: float) -> np.ndarray:
        """The |s| that is passed with a chance of at most alpha: in closed form."""
        v = np.asarray(v, dtype=float)
        return np.asarray(np.sqrt((v + self.rho) * (np.log((v + self.rho) / self.rho) + 2 * _level(alpha))))


@dataclass(frozen=True)
class OneSidedNormal:
    """Sub-Gaussian sums, upper side (HRMS proposition 6)."""

    rho: float

    def log_mixture(self, s: np.ndarray, v: np.ndarray) -> np.ndarray:
        """log m(s, v)."""
        total = v + self.rho
        return np.asarray(
            0.5 * np.log(4 * self.rho / total) + s**2 / (2 * total) + special.log_ndtr(s / np.sqrt(total))
        )

    def bound(self, v: np.ndarray, alpha: float) -> np.ndarray:
        """The s that is passed with a chance of at most alpha."""
        return _solve(self.log_mixture, v, alpha)


@dataclass(frozen=True)
class GammaExponential:
    """Sub-exponential sums with scale c, upper side (HRMS proposition 9): the one for bounded data and their own
    variance.
    """

    rho: float
    c: float

    def log_mixture(self, s: np.ndarray, v: np.ndarray) -> np.ndarray:
        """log m(s, v)."""
        square = self.c**2
        shape, rate = (v + self.rho) / square, (self.c * s + v + self.rho) / square
        return np.asarray((self.c * s + v) / square + _log_gamma_part(shape, rate) - _log_gamma_part(*self._start))

    @property
    def _start(self) -> tuple[np.ndarray, np.ndarray]:
        ratio = np.asarray(self.rho / self.c**2)
        return ratio, ratio

    def bound(self, v: np.ndarray, alpha: float) -> np.ndarray:
        """The s that is passed with a chance of at most alpha."""
        return _solve(self.log_mixture, v, alpha)


@dataclass(frozen=True)
class GammaPoisson:
    """Sub-Poisson sums with scale c, upper side (HRMS proposition 10)."""

    rho: float
    c: float

    def log_mixture(self, s: np.ndarray, v: np.ndarray) -> np.ndarray:
        """log m(s, v)."""
        square = self.c**2
        shape, rate = (self.c * s + v + self.rho) / square, (v + self.rho) / square
        ratio = np.asarray(self.rho / square)
        return np.asarray(v / square + _log_upper_part(shape, rate) - _log_upper_part(ratio, ratio))

    def bound(self, v: np.ndarray, alpha: float) -> np.ndarray:
        """The s that is passed with a chance of at most alpha."""
        return _solve(self.log_mixture, v, alpha)


@dataclass(frozen=True)
class BetaBinomial:
    """Sums of observations in [-g, h] with mean 0 (sub-Bernoulli), one or both sides (HRMS propositions 7 and 8).

    r: tuning parameter, see `tuned`.
    """

    r: float
    g: float
    h: float
    one_sided: bool = False

    @classmethod
    def tuned(cls, v_opt: float, alpha_opt: float, g: float, h: float, *, one_sided: bool = False) -> "BetaBinomial":
        """Tightest near v_opt: as the normal mixture, less the variance g h of one observation."""
        rho = normal_rho(v_opt, alpha_opt, one_sided=one_sided)
        return cls(max(rho - g * h, 1e-3 * g * h), g, h, one_sided)

    def log_mixture(self, s: np.ndarray, v: np.ndarray) -> np.ndarray:
        """log m(s, v); s at most v / g. One-sided, far below 0 it may be minus infinity."""
        g, h, both = self.g, self.h, self.g + self.h
        likelihood = v / (g * h) * math.log(both) - (v + h * s) / (h * both) * math.log(g)
        likelihood = likelihood - (v - g * s) / (g * both) * math.log(h)
        after = self._log_beta((self.r + v - g * s) / (g * both), (self.r + v + h * s) / (h * both))
        before = self._log_beta(np.asarray(self.r / (g * both)), np.asarray(self.r / (h * both)))
        return np.asarray(likelihood + after - before)

    def _log_beta(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        whole = special.betaln(a, b)
        if not self.one_sided:
            return np.asarray(whole)
        with np.errstate(divide="ignore"):
            return np.asarray(whole + np.log(special.betainc(a, b, self.h / (self.g + self.h))))

    def bound(self, v: np.ndarray, alpha: float) -> np.ndarray:
        """The s that is passed with a chance of at most alpha; v / g, the largest that can be, where none is."""
        return _solve(self.log_mixture, v, alpha, np.asarray(v, dtype=float) / self.g)


def poly_stitching_bound(
    v: np.ndarray, alpha: float, v_min: float, c: float = 0.0, s: float = 1.4, eta: float = 2.0
) -> np.ndarray:
    """Bound for sub-gamma sums with scale c by polynomial stitching (HRMS theorem 1, equation 10).

    v_min: where it begins to be tight. s > 1, eta > 1: how epochs share alpha, and how fast they grow.
    """
    v = np.maximum(np.asarray(v, dtype=float), v_min)
    level = s * np.log(np.log(eta * v / v_min)) + math.log(float(special.zeta(s)) / (alpha * math.log(eta) ** s))
    k1, k2 = (eta**0.25 + eta**-0.25) / math.sqrt(2), (math.sqrt(eta) + 1) / 2
    return np.asarray(np.sqrt(k1**2 * v * level + (k2 * c * level) ** 2) + k2 * c * level)


def bernoulli_interval(
    successes: int, trials: int, alpha: float, t_opt: float, alpha_opt: float = 0.05
) -> tuple[float, float]:
    """(low, high) of a success rate, valid at all times at once: what the two-sided beta-binomial mixture does not
    refute.

    t_opt: trials at which it is tightest. Raises ValueError for counts that can't be.
    """
    if not 0 <= successes <= trials or trials < 1:
        raise ValueError(f"{successes} successes of {trials} trials")

    def refutes(rate: np.ndarray) -> np.ndarray:
        variance = rate * (1 - rate)
        evidence = [
            BetaBinomial.tuned(t_opt * one * (1 - one), alpha_opt, one, 1 - one).log_mixture(
                np.asarray(successes - one * trials), np.asarray(trials * spread)
            )
            for one, spread in zip(rate, variance, strict=True)
        ]
        return np.asarray(evidence) > math.log(1 / alpha)

    share, edge = successes / trials, 1e-12
    low, high = np.array([edge]), np.array([1 - edge])
    lower = float(_bisect(refutes, low, np.array([share]))[0]) if successes and refutes(low)[0] else 0.0
    upper = float(_bisect(refutes, high, np.array([share]))[0]) if successes < trials and refutes(high)[0] else 1.0
    return lower, upper


def _solve(
    log_mixture: Callable[[np.ndarray, np.ndarray], np.ndarray],
    v: np.ndarray,
    alpha: float,
    most: np.ndarray | None = None,
) -> np.ndarray:
    """The s at which the mixture reaches 1 / alpha, on all v at once (Chandrupatla 1997); `most` where it does not."""
    v = np.asarray(v, dtype=float)
    level = _level(alpha)
    if most is None:
        most = np.sqrt(v) + 1.0
        while np.any(low := log_mixture(most, v) < level):
            most = np.where(low, 2 * most, most)
    tolerances = {"xatol": 0.0, "xrtol": _PRECISION, "fatol": _PRECISION}
    found = elementwise.find_root(
        lambda s, v: log_mixture(s, v) - level, (np.zeros_like(most), most), args=(v,), tolerances=tolerances
    )
    return np.where(found.success, found.x, most)


def _level(alpha: float) -> float:
    if not 0 < alpha < 1:
        raise ValueError(f"alpha, the chance to pass the bound, lies between 0 and 1, not {alpha:g}")
    return math.log(1 / alpha)


def _bisect(holds: Callable[[np.ndarray], np.ndarray], inside: np.ndarray, outside: np.ndarray) -> np.ndarray:
    """Where `holds`, true at `inside`, turns false on the way to `outside`."""
    for _ in range(_HALVINGS):
        middle = (inside + outside) / 2
        true = holds(middle)
        inside, outside = np.where(true, middle, inside), np.where(true, outside, middle)
    return inside


def _log_gamma_part(shape: np.ndarray, rate: np.ndarray) -> np.ndarray:
    """Log of the integral of u^(shape - 1) e^(-rate u) from 0 to 1; the rate may be 0 or less (DLMF 8.5.1)."""
    shape, rate = np.broadcast_arrays(shape, rate)
    with np.errstate(invalid="ignore", divide="ignore"):
        part = special.gammainc(shape, rate)
        log = np.array(special.gammaln(shape) + np.log(part) - shape * np.log(rate))
        rest = ~(part > _TINY)
    a, b = shape[rest], rate[rest]
    log[rest] = np.log(special.hyp1f1(1.0, a + 1, b)) - b - np.log(a)
    return log


def _log_upper_part(shape: np.ndarray, rate: np.ndarray) -> np.ndarray:
    """Log of the integral of u^(shape - 1) e^(-rate u) from 1; the shape may be 0 or less (DLMF 8.9.2, even part)."""
    shape, rate = np.broadcast_arrays(shape, rate)
    with np.errstate(invalid="ignore", divide="ignore"):
        part = special.gammaincc(shape, rate)
        log = np.array(special.gammaln(shape) + np.log(part) - shape * np.log(rate))
        rest = ~(part > _TINY)
    a, b = shape[rest], rate[rest]
    fraction = np.zeros_like(b)
    for k in range(_FRACTIONS, 0, -1):
        fraction = k * (k - a) / (b + 2 * k + 1 - a - fraction)
    log[rest] = -b - np.log(b + 1 - a - fraction)
    return log
