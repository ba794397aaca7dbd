"""Commands that measure: `flywheel bench …`. Each prints JSON with --json and compares in one run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from flywheel.cli_parts import Json, print_rows, settings_of

bench_app = typer.Typer(help="Measure this platform against its peers.", no_args_is_help=True)


def add_to(app: typer.Typer) -> None:
    """Register the command group on `app`."""
    app.add_typer(bench_app, name="bench")


@bench_app.command("serving")
def bench_serving(
    context: typer.Context,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; their medians are shown.")] = 5,
    peer: Annotated[list[str] | None, typer.Option(help="vllm, ray_serve_llm. Repeatable; both by default.")] = None,
    as_json: Json = False,
) -> None:
    """Streaming speed beside vLLM's own server and Ray Serve LLM, same engine arguments, same load, one run."""
    from flywheel.bench import OURS, PEERS, run

    peers = tuple(peer or PEERS)
    unknown = sorted(set(peers) - set(PEERS))
    if unknown:
        raise typer.BadParameter(f"{', '.join(unknown)}: peers are {', '.join(PEERS)}")
    report = _measured(lambda say: run(settings_of(context), rounds=rounds, peers=peers, say=say))
    if as_json:
        typer.echo(json.dumps(report))
        return
    from flywheel.terminal import print_fields

    rows = [
        {"server": name, "at once": count, **figures}
        for name, by_count in report["servers"].items()
        for count, figures in by_count.items()
    ]
    print_rows("Streaming, 96 new tokens", rows, as_json=False)
    print_fields(
        f"{OURS} against its peers",
        {name: value for name, value in report.items() if "_vs_" in name or "ratio" in name or "added" in name},
    )


@bench_app.command("feedback")
def bench_feedback(
    context: typer.Context,
    seconds: Annotated[float, typer.Option(min=1, help="How long each part is measured.")] = 60,
    rate: Annotated[int, typer.Option(min=1, help="Votes a second of the steady part.")] = 1000,
    as_json: Json = False,
) -> None:
    """Votes acknowledged a second, and how soon they are in the store, with everything on."""
    from flywheel.bench_feedback import run
    from flywheel.terminal import print_fields

    report = _measured(lambda say: run(settings_of(context), seconds=seconds, rate=rate, say=say))
    if as_json:
        typer.echo(json.dumps(report))
    else:
        print_fields("Votes", report)


@bench_app.command("preferences")
def bench_preferences(
    size: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Votes in the store. Repeatable; by default 10000, 100000, 1000000."),
    ] = None,
    as_json: Json = False,
) -> None:
    """What new votes, and a snapshot, cost beside many old ones."""
    from flywheel.bench_preferences import run

    sizes = sorted(set(size or (10_000, 100_000, 1_000_000)))
    report = _measured(lambda say: run(sizes=sizes, say=say))
    if as_json:
        typer.echo(json.dumps(report))
    else:
        rows = [{"votes in the store": held, **figures} for held, figures in report["sizes"].items()]
        print_rows(f"A new vote costs {report['new_votes_growth']} times as much beside the most", rows, as_json=False)


@bench_app.command("statistics")
def bench_statistics(
    runs: Annotated[int, typer.Option(min=200, help="Simulated experiments of a case.")] = 4000,
    seed: Annotated[int, typer.Option(help="Of the simulation.")] = 1,
    as_json: Json = False,
) -> None:
    """False promotions, votes to a decision, and coverage, simulated with the statistics that experiments use."""
    from flywheel.bench_statistics import run

    report = _measured(lambda say: run(runs=runs, seed=seed, say=say))
    if as_json:
        typer.echo(json.dumps(report))
        return
    rates = [{"case": case, "promoted": f"{rate:.3f}"} for case, rate in report["false_promotion_rate"].items()]
    print_rows(f"No arm is better: promoted (at most {report['alpha']})", rates, as_json=False)
    rates = [{"case": case, "promoted": f"{rate:.3f}"} for case, rate in report["naive_false_promotion_rate"].items()]
    print_rows("The same without these precautions", rates, as_json=False)
    votes = [
        {
            "win share": share,
            **{name: f"{count:.0f} ({report['power'][share][name]:.0%})" for name, count in by.items()},
        }
        for share, by in report["median_votes"].items()
    ]
    print_rows("One arm is better: median votes (promoted)", votes, as_json=False)
    covered = [{"interval of": case, "covered": f"{rate:.3f}"} for case, rate in report["coverage"].items()]
    print_rows("Intervals that hold the truth (95 %)", covered, as_json=False)


@bench_app.command("report")
def bench_report(
    exposures: Annotated[int, typer.Option(min=100, help="Answers that the experiment showed.")] = 1_000_000,
    votes: Annotated[int, typer.Option(min=20, help="Of them with a vote.")] = 100_000,
    as_json: Json = False,
) -> None:
    """How long the report of a large experiment takes, from the store to the page with its plots."""
    from flywheel.bench_report import run
    from flywheel.terminal import print_fields

    report = _measured(lambda say: run(exposures=exposures, votes=votes, say=say))
    if as_json:
        typer.echo(json.dumps(report))
    else:
        print_fields("Report of an experiment", report)


@bench_app.command("reward")
def bench_reward(
    context: typer.Context,
    pairs: Annotated[Path | None, typer.Option(help="A file of pairs; made ones when absent.")] = None,
    steps: Annotated[int, typer.Option(min=2, help="Updates of a training; the first is not timed.")] = 6,
    pairs_per_step: Annotated[int, typer.Option(min=1, help="Pairs of one update.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Trainings of each; their medians are shown.")] = 3,
    as_json: Json = False,
) -> None:
    """Training of a reward model beside TRL's RewardTrainer: same weights, same pairs, same batches, one run."""
    from flywheel.bench_reward import run
    from flywheel.model import prepare_base_model
    from flywheel.terminal import print_fields

    settings = settings_of(context)
    mode = "full" if settings.reward.mode == "full" else "lora"
    reward = settings.reward.model_copy(update={"mode": mode})
    report = _measured(
        lambda say: run(
            prepare_base_model(settings, say),
            reward,
            pairs=pairs,
            steps=steps,
            pairs_per_step=pairs_per_step,
            rounds=rounds,
            say=say,
        )
    )
    if as_json:
        typer.echo(json.dumps(report))
        return
    sides = report.pop("sides")
    print_rows(
        "Training a reward model", [{"trainer": name, **figures} for name, figures in sides.items()], as_json=False
    )
    print_fields("Ours over TRL's", report)


def _measured(work: Callable[[Callable[[str], None]], dict[str, Any]]) -> dict[str, Any]:
    """Do it, and show on stderr what is under way."""
    from rich.console import Console

    console = Console(stderr=True)
    with console.status("starting") as status:

        def say(text: str) -> None:
            status.update(text)
            if not console.is_terminal:
                console.print(text)

        return work(say)
