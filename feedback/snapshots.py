"""Snapshots: derived preferences, frozen as a dataset in TRL's conversational preference format.

`train.parquet` and `heldout.parquet` have `prompt`, `chosen` and `rejected` (lists of messages), and weight,
margin, tie and where the pair comes from. A manifest beside them counts what is inside.
Guarantees
- What was erased before or while it is made is not in it; whose words and votes are is kept as digests, so that a
  later erasure can name it.
- No prompt is on both sides; the side is a function of the prompt's hash and the share alone, so a prompt
  that was held out once is held out in every later snapshot of that share.
- The id is made of the content: the same preferences give the same snapshot, whatever their order, and
  making it twice is harmless. Reading verifies the content.
- Written whole or not at all (storage.artifacts).
Non-guarantee: with very few prompts a side can be empty; the manifest tells.
"""

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from feedback.erasure import erased_since, hold_off_erasures, subject_of
from feedback.errors import NothingToLearn, SnapshotCorrupt
from feedback.events import prompt_hash
from feedback.preferences import DerivedPreference, derive_preferences
from feedback.stream import plain_text
from storage.artifacts import read_manifest, write_artifact
from storage.postgres import Connection, connect

FORMAT = "flywheel.snapshot.v1"
_SIDES: tuple[Literal["train", "heldout"], ...] = ("train", "heldout")


class Pair(BaseModel):
    """One row. prompt: messages of role and content. weight in (0, 1]. margin: TRL's, 0 where nobody stated one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt: list[dict[str, Any]]
    chosen: str
    rejected: str
    weight: float
    margin: float = 0.0
    tie: bool
    prompt_hash: str
    rater: str
    source: str
    kind: str
    preference_id: str
    chosen_response_id: str | None
    rejected_response_id: str


class Snapshot(BaseModel):
    """A frozen dataset. Pairs are in the order of prompt hash and preference id."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    snapshot_id: str
    path: Path
    manifest: dict[str, Any]
    train: list[Pair]
    heldout: list[Pair]


def side_of(prompt_hash: str, heldout_share: float) -> Literal["train", "heldout"]:
    """Which side a prompt is on: a uniform draw in [0, 1) from its hash, held out below the share."""
    draw = hashlib.sha256(f"flywheel-heldout:{prompt_hash}".encode()).digest()[:8]
    return "heldout" if int.from_bytes(draw, "big") / 2**64 < heldout_share else "train"


def create_snapshot(dsn: str, artifacts: Path, *, heldout_share: float = 0.25) -> Snapshot:
    """Freeze what the store says now under `artifacts/snapshots/<snapshot_id>` and list it in `snapshots`.

    heldout_share: the share of prompts kept out of training. Raises NothingToLearn when no preference can
    be derived, DatabaseUnreachable when the store does not answer.
    """
    with connect(dsn) as connection:
        read_at = hold_off_erasures(connection)
        preferences = derive_preferences(connection)
        subjects = _subjects(connection, preferences)
    pairs = [_pair(preference) for preference in preferences]
    if not pairs:
        raise NothingToLearn("no preference can be derived from the votes so far; collect some comparisons first")
    digest = content_digest(pairs, heldout_share)
    snapshot_id = f"snapshot-{digest[:16]}"
    path = write_artifact(
        artifacts.absolute() / "snapshots" / snapshot_id,
        lambda folder: _fill(folder, snapshot_id, digest, pairs, heldout_share),
    )
    snapshot = read_snapshot(path)
    with connect(dsn) as connection:
        known = connection.execute("select from snapshots where snapshot_id = %s", (snapshot_id,)).fetchone()
        if erased_since(connection, subjects, read_at) and known is None:
            shutil.rmtree(path)  # it holds what was to go; of what is left a new one is made
            return create_snapshot(dsn, artifacts, heldout_share=heldout_share)
        connection.execute(
            "insert into snapshots (snapshot_id, path, digest, manifest) values (%s, %s, %s, %s)"
            " on conflict (snapshot_id) do nothing",
            (snapshot_id, str(path), digest, json.dumps(snapshot.manifest)),
        )
        connection.execute(
            "insert into snapshot_subjects (snapshot_id, subject) select %s, unnest(%s::text[]) on conflict do nothing",
            (snapshot_id, subjects),
        )
    return snapshot


