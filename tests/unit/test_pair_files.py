"""Laws of files of preference pairs, read as they come."""

import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from reward.errors import PairsInvalid
from reward.pair_files import read_answers, read_dataset, read_pairs

SHARED = Path(__file__).parents[3] / "shared" / "data"
ROW: dict[str, Any] = {"prompt": "Why?", "chosen": "Because.", "rejected": "No idea."}


def write(folder: Path, rows: list[Any], name: str = "pairs.jsonl") -> Path:
    file = folder / name
    text = "".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)
    file.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return file


def the_formats_of_a_row_say_the_same(tmp_path: Path) -> None:
    user, good, bad = (
        {"role": role, "content": content}
        for role, content in (("user", "Why?"), ("assistant", "Because."), ("assistant", "No idea."))
    )
    rows = [
        ROW,
        {"prompt": [user], "chosen": [good], "rejected": [bad]},
        {"chosen": [user, good], "rejected": [user, bad]},
        {**ROW, "prompt": [user], "other": {"left": "alone"}, "tie": None},
    ]
    pairs = read_pairs(write(tmp_path, rows)).all
    assert len(pairs) == 4
    for pair in pairs:
        assert (pair.prompt, pair.chosen, pair.rejected) == ([user], "Because.", "No idea.")
        assert (pair.weight, pair.margin, pair.tie) == (1.0, 0.0, False)


def each_kind_of_file_says_the_same(tmp_path: Path) -> None:
    rows = [{**ROW, "prompt": f"{number}?", "tie": number % 3 == 0, "weight": 0.5} for number in range(40)]
    plain = read_pairs(write(tmp_path, rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "pairs.parquet")
    for other in (read_pairs(write(tmp_path, rows, "pairs.jsonl.gz")), read_pairs(tmp_path / "pairs.parquet")):
        assert (other.train, other.heldout) == (plain.train, plain.heldout)
    assert 0 < len(plain.heldout) < len(plain.train)


def the_split_of_the_file_is_kept(tmp_path: Path) -> None:
    names = ["train", "heldout", "test", "validation", "dev"]
    rows = [{**ROW, "prompt": name, "split": name} for name in names]
    found = read_pairs(write(tmp_path, rows))
    assert [pair.prompt[0]["content"] for pair in found.train] == ["train"]
    assert len(found.heldout) == 4


def a_dataset_s_splits_are_its_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "pairs"
    folder.mkdir()
    write(folder, [{**ROW, "prompt": "one"}, {**ROW, "prompt": "two"}], "train.jsonl")
    write(folder, [{**ROW, "prompt": "three"}], "test.jsonl")
    found = read_dataset(str(folder))
    assert [pair.prompt[0]["content"] for pair in found.train] == ["one", "two"]
    assert [pair.prompt[0]["content"] for pair in found.heldout] == ["three"]
    assert found.snapshot_id == read_dataset(str(folder)).snapshot_id
    with pytest.raises(PairsInvalid, match="can't be loaded"):
        read_dataset(str(tmp_path / "nowhere"))


def a_number_or_a_truth_value_is_an_answer(tmp_path: Path) -> None:
    [pair] = read_pairs(write(tmp_path, [{**ROW, "chosen": True, "rejected": 7}])).all
    assert (pair.chosen, pair.rejected) == ("true", "7")


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("[1]\n", "row 2: it must be a JSON object"),
        ("{\n", "row 2: it is not JSON"),
        ({"prompt": "a", "chosen": "b"}, "row 2: `rejected` is missing"),
        ({**ROW, "prompt": None}, "row 2: there is no prompt"),
        ({**ROW, "chosen": {"text": "x"}}, "row 2: `chosen` must be a text"),
        ({**ROW, "chosen": [{"role": "user", "content": "x"}]}, "row 2: `chosen` must be one answer"),
        ({**ROW, "tie": "yes"}, "row 2: `tie` must be true or false"),
        ({**ROW, "weight": -1}, "row 2: `weight` must be a number of at least 0"),
        ({**ROW, "margin": float("nan")}, "row 2: `margin` must be a number"),
        ({**ROW, "split": "maybe"}, "row 2: `split` must be train or one of"),
        ({**ROW, "prompt": "first", "split": "test"}, "row 2: its prompt is on the other side"),
    ],
)
def a_bad_row_is_told_with_its_number(tmp_path: Path, row: Any, told: str) -> None:
    file = write(tmp_path, [{**ROW, "prompt": "first", "split": "train"}, row])
    with pytest.raises(PairsInvalid) as error:
        read_pairs(file)
    assert told in str(error.value)


def a_file_that_is_none_is_told(tmp_path: Path) -> None:
    (tmp_path / "broken.parquet").write_bytes(b"PAR0")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(json.dumps(ROW).encode())[:-12])
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}')
    write(tmp_path, [], "empty.jsonl")
    for name in ("broken.parquet", "cut.jsonl.gz", "latin.jsonl", "empty.jsonl", "none.jsonl"):
        with pytest.raises(PairsInvalid):
            read_pairs(tmp_path / name)


def the_answers_to_score_keep_their_rows(tmp_path: Path) -> None:
    file = write(tmp_path, [{"prompt": "Why?", "answer": "Because.", "id": 3}])
    [row] = read_answers(file)
    assert (row.answer, row.fields) == ("Because.", {"prompt": "Why?", "answer": "Because.", "id": 3})
    with pytest.raises(PairsInvalid, match="`answer` is missing"):
        read_answers(write(tmp_path, [ROW]))


@pytest.mark.parametrize(
    ("name", "pairs", "heldout", "ties"),
    [("fg_rlhf_dev/fg.pairs.jsonl.gz", 3000, 576, 384), ("pandalm/pandalm.pairs.jsonl.gz", 999, 174, 105)],
)
def every_pair_of_a_real_set_is_read(name: str, pairs: int, heldout: int, ties: int) -> None:
    if not (SHARED / name).is_file():
        pytest.skip(f"{name} is not beside the repository")
    found = read_pairs(SHARED / name)
    assert (len(found.all), len(found.heldout)) == (pairs, heldout)
    assert sum(pair.tie for pair in found.all) == ties
