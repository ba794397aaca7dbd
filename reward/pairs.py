"""Preference pairs as the trainer sees them: answers listed once, pairs as indices into that list.

Any object with `Pair`'s fields will do (feedback.snapshots.Pair does). Guarantees: an answer shown in several
pairs of one prompt is scored once; what is left out is counted. Does not deduplicate votes: two raters
who agree count twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Messages = list[dict[str, Any]]


class PairLike(Protocol):
    """What training reads of one pair."""

    prompt: Messages
    chosen: str
    rejected: str
    weight: float
    margin: float | None
    tie: bool
    prompt_hash: str


@dataclass
class Comparisons:
    """Pairs over a list of distinct (prompt, answer) texts.

    prompts, answers: n_answers texts. chosen, rejected: int [n_pairs], indices into them. target: float [n_pairs], 1
    where chosen won and 0.5 for a tie. weight, margin: float [n_pairs]; a tie has no margin. group: int [n_pairs], the
    prompt's number. counters: what was left out, by reason.
    """

    prompts: list[Messages]
    answers: list[str]
    chosen: npt.NDArray[np.int64]
    rejected: npt.NDArray[np.int64]
    target: npt.NDArray[np.float64]
    weight: npt.NDArray[np.float64]
    margin: npt.NDArray[np.float64]
    group: npt.NDArray[np.int64]
    counters: dict[str, int] = field(default_factory=dict)

    @property
    def decided(self) -> npt.NDArray[np.bool_]:
        """bool [n_pairs]: not a tie."""
        return self.target != 0.5


def compare(pairs: Sequence[PairLike], tie_weight: float) -> Comparisons:
    """List the answers of `pairs` once each. A tie keeps `tie_weight` of its weight; 0 drops it."""
    counters = {"pairs": len(pairs), "ties": 0, "dropped_ties": 0, "dropped_identical": 0, "dropped_weightless": 0}
    places: dict[tuple[str, str], int] = {}
    groups: dict[str, int] = {}
    prompts: list[Messages] = []
    answers: list[str] = []

    def place(pair: PairLike, text: str) -> int:
        key = (pair.prompt_hash, text)
        if key not in places:
            places[key] = len(answers)
            prompts.append(list(pair.prompt))
            answers.append(text)
        return places[key]

    rows: list[tuple[int, int, float, float, float, int]] = []
    for pair in pairs:
        counters["ties"] += pair.tie
        weight = pair.weight * (tie_weight if pair.tie else 1.0)
        if pair.chosen == pair.rejected:
            counters["dropped_identical"] += 1
        elif pair.tie and tie_weight == 0:
            counters["dropped_ties"] += 1
        elif weight <= 0:
            counters["dropped_weightless"] += 1
        else:
            group = groups.setdefault(pair.prompt_hash, len(groups))
            target = 0.5 if pair.tie else 1.0
            margin = 0.0 if pair.tie else float(pair.margin or 0.0)
            rows.append((place(pair, pair.chosen), place(pair, pair.rejected), target, weight, margin, group))
    columns = list(zip(*rows, strict=True)) if rows else [[] for _ in range(6)]
    return Comparisons(
        prompts,
        answers,
        np.asarray(columns[0], np.int64),
        np.asarray(columns[1], np.int64),
        np.asarray(columns[2], np.float64),
        np.asarray(columns[3], np.float64),
        np.asarray(columns[4], np.float64),
        np.asarray(columns[5], np.int64),
        counters,
    )
