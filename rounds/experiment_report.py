"""The report of an experiment: one dictionary, ready for JSON, made from the store whenever somebody asks.

Guarantees: it may be looked at as often as one likes (intervals and evidence hold at all times at once, alpha shared
by the arms); people's votes alone decide, judges' are shown apart; what can't be concluded is said.
"""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from rounds.evidence import (
    ArmFacts,
    Metric,
    Period,
    Votes,
    metric_of,
    read_arms,
    read_earlier,
    read_judged,
    read_periods,
    read_votes,
)
from rounds.experiments import Tally, evidence_path, tally
from rounds.guardrails import check_guardrails
from rounds.statistics.adjust import cuped, prediction_powered_difference, prediction_powered_mean
from rounds.statistics.anytime import log_evidence_better, log_evidence_worse, sample_ratio_evidence, win_share_bounds
from rounds.statistics.fixed import Estimate, difference, wilson_interval
from rounds.statistics.planning import days_until, minimum_detectable_effect, votes_anytime
from rounds.statistics.sequences import difference_sequence
from rounds.words import conclude
from serving.experiment_plan import Arm, Experiment
from serving.experiments import changes, get_experiment
from storage.postgres import Connection

SAMPLE_RATIO_LIMIT = 0.001
_POINTS = 200
_LOOKS = 5000  # at the evidence; fewer than all make it no less valid
_SEGMENT_UNITS = 20
_SEGMENTS = 12
_JUDGED = 20


def make_report(connection: Connection, experiment_id: str) -> dict[str, Any]:
    """Everything that the store says about the experiment now. Raises ExperimentUnknown.

    `connection` must be at the start of a transaction, and is left in one: all of it is as of one moment.
    """
    connection.execute("set transaction isolation level repeatable read, read only")
    connection.execute("set local work_mem = '64MB'")
    experiment = get_experiment(connection, experiment_id)
    history = changes(connection, experiment_id)
    facts = read_arms(connection, experiment)
    periods = read_periods(connection, experiment, history)
    units = {arm.name: sum(period.counts[place] for period in periods) for place, arm in enumerate(experiment.arms)}
    name = experiment.plan.metric
    metric = metric_of("thumb" if name == "preference" else name)
    earlier = read_earlier(connection, experiment, metric)
    votes = read_votes(connection, experiment, metric, with_units=bool(earlier))
    alpha = experiment.plan.alpha / (len(experiment.arms) - 1)
    weights = [change["detail"]["weights"] for change in history if change["detail"].get("weights")]
    judged = read_judged(connection, experiment, metric)
    exposed = sum(units.values())
    further = [
        (one, read_votes(connection, experiment, one))
        for one in map(metric_of, experiment.plan.further_metrics)
        if one.name != metric.name
    ]
    compared = []
    for place, arm in enumerate(experiment.arms[1:], start=1):
        both = experiment.control.name, arm.name
        findings = check_guardrails(
            experiment.plan.guardrails,
            arm.name,
            (facts[both[0]], facts[both[1]]),
            (units[both[0]], units[both[1]]),
            experiment.plan.alpha,
        )
        compared.append(
            {
                "arm": arm.name,
                "side_by_side": _side_by_side(connection, experiment, arm, alpha),
                "effect": _effect(experiment, metric, votes, place, weights, exposed, alpha, earlier),
                "further": [
                    _effect(experiment, one, told, place, weights, exposed, alpha, {}) for one, told in further
                ],
                "segments": _segments(votes, place),
                "judge": _judge(judged, experiment.control.name, arm.name),
                "guardrails": [finding.as_json() for finding in findings],
            }
        )
    report = {
        "experiment_id": experiment_id,
        "alias": experiment.alias,
        "state": experiment.state,
        "metric": name,
        "unit": experiment.plan.unit,
        "alpha": experiment.plan.alpha,
        "started_at": _iso(experiment.started_at),
        "stopped_at": _iso(experiment.stopped_at),
        "as_of": datetime.now(UTC).isoformat(),
        "is_aa": experiment.same_everywhere,
        "higher_is_better": metric.higher_is_better or name == "preference",
        "arms": [
            _arm(arm, units[arm.name], facts[arm.name], votes, place) for place, arm in enumerate(experiment.arms)
        ],
        "sample_ratio": _sample_ratio(periods),
        "compared": compared,
        "changes": [{**change, "changed_at": change["changed_at"].isoformat()} for change in history],
    }
    report["sentence"], report["cannot"] = conclude(report)
    return report


def _arm(arm: Arm, units: int, facts: ArmFacts, votes: Votes, place: int) -> dict[str, Any]:
    values = votes.value[votes.arm == place]
    mean = float(values.mean()) if len(values) else None
    low, high = (None, None) if mean is None else wilson_interval_of(mean, len(values))
    return {
        "name": arm.name,
        "checkpoint_id": arm.checkpoint_id,
        "weight": arm.weight,
        "units": units,
        "answers": facts.answers,
        "fallbacks": facts.fallbacks,
        "error_rate": facts.failed / facts.answers if facts.answers else None,
        "abort_rate": facts.left / facts.answers if facts.answers else None,
        "time_to_first_token_median_s": facts.first_token_median,
        "time_to_first_token_p95_s": facts.first_token_p95,
        "mean_tokens": facts.length_mean,
        "voters": len(values),
        "vote_mean": mean,
        "vote_mean_low": low,
        "vote_mean_high": high,
    }


