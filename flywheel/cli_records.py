"""Commands about what the platform keeps: the ledger's audit, API keys, checkpoints, rounds."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flywheel.cli_parts import settings_of

if TYPE_CHECKING:
    from storage.postgres import Connection

Json = Annotated[bool, typer.Option("--json", help="Print JSON for a script.")]

feedback_app = typer.Typer(help="The ledger of votes and answers.", no_args_is_help=True)
key_app = typer.Typer(help="API keys.", no_args_is_help=True)
checkpoint_app = typer.Typer(help="Checkpoints in the registry.", no_args_is_help=True)
rounds_app = typer.Typer(help="Turns of the wheel.", no_args_is_help=True)


def add_to(app: typer.Typer) -> None:
    """Register the command groups on `app`."""
    app.add_typer(feedback_app, name="feedback")
    app.add_typer(key_app, name="key")
    app.add_typer(checkpoint_app, name="checkpoint")
    app.add_typer(rounds_app, name="rounds")


@feedback_app.command("audit")
def feedback_audit(context: typer.Context, as_json: Json = False) -> None:
    """Compare outbox, log and store. Exit code 1 when something acknowledged is in none of its places."""
    from feedback.audit import audit

    settings = settings_of(context)
    report = audit(settings.feedback, settings.storage.dsn)
    if as_json:
        typer.echo(json.dumps({**report.model_dump(mode="json"), "clean": report.clean}))
    else:
        from flywheel.terminal import print_fields

        print_fields("Ledger: clean" if report.clean else "Ledger: NOT clean", report.model_dump(mode="json"))
    raise typer.Exit(0 if report.clean else 1)


@key_app.command("create")
def key_create(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Who or what the key is for.")],
    scope: Annotated[list[str] | None, typer.Option(help="inference, feedback, evaluate, admin. Repeatable.")] = None,
    as_json: Json = False,
) -> None:
    """Make a key; its secret is shown once and not kept."""
    from serving.keys import create_key

    try:
        with _connect(context) as connection:
            key_id, secret = create_key(connection, name, scope or ["inference", "feedback"])
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(json.dumps({"key_id": key_id, "secret": secret}) if as_json else f"{key_id}\n{secret}")


@key_app.command("list")
def key_list(context: typer.Context, as_json: Json = False) -> None:
    """All keys, without their secrets."""
    _print_rows(
        context,
        "select key_id, name, scopes, created_at, revoked_at from api_keys order by created_at, key_id",
        "API keys",
        as_json=as_json,
    )


@key_app.command("first", hidden=True)
def key_first(context: typer.Context) -> None:
    """Make the first key and write it to the home folder, unless the one there is good."""
    from flywheel.setup import ensure_first_key

    typer.echo(ensure_first_key(settings_of(context)))


@checkpoint_app.command("list")
def checkpoint_list(context: typer.Context, as_json: Json = False) -> None:
    """All checkpoints, with the aliases that name them."""
    _print_rows(
        context,
        """
        select checkpoint_id, kind, parent_id, state, created_at,
               (select array_agg(alias order by alias) from aliases a
                where a.checkpoint_id = c.checkpoint_id) as aliases
        from checkpoints c order by created_at, checkpoint_id
        """,
        "Checkpoints",
        as_json=as_json,
    )


@rounds_app.command("list")
def rounds_list(context: typer.Context, as_json: Json = False) -> None:
    """All rounds, each with its state and the reason for it."""
    _print_rows(
        context,
        """
        select r.number, r.round_id, r.state, r.created_at, r.updated_at,
               (select t.reason from round_transitions t where t.round_id = r.round_id
                order by t.ordinal desc limit 1) as reason
        from rounds r order by r.number
        """,
        "Rounds",
        as_json=as_json,
    )


def _connect(context: typer.Context) -> "Connection":
    from storage.postgres import connect

    settings = settings_of(context)
    return connect(settings.storage.dsn, connect_timeout_s=settings.storage.connect_timeout_s)


def _print_rows(context: typer.Context, query: Any, title: str, *, as_json: bool) -> None:
    with _connect(context) as connection:
        rows = connection.execute(query).fetchall()
    if as_json:
        typer.echo(json.dumps(rows, default=str))
    else:
        from flywheel.terminal import print_rows

        print_rows(title, rows)
