"""Laws of the commands that rate models from a file."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from flywheel.cli_rating import add_to
from rounds.errors import RatingFileInvalid
from rounds.leaderboard import read_leaderboard
from rounds.statistics.lengths import length_controlled_rate
from rounds.winrate import read_win_rates

HEADER = "model_a,model_b,winner"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "votes"


def run(*arguments: str) -> Any:
    app = typer.Typer()
    add_to(app)
    return CliRunner().invoke(app, arguments)


def a_csv_file_and_the_same_as_json_lines_give_one_leaderboard(file: Path) -> None:
    rows = [("x", "y", "a"), ("y", "x", "a"), ("x", "y", "tie"), ("y", "z", "b"), ("z", "x", "b")]
    file.write_text(HEADER + "\n" + "".join(f"{','.join(row)}\n" for row in rows))
    from_csv = run("leaderboard", str(file), "--json")
    lines = (json.dumps(dict(zip(HEADER.split(","), row, strict=True), extra=1)) + "\n" for row in rows)
    file.write_text("".join(lines))
    from_json = run("leaderboard", str(file), "--json")
    assert from_csv.exit_code == 0, from_csv.output
    told = json.loads(from_csv.stdout)
    assert told == json.loads(from_json.stdout)
    assert [one["rank"] for one in told["models"]] == [1, 2, 3]
    assert np.prod([one["strength"] for one in told["models"]]) == pytest.approx(1)
    by_name = {one["model"]: one for one in told["models"]}
    assert (by_name["x"]["wins"], by_name["x"]["losses"], by_name["x"]["ties"]) == (2, 1, 1)
    assert all(one["low"] < one["strength"] < one["high"] for one in told["models"])


def a_weight_counts_as_so_many_rows(file: Path) -> None:
    file.write_text(f"{HEADER},weight\nx,y,a,3\nx,y,b,1\nx,y,a,0\n")
    board = read_leaderboard(file)
    assert board.models[0].strength / board.models[1].strength == pytest.approx(3)


def the_intervals_are_clustered_by_what_every_row_has(file: Path) -> None:
    rows = "".join(f"x,y,{'ab'[number % 3 == 0]},r{number % 7},p{number % 5}\n" for number in range(70))
    file.write_text(f"{HEADER},rater,prompt\n{rows}")
    assert read_leaderboard(file).clustered_by == ("rater", "prompt")
    file.write_text(f"{HEADER},rater,prompt\n{rows}x,y,a,,p1\n")
    assert read_leaderboard(file).clustered_by == ("prompt",)
    file.write_text(f"{HEADER},rater\nx,y,a,r\nx,y,b,r\n")
    [first, _] = read_leaderboard(file).models
    assert (first.low, first.elo_high) == (None, None)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "no column model_a"),
        (b"model_a,model_b\nx,y\n", "no column winner"),
        (f"{HEADER}\n".encode(), "there are no rows"),
        (f"{HEADER}\nx,y,a\nx,y,model_a\n".encode(), "line 3: `winner` must be a, b or tie"),
        (f"{HEADER}\nx,x,a\n".encode(), "line 2: x is compared with itself"),
        (f"{HEADER}\nx,,a\n".encode(), "line 2: `model_b` is missing"),
        (f"{HEADER}\nx,y,a,b\n".encode(), "line 2: 4 fields"),
        (f"{HEADER},weight\nx,y,a,-1\n".encode(), "line 2: `weight` must not be negative"),
        (f"{HEADER},weight\nx,y,a,much\n".encode(), "line 2: `weight` must be a number"),
        (f"{HEADER},weight\nx,y,a,inf\n".encode(), "line 2: `weight` must be a number"),
        (f"{HEADER},weight\nx,y,a,1e300\n".encode(), "line 2: `weight` must be a number of at most 1e+12"),
        (b'{"model_a": "\\ud800", "model_b": "b", "winner": "a"}\n', "line 1: `model_a` must be a printable text"),
        (b'{"model_a": ["a"], "model_b": "b", "winner": "a"}\n', "line 1: `model_a` must be a printable text"),
        (f"{HEADER},weight\nx,y,a,0\n".encode(), "every row has the weight 0"),
        (f"{HEADER}\nx,y,a\n".encode(), "x never lost"),
        (b"\xff\xfe", "not UTF-8"),
        (b'{"model_a": "x"\n', "line 1: this is not JSON"),
        (b'{"model_a": "x", "model_b": "y", "winner": "a"}\n3\n', "line 2: every line must be a JSON object"),
        (f'{HEADER}\n"x,y,a\n'.encode(), "this is not CSV"),
    ],
)
def a_bad_file_is_refused_with_its_line(file: Path, content: bytes, told: str) -> None:
    file.write_bytes(content)
    with pytest.raises(RatingFileInvalid) as error:
        read_leaderboard(file)
    assert told in str(error.value)
    assert isinstance(run("leaderboard", str(file)).exception, RatingFileInvalid)


def a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(RatingFileInvalid, match="No such file"):
        read_leaderboard(tmp_path / "none")
    with pytest.raises(RatingFileInvalid, match="directory"):
        read_win_rates(tmp_path)


def no_two_different_rows_give_no_interval(file: Path) -> None:
    file.write_text(f"{HEADER}\n" + "x,y,tie\ny,z,tie\n" * 5)
    assert [(one.model, one.strength, one.low) for one in read_leaderboard(file).models] == [
        (name, pytest.approx(1), None) for name in "xyz"
    ]


def an_unknown_treatment_of_ties_is_bad_usage(file: Path) -> None:
    file.write_text(f"{HEADER}\nx,y,a\n")
    assert run("leaderboard", str(file), "--ties", "coin").exit_code == 2


def the_win_rate_is_the_mean_and_is_clustered_by_item(file: Path) -> None:
    rows = "".join(f"m,i{number},{value}\n" for number in range(20) for value in (number % 2, number % 2))
    file.write_text(f"model,item,preference\n{rows}other,i1,0.25\n")
    rates = read_win_rates(file)
    [first, second] = rates.models
    assert (first.model, first.items, first.win_rate) == ("m", 20, 0.5)
    assert first.error == pytest.approx(0.5 / np.sqrt(19), rel=1e-6)
    assert (second.win_rate, second.error, second.length_controlled) == (0.25, None, None)
    told = json.loads(run("winrate", str(file), "--json").stdout)
    assert [one["model"] for one in told["models"]] == ["m", "other"]
    assert "other" in run("winrate", str(file)).stdout


@pytest.mark.parametrize("value", ["1.5", "-0.1", "nan", "yes"])
def a_preference_outside_of_0_to_1_is_refused(file: Path, value: str) -> None:
    file.write_text(f"model,item,preference\nm,i,{value}\n")
    with pytest.raises(RatingFileInvalid, match="line 2: `preference` must"):
        read_win_rates(file)


def a_preference_for_length_alone_is_gone_at_equal_length() -> None:
    generator = np.random.default_rng(1)
    reference, length = generator.normal(100, 30, 4000), generator.normal(140, 30, 4000)
    squeezed = np.tanh((length - reference) / np.std(length - reference))
    preference = (generator.random(4000) < 1 / (1 + np.exp(-2.5 * squeezed))).astype(float)
    found = length_controlled_rate(preference, length, reference)
    assert found.plain > 0.7
    assert abs(found.rate - 0.5) < 3 * found.error < 0.1
    assert found.length_effect == pytest.approx(2.5 * np.tanh(1), rel=0.15)


def a_preference_that_has_nothing_to_do_with_length_stays() -> None:
    generator = np.random.default_rng(2)
    preference = generator.beta(3, 1, 2000)
    found = length_controlled_rate(preference, generator.normal(100, 30, 2000), generator.normal(100, 30, 2000))
    assert found.rate == pytest.approx(found.plain, abs=0.01)
    assert found.error == pytest.approx(np.std(preference) / np.sqrt(2000), rel=0.1)


def no_difference_of_lengths_and_a_side_that_always_wins_are_no_trouble() -> None:
    same = length_controlled_rate(np.array([1.0, 0.0, 1.0, 1.0]), np.full(4, 7.0), np.full(4, 7.0))
    assert (same.rate, same.length_effect) == (pytest.approx(0.75, abs=1e-4), None)
    always = length_controlled_rate(np.ones(50), np.arange(50.0), np.zeros(50))
    assert always.rate > 0.99
    with pytest.raises(ValueError, match="two rows"):
        length_controlled_rate(np.ones(1), np.ones(1), np.ones(1))