def wilson_interval_of(mean: float, count: int) -> tuple[float, float]:
    """Wilson's interval as if each vote were yes or no: for values within [0, 1] it is not too short."""
    successes = round(mean * count)
    return wilson_interval(successes, count)


def _sample_ratio(periods: Sequence[Period]) -> dict[str, Any]:
    """Whether as many units came to each arm as should, over all stretches between ramps, whenever somebody looks."""
    evidence = 0.0
    for period in periods:
        shares, counts = np.array(period.weights), np.array(period.counts)
        late = (shares == 0) & (counts <= 0.01 * counts.sum())  # of an arm that was just ramped to nothing
        evidence += float(sample_ratio_evidence(counts[~late], shares[~late])) if counts.any() else 0.0
    p_value = math.exp(-max(evidence, 0.0)) if any(any(period.counts) for period in periods) else None
    return {
        "p_value": p_value,
        "limit": SAMPLE_RATIO_LIMIT,
        "fits": p_value is None or p_value >= SAMPLE_RATIO_LIMIT,
        "periods": [{"counts": period.counts, "weights": period.weights} for period in periods],
    }


def _side_by_side(connection: Connection, experiment: Experiment, arm: Arm, alpha: float) -> dict[str, Any]:
    """Choices between answers of the arm and the control, shown together."""
    votes = tally(connection, experiment.experiment_id, arm.name, control=experiment.control.name)
    wins, losses = votes.wins, votes.losses
    low, high = win_share_bounds(wins, losses, alpha)
    share = wins / (wins + losses) if wins + losses else None
    return {
        "raters": len(votes.outcomes),
        "wins": wins,
        "losses": losses,
        "ties": votes.ties,
        "both_bad": votes.both_bad,
        "repeated": votes.repeated,
        "win_share": share,
        "low": low,
        "high": high,
        **_verdict(log_evidence_better(wins, losses), log_evidence_worse(wins, losses), alpha),
        "path": _thin(evidence_path(votes.outcomes, alpha)),
        "plan": _votes_ahead(experiment, votes, share, alpha),
    }


def _votes_ahead(experiment: Experiment, votes: Tally, share: float | None, alpha: float) -> dict[str, Any]:
    """How long until a decision, if the share of wins stays as it is seen; null when no one is ahead."""
    decided = votes.wins + votes.losses
    days = _days(experiment)
    rate = decided / days if days else 0.0
    ahead = None if share is None else max(share, 1 - share)
    if ahead is None or decided < 10 or not 0.505 < ahead < 1:
        return {"votes_per_day": rate, "votes_needed": None, "days_needed": None}
    needed = votes_anytime(ahead, alpha, most=10_000)
    left = days_until(max(0.0, needed - decided), rate)
    finite = np.isfinite(needed) and np.isfinite(left)
    return {"votes_per_day": rate, "votes_needed": needed if finite else None, "days_needed": left if finite else None}


def _effect(
    experiment: Experiment,
    metric: Metric,
    votes: Votes,
    place: int,
    weights: Sequence[dict[str, float]],
    exposed: int,
    alpha: float,
    earlier: dict[str, float],
) -> dict[str, Any] | None:
    """Votes on single answers: the arm less the control. Null before both arms have voters."""
    names = [arm.name for arm in experiment.arms]
    drawn = [w for w in weights if w[names[0]] > 0 and w[names[place]] > 0]  # both could be drawn then
    allowed = {(index, round(w[name], 9)) for w in drawn for index, name in enumerate(names)}
    usable = np.zeros(len(votes.arm), dtype=bool)
    for index, chance in allowed:
        usable |= (votes.arm == index) & (np.abs(votes.propensity - chance) < 1e-8)
    arm, value, propensity = votes.arm[usable], votes.value[usable], votes.propensity[usable]
    is_candidate, is_control = arm == place, arm == 0
    if not is_candidate.any() or not is_control.any():
        return None
    least = min(chance for index, chance in allowed if index in (0, place))
    sequence = difference_sequence(
        is_candidate, propensity, value, 2 * alpha, min(least, float(propensity.min())), metric.silent, is_control
    )
    looks = sequence.at(_places(len(value), _LOOKS))
    better, worse = float(looks.log_evidence().max()), float(looks.log_evidence(better=False).max())
    if not metric.higher_is_better:
        better, worse = worse, better
    shown = sequence.at(_places(len(value), _POINTS))
    told, low, high = shown.bounds()
    per_exposed = shown.at(np.array([-1])).bounds(float(exposed))
    enough = min(is_candidate.sum(), is_control.sum()) > 1
    fixed = difference(value[is_candidate], value[is_control]) if enough else None
    spread = float(np.std(value[is_candidate | is_control]))
    share = float(is_candidate.sum() / (is_candidate | is_control).sum())
    return {
        "metric": metric.name,
        "voters": len(value),
        "votes": votes.all_votes,
        "difference": float(told[-1]),
        "low": float(low[-1]),
        "high": float(high[-1]),
        "per_exposed": {
            name: float(bound[0]) for name, bound in zip(("difference", "low", "high"), per_exposed, strict=True)
        },
        **_verdict(better, worse, alpha),
        "path": [
            {"vote": int(n), "difference": float(d), "low": float(a), "high": float(b)}
            for n, d, a, b in zip(shown.count, told, low, high, strict=True)
        ],
        "fixed_horizon": _estimate(fixed),
        "planned_units": experiment.plan.planned_units,
        "cuped": _cuped(votes, usable, is_candidate, is_control, earlier),
        "minimum_detectable_effect": minimum_detectable_effect(len(value), spread, share) if spread else None,
    }


