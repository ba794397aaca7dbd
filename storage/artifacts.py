"""Artifacts: directories written whole or not at all.

A writer fills a temporary sibling, fsyncs the files, renames it into place and writes the marker last;
a reader takes marked directories only. A second write under the same name keeps the first.
Only their owner may read them: snapshots hold conversations.
Local paths only for now; the layout is the one that an object store would hold.
"""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from storage.errors import ArtifactIncomplete

MARKER = "COMPLETE"
MANIFEST = "manifest.json"


def digest(files: Iterable[Path]) -> str:
    """sha256 (hex) over the names and bytes of `files`, in name order."""
    total = hashlib.sha256()
    for file in sorted(files, key=lambda path: path.name):
        total.update(file.name.encode() + b"\0")
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                total.update(block)
    return total.hexdigest()


def write_artifact(target: Path, fill: Callable[[Path], dict[str, Any]]) -> Path:
    """Create directory `target`: `fill(temporary)` writes the files and returns the manifest.

    Returns `target`. If a complete one is there already it is kept and `fill` is not called.
    """
    if (target / MARKER).exists():
        return target
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if target.exists():
        shutil.rmtree(target)
    temporary = target.parent / f".{target.name}.{uuid.uuid4().hex}"
    temporary.mkdir(mode=0o700)
    try:
        manifest = fill(temporary)
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=2, sort_keys=True, ensure_ascii=False))
        for file in temporary.rglob("*"):
            if file.is_file():
                _fsync(file)
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    marker = target / MARKER
    marker.write_text("")
    _fsync(marker)
    _fsync(target)
    return target


def read_manifest(target: Path) -> dict[str, Any]:
    """The manifest of a complete artifact. Raises ArtifactIncomplete when the marker is missing."""
    if not (target / MARKER).exists():
        raise ArtifactIncomplete(f"{target} has no {MARKER} marker: it was not written to the end")
    manifest: dict[str, Any] = json.loads((target / MANIFEST).read_text(encoding="utf-8"))
    return manifest


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
