"""Builders of preference pairs and snapshots for the learning tests, with the fields of feedback.snapshots'."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Pair:
    """One preference; every field can be overridden."""

    prompt: list[dict[str, Any]] = field(default_factory=lambda: [{"role": "user", "content": "Say something."}])
    chosen: str = "A short answer."
    rejected: str = "A rather longer answer that goes on and on"
    weight: float = 1.0
    margin: float | None = None
    tie: bool = False
    prompt_hash: str = "0"
    rater: str = "rater"


@dataclass
class Snapshot:
    """What reward training reads."""

    snapshot_id: str = "snap-test"
    train: list[Pair] = field(default_factory=list)
    heldout: list[Pair] = field(default_factory=list)


def text(generator: random.Random, words: int) -> str:
    """A few everyday words and a full stop."""
    return " ".join(generator.choice(["cat", "dog", "sun", "tree", "rain"]) for _ in range(words)) + "."


def snapshot_of(
    prefer_first: Callable[[str, str], bool],
    *,
    train: int = 80,
    heldout: int = 40,
    votes_per_prompt: int = 2,
    seed: int = 0,
) -> Snapshot:
    """Random answers of 1 to 16 words to `train` and `heldout` votes' worth of prompts; the taste chooses."""
    generator = random.Random(seed)

    def pair(number: int) -> Pair:
        prompt = f"question {number // votes_per_prompt}"
        first, second = text(generator, generator.randint(1, 16)), text(generator, generator.randint(1, 16))
        if not prefer_first(first, second):
            first, second = second, first
        return Pair([{"role": "user", "content": prompt}], first, second, prompt_hash=prompt)

    return Snapshot("snap-test", [pair(n) for n in range(train)], [pair(100_000 + n) for n in range(heldout)])
