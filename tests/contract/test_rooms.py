"""Who may import whom (design §2): a forbidden edge between two rooms fails here.

Every import statement counts, also one inside a function or under TYPE_CHECKING.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LEAVES = frozenset({"storage", "telemetry"})
ROOMS = frozenset({"flywheel", "serving", "feedback", "reward", "rounds", "loadtest"}) | LEAVES

# What a room may import beside itself and the leaves: rooms, or single modules of a room.
ALLOWED: dict[str, frozenset[str]] = {
    "flywheel": ROOMS,
    "serving": frozenset(
        {
            "feedback.events",
            "feedback.outbox",
            "feedback.outgoing",
            "feedback.votes",
            "feedback.erasure",
            "feedback.errors",
            "feedback.settings",
        }
    ),
    "feedback": frozenset(),
    "reward": frozenset({"feedback.events", "feedback.snapshots"}),
    "rounds": frozenset({"serving", "feedback", "reward"}),
    "loadtest": frozenset({"feedback.events"}),
    "storage": frozenset(),
    "telemetry": frozenset(),
}


def imports_of(file: Path) -> set[str]:
    """The modules of this repository that the file imports, names of `from … import …` resolved to modules."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative imports hide which room is meant"
            module = node.module or ""
            found |= {f"{module}.{alias.name}" if "." not in module else module for alias in node.names}
    return {name for name in found if name.split(".")[0] in ROOMS}


def forbidden_edges(room: str, allowed: frozenset[str]) -> list[str]:
    """`file → module` for each import that the table does not allow."""
    edges = []
    for file in sorted((ROOT / room).rglob("*.py")):
        for module in sorted(imports_of(file)):
            other = module.split(".")[0]
            two_parts = ".".join(module.split(".")[:2])
            if other not in {room, *LEAVES} and other not in allowed and two_parts not in allowed:
                edges.append(f"{file.relative_to(ROOT)} → {module}")
            if room in LEAVES and other != room:
                edges.append(f"{file.relative_to(ROOT)} → {module}")
    return edges


@pytest.mark.parametrize("room", sorted(ROOMS))
def no_room_imports_what_the_design_forbids(room: str) -> None:
    assert forbidden_edges(room, ALLOWED[room]) == []


@pytest.mark.parametrize("room", ["reward", "rounds", "serving", "feedback"])
def no_room_that_learns_or_serves_can_see_the_simulated_raters(room: str) -> None:
    seen = {module for file in (ROOT / room).rglob("*.py") for module in imports_of(file)}
    assert not {module for module in seen if module.split(".")[0] == "loadtest"}
    words = [file for file in (ROOT / room).rglob("*.py") if "loadtest" in file.read_text(encoding="utf-8")]
    assert words == [], "not even by name: importlib and subprocesses would get round the first check"


def the_event_contract_imports_the_standard_library_and_pydantic_only() -> None:
    import sys

    tree = ast.parse((ROOT / "feedback/events.py").read_text(encoding="utf-8"))
    names = {
        alias.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    }
    names |= {(node.module or "").split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert names - set(sys.stdlib_module_names) == {"pydantic"}
