"""What the store holds about an experiment, read in a few queries: units, answers, votes. Only reads.

Guarantees: only what the experiment drew counts (no pinned, forced or shadow answer); a unit counts once in an arm's
units, and once as a voter, by its first vote within the attribution window; people's votes and judges' are apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from serving.experiment_plan import Experiment
from storage.postgres import Connection

FAILED = ("upstream_error", "timeout")
LEFT = "client_abort"
_BUCKETS = 20.0  # of the time to the first token, for each factor of e: as the table has them


@dataclass(frozen=True)
class Metric:
    """A number that a vote gives a unit, 0 to 1. silent: the value of a unit that gave none.

    higher_is_better: false for signals of displeasure.
    """

    name: str
    condition: str
    value: str
    silent: float
    higher_is_better: bool = True


def metric_of(name: str) -> Metric:
    """The metric that a plan names; `preference` is no metric of single answers. Raises ValueError for that."""
    kind, _, detail = name.partition(":")
    if kind == "thumb":
        return Metric(name, "vote.kind = 'thumb'", "(vote.value = 'up')::int", 0.5)
    if kind == "rating":
        scaled = "(vote.value::float8 - vote.lowest) / (vote.highest - vote.lowest)"
        return Metric(name, "vote.kind = 'rating'", scaled, 0.5)
    if kind == "score":
        within = "vote.kind = 'score' and vote.name = %(name)s and vote.value::float8 between 0 and 1"
        return Metric(name, within, "vote.value::float8", 0.5)
    if kind == "signal":
        better = detail in ("copied", "shared")
        return Metric(name, "vote.kind = 'signal' and vote.name = %(name)s", "1", 0.0, better)
    raise ValueError(f"{name} is no metric of single answers")


@dataclass(frozen=True)
class ArmFacts:
    """What one arm showed. Times in seconds, length in tokens, of answers that came whole.

    failing_units, leaving_units: units that met an answer that failed, or left one. Means and deviations are null
    without an answer that has the number.
    """

    answers: int = 0
    fallbacks: int = 0
    failed: int = 0
    left: int = 0
    failing_units: int = 0
    leaving_units: int = 0
    first_token_n: int = 0
    first_token_mean: float | None = None
    first_token_deviation: float | None = None
    first_token_median: float | None = None
    first_token_p95: float | None = None
    length_n: int = 0
    length_mean: float | None = None
    length_deviation: float | None = None


@dataclass(frozen=True)
class Votes:
    """One vote of each unit, in the order of their times.

    arm: int64[n], position in the experiment's arms; propensity: float64[n], of that arm; value: float64[n], 0 to 1;
    time: float64[n], Unix seconds; unit: its name, where asked for; segment: for each the tags of its answer as JSON
    text, or null. all_votes: how many there were, later ones of a unit too.
    """

    arm: np.ndarray
    propensity: np.ndarray
    value: np.ndarray
    time: np.ndarray
    unit: list[str]
    segment: list[str | None]
    all_votes: int


@dataclass(frozen=True)
class Period:
    """Units that were first shown an answer while the weights stood: by arm; weights in the order of the arms."""

    counts: list[int]
    weights: list[float]


def read_arms(connection: Connection, experiment: Experiment) -> dict[str, ArmFacts]:
    """The facts of each arm, by its name."""
    parameters = {"experiment": experiment.experiment_id, "failed": list(FAILED), "left": LEFT}
    found = {arm.name: dict[str, Any]() for arm in experiment.arms}
    for row in connection.execute(_TROUBLE, parameters):
        if row["arm"] in found:
            found[row["arm"]] |= {"failing_units": row["failing"], "leaving_units": row["leaving"]}
    rows = connection.execute(_ANSWERS, parameters).fetchall()
    for name, facts in found.items():
        facts |= _answers([row for row in rows if row["arm"] == name])
    return {name: ArmFacts(**facts) for name, facts in found.items()}


def read_periods(connection: Connection, experiment: Experiment, changes: Sequence[dict[str, Any]]) -> list[Period]:
    """New units by arm, for each stretch of time in which the weights stood. changes: as the registry tells them."""
    weighted = [change for change in changes if change["detail"].get("weights")]
    names = [arm.name for arm in experiment.arms]
    rows = connection.execute(
        _PERIODS,
        {"experiment": experiment.experiment_id, "times": [change["changed_at"] for change in weighted[1:]]},
    ).fetchall()
    periods = []
    for place, change in enumerate(weighted):
        counts = {row["arm"]: row["units"] for row in rows if row["period"] == place}
        weights = change["detail"]["weights"]
        periods.append(Period([counts.get(name, 0) for name in names], [weights[name] for name in names]))
    return [period for period in periods if sum(period.counts)]


def read_votes(connection: Connection, experiment: Experiment, metric: Metric, *, with_units: bool = False) -> Votes:
    """People's first votes on what they were shown, one of each unit. with_units: name them."""
    names = [arm.name for arm in experiment.arms]
    query = _VOTES.format(condition=metric.condition, value=metric.value)
    row = connection.execute(
        query,
        {
            "experiment": experiment.experiment_id,
            "name": metric.name.partition(":")[2],
            "with_units": with_units,
            "window": experiment.plan.window_s,
            "arms": names,
        },
        binary=True,
    ).fetchone()
    assert row is not None, "an aggregate gives one row"
    columns = {name: row[name] or [] for name in ("arm", "propensity", "value", "time", "unit", "segment")}
    return Votes(
        arm=np.array(columns["arm"], dtype=np.int64),
        propensity=np.array(columns["propensity"], dtype=float),
        value=np.array(columns["value"], dtype=float),
        time=np.array(columns["time"], dtype=float),
        unit=columns["unit"],
        segment=columns["segment"],
        all_votes=row["all_votes"] or 0,
    )


