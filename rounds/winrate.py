"""Win rates against one reference, from a file with one preference for each item."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rounds.rating_files import fault, number, read_rows, text
from rounds.statistics.fixed import clustered_mean_interval
from rounds.statistics.lengths import length_controlled_rate


@dataclass(frozen=True)
class WinRate:
    """One model. rates and errors: 0 to 1. What needs two items is null with one; what needs lengths, without them."""

    model: str
    items: int
    win_rate: float
    error: float | None
    low: float | None
    high: float | None
    length_controlled: float | None
    length_controlled_error: float | None
    mean_length_ratio: float | None


@dataclass(frozen=True)
class WinRates:
    """All models, the best first."""

    models: tuple[WinRate, ...]
    rows: int
    confidence: float

    def as_json(self) -> dict[str, Any]:
        """For a script."""
        return asdict(self)


def read_win_rates(file: Path, *, confidence: float = 0.95) -> WinRates:
    """From a CSV or JSONL file with `model`, `item`, `preference` (0 to 1; 1: the model's answer is better than the
    reference's), and perhaps `length` and `reference_length`.

    Rows of one model and item hang together. Raises RatingFileInvalid.
    """
    rows: dict[str, list[tuple[str, float, float, float]]] = {}
    for line, fields in read_rows(file, ("model", "item", "preference"), ("length", "reference_length")):
        preference = number(file, line, fields, "preference")
        if not 0 <= preference <= 1:
            raise fault(file, line, f"`preference` must lie between 0 and 1, not {preference:g}")
        lengths = [
            number(file, line, fields, name) if name in fields else float("nan")
            for name in ("length", "reference_length")
        ]
        if any(length < 0 for length in lengths):
            raise fault(file, line, "a length must not be negative")
        model = text(file, line, fields, "model", shown=True)
        rows.setdefault(model, []).append((text(file, line, fields, "item"), preference, *lengths))
    models = [_rate(model, of_model, confidence) for model, of_model in rows.items()]
    models.sort(key=lambda rated: (-rated.win_rate, rated.model))
    return WinRates(tuple(models), sum(map(len, rows.values())), confidence)


def _rate(model: str, rows: list[tuple[str, float, float, float]], confidence: float) -> WinRate:
    items = np.unique([item for item, *_ in rows], return_inverse=True)[1]
    preference, length, reference = (np.array([row[place] for row in rows]) for place in (1, 2, 3))
    mean, low, high, error = float(preference.mean()), None, None, None
    if items.max() > 0:
        found = clustered_mean_interval(preference, items, confidence)
        low, high, error = max(0.0, found.low), min(1.0, found.high), found.error
    controlled = None
    if np.all(np.isfinite(length + reference)) and len(rows) > 1:
        controlled = length_controlled_rate(preference, length, reference, items)
    has_ratio = controlled is not None and reference.mean() > 0
    return WinRate(
        model=model,
        items=int(items.max()) + 1,
        win_rate=mean,
        error=error,
        low=low,
        high=high,
        length_controlled=controlled and controlled.rate,
        length_controlled_error=controlled and controlled.error,
        mean_length_ratio=float(length.mean() / reference.mean()) if has_ratio else None,
    )
