"""Commands about experiments: `flywheel experiment …`."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flywheel import cli_rating
from flywheel.cli_parts import Json, connect_to, print_rows, settings_of

if TYPE_CHECKING:
    from serving.experiment_plan import Experiment

experiment_app = typer.Typer(help="A/B tests and side-by-side comparisons.", no_args_is_help=True)
Id = Annotated[str, typer.Argument(help="As `experiment list` shows it.")]
Weights = Annotated[list[str] | None, typer.Option("--weight", help="arm=0.3, one for each arm. Repeatable.")]


def add_to(app: typer.Typer) -> None:
    """Register the command group on `app`."""
    app.add_typer(experiment_app, name="experiment")
    cli_rating.add_to(experiment_app)


@experiment_app.command("start")
def start(
    context: typer.Context,
    candidate: Annotated[list[str], typer.Argument(help="Checkpoints to test, each as id or name=id.")],
    weight: Annotated[float, typer.Option(min=0, max=1, help="Of each candidate; the control gets the rest.")] = 0.5,
    control: Annotated[str | None, typer.Option(help="A checkpoint; what the alias names when not given.")] = None,
    alias: Annotated[str | None, typer.Option(help="Whose traffic; the settings' alias when not given.")] = None,
    metric: Annotated[str, typer.Option(help="preference, thumb, rating, score:NAME or signal:NAME.")] = "preference",
    further: Annotated[
        list[str] | None, typer.Option("--further", help="Another metric, told and not decisive. Repeatable.")
    ] = None,
    unit: Annotated[str, typer.Option(help="What is assigned: user, session or response.")] = "user",
    share: Annotated[float, typer.Option(min=0, max=1, help="Part of the alias's units in the experiment.")] = 1.0,
    namespace: Annotated[
        str | None, typer.Option(help="Experiments in one never share a unit; by default the alias.")
    ] = None,
    alpha: Annotated[float, typer.Option(min=0.0001, max=0.4999, help="Chance of promoting what is no better.")] = 0.05,
    window: Annotated[float, typer.Option(min=1, help="Seconds within which a vote counts.")] = 86_400.0,
    planned_units: Annotated[int | None, typer.Option(min=2, help="For one planned look beside it.")] = None,
    tester: Annotated[
        list[str] | None, typer.Option(help="unit=arm: always sees it, is not counted. Repeatable.")
    ] = None,
    shadow: Annotated[
        float, typer.Option(min=0, max=1, help="Part of prompts that candidates answer unseen, too.")
    ] = 0.0,
    guardrail: Annotated[
        list[str] | None,
        typer.Option(help="error_rate=0.02, abort_rate=0.05, time_to_first_token=2, length=2; or =off."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Begin an experiment; gateways follow within a second. The control's checkpoint twice makes an A/A test."""
    from pydantic import ValidationError

    from serving.experiment_plan import Start
    from serving.experiments import start_experiment
    from serving.registry import resolve_alias

    settings = settings_of(context)
    name = alias or settings.serving.alias
    with connect_to(context) as connection:
        arms = [{"name": "control", "checkpoint_id": control or resolve_alias(connection, name)}]
        arms[0]["weight"] = 1 - weight * len(candidate)
        for place, given in enumerate(candidate, start=1):
            label, separator, checkpoint_id = given.partition("=")
            default = "candidate" if len(candidate) == 1 else f"candidate-{place}"
            arms.append(
                {
                    "name": label if separator else default,
                    "checkpoint_id": checkpoint_id if separator else label,
                    "weight": weight,
                }
            )
        plan: dict[str, Any] = {
            "alias": name,
            "arms": arms,
            "metric": metric,
            "further_metrics": further or [],
            "unit": unit,
            "share": share,
            "namespace": namespace,
            "alpha": alpha,
            "window_s": window,
            "planned_units": planned_units,
            "testers": _assignments(tester, "--tester"),
            "shadow_share": shadow,
            "guardrails": {key: _limit(value) for key, value in _assignments(guardrail, "--guardrail").items()},
        }
        try:
            asked = Start.model_validate(plan)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise typer.BadParameter(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
        started = start_experiment(connection, asked, timeout_s=settings.serving.replica_timeout_s)
    _print_one(started, as_json=as_json)


@experiment_app.command("list")
def list_(
    context: typer.Context,
    alias: Annotated[str | None, typer.Option(help="Of this alias only.")] = None,
    running: Annotated[bool, typer.Option("--running", help="Running ones only.")] = False,
    as_json: Json = False,
) -> None:
    """All experiments, oldest first."""
    from serving.experiments import list_experiments

    with connect_to(context) as connection:
        found = list_experiments(connection, alias=alias, state="running" if running else None)
    if as_json:
        typer.echo(json.dumps([_shown(one) for one in found]))
        return
    rows = [
        {
            "experiment": one.experiment_id,
            "alias": one.alias,
            "state": one.state,
            "arms": ", ".join(f"{arm.name} {arm.weight:.0%} {arm.checkpoint_id}" for arm in one.arms),
            "share": f"{one.share:.0%}",
            "metric": one.plan.metric,
            "started": f"{one.started_at:%Y-%m-%d %H:%M}",
        }
        for one in found
    ]
    print_rows("Experiments", rows, as_json=False)


@experiment_app.command("ramp")
def ramp(
    context: typer.Context,
    experiment_id: Id,
    weight: Weights = None,
    share: Annotated[float | None, typer.Option(min=0, max=1, help="Part of the alias's units.")] = None,
    as_json: Json = False,
) -> None:
    """Change the weights of the arms or the share of the traffic; only units that must move do."""
    from serving.experiments import ramp_experiment

    weights = {name: _number(value, "--weight") for name, value in _assignments(weight, "--weight").items()}
    if not weights and share is None:
        raise typer.BadParameter("give --weight for each arm, or --share")
    with connect_to(context) as connection:
        ramped = ramp_experiment(connection, experiment_id, weights=weights or None, share=share)
    _print_one(ramped, as_json=as_json)


@experiment_app.command("stop")
def stop(
    context: typer.Context,
    experiment_id: Id,
    reason: Annotated[str, typer.Option(help="Kept with it.")] = "stopped by hand",
    as_json: Json = False,
) -> None:
    """End an experiment without a decision: the alias's own checkpoint answers everybody again."""
    from serving.experiments import get_experiment, stop_experiment

    with connect_to(context) as connection:
        stop_experiment(connection, experiment_id, "stopped", {"reason": reason})
        stopped = get_experiment(connection, experiment_id)
    _print_one(stopped, as_json=as_json)


@experiment_app.command("report")
def report(
    context: typer.Context,
    experiment_id: Id,
    html: Annotated[Path | None, typer.Option(help="Write the page with its plots there.")] = None,
    rows: Annotated[Path | None, typer.Option(help="Write the raw rows as Parquet into this folder.")] = None,
    as_json: Json = False,
) -> None:
    """What can be concluded now, as often as one likes to look."""
    from rounds.experiment_report import make_report

    began = time.perf_counter()
    with connect_to(context) as connection:
        made = make_report(connection, experiment_id)
        connection.rollback()
        if rows is not None:
            from rounds.experiment_rows import write_rows

            counts = write_rows(connection, experiment_id, rows)
            typer.echo(f"{rows}: {', '.join(f'{count} {name}' for name, count in counts.items())}", err=True)
    if html is not None:
        from flywheel.experiment_page import write_page

        write_page(made, html)
        typer.echo(f"{html}: written", err=True)
    if as_json:
        typer.echo(json.dumps(made))
        return
    _print_report(made, time.perf_counter() - began)


def _print_report(made: dict[str, Any], seconds: float) -> None:
    from rich.console import Console

    console = Console()
    console.print(f"[bold]{made['sentence']}[/bold]")
    arms = [
        {
            "arm": arm["name"],
            "checkpoint": arm["checkpoint_id"],
            "weight": f"{arm['weight']:.0%}",
            "units": arm["units"],
            "answers": arm["answers"],
            "voters": arm["voters"],
            "mean of votes": _percent(arm["vote_mean"]),
            "failed": _percent(arm["error_rate"]),
            "left": _percent(arm["abort_rate"]),
            "first token": ""
            if arm["time_to_first_token_median_s"] is None
            else f"{arm['time_to_first_token_median_s']:.2f} s",
            "tokens": "" if arm["mean_tokens"] is None else f"{arm['mean_tokens']:.1f}",
        }
        for arm in made["arms"]
    ]
    print_rows(f"{made['experiment_id']}: {made['state']}, by {made['unit']}, on {made['metric']}", arms, as_json=False)
    estimates, guardrails = [], []
    for compared in made["compared"]:
        side, effect = compared["side_by_side"], compared["effect"]
        estimates.append(
            {
                "arm": compared["arm"],
                "number": "share of choices, side by side",
                "estimate": _percent(side["win_share"]),
                "from": _percent(side["low"]),
                "to": _percent(side["high"]),
                "votes": side["wins"] + side["losses"],
                "verdict": side["verdict"],
            }
        )
        estimates += [
            {
                "arm": compared["arm"],
                "number": f"{one['metric']}, less the control's{'' if one is effect else '; decides nothing'}",
                "estimate": _percent(one["difference"]),
                "from": _percent(one["low"]),
                "to": _percent(one["high"]),
                "votes": one["voters"],
                "verdict": one["verdict"],
            }
            for one in (effect, *compared["further"])
            if one is not None
        ]
        guardrails += [
            {name: one[name] for name in ("arm", "guardrail", "value", "low", "high", "limit", "verdict")}
            for one in compared["guardrails"]
        ]
    print_rows("Beside the control, valid at all times", estimates, as_json=False)
    print_rows("Guardrails", [_rounded(one) for one in guardrails], as_json=False)
    ratio = made["sample_ratio"]["p_value"]
    console.print(f"Units by arm beside the weights: p = {'–' if ratio is None else f'{ratio:.3g}'}")
    console.print("What can't be concluded:")
    for said in made["cannot"]:
        console.print(f"- {said}")
    console.print(f"[dim]{seconds:.1f} s[/dim]")


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}


def _shown(experiment: "Experiment") -> dict[str, Any]:
    return experiment.model_dump(mode="json", exclude={"salt", "allocation"})


def _print_one(experiment: "Experiment", *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(_shown(experiment)))
        return
    arms = ", ".join(f"{arm.name} {arm.weight:.0%} ({arm.checkpoint_id})" for arm in experiment.arms)
    typer.echo(f"{experiment.experiment_id}\n{experiment.state} on {experiment.alias}, {experiment.share:.0%}: {arms}")


def _assignments(given: list[str] | None, option: str) -> dict[str, str]:
    """name=value pairs."""
    found = {}
    for one in given or ():
        name, separator, value = one.rpartition("=")
        if not separator or not name:
            raise typer.BadParameter(f"{one}: write it as name=value", param_hint=option)
        found[name] = value
    return found


def _number(value: str, option: str) -> float:
    try:
        return float(value)
    except ValueError as error:
        raise typer.BadParameter(f"{value} is no number", param_hint=option) from error


def _limit(value: str) -> float | None:
    return None if value == "off" else _number(value, "--guardrail")
