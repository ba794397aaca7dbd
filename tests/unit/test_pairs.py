"""Laws of paired comparisons: published tables, symmetries, and intervals that cover."""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest

from rounds.statistics.pairs import TIES, Comparisons, Ties, Undefined, fit_strengths, probabilities, scores
from rounds.statistics.pairs_intervals import strength_intervals

TABLES = Path(__file__).parents[3] / "shared" / "data" / "bt_tables"
Row = tuple[str, str, float, float]

# Four players and 22 games, the worked example of Wikipedia's article on the Bradley-Terry model: (winner, loser,
# games).
FOUR_PLAYERS = [
    ("A", "B", 2), ("A", "D", 1), ("B", "A", 3), ("B", "C", 5),
    ("C", "B", 3), ("C", "D", 1), ("D", "A", 4), ("D", "C", 3),
]  # fmt: skip
# Davidson 1970, example 2: six brands of chocolate pudding: (i, j, i preferred, j preferred, no preference).
PUDDING = [
    (1, 2, 19, 22, 16), (1, 3, 16, 19, 12), (2, 3, 19, 19, 10), (1, 4, 18, 23, 13), (2, 4, 23, 19, 9),
    (3, 4, 19, 20, 15), (1, 5, 13, 19, 18), (2, 5, 16, 20, 12), (3, 5, 16, 15, 17), (4, 5, 17, 14, 16),
    (1, 6, 18, 21, 12), (2, 6, 22, 20, 12), (3, 6, 13, 18, 10), (4, 6, 14, 19, 18), (5, 6, 11, 21, 12),
]  # fmt: skip


def build(rows: Iterable[Row]) -> Comparisons:
    """Comparisons from (a, b, outcome, weight)."""
    rows = [row for row in rows if row[3]]
    models = sorted({name for row in rows for name in row[:2]})
    return Comparisons(
        models,
        np.array([models.index(row[0]) for row in rows]),
        np.array([models.index(row[1]) for row in rows]),
        np.array([row[2] for row in rows]),
        np.array([row[3] for row in rows], dtype=float),
    )


def pudding() -> Comparisons:
    rows: list[Row] = []
    for i, j, first, second, neither in PUDDING:
        rows += [(str(i), str(j), 1.0, first), (str(i), str(j), 0.0, second), (str(i), str(j), 0.5, neither)]
    return build(rows)


def draw(
    generator: np.random.Generator, logs: Sequence[float], rows: int, ties: Ties = "half", inner: float | None = None
) -> Comparisons:
    """Comparisons drawn from the model itself."""
    size = len(logs)
    a = generator.integers(0, size, rows)
    b = (a + generator.integers(1, size, rows)) % size
    win, loss, _ = probabilities(ties, np.array(logs)[a], np.array(logs)[b], inner)
    point = generator.random(rows)
    outcome = np.where(point < win, 1.0, np.where(point < win + loss, 0.0, 0.5))
    return Comparisons([f"m{number}" for number in range(size)], a, b, outcome, np.ones(rows))


def each_of_four_players_gets_the_published_strength() -> None:
    fit = fit_strengths(build((winner, loser, 1.0, games) for winner, loser, games in FOUR_PLAYERS))
    assert fit.strengths == pytest.approx([0.639835, 1.043314, 0.659810, 2.270377], abs=1e-6)


@pytest.mark.parametrize(
    ("ties", "shares", "parameter", "log_likelihood"),
    [
        ("davidson", [0.13880, 0.17300, 0.16175, 0.16537, 0.15869, 0.20239], 0.74682, -809.70951),
        ("rao-kupper", [0.14440, 0.17179, 0.16282, 0.16608, 0.16038, 0.19453], 1.74846, -809.69713),
    ],
)
def the_puddings_get_their_published_strengths(
    ties: Ties, shares: list[float], parameter: float, log_likelihood: float
) -> None:
    fit = fit_strengths(pudding(), ties)
    assert fit.strengths / fit.strengths.sum() == pytest.approx(shares, abs=6e-6)
    assert fit.tie_parameter == pytest.approx(parameter, abs=6e-6)
    assert fit.log_likelihood == pytest.approx(log_likelihood, abs=6e-6)


