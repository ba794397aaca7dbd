"""Files of preference pairs that anybody may have, read as they come: JSON Lines (also gzipped) or Parquet.

A row has `prompt`, `chosen` and `rejected`, each a text or a list of messages (TRL's two formats; without `prompt` the
answers begin with the same messages, which are the prompt). Optional: `tie`, `weight`, `margin`, `rater`, `kind`,
`source`, `position` (where the chosen answer was shown), `id`, and `split` (`train`; `heldout`, `test`, `validation`
or `dev` are held out). Without `split` a prompt's side is drawn from its hash. Other columns are left alone.
Guarantees: no prompt is on both sides; a bad row is told with its number.
"""

import gzip
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from feedback.events import prompt_hash
from feedback.snapshots import side_of
from reward.errors import PairsInvalid
from reward.pairs import Messages

HELD_OUT = ("heldout", "held_out", "held-out", "test", "validation", "dev")
_KNOWN = (
    "prompt",
    "chosen",
    "rejected",
    "tie",
    "weight",
    "margin",
    "rater",
    "kind",
    "source",
    "position",
    "id",
    "split",
    "answer",
)
_BATCH = 4096


@dataclass(frozen=True)
class FilePair:
    """One row. weight: above 0; margin: how much better, 0 where nobody said; names are empty where the file has
    none.
    """

    prompt: Messages
    chosen: str
    rejected: str
    weight: float
    margin: float
    tie: bool
    prompt_hash: str
    rater: str = ""
    kind: str = ""
    source: str = "human"
    position: str = ""


@dataclass(frozen=True)
class PairSet:
    """A file's pairs. snapshot_id: `file-` and a digest of the file's content."""

    snapshot_id: str
    train: list[FilePair]
    heldout: list[FilePair]

    @property
    def all(self) -> list[FilePair]:
        """Both sides."""
        return [*self.train, *self.heldout]


def read_pairs(file: Path, heldout_share: float = 0.25) -> PairSet:
    """Read it whole. heldout_share: of the prompts, where the file has no `split`. Raises PairsInvalid."""
    sides = _sides(str(file), _rows(file), heldout_share)
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return PairSet(f"file-{digest[:16]}", *sides)


def read_dataset(name: str, heldout_share: float = 0.25) -> PairSet:
    """A dataset that Hugging Face `datasets` can load: a name on its hub, or a folder. Raises PairsInvalid.

    A split called `train` is for training when there are others, which are held out; a single one is split as a file
    is.
    """
    import datasets

    try:
        loaded = datasets.load_dataset(name)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise PairsInvalid(f"dataset {name}: it can't be loaded: {error}") from error

    content = hashlib.sha256()

    def rows() -> Iterator[tuple[int, Mapping[str, Any]]]:
        number = 0
        for split, table in loaded.items():
            side = {} if len(loaded) == 1 else {"split": "train" if split == "train" else "heldout"}
            for row in table:
                number += 1
                content.update(json.dumps([split, row], sort_keys=True, default=str).encode())
                yield number, {**row, **side}

    sides = _sides(f"dataset {name}", rows(), heldout_share)
    return PairSet(f"dataset-{content.hexdigest()[:16]}", *sides)


def _sides(
    source: str, rows: Iterator[tuple[int, Mapping[str, Any]]], heldout_share: float
) -> tuple[list[FilePair], list[FilePair]]:
    """(train, held out)."""
    sides: dict[str, list[FilePair]] = {"train": [], "heldout": []}
    of_prompt: dict[str, str] = {}
    for number, row in rows:
        pair = _pair(source, number, row)
        side = _side(source, number, row, pair.prompt_hash, heldout_share)
        if of_prompt.setdefault(pair.prompt_hash, side) != side:
            raise PairsInvalid(f"{source}, row {number}: its prompt is on the other side of the split already")
        sides[side].append(pair)
    if not of_prompt:
        raise PairsInvalid(f"{source}: there are no pairs; a row needs prompt, chosen and rejected")
    return sides["train"], sides["heldout"]


@dataclass(frozen=True)
class AnswerRow:
    """An answer to score. fields: the whole row, as it came."""

    prompt: Messages
    answer: str
    fields: dict[str, Any]


