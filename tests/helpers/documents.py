"""The fenced blocks of README.md and docs/."""

import re
from collections.abc import Iterator
from pathlib import Path

from tests.helpers.servers import ROOT

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


API = "http://127.0.0.1:8000"
BROKER = "127.0.0.1:19092"


def documents() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def programs(address: str) -> list[tuple[str, str]]:
    """(where, text) of each Python program that speaks to `address`, API or BROKER."""
    return [(where, text) for where, text in blocks("python") if address in text]


def blocks(language: str) -> Iterator[tuple[str, str]]:
    """(where, text) of each block in this language; "" for those of a terminal."""
    for path in documents():
        for found in _BLOCK.finditer(path.read_text(encoding="utf-8")):
            if found[1] == language:
                line = path.read_text(encoding="utf-8").count("\n", 0, found.start()) + 1
                yield f"{path.relative_to(ROOT)}:{line}", found[2]