@pytest.mark.parametrize("name", ["food", "simple"])
def the_golden_strengths_of_another_implementation_are_met(name: str) -> None:
    if not TABLES.is_dir():
        pytest.skip("the folder with evalica's golden files is not beside the repository")
    with (TABLES / f"evalica-{name}.csv").open(encoding="utf-8") as stream:
        outcomes = {"left": 1.0, "right": 0.0, "tie": 0.5}
        data = build((row["left"], row["right"], outcomes[row["winner"]], 1.0) for row in csv.DictReader(stream))
    with (TABLES / f"evalica-{name}-golden.csv").open(encoding="utf-8") as stream:
        golden = {
            row["item"]: float(row["score"]) for row in csv.DictReader(stream) if row["algorithm"] == "bradley_terry"
        }
    strengths = fit_strengths(data).strengths
    expected = np.array([golden[model] for model in data.models])
    assert strengths / strengths.sum() == pytest.approx(expected / expected.sum(), rel=1e-5)


def a_random_table_gets_the_strengths_of_evalica() -> None:
    evalica = pytest.importorskip("evalica", reason="evalica is not installed")
    data = draw(np.random.default_rng(5), [0.0, 0.4, -0.3, 1.0], 600, "davidson", -0.5)
    winners = [{1.0: evalica.Winner.X, 0.0: evalica.Winner.Y, 0.5: evalica.Winner.Draw}[one] for one in data.outcome]
    names = np.array(data.models)
    result = evalica.bradley_terry(
        names[data.a].tolist(), names[data.b].tolist(), winners, tie_weight=0.5, tolerance=1e-12
    )
    theirs = np.array([result.scores[model] for model in data.models])
    ours = fit_strengths(data).strengths
    assert ours / ours.sum() == pytest.approx(theirs / theirs.sum(), rel=1e-5)


@pytest.mark.parametrize("ties", TIES)
def the_gradient_at_the_fit_is_zero(ties: Ties) -> None:
    data = pudding()
    fit = fit_strengths(data, ties)
    assert np.abs(data.weight @ scores(fit, data)).max() < 1e-6


@pytest.mark.parametrize("ties", TIES)
def the_order_of_rows_sides_and_the_unit_of_weight_do_not_matter(ties: Ties) -> None:
    data = pudding()
    order = np.random.default_rng(1).permutation(len(data.a))
    other = Comparisons(data.models, data.b[order], data.a[order], 1 - data.outcome[order], 3.5 * data.weight[order])
    assert fit_strengths(other, ties).strengths == pytest.approx(fit_strengths(data, ties).strengths, rel=1e-7)


def the_three_models_agree_when_there_are_no_ties() -> None:
    data = build((winner, loser, 1.0, games) for winner, loser, games in FOUR_PLAYERS)
    fits = [fit_strengths(data, ties) for ties in TIES]
    for fit in fits[1:]:
        assert fit.strengths == pytest.approx(fits[0].strengths, rel=1e-8)
        assert fit.log_likelihood == pytest.approx(fits[0].log_likelihood)
    assert [fit.tie_parameter for fit in fits] == [None, 0.0, 1.0]


@pytest.mark.parametrize(("ties", "inner"), [("half", None), ("davidson", -0.4), ("rao-kupper", -0.3)])
def the_strengths_that_made_many_votes_are_found_again(ties: Ties, inner: float | None) -> None:
    logs = np.array([0.9, 0.2, -0.4, -0.7])
    data = draw(np.random.default_rng(2), logs.tolist(), 200_000, ties, inner)
    fit = fit_strengths(data, ties)
    assert fit.log_strengths == pytest.approx(logs, abs=0.03)
    if inner is not None:
        assert fit.inner == pytest.approx(inner, abs=0.03)


