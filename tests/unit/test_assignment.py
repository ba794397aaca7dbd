"""Laws of assignment: who sees which arm of which experiment, and that little moves when something changes."""

import hashlib
import itertools
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import stats

from serving.assignment import (
    NOBODY,
    SPACE,
    Allocation,
    allocate,
    assign,
    check_allocation,
    owner_at,
    point_of,
    share_of,
)
from serving.errors import NotFound, Overloaded
from serving.experiment_plan import Arm, Plan, candidate_start
from serving.routing import RoutingTable, Units
from tests.helpers.serving import BASE, CANDIDATE, build_experiment, build_experiments, build_table

MILLION = 1_000_000
OTHER = "flash-r0002-000000"
shares = st.dictionaries(st.sampled_from("abcde"), st.floats(0, 1), max_size=5).map(
    lambda drawn: {name: share / max(1.0, sum(drawn.values())) for name, share in drawn.items()}
)


@cache
def points(salt: str) -> np.ndarray:
    """Where a million units fall (int64, one each)."""
    return np.fromiter((point_of(salt, f"user-{number}") for number in range(MILLION)), dtype=np.int64, count=MILLION)


def owners(allocation: Allocation, at: np.ndarray) -> np.ndarray:
    """The owners of many points at once; `owner_at` is the law, this is its copy for arrays."""
    names = np.array([owner or "" for _, owner in allocation])
    return names[np.searchsorted([end for end, _ in allocation], at, side="right")]


def moved(before: Allocation, after: Allocation) -> float:
    """The part of the line (0 to 1) that went to another owner."""
    ends = sorted({end for end, _ in (*before, *after)})
    stretches = zip([0, *ends], ends, strict=False)
    changed = (end - begin for begin, end in stretches if owner_at(before, begin) != owner_at(after, begin))
    return sum(changed) / SPACE


def units(user: str | None = None, session_id: str | None = None, response_id: str = "r") -> Units:
    return Units(user, session_id, response_id)


@pytest.mark.parametrize("weights", [(0.5, 0.5), (0.9, 0.1), (0.2, 0.3, 0.5), (0.97, 0.01, 0.02)])
def a_million_units_are_divided_by_the_weights(weights: Sequence[float]) -> None:
    allocation = allocate({f"arm-{number}": weight for number, weight in enumerate(weights)})
    seen = Counter(owners(allocation, points("salt")).tolist())
    counts = [seen[f"arm-{number}"] for number in range(len(weights))]
    assert stats.chisquare(counts, np.array(weights) * MILLION).pvalue > 0.001
    sample = range(0, MILLION, 997)
    assert [assign(allocation, "salt", f"user-{number}") for number in sample] == [
        str(owner) for owner in owners(allocation, points("salt")[::997])
    ]


def a_raised_weight_moves_only_the_units_that_must_move() -> None:
    before = allocate({"control": 0.9, "candidate": 0.1})
    after = allocate({"control": 0.6, "candidate": 0.4}, before)
    old, new = owners(before, points("salt")), owners(after, points("salt"))
    assert not np.any((old == "candidate") & (new == "control"))
    assert abs(np.mean(old != new) - 0.3) < 0.002


def an_added_arm_moves_no_unit_beyond_its_own_share() -> None:
    before = allocate({"control": 0.5, "candidate": 0.5})
    after = allocate({"control": 0.4, "candidate": 0.4, "third": 0.2}, before)
    old, new = owners(before, points("salt")), owners(after, points("salt"))
    assert set(new[old != new].tolist()) == {"third"}
    assert abs(np.mean(old != new) - 0.2) < 0.002


def two_salts_are_independent() -> None:
    allocation = allocate({"control": 0.5, "candidate": 0.5})
    first, second = (owners(allocation, points(salt)) == "candidate" for salt in ("salt", "another"))
    table = [[np.sum(first & second), np.sum(first & ~second)], [np.sum(~first & second), np.sum(~first & ~second)]]
    assert stats.chi2_contingency(table).pvalue > 0.001


@given(st.lists(shares, min_size=1, max_size=6))
@example([{"a": 0.5, "c": 0.5}, {"c": 0.5}, {"a": 0.5}])
def every_change_gives_each_its_share_and_moves_the_least_that_can_be(history: list[dict[str, float]]) -> None:
    before = NOBODY
    for wanted in history:
        after = allocate(wanted, before)
        needed = 0.0
        for name in {*wanted, *(owner for _, owner in before if owner)}:
            assert share_of(after, name) == pytest.approx(wanted.get(name, 0.0), abs=1e-9)
            needed += max(0.0, share_of(after, name) - share_of(before, name))
        freed = max(0.0, share_of(after, None) - share_of(before, None))
        assert moved(before, after) == pytest.approx(needed + freed, abs=1e-9)
        assert check_allocation([list(stretch) for stretch in after]) == after
        before = after


@given(st.text(), st.text())
def the_point_of_a_unit_is_the_start_of_its_digest(salt: str, unit: str) -> None:
    digest = hashlib.sha256(f"{len(salt)}:{salt}{unit}".encode()).digest()
    assert point_of(salt, unit) == int.from_bytes(digest[:8], "big") >> 11 < SPACE


@pytest.mark.parametrize("wrong", [{"a": 0.7, "b": 0.4}, {"a": -0.1}, {"a": float("nan")}])
def bad_shares_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="shares"):
        allocate(wrong)


