"""Guardrails: what a candidate may not make worse, however well it is liked.

Pure functions of the arms' facts. Guarantees: a breach is told when it is sure beyond chance, looked at whenever (at
most alpha of candidates that stay within the limit are ever told to breach it). Trouble is counted in units that met
it, which are independent. Times and lengths are those of answers, taken as independent, and their intervals hold for
many answers (an asymptotic confidence sequence: Waudby-Smith, Arbour, Sinha, Kennedy & Ramdas 2021).
"""

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from rounds.evidence import ArmFacts
from rounds.statistics.mixtures import TwoSidedNormal, bernoulli_interval, normal_rho
from serving.experiment_plan import Guardrails

Verdict = Literal["kept", "breached", "open"]
_UNITS_OPT = 500.0


@dataclass(frozen=True)
class Finding:
    """One guardrail of one arm. value, low, high: difference of shares, or ratio of means; null without answers.

    limit: the largest allowed. verdict: `kept` and `breached` are sure beyond chance, `open` is neither yet.
    """

    arm: str
    guardrail: str
    control: float | None
    candidate: float | None
    value: float | None
    low: float | None
    high: float | None
    limit: float
    verdict: Verdict

    def as_json(self) -> dict[str, Any]:
        """For a report."""
        return asdict(self)


def check_guardrails(
    limits: Guardrails,
    arm: str,
    facts: tuple[ArmFacts, ArmFacts],
    units: tuple[int, int],
    alpha: float = 0.05,
) -> list[Finding]:
    """Each guardrail that is set. facts, units: the control's, then the arm's. alpha: chance of a false alarm, of
    each.
    """
    control, candidate = facts
    found = []
    for name, limit, counts in (
        ("error_rate", limits.error_rate, [(control.failing_units, units[0]), (candidate.failing_units, units[1])]),
        ("abort_rate", limits.abort_rate, [(control.leaving_units, units[0]), (candidate.leaving_units, units[1])]),
    ):
        if limit is not None:
            found.append(_rates(arm, name, limit, counts, alpha))
    for name, limit, means in (
        ("time_to_first_token", limits.time_to_first_token, [_first_token(facts) for facts in (control, candidate)]),
        ("length", limits.length, [_length(facts) for facts in (control, candidate)]),
    ):
        if limit is not None:
            found.append(_ratio(arm, name, limit, means, alpha, both_ways=name == "length"))
    return found


def _rates(arm: str, name: str, limit: float, counts: list[tuple[int, int]], alpha: float) -> Finding:
    """The rise of a share of units, each arm's share between bounds that hold at all times at alpha / 2."""
    if any(units == 0 for _, units in counts):
        return Finding(arm, name, None, None, None, None, None, limit, "open")
    (met, units), (candidate_met, candidate_units) = counts
    low, high = bernoulli_interval(min(met, units), units, alpha / 2, _UNITS_OPT)
    bounds = bernoulli_interval(min(candidate_met, candidate_units), candidate_units, alpha / 2, _UNITS_OPT)
    shares = met / units, candidate_met / candidate_units
    least, most = bounds[0] - high, bounds[1] - low
    verdict: Verdict = "breached" if least > limit else "kept" if most <= limit else "open"
    return Finding(arm, name, *shares, shares[1] - shares[0], least, most, limit, verdict)


def _ratio(
    arm: str,
    name: str,
    limit: float,
    means: list[tuple[int, float | None, float | None]],
    alpha: float,
    *,
    both_ways: bool,
) -> Finding:
    """The ratio of two means: the logarithm by the delta method, each arm at alpha / 2."""
    logs, radii = [], []
    for count, mean, deviation in means:
        if count < 2 or not mean or deviation is None:
            return Finding(arm, name, means[0][1], means[1][1], None, None, None, limit, "open")
        bound = TwoSidedNormal(normal_rho(_UNITS_OPT, alpha / 2)).bound(np.asarray(float(count)), alpha / 2)
        logs.append(math.log(mean))
        radii.append(deviation / mean * float(bound) / count)
    value, radius = logs[1] - logs[0], sum(radii)
    low, high, allowed = value - radius, value + radius, math.log(limit)
    too_low = both_ways and high < -allowed
    kept = high <= allowed and (not both_ways or low >= -allowed)
    verdict: Verdict = "breached" if low > allowed or too_low else "kept" if kept else "open"
    return Finding(arm, name, means[0][1], means[1][1], math.exp(value), _exp(low), _exp(high), limit, verdict)


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))


def _first_token(facts: ArmFacts) -> tuple[int, float | None, float | None]:
    return facts.first_token_n, facts.first_token_mean, facts.first_token_deviation


def _length(facts: ArmFacts) -> tuple[int, float | None, float | None]:
    return facts.length_n, facts.length_mean, facts.length_deviation
