"""The command line: `flywheel --help`.

Parses arguments and hands over; everything heavy is imported inside the commands, so that help answers at
once. An error that one of our rooms raises is printed as it is, without a trace, and ends with its exit code.
Exit codes: 0 done, 1 failed, 2 bad usage or settings, 3 already running.
"""

import sys
from typing import Annotated, Any

import typer

from flywheel import cli_bench, cli_experiments, cli_parts, cli_records, cli_registry, cli_reward

app = typer.Typer(
    name="flywheel",
    help="Serve a small chat model, learn from what its users think, promote only what they prefer.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
cli_parts.add_to(app)
cli_records.add_to(app)
cli_registry.add_to(app)
cli_experiments.add_to(app)
cli_reward.add_to(app)
cli_bench.add_to(app)

model_app = typer.Typer(help="The base model.", no_args_is_help=True)
app.add_typer(model_app, name="model")


@app.callback()
def root(
    context: typer.Context,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Set one setting, such as serving.port=8001. Repeatable."),
    ] = None,
) -> None:
    """Settings come from flywheel.toml, then FLYWHEEL_* variables, then --set; `flywheel config` shows them."""
    context.obj = list(assignments or [])


@app.command()
def up(
    context: typer.Context,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return when ready; `flywheel down` stops it.")
    ] = False,
    only: Annotated[list[str] | None, typer.Option(help="Start this component only. Repeatable.")] = None,
) -> None:
    """Start the platform and keep it up; Ctrl-C drains and stops it."""
    from flywheel import terminal
    from flywheel.components import plan

    settings = cli_parts.settings_of(context)
    plan(settings, frozenset(only or ()))
    raise typer.Exit(terminal.up(settings, cli_parts.set_options(context), only or [], detach=detach))


@app.command()
def status(context: typer.Context, as_json: cli_parts.Json = False) -> None:
    """Show every component, and whether the API is ready. Exit code 1 when nothing runs."""
    from flywheel import terminal

    raise typer.Exit(terminal.status(cli_parts.settings_of(context), as_json=as_json))


@app.command()
def down(context: typer.Context) -> None:
    """Drain, stop everything, and make sure that nothing is left."""
    from flywheel import terminal

    terminal.down(cli_parts.settings_of(context))


@app.command()
def redeploy(context: typer.Context) -> None:
    """Replace gateway and engines by ones with the settings as they are now, without an outage."""
    from flywheel import terminal

    terminal.redeploy(cli_parts.settings_of(context))


@app.command()
def config(context: typer.Context, as_json: cli_parts.Json = False) -> None:
    """Print the settings as they are resolved, secrets masked."""
    from flywheel import terminal

    terminal.print_settings(cli_parts.settings_of(context), as_json=as_json)


@app.command()
def demo(
    context: typer.Context,
    raters: Annotated[str, typer.Option(help="The raters' hidden taste: concise, verbose or random.")] = "concise",
    seed: Annotated[int, typer.Option(help="Seed of the raters and of the traffic.")] = 1,
) -> None:
    """Turn the wheel once with simulated raters, and report."""
    from flywheel.demo import run

    code = run(cli_parts.settings_of(context), raters=raters, seed=seed, arguments=cli_parts.set_options(context))
    raise typer.Exit(code)


@model_app.command("prepare")
def model_prepare(context: typer.Context) -> None:
    """Make the base model ready to serve: de-quantise SmolLM2 once, with its canaries."""
    from flywheel.model import prepare_base_model

    prepare_base_model(cli_parts.settings_of(context), lambda text: print(text, flush=True))


def room_errors() -> tuple[type[Exception], ...]:
    """The base error of every room. Imported when something was raised, not before."""
    from feedback.errors import FeedbackError
    from flywheel.errors import FlywheelError
    from reward.errors import RewardError
    from rounds.errors import RoundsError
    from serving.errors import ServingError
    from storage.errors import StorageError

    return FlywheelError, StorageError, FeedbackError, ServingError, RewardError, RoundsError


def main() -> None:
    """Run a command; the boundary at which our errors become a line and an exit code."""
    try:
        app()
    except room_errors() as error:
        sys.stderr.write(f"flywheel: {error}\n")
        sys.exit(_exit_code(error))


def _exit_code(error: Any) -> int:
    return int(getattr(error, "exit_code", 1))