@pytest.mark.parametrize("wrong", [[], [[5, "a"]], [[SPACE, 3]], [[9, "a"], [4, "b"], [SPACE, None]]])
def a_bad_allocation_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="allocation"):
        check_allocation(wrong)


def table_of(*experiments: Any, **overrides: Any) -> RoutingTable:
    active = {BASE: 1, CANDIDATE: 2, OTHER: 3}
    servable = dict.fromkeys(active, BASE)
    unit = overrides.pop("unit", "user")
    values = {"active": active, "servable": servable, **build_experiments(*experiments, unit=unit), **overrides}
    return build_table(**values)


def an_arm_that_cannot_be_served_falls_back_and_keeps_its_units() -> None:
    whole = table_of(build_experiment())
    broken = table_of(build_experiment(), servable={BASE: BASE})
    with pytest.raises(Overloaded):
        broken.route(CANDIDATE, units("u"))
    for number in range(100):
        intended, got = (table.route("flash", units(f"u{number}")) for table in (whole, broken))
        assert (got.arm, got.propensity, got.experiment_id) == (intended.arm, 0.5, "exp-1")
        assert (got.checkpoint_id, got.fallback) == (BASE, intended.arm == "candidate")
    with pytest.raises(NotFound):
        whole.route("nothing", units("u"))


def a_pinned_request_is_never_exposed_to_an_experiment() -> None:
    table = table_of(build_experiment())
    route = table.route(BASE, units("u"))
    assert route.pinned
    assert (route.experiment_id, route.arm, route.propensity) == (None, None, None)
    exposed = table.route("flash", units("u"))
    assert not exposed.pinned
    assert (exposed.experiment_id, exposed.propensity) == ("exp-1", 0.5)


def a_tester_always_sees_the_arm_and_is_not_counted() -> None:
    table = table_of(build_experiment(plan=Plan(testers={"eve": "candidate", "abe": "control"})))
    for user, checkpoint_id in (("eve", CANDIDATE), ("abe", BASE)):
        route = table.route("flash", units(user))
        assert (route.checkpoint_id, route.propensity, route.experiment_id) == (checkpoint_id, None, "exp-1")


def two_experiments_in_a_namespace_never_share_a_unit_and_in_two_they_are_independent() -> None:
    first = build_experiment(share=0.3)
    second = build_experiment(experiment_id="exp-2", share=0.5, salt="other")
    apart = build_experiment(experiment_id="exp-3", share=0.4, salt="third", alias="canary", namespace="canary")
    table = table_of(first, second, apart, aliases={"flash": BASE, "canary": BASE})
    users = [units(f"user-{number}") for number in range(20_000)]
    on_flash = [table.route("flash", user).experiment_id for user in users]
    on_canary = [table.route("canary", user).experiment_id for user in users]
    shares = Counter(on_flash)
    assert abs(shares["exp-1"] / len(users) - 0.3) < 0.015
    assert abs(shares["exp-2"] / len(users) - 0.5) < 0.015
    in_both = [[0, 0], [0, 0]]
    for one, other in zip(on_flash, on_canary, strict=True):
        in_both[one == "exp-1"][other == "exp-3"] += 1
    assert stats.chi2_contingency(in_both).pvalue > 0.001


def two_aliases_in_one_namespace_share_no_unit_either() -> None:
    first = build_experiment(share=0.5)
    second = build_experiment(experiment_id="exp-2", share=0.5, salt="other", alias="canary")
    table = table_of(first, second, aliases={"flash": BASE, "canary": BASE})
    for number in range(500):
        seen = [table.route(alias, units(f"user-{number}")).experiment_id for alias in ("flash", "canary")]
        assert seen.count(None) == 1


@pytest.mark.parametrize(
    ("unit", "expected"),
    [("user", ["u", "s", "r"]), ("session", ["s", "s", "r"]), ("response", ["r", "r", "r"])],
)
def the_unit_is_what_the_experiment_says_or_the_next_smaller(unit: Any, expected: list[str]) -> None:
    table = table_of(build_experiment(plan=Plan(unit=unit)), unit=unit)
    asked = [units("u", "s"), units(None, "s"), units()]
    assert [table.route("flash", one).unit for one in asked] == expected


def each_pair_of_three_arms_is_compared_as_often() -> None:
    names = {"control": BASE, "candidate": CANDIDATE, "third": OTHER}
    arms = tuple(Arm(name=name, checkpoint_id=checkpoint, weight=1 / 3) for name, checkpoint in names.items())
    table = table_of(build_experiment(arms=arms))
    seen = Counter(
        tuple(sorted(str(route.arm) for route in table.pair("flash", units("u", None, f"cmp-{number}"))))
        for number in range(3000)
    )
    assert set(seen) == {tuple(sorted(pair)) for pair in itertools.combinations(names, 2)}
    assert stats.chisquare(list(seen.values())).pvalue > 0.001


def an_arm_that_cannot_be_served_is_not_compared_with_itself() -> None:
    table = table_of(build_experiment(), servable={BASE: BASE})
    for route in table.pair("flash", units("u")):
        assert (route.checkpoint_id, route.experiment_id) == (BASE, None)


@pytest.mark.parametrize("weight", [-0.1, 1.2, float("nan")])
def a_weight_outside_of_its_range_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="weight"):
        candidate_start("flash", BASE, CANDIDATE, weight)


def a_tester_of_an_arm_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="which is no arm"):
        candidate_start("flash", BASE, CANDIDATE, 0.5, testers={"eve": "third"})