def read_judged(connection: Connection, experiment: Experiment, metric: Metric) -> dict[str, dict[str, np.ndarray]]:
    """Votes of judges (source `ai`), by arm: `human` and `same` (float64[n]) where people voted on the answer,
    `rest`.
    """
    query = _JUDGED.format(condition=metric.condition, value=metric.value)
    rows = connection.execute(
        query, {"experiment": experiment.experiment_id, "name": metric.name.partition(":")[2]}
    ).fetchall()
    found: dict[str, dict[str, np.ndarray]] = {}
    for name in (arm.name for arm in experiment.arms):
        mine = [row for row in rows if row["arm"] == name]
        both = [row for row in mine if row["human"] is not None]
        found[name] = {
            "human": np.array([row["human"] for row in both], dtype=float),
            "same": np.array([row["judge"] for row in both], dtype=float),
            "rest": np.array([row["judge"] for row in mine if row["human"] is None], dtype=float),
        }
    return found


def read_earlier(connection: Connection, experiment: Experiment, metric: Metric) -> dict[str, float]:
    """The mean of each unit's votes of the same kind before the experiment began, by unit; only for units of users."""
    if experiment.plan.unit != "user":
        return {}
    query = _EARLIER.format(condition=metric.condition, value=metric.value)
    rows = connection.execute(
        query,
        {
            "experiment": experiment.experiment_id,
            "name": metric.name.partition(":")[2],
            "start": experiment.started_at,
        },
    )
    return {row["unit"]: float(row["earlier"]) for row in rows}