def read_answers(file: Path) -> list[AnswerRow]:
    """Rows with `prompt` and `answer`, each a text or messages. Raises PairsInvalid."""
    rows = []
    for number, row in _rows(file):
        where = f"{file}, row {number}"
        prompt = _messages(where, row, "prompt", "user")
        answer = _answer(where, "answer", _messages(where, row, "answer", "assistant"))
        rows.append(AnswerRow(prompt, answer, dict(row)))
    if not rows:
        raise PairsInvalid(f"{file}: there are no rows; each needs prompt and answer")
    return rows


def _rows(file: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    try:
        if file.suffix == ".parquet":
            yield from _parquet_rows(file)
        else:
            yield from _json_rows(file)
    except OSError as error:
        raise PairsInvalid(f"{file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise PairsInvalid(f"{file}: it is not UTF-8 text (at byte {error.start})") from error
    except EOFError as error:
        raise PairsInvalid(f"{file}: it ends in the middle") from error


def _parquet_rows(file: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        table = pq.ParquetFile(file)
        columns = [name for name in table.schema_arrow.names if name in _KNOWN]
        for batch in table.iter_batches(_BATCH, columns=columns):
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except pa.ArrowInvalid as error:
        raise PairsInvalid(f"{file}: it is not Parquet: {error}") from error


def _json_rows(file: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    opener = gzip.open if file.suffix == ".gz" else open
    with opener(file, "rt", encoding="utf-8-sig") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise PairsInvalid(f"{file}, row {number}: it is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise PairsInvalid(f"{file}, row {number}: it must be a JSON object")
            yield number, row


def _pair(file: str, number: int, row: Mapping[str, Any]) -> FilePair:
    where = f"{file}, row {number}"
    chosen, rejected = (_messages(where, row, name, "assistant") for name in ("chosen", "rejected"))
    if row.get("prompt") is not None:
        prompt = _messages(where, row, "prompt", "user")
    else:
        shared = 0
        while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
            shared += 1
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    if not prompt:
        raise PairsInvalid(f"{where}: there is no prompt")
    return FilePair(
        prompt=prompt,
        chosen=_answer(where, "chosen", chosen),
        rejected=_answer(where, "rejected", rejected),
        weight=_number(where, row, "weight", 1.0, least=0.0),
        margin=_number(where, row, "margin", 0.0, least=-math.inf),
        tie=_flag(where, row, "tie"),
        prompt_hash=prompt_hash(prompt),
        rater=str(row.get("rater") or ""),
        kind=str(row.get("kind") or ""),
        source=str(row.get("source") or "human"),
        position=str(row.get("position") or ""),
    )


def _messages(where: str, row: Mapping[str, Any], name: str, role: str) -> Messages:
    """The field as messages; what is no list is one message, a number or a truth value as its JSON text."""
    value = row.get(name)
    if value is None:
        raise PairsInvalid(f"{where}: `{name}` is missing")
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, bool | int | float):
        return [{"role": role, "content": json.dumps(value)}]
    if isinstance(value, list) and all(
        isinstance(one, dict) and isinstance(one.get("role"), str) and isinstance(one.get("content"), str)
        for one in value
    ):
        return [{"role": one["role"], "content": one["content"]} for one in value]
    raise PairsInvalid(f"{where}: `{name}` must be a text, or a list of messages with role and content")


def _answer(where: str, name: str, messages: Messages) -> str:
    if len(messages) != 1 or messages[0]["role"] != "assistant":
        raise PairsInvalid(f"{where}: `{name}` must be one answer, by the role assistant")
    return str(messages[0]["content"])


def _number(where: str, row: Mapping[str, Any], name: str, default: float, *, least: float) -> float:
    value = row.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < least:
        raise PairsInvalid(f"{where}: `{name}` must be a number{' of at least 0' if least == 0 else ''}, not {value!r}")
    return float(value)


def _flag(where: str, row: Mapping[str, Any], name: str) -> bool:
    value = row.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise PairsInvalid(f"{where}: `{name}` must be true or false, not {value!r}")
    return value


def _side(file: str, number: int, row: Mapping[str, Any], hashed: str, heldout_share: float) -> str:
    given = row.get("split")
    if given is None:
        return side_of(hashed, heldout_share)
    if given == "train":
        return "train"
    if given in HELD_OUT:
        return "heldout"
    raise PairsInvalid(f"{file}, row {number}: `split` must be train or one of {', '.join(HELD_OUT)}, not {given!r}")
