"""Answers as token sequences, and strips of them to compute at once: what answers share is computed once, and nothing
is padded.

A group is all answers to one prompt. Its longest common front stands once in a strip, its answers' ends follow one
after the other; each end sees the front and itself, at the positions that it would have alone. So a strip's hidden
states are those of the sequences computed one by one. Guarantees: a sequence over `max_length` loses its front, never
the answer, and is counted.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer

from reward.pairs import Messages

Tokens = list[int]


class ChatSequences:
    """The chat format of a base model, with prompt and answer both in it, as trainers of reward models use it.

    truncated: how many sequences lost their front.
    """

    def __init__(self, base_model: Path, max_length: int) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(base_model)
        self.max_length = max_length
        self.truncated = 0

    def __call__(self, prompt: Messages, answer: str) -> Tokens:
        """Token ids of the conversation that ends with `answer`."""
        messages = [*prompt, {"role": "assistant", "content": answer}]
        ids: Tokens = self.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
        if len(ids) > self.max_length:
            self.truncated += 1
            ids = ids[-self.max_length :]
        return ids


@dataclass(frozen=True)
class Strip:
    """One row to compute. input_ids, position_ids: int64 [1, width]. mask: bool [1, 1, width, width], what sees what.

    last: int64 [n], the columns of the sequences' last tokens. sequences: their n numbers, as `pack` was given them.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    mask: torch.Tensor
    last: torch.Tensor
    sequences: list[int]

    def to(self, device: torch.device | str) -> "Strip":
        """The same on another device."""
        moved = (part.to(device) for part in (self.input_ids, self.position_ids, self.mask, self.last))
        return Strip(*moved, self.sequences)


def shared_front(sequences: Sequence[Tokens]) -> int:
    """How many tokens all of them begin with; at least one token of each is left over."""
    most = min(len(sequence) for sequence in sequences) - 1
    first = sequences[0]
    for place in range(most):
        if any(sequence[place] != first[place] for sequence in sequences):
            return place
    return most


def pack(groups: Sequence[Sequence[int]], sequences: Sequence[Tokens], strip_tokens: int) -> list[Strip]:
    """Strips that hold each group of sequence numbers whole; at most `strip_tokens` wide, unless one group is wider.

    First fit, widest group first: what is left free is little, and no token is padding.
    """
    rows = sorted((_Row(group, sequences) for group in groups if len(group)), key=lambda row: -row.width)
    bins: list[list[_Row]] = []
    room: list[int] = []
    for row in rows:
        place = next((number for number, free in enumerate(room) if free >= row.width), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(max(strip_tokens, row.width))
        bins[place].append(row)
        room[place] -= row.width
    return [_strip(rows_of_one) for rows_of_one in bins]


def split(group: Sequence[int], sequences: Sequence[Tokens], strip_tokens: int) -> list[list[int]]:
    """The group in parts that each fit in a strip, or are one sequence."""
    parts: list[list[int]] = [[]]
    width = 0
    front = shared_front([sequences[number] for number in group])
    for number in group:
        end = len(sequences[number]) - front
        if parts[-1] and width + end > strip_tokens:
            parts.append([])
        if not parts[-1]:
            width = front
        parts[-1].append(number)
        width += end
    return parts


class _Row:
    """A group laid out: segments of (sequence number or None for the front, token ids, first position)."""

    def __init__(self, group: Sequence[int], sequences: Sequence[Tokens]) -> None:
        front = shared_front([sequences[number] for number in group])
        self.front = sequences[group[0]][:front]
        self.ends = [(number, sequences[number][front:]) for number in group]
        self.width = front + sum(len(end) for _, end in self.ends)


def _strip(rows: Sequence[_Row]) -> Strip:
    width = sum(row.width for row in rows)
    ids: Tokens = []
    positions: list[int] = []
    mask = torch.zeros(width, width, dtype=torch.bool)
    last, numbers = [], []
    for row in rows:
        start, front = len(ids), len(row.front)
        ids += row.front
        positions += range(front)
        mask[start : start + front, start : start + front] = _triangle(front)
        for number, end in row.ends:
            begin = len(ids)
            ids += end
            positions += range(front, front + len(end))
            mask[begin : begin + len(end), start : start + front] = True
            mask[begin : begin + len(end), begin : begin + len(end)] = _triangle(len(end))
            last.append(len(ids) - 1)
            numbers.append(number)
    return Strip(torch.tensor(ids)[None], torch.tensor(positions)[None], mask[None, None], torch.tensor(last), numbers)


def _triangle(size: int) -> torch.Tensor:
    return torch.ones(size, size, dtype=torch.bool).tril()


def grouped(keys: Sequence[int]) -> Iterator[list[int]]:
    """The numbers 0 … n-1 that have one key, together, in the order of the keys' first appearance."""
    found: dict[int, list[int]] = {}
    for number, key in enumerate(keys):
        found.setdefault(key, []).append(number)
    return iter(found.values())