def _answers(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One arm's numbers, from its answers grouped by how they ended and how soon they began."""
    facts: dict[str, Any] = {
        "answers": sum(row["n"] for row in rows),
        "fallbacks": sum(row["fallbacks"] for row in rows),
        "failed": sum(row["n"] for row in rows if row["status"] in FAILED),
        "left": sum(row["n"] for row in rows if row["status"] == LEFT),
    }
    for name, count, total, squares in (
        ("first_token", "first_n", "first_sum", "first_squares"),
        ("length", "length_n", "length_sum", "length_squares"),
    ):
        n = sum(row[count] for row in rows)
        facts[f"{name}_n"] = n
        if n:
            mean = sum(row[total] or 0.0 for row in rows) / n
            spread = sum(row[squares] or 0.0 for row in rows) / n - mean**2
            facts |= {f"{name}_mean": mean, f"{name}_deviation": max(0.0, spread) ** 0.5}
    timed = sorted((row["bucket"], row["first_n"]) for row in rows if row["bucket"] is not None)
    if timed:
        buckets, counts = np.array(timed).T
        places = np.searchsorted(np.cumsum(counts), np.array([0.5, 0.95]) * counts.sum())
        median, p95 = np.exp((buckets[places] + 0.5) / _BUCKETS)
        facts |= {"first_token_median": float(median), "first_token_p95": float(p95)}
    return facts


_FIRSTS = """
select distinct on (unit) unit, arm, exposed_at from exposures
where experiment_id = %(experiment)s order by unit, exposed_at
"""
_PERIODS = f"""
select arm, width_bucket(exposed_at, %(times)s::timestamptz[]) as period, count(*) as units
from ({_FIRSTS}) as firsts group by arm, period
"""
_TROUBLE = """
select arm,
    count(distinct unit) filter (where status = any (%(failed)s)) as failing,
    count(distinct unit) filter (where status = %(left)s) as leaving
from exposures
where experiment_id = %(experiment)s and status not in ('completed', 'length')
group by arm
"""
_ANSWERS = """
select arm, status, first_token_bucket as bucket,
    count(*) as n, count(*) filter (where fallback) as fallbacks,
    count(time_to_first_token_s) as first_n,
    sum(time_to_first_token_s::float8) as first_sum,
    sum(time_to_first_token_s::float8 * time_to_first_token_s) as first_squares,
    count(completion_tokens) filter (where status in ('completed', 'length')) as length_n,
    sum(completion_tokens::float8) filter (where status in ('completed', 'length')) as length_sum,
    sum(completion_tokens::float8 * completion_tokens) filter (where status in ('completed', 'length')) as
length_squares from exposures
where experiment_id = %(experiment)s
group by arm, status, bucket
"""
_VOTES = """
with votes as materialized (
    select shown.unit, shown.arm, shown.propensity, ({value})::float8 as value, vote."time" as at, vote.event_id,
        shown.tags
    from feedback vote
    join exposures shown on shown.response_id = vote.response_id
    where shown.experiment_id = %(experiment)s and {condition} and vote.source = 'human'
      and vote."time" between shown.exposed_at and shown.exposed_at + make_interval(secs => %(window)s)
),
firsts as (select distinct on (unit) * from votes order by unit, at, event_id)
select
    array_agg(array_position(%(arms)s::text[], arm) - 1 order by at, event_id) as arm,
    array_agg(propensity::float8 order by at, event_id) as propensity,
    array_agg(value order by at, event_id) as value,
    array_agg(extract(epoch from at)::float8 order by at, event_id) as "time",
    case when %(with_units)s then array_agg(unit order by at, event_id) end as unit,
    array_agg(tags::text order by at, event_id) as segment,
    (select count(*) from votes) as all_votes
from firsts
where arm = any (%(arms)s::text[])
"""
_JUDGED = """
with judges as materialized (
    select shown.response_id, shown.arm, avg(({value})::float8) as value
    from feedback vote
    join exposures shown on shown.response_id = vote.response_id
    where shown.experiment_id = %(experiment)s and {condition} and vote.source = 'ai'
    group by shown.response_id, shown.arm
),
people as (
    select vote.response_id, avg(({value})::float8) as value
    from feedback vote
    where vote.response_id in (select response_id from judges) and {condition} and vote.source = 'human'
    group by vote.response_id
)
select judges.arm, judges.value as judge, people.value as human
from judges left join people using (response_id)
"""
_EARLIER = """
select answer."user" as unit, avg(({value})::float8) as earlier
from feedback vote
join interactions answer on answer.response_id = vote.response_id
where vote."time" < %(start)s and {condition} and vote.source = 'human' and answer."user" is not null
  and exists (
    select from exposures shown where shown.experiment_id = %(experiment)s and shown.unit = answer."user"
  )
group by answer."user"
"""