@pytest.mark.parametrize("ties", TIES)
def a_winner_of_everything_is_refused_by_name_and_finite_with_a_ridge(ties: Ties) -> None:
    data = build(
        [("a", "b", 1.0, 3), ("b", "a", 1.0, 2), ("best", "a", 1.0, 4), ("best", "b", 1.0, 1), ("a", "b", 0.5, 1)]
    )
    with pytest.raises(Undefined, match="best never lost"):
        fit_strengths(data, ties)
    strengths = fit_strengths(data, ties, ridge=0.1).log_strengths
    assert np.all(np.isfinite(strengths))
    assert strengths.argmax() == 2


def two_islands_are_refused_by_name() -> None:
    data = build([("a", "b", 1.0, 3), ("b", "a", 1.0, 2), ("x", "y", 1.0, 4), ("y", "x", 1.0, 1)])
    with pytest.raises(Undefined, match="connects a, b with x, y"):
        fit_strengths(data)


def only_ties_say_nothing_about_wins() -> None:
    data = build([("a", "b", 0.5, 3)])
    assert fit_strengths(data, "half").strengths == pytest.approx([1, 1])
    with pytest.raises(Undefined, match="every comparison is a tie"):
        fit_strengths(data, "davidson")


def a_bad_table_is_refused() -> None:
    one = np.array([0])
    for wrong in ((one, one, np.array([1.0]), np.array([1.0])), (one, one + 1, np.array([1.0]), np.array([-1.0]))):
        with pytest.raises(ValueError, match=r"itself|above 0"):
            Comparisons(["a", "b"], *wrong)


@pytest.mark.parametrize(("ties", "inner"), [("half", None), ("davidson", -0.4), ("rao-kupper", -0.3)])
def the_intervals_cover_the_true_strengths(ties: Ties, inner: float | None) -> None:
    generator = np.random.default_rng(11)
    logs = np.array([0.6, 0.0, -0.6])
    covered = np.zeros(3)
    for _ in range(300):
        data = draw(generator, logs.tolist(), 300, ties, inner)
        found = strength_intervals(fit_strengths(data, ties), data)
        covered += (found.low <= logs) & (logs <= found.high)
    assert np.all(np.abs(covered / 300 - 0.95) < 0.045)  # of a binomial: 3.6 standard deviations


def one_rater_who_votes_often_widens_the_clustered_interval_only() -> None:
    data = draw(np.random.default_rng(3), [0.3, 0.0, -0.3], 400)
    raters = np.arange(400)
    raters[:200] = 0
    fit = fit_strengths(data)
    alone, clustered = strength_intervals(fit, data), strength_intervals(fit, data, [raters])
    repeated = Comparisons(data.models, *(np.repeat(part, 5) for part in (data.a, data.b, data.outcome, data.weight)))
    again = fit_strengths(repeated)
    by_rater = strength_intervals(again, repeated, [np.repeat(np.arange(400), 5)])
    assert by_rater.error == pytest.approx(alone.error, rel=1e-3)
    assert np.all(strength_intervals(again, repeated).error < 0.6 * alone.error)
    assert clustered.clusters == 201


def what_raters_like_by_themselves_needs_clustered_intervals() -> None:
    """Each rater likes one of two models for all of 20 prompts: 600 rows tell as much as 30."""
    generator = np.random.default_rng(4)
    missed = {"rows": 0, "raters": 0, "both": 0}
    for _ in range(200):
        taste = generator.random(30) < 0.5
        rater, prompt = np.repeat(np.arange(30), 20), np.tile(np.arange(20), 30)
        outcome = np.where(generator.random(600) < np.where(taste, 0.9, 0.1)[rater], 1.0, 0.0)
        data = Comparisons(["a", "b"], np.zeros(600, int), np.ones(600, int), outcome, np.ones(600))
        fit = fit_strengths(data)
        for name, groupings in (("rows", []), ("raters", [rater]), ("both", [rater, prompt])):
            found = strength_intervals(fit, data, groupings)
            missed[name] += not found.low[0] <= 0 <= found.high[0]
    assert missed["rows"] > 80
    assert missed["raters"] <= 20
    assert missed["both"] <= 24
