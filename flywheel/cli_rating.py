"""Commands that rate models from a file: `flywheel experiment leaderboard`, `flywheel experiment winrate`."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from flywheel.cli_parts import Json, print_rows

File = Annotated[Path, typer.Argument(help="CSV with a header, or JSON Lines.")]
Confidence = Annotated[float, typer.Option(min=0.5, max=0.9999, help="Of the intervals.")]


def add_to(group: typer.Typer) -> None:
    """Register the commands on the group."""
    group.command("leaderboard")(leaderboard)
    group.command("winrate")(winrate)


def leaderboard(
    file: File,
    ties: Annotated[str, typer.Option(help="half, davidson or rao-kupper.")] = "half",
    ridge: Annotated[float, typer.Option(min=0, help="Makes strengths finite where some model never lost.")] = 0.0,
    confidence: Confidence = 0.95,
    as_json: Json = False,
) -> None:
    """Rate models by paired comparisons: `model_a`, `model_b`, `winner` (a, b, tie); perhaps `rater`, `prompt`,
    `weight`.

    Strengths are Bradley and Terry's, with a geometric mean of 1; points are the same for reading.
    """
    from rounds.leaderboard import read_leaderboard
    from rounds.statistics.pairs import TIES

    treatment = next((known for known in TIES if known == ties), None)
    if treatment is None:
        raise typer.BadParameter(f"must be one of {', '.join(TIES)}", param_hint="--ties")
    board = read_leaderboard(file, ties=treatment, ridge=ridge, confidence=confidence)
    if as_json:
        typer.echo(json.dumps(board.as_json()))
        return
    level = f"{confidence:.3g}".removeprefix("0.")
    rows = [
        {
            "rank": one.rank,
            "model": one.model,
            "points": f"{one.elo:.0f}",
            f"from to ({level} %)": _between(one.elo_low, one.elo_high, "{:.0f}"),
            "strength": f"{one.strength:.3f}",
            "won": f"{one.wins:g}",
            "lost": f"{one.losses:g}",
            "tied": f"{one.ties:g}",
        }
        for one in board.models
    ]
    grouped = f", grouped by {' and '.join(board.clustered_by)}" if board.clustered_by else ""
    print_rows(f"{board.rows} comparisons, ties {board.ties}{grouped}", rows, as_json=False)


def winrate(file: File, confidence: Confidence = 0.95, as_json: Json = False) -> None:
    """Win rates against one reference: `model`, `item`, `preference` (0 to 1); perhaps `length`, `reference_length`.

    With lengths also the rate that remains when answers are equally long.
    """
    from rounds.winrate import read_win_rates

    rates = read_win_rates(file, confidence=confidence)
    if as_json:
        typer.echo(json.dumps(rates.as_json()))
        return
    rows: list[dict[str, Any]] = [
        {
            "model": one.model,
            "items": one.items,
            "win rate": f"{one.win_rate:.1%}",
            "standard error": "" if one.error is None else f"{one.error:.1%}",
            "from to": _between(one.low, one.high, "{:.1%}"),
            "at equal length": "" if one.length_controlled is None else f"{one.length_controlled:.1%}",
            "length ratio": "" if one.mean_length_ratio is None else f"{one.mean_length_ratio:.2f}",
        }
        for one in rates.models
    ]
    print_rows(f"{rates.rows} preferences against the reference", rows, as_json=False)


def _between(low: float | None, high: float | None, form: str) -> str:
    return "" if low is None or high is None else f"{form.format(low)} to {form.format(high)}"
