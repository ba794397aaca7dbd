"""Commands about what the platform keeps: the ledger's audit, rounds."""

import json

import typer

from flywheel.cli_parts import Json, connect_to, print_rows, settings_of

feedback_app = typer.Typer(help="The ledger of votes and answers.", no_args_is_help=True)
rounds_app = typer.Typer(help="Turns of the wheel.", no_args_is_help=True)


def add_to(app: typer.Typer) -> None:
    """Register the command groups on `app`."""
    app.add_typer(feedback_app, name="feedback")
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


@rounds_app.command("list")
def rounds_list(context: typer.Context, as_json: Json = False) -> None:
    """All rounds, each with its state and the reason for it."""
    query = """
        select r.number, r.round_id, r.state, r.created_at, r.updated_at,
               (select t.reason from round_transitions t where t.round_id = r.round_id
                order by t.ordinal desc limit 1) as reason
        from rounds r order by r.number
        """
    with connect_to(context) as connection:
        rows = connection.execute(query).fetchall()
    print_rows("Rounds", rows, as_json=as_json)