def _cuped(
    votes: Votes, usable: np.ndarray, is_candidate: np.ndarray, is_control: np.ndarray, earlier: dict[str, float]
) -> dict[str, Any] | None:
    """The difference adjusted for what units voted before; null where too few did."""
    if not earlier:
        return None
    names = [unit for unit, chosen in zip(votes.unit, usable, strict=True) if chosen]
    before = np.array([earlier.get(name, np.nan) for name in names])
    compared = is_candidate | is_control
    if np.isfinite(before[compared]).sum() < 10 or min(is_candidate.sum(), is_control.sum()) < 2:
        return None
    found = cuped(votes.value[usable][compared], before[compared], is_candidate[compared])
    return {**(_estimate(found.adjusted) or {}), "variance_removed": found.removed, "units_without": found.imputed}


def _segments(votes: Votes, place: int) -> list[dict[str, Any]]:
    """The difference within each group of answers with one tag; for a horizon fixed in advance, and not corrected for
    their number: to see where to look next.
    """
    rows_of: dict[str, list[int]] = defaultdict(list)
    for index, tags in enumerate(votes.segment):
        if tags:
            rows_of[tags].append(index)
    groups: dict[str, list[int]] = defaultdict(list)
    for tags, same in rows_of.items():
        for name, value in json.loads(tags).items():
            groups[f"{name}={value}"] += same
    frequent = Counter({name: len(same) for name, same in groups.items()}).most_common(_SEGMENTS)
    found = []
    for name, count in frequent:
        rows = np.array(groups[name])
        arm, value = votes.arm[rows], votes.value[rows]
        sides = value[arm == place], value[arm == 0]
        if count >= _SEGMENT_UNITS and min(map(len, sides)) > 1:
            estimate = difference(sides[0], sides[1])
            found.append({"segment": name, "voters": len(sides[0]) + len(sides[1]), **(_estimate(estimate) or {})})
    return found


def _judge(judged: dict[str, dict[str, np.ndarray]], control: str, arm: str) -> dict[str, Any] | None:
    """What people's votes say with the help of a judge's, where both voted on enough answers of both arms."""
    if any(min(len(judged[name]["human"]), len(judged[name]["rest"])) < _JUDGED for name in (control, arm)):
        votes = sum(len(part["same"]) + len(part["rest"]) for part in judged.values())
        return {"votes": votes, "difference": None} if votes else None
    powered = {
        name: prediction_powered_mean(judged[name]["human"], judged[name]["same"], judged[name]["rest"])
        for name in (control, arm)
    }
    both = prediction_powered_difference(powered[arm], powered[control])
    plain = {
        name: float(np.concatenate([judged[name]["same"], judged[name]["rest"]]).mean()) for name in (control, arm)
    }
    return {
        "votes": sum(len(part["same"]) + len(part["rest"]) for part in judged.values()),
        "difference": both.estimate.mean,
        "low": both.estimate.low,
        "high": both.estimate.high,
        "people_alone": _estimate(both.people),
        "judge_alone": plain[arm] - plain[control],
        "weight": both.weight,
    }


def _verdict(better: float, worse: float, alpha: float) -> dict[str, Any]:
    needed = float(np.log(1 / alpha))
    verdict = "better" if better >= needed else "worse" if worse >= needed else "open"
    finite = {"log_evidence_better": better, "log_evidence_worse": worse}
    return {
        **{name: value if np.isfinite(value) else None for name, value in finite.items()},
        "log_evidence_needed": needed,
        "verdict": verdict,
    }


def _estimate(found: Estimate | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {"difference": found.mean, "low": found.low, "high": found.high, "p_value": found.p_value}


def _places(count: int, most: int) -> np.ndarray:
    """At most so many positions, closer together at the beginning, the last one among them."""
    return np.unique(np.minimum(count - 1, (np.geomspace(1, count, most) - 1).round().astype(np.int64)))


def _thin(path: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [path[place] for place in _places(len(path), _POINTS)] if path else []


def _days(experiment: Experiment) -> float:
    if experiment.started_at is None:
        return 0.0
    return ((experiment.stopped_at or datetime.now(UTC)) - experiment.started_at).total_seconds() / 86_400


def _iso(time: datetime | None) -> str | None:
    return time.isoformat() if time else None
