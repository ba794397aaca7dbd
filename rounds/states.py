"""The states of one turn of the wheel, and the moves between them, as a table.

    collecting → snapshot → reward_training → reward_gate → policy_update → checkpoint_gate
      → registration → experiment → promoted | rejected

A gate that says no ends the round as rejected; the next round then collects again.
"""

from rounds.errors import ForbiddenMove

FIRST = "collecting"

MOVES: dict[str, frozenset[str]] = {
    "collecting": frozenset({"snapshot"}),
    "snapshot": frozenset({"reward_training", "rejected"}),
    "reward_training": frozenset({"reward_gate", "rejected"}),
    "reward_gate": frozenset({"policy_update", "rejected"}),
    "policy_update": frozenset({"checkpoint_gate", "rejected"}),
    "checkpoint_gate": frozenset({"registration", "rejected"}),
    "registration": frozenset({"experiment", "rejected"}),
    "experiment": frozenset({"promoted", "rejected"}),
    "promoted": frozenset(),
    "rejected": frozenset(),
}

TERMINAL = frozenset(state for state, moves in MOVES.items() if not moves)


def check_move(from_state: str, to_state: str) -> None:
    """Raise ForbiddenMove unless the table allows the move."""
    if to_state not in MOVES.get(from_state, frozenset()):
        raise ForbiddenMove(f"a round can't move from {from_state} to {to_state}")
