"""Which arm of an experiment a unit sees: a pure function, so nothing needs to be stored for each unit.

The same (salt, unit) always falls on the same point of a line of SPACE points; an `Allocation` says who owns which
stretch of that line. Guarantees: a unit keeps its owner while the allocation stays; `allocate` moves exactly as much
of the line as the new shares demand, so an owner that grows takes only from those that shrink, and a new owner only
its own share. Another salt draws independent points.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence

SPACE = 1 << 53
Stretch = tuple[int, str | None]
"""(end, owner): from the end of the one before it (0 for the first) up to `end`, which is not part of it."""
Allocation = tuple[Stretch, ...]
"""Ascending; the last end is SPACE. What None owns is nobody's."""
NOBODY: Allocation = ((SPACE, None),)
_TOLERANCE = 1e-9


def point_of(salt: str, unit: str) -> int:
    """The unit's place, 0 to SPACE - 1: the first 53 bits of sha256 over (length of salt, salt, unit)."""
    digest = hashlib.sha256(f"{len(salt)}:{salt}{unit}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") >> 11


def owner_at(allocation: Allocation, point: int) -> str | None:
    """Who owns the point."""
    return allocation[bisect_right(allocation, point, key=_end)][1]


def assign(allocation: Allocation, salt: str, unit: str) -> str | None:
    """The owner (arm, or experiment) of the unit."""
    return owner_at(allocation, point_of(salt, unit))


def allocate(shares: Mapping[str, float], before: Allocation = NOBODY) -> Allocation:
    """The line divided by `shares` (owner → 0 to 1, together at most 1), as near to `before` as can be.

    Owners of `before` without a share lose what they had; what is left over is nobody's. Raises ValueError for shares
    that are negative or more than the whole.
    """
    left = _points(shares)
    pieces: list[tuple[int, int, str | None]] = []  # (from, to, owner)
    freed: list[tuple[int, int]] = []
    free: list[tuple[int, int]] = []
    begin = 0
    for end, owner in before:
        keeps = 0
        if owner is not None and left.get(owner):
            keeps = min(end - begin, left[owner])
            left[owner] -= keeps
            pieces.append((begin, begin + keeps, owner))
        if begin + keeps < end:
            (free if owner is None else freed).append((begin + keeps, end))
        begin = end
    growing = [(owner, points) for owner, points in left.items() if points]
    for begin, end in freed + free:  # whoever loses its owner moves anyway: the growing take those first
        while growing and begin < end:
            owner, points = growing.pop(0)
            taken = min(points, end - begin)
            if taken < points:
                growing.insert(0, (owner, points - taken))
            pieces.append((begin, begin + taken, owner))
            begin += taken
        if begin < end:
            pieces.append((begin, end, None))
    line: list[Stretch] = []
    for _, end, owner in sorted(pieces, key=_start):
        _append(line, end, owner)
    return tuple(line)


def check_allocation(value: Sequence[Sequence[object]]) -> Allocation:
    """`value`, as JSON gives it, as an allocation. Raises ValueError when it is none."""
    line: list[Stretch] = []
    begin = 0
    for end, owner in value:
        if not isinstance(end, int) or end <= begin or not isinstance(owner, str | None):
            raise ValueError("an allocation is a list of (end, owner) with rising ends")
        line.append((end, owner))
        begin = end
    if begin != SPACE:
        raise ValueError(f"an allocation ends at {SPACE}")
    return tuple(line)


def share_of(allocation: Allocation, owner: str | None) -> float:
    """What part of the line is the owner's, 0 to 1."""
    total, begin = 0, 0
    for end, name in allocation:
        if name == owner:
            total += end - begin
        begin = end
    return total / SPACE


def _points(shares: Mapping[str, float]) -> dict[str, int]:
    if any(not share >= 0 for share in shares.values()) or sum(shares.values()) > 1 + _TOLERANCE:
        raise ValueError(f"shares are at least 0 and together at most 1: {dict(shares)}")
    points = {owner: round(share * SPACE) for owner, share in shares.items()}
    missing = SPACE - sum(points.values())
    if missing < 0 or abs(sum(shares.values()) - 1) <= _TOLERANCE:  # rounding: the largest makes up for it
        points[max(points, key=points.__getitem__)] += missing
    return points


def _append(line: list[Stretch], end: int, owner: str | None) -> None:
    if line and line[-1][1] == owner:
        line[-1] = (end, owner)
    else:
        line.append((end, owner))


def _end(stretch: Stretch) -> int:
    return stretch[0]


def _start(piece: tuple[int, int, str | None]) -> int:
    return piece[0]