def read_snapshot(path: Path) -> Snapshot:
    """Read a complete snapshot back. Raises ArtifactIncomplete, or SnapshotCorrupt when the rows differ."""
    manifest = read_manifest(path)
    sides = {side: _read_side(path / f"{side}.parquet") for side in _SIDES}
    if content_digest([*sides["train"], *sides["heldout"]], manifest["heldout_share"]) != manifest["content_sha256"]:
        raise SnapshotCorrupt(f"the rows in {path} are not those that its manifest names")
    return Snapshot(
        snapshot_id=manifest["snapshot_id"],
        path=path,
        manifest=manifest,
        train=sides["train"],
        heldout=sides["heldout"],
    )


def content_digest(pairs: Sequence[Pair], heldout_share: float) -> str:
    """sha256 (hex) over the pairs, whatever their order, and the share that splits them."""
    rows = sorted(json.dumps(pair.model_dump(), sort_keys=True, ensure_ascii=False) for pair in pairs)
    return hashlib.sha256("\n".join([FORMAT, repr(float(heldout_share)), *rows]).encode()).hexdigest()


def _subjects(connection: Connection, preferences: Sequence[DerivedPreference]) -> list[str]:
    """The digests of all whose words or votes are in these preferences."""
    answers = [one for p in preferences for one in (p.chosen_response_id, p.rejected_response_id) if one]
    users = connection.execute(
        'select distinct "user" as name from interactions where response_id = any (%s) and "user" is not null',
        (answers,),
    )
    names = {row["name"] for row in users}.union(*({p.rater, p.other_rater} for p in preferences))
    return sorted(map(subject_of, names))


def _pair(preference: DerivedPreference) -> Pair:
    prompt = [
        {"role": str(message.get("role")), "content": plain_text(message.get("content"))}
        for message in preference.messages
    ]
    return Pair(
        prompt=prompt,
        chosen=preference.chosen_text,
        rejected=preference.rejected_text,
        weight=preference.weight,
        tie=preference.tie,
        prompt_hash=prompt_hash(prompt),  # of what is learned from: clients write one text in several ways
        rater=preference.rater,
        source=preference.source,
        kind=preference.kind,
        preference_id=preference.preference_id,
        chosen_response_id=preference.chosen_response_id,
        rejected_response_id=preference.rejected_response_id,
    )


def _fill(folder: Path, snapshot_id: str, digest: str, pairs: Sequence[Pair], heldout_share: float) -> dict[str, Any]:
    sides = {side: [pair for pair in pairs if side_of(pair.prompt_hash, heldout_share) == side] for side in _SIDES}
    for side, rows in sides.items():
        _write_side(folder / f"{side}.parquet", rows)
    return {
        "format": FORMAT,
        "snapshot_id": snapshot_id,
        "content_sha256": digest,
        "heldout_share": float(heldout_share),
        "pairs": len(pairs),
        "decided": sum(not pair.tie for pair in pairs),
        "ties": sum(pair.tie for pair in pairs),
        "raters": len({pair.rater for pair in pairs}),
        "kinds": {kind: sum(pair.kind == kind for pair in pairs) for kind in sorted({pair.kind for pair in pairs})},
        **{f"{side}_pairs": len(rows) for side, rows in sides.items()},
        **{f"{side}_prompts": len({pair.prompt_hash for pair in rows}) for side, rows in sides.items()},
    }


def _write_side(file: Path, pairs: Sequence[Pair]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    messages = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    schema = pa.schema(
        [
            ("prompt", messages),
            ("chosen", messages),
            ("rejected", messages),
            ("weight", pa.float64()),
            ("margin", pa.float64()),
            ("tie", pa.bool_()),
            *((name, pa.string()) for name in ("prompt_hash", "rater", "source", "kind")),
            *((name, pa.string()) for name in ("preference_id", "chosen_response_id", "rejected_response_id")),
        ]
    )
    rows = [
        pair.model_dump()
        | {name: [{"role": "assistant", "content": getattr(pair, name)}] for name in ("chosen", "rejected")}
        for pair in pairs
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), file, compression="zstd")


def _read_side(file: Path) -> list[Pair]:
    import pyarrow.parquet as pq

    return [
        Pair.model_validate(row | {name: row[name][0]["content"] for name in ("chosen", "rejected")})
        for row in pq.read_table(file).to_pylist()
    ]
