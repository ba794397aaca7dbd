"""A leaderboard from a file of paired comparisons, whoever made it."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rounds.errors import RatingFileInvalid
from rounds.rating_files import fault, number, read_rows, text
from rounds.statistics.pairs import Comparisons, Ties, Undefined, elo, fit_strengths
from rounds.statistics.pairs_intervals import strength_intervals

_OUTCOMES = {"a": 1.0, "b": 0.0, "tie": 0.5}


@dataclass(frozen=True)
class Rated:
    """One model. strength, low, high: geometric mean 1 over all; elo: the same for reading, 1000 on average.

    low, high: null when there are too few raters, prompts or rows for an interval, or no two rows differ. wins,
    losses, ties: weight of rows.
    """

    model: str
    rank: int
    strength: float
    low: float | None
    high: float | None
    elo: float
    elo_low: float | None
    elo_high: float | None
    wins: float
    losses: float
    ties: float


@dataclass(frozen=True)
class Leaderboard:
    """All models, the strongest first, and how they were rated."""

    models: tuple[Rated, ...]
    rows: int
    ties: Ties
    tie_parameter: float | None
    log_likelihood: float
    ridge: float
    confidence: float
    clustered_by: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """For a script."""
        return asdict(self)


def read_leaderboard(file: Path, *, ties: Ties = "half", ridge: float = 0.0, confidence: float = 0.95) -> Leaderboard:
    """Rate the models of a CSV or JSONL file with `model_a`, `model_b`, `winner` (`a`, `b`, `tie`), and perhaps
    `rater`, `prompt` and `weight`.

    Intervals are clustered by rater and by prompt where every row has them. Raises RatingFileInvalid for a file that
    can't be read, or whose strengths are undefined.
    """
    data, groupings = _read(file)
    try:
        fit = fit_strengths(data, ties, ridge)
    except Undefined as error:
        raise RatingFileInvalid(f"{file}: {error}") from error
    usable = [label for label in groupings.values() if label.max() > 0]
    intervals = None
    if len(usable) == len(groupings) and len(data.a) > 1:
        intervals = strength_intervals(fit, data, usable, confidence)
    if intervals is not None and not intervals.error.all():  # no two rows differ: that is no certainty
        intervals = None
    lows, highs = (None, None) if intervals is None else (intervals.low, intervals.high)
    wins, tied = data.wins, data.tied
    order = sorted(range(len(data.models)), key=lambda index: (-fit.log_strengths[index].round(9), data.models[index]))
    points = elo(fit.log_strengths)
    models = tuple(
        Rated(
            model=data.models[index],
            rank=place,
            strength=float(fit.strengths[index]),
            low=None if lows is None else float(np.exp(lows[index])),
            high=None if highs is None else float(np.exp(highs[index])),
            elo=float(points[index]),
            elo_low=None if lows is None else float(elo(lows)[index]),
            elo_high=None if highs is None else float(elo(highs)[index]),
            wins=float(wins[index].sum()),
            losses=float(wins[:, index].sum()),
            ties=float(tied[index].sum()),
        )
        for place, index in enumerate(order, start=1)
    )
    return Leaderboard(
        models=models,
        rows=len(data.a),
        ties=ties,
        tie_parameter=fit.tie_parameter,
        log_likelihood=fit.log_likelihood,
        ridge=ridge,
        confidence=confidence,
        clustered_by=tuple(groupings),
    )


def _read(file: Path) -> tuple[Comparisons, dict[str, np.ndarray]]:
    """The comparisons, and by which of rater and prompt they can be grouped."""
    models: dict[str, int] = {}
    columns: dict[str, list[Any]] = {"a": [], "b": [], "outcome": [], "weight": []}
    labels: dict[str, list[int]] = {"rater": [], "prompt": []}
    known: dict[str, dict[str, int]] = {"rater": {}, "prompt": {}}
    for line, fields in read_rows(file, ("model_a", "model_b", "winner"), ("rater", "prompt", "weight")):
        first, second = (text(file, line, fields, name, shown=True) for name in ("model_a", "model_b"))
        if first == second:
            raise fault(file, line, f"{first} is compared with itself")
        winner = text(file, line, fields, "winner")
        if winner not in _OUTCOMES:
            raise fault(file, line, f"`winner` must be a, b or tie, not {winner!r}")
        weight = number(file, line, fields, "weight") if "weight" in fields else 1.0
        if weight < 0:
            raise fault(file, line, f"`weight` must not be negative: {weight:g}")
        indices = (models.setdefault(first, len(models)), models.setdefault(second, len(models)))
        if weight == 0:
            continue
        for name, value in zip(columns, (*indices, _OUTCOMES[winner], weight), strict=True):
            columns[name].append(value)
        for name, found in labels.items():
            if name in fields:
                found.append(known[name].setdefault(text(file, line, fields, name), len(known[name])))
    rows = len(columns["a"])
    if not rows:
        raise RatingFileInvalid(f"{file}: every row has the weight 0")
    data = Comparisons(
        models=list(models),
        a=np.array(columns["a"], dtype=np.int64),
        b=np.array(columns["b"], dtype=np.int64),
        outcome=np.array(columns["outcome"]),
        weight=np.array(columns["weight"]),
    )
    return data, {name: np.array(found) for name, found in labels.items() if len(found) == rows}
