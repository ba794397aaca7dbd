"""Files of votes that anybody may have: CSV with a header, or JSON Lines; read row by row, each fault told with its
line.
"""

import csv
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rounds.errors import RatingFileInvalid

LARGEST = 1e12
Row = tuple[int, Mapping[str, Any]]
"""(line, fields). An optional field that is absent or empty is not in it."""


def read_rows(file: Path, required: Sequence[str], optional: Sequence[str]) -> Iterator[Row]:
    """The rows of `file`, other columns left out: JSON Lines when it begins with a brace, else CSV.

    Raises RatingFileInvalid: the file can't be read, has no row, or a row lacks what is required.
    """
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            begin = stream.read(4096).lstrip()
            stream.seek(0)
            rows = _json_rows(file, stream) if begin.startswith("{") else _csv_rows(file, stream, required)
            wanted = (*required, *optional)
            found = False
            for line, fields in rows:
                found = True
                kept = {name: fields[name] for name in wanted if fields.get(name) not in (None, "")}
                for name in required:
                    if name not in kept:
                        raise fault(file, line, f"`{name}` is missing")
                yield line, kept
            if not found:
                raise RatingFileInvalid(f"{file}: there are no rows; the columns are {', '.join(required)}")
    except OSError as error:
        raise RatingFileInvalid(f"{file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise RatingFileInvalid(f"{file}: it is not UTF-8 text (at byte {error.start}); save it as UTF-8") from error


def number(file: Path, line: int, fields: Mapping[str, Any], name: str) -> float:
    """The field as a number of at most LARGEST. Raises RatingFileInvalid."""
    value = fields[name]
    try:
        found = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        found = math.nan
    if not abs(found) <= LARGEST:
        raise fault(file, line, f"`{name}` must be a number of at most {LARGEST:g}, not {value!r}")
    return found


def text(file: Path, line: int, fields: Mapping[str, Any], name: str, *, shown: bool = False) -> str:
    """The field as a name; whole numbers are names, too. shown: it must be printable. Raises RatingFileInvalid."""
    value = fields[name]
    if not isinstance(value, str | int) or (shown and not str(value).isprintable()):
        raise fault(file, line, f"`{name}` must be {'a printable ' if shown else ''}text, not {value!r}")
    return str(value)


def fault(file: Path, line: int, what: str) -> RatingFileInvalid:
    """What is wrong, and where."""
    return RatingFileInvalid(f"{file}, line {line}: {what}")


def _csv_rows(file: Path, stream: Any, required: Sequence[str]) -> Iterator[Row]:
    reader = csv.reader(stream, strict=True)
    try:
        header = [name.strip() for name in next(reader, [])]
        missing = [name for name in required if name not in header]
        if missing:
            raise RatingFileInvalid(
                f"{file}: the header has no column {', '.join(missing)}; it has {', '.join(header)}"
            )
        for cells in reader:
            if not cells:
                continue
            if len(cells) != len(header):
                raise fault(file, reader.line_num, f"{len(cells)} fields, and the header has {len(header)}")
            yield reader.line_num, dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise fault(file, reader.line_num, f"this is not CSV: {error}") from error


def _json_rows(file: Path, stream: Any) -> Iterator[Row]:
    for line, content in enumerate(stream, start=1):
        if not content.strip():
            continue
        try:
            fields = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise fault(file, line, f"this is not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise fault(file, line, "every line must be a JSON object")
        yield line, fields
