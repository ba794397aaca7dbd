"""Commands about what the platform keeps: the ledger's audit, rounds."""

import json
from typing import Annotated

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


@feedback_app.command("schema")
def feedback_schema(
    context: typer.Context,
    topic: Annotated[str, typer.Argument(help="One topic; all of them by default.")] = "",
    as_asyncapi: Annotated[bool, typer.Option("--asyncapi", help="An AsyncAPI 3.0 document instead.")] = False,
) -> None:
    """Print the JSON Schemas of what travels on the topics."""
    from importlib.metadata import version

    from feedback.schemas import asyncapi, topic_schemas

    if as_asyncapi:
        typer.echo(json.dumps(asyncapi(settings_of(context).feedback.bootstrap_servers, version("flywheel")), indent=2))
        return
    schemas = topic_schemas()
    if topic and topic not in schemas:
        raise typer.BadParameter(f"must be one of {', '.join(schemas)}", param_hint="TOPIC")
    typer.echo(json.dumps(schemas[topic] if topic else schemas, indent=2))


@feedback_app.command("snapshot")
def feedback_snapshot(
    context: typer.Context,
    heldout_share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the prompts kept out of training.")
    ] = 0.25,
    as_json: Json = False,
) -> None:
    """Freeze what the votes say now as a Parquet dataset in TRL's preference format."""
    from feedback.snapshots import create_snapshot

    settings = settings_of(context)
    snapshot = create_snapshot(settings.storage.dsn, settings.storage.artifacts, heldout_share=heldout_share)
    told = {"path": str(snapshot.path), **snapshot.manifest}
    if as_json:
        typer.echo(json.dumps(told))
    else:
        from flywheel.terminal import print_fields

        print_fields(snapshot.snapshot_id, told)


@feedback_app.command("dead-letters")
def feedback_dead_letters(context: typer.Context, as_json: Json = False) -> None:
    """The records that could not be read or stored, and why; the newest hundred."""
    query = """
        select dead_letter_id, topic, partition, "offset", event_id, error_class, error_message, created_at, replayed_at
        from dead_letters order by dead_letter_id desc limit 100
        """
    with connect_to(context) as connection:
        rows = connection.execute(query).fetchall()
    print_rows("Dead letters", rows, as_json=as_json)


@feedback_app.command("replay")
def feedback_replay(
    context: typer.Context,
    dead_letter_id: Annotated[
        list[int] | None, typer.Argument(help="Only these; by default all not replayed yet.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Send dead letters again, once what made them unreadable is put right."""
    from feedback.replay import replay

    settings = settings_of(context)
    done = replay(settings.feedback, settings.storage.dsn, dead_letter_ids=dead_letter_id or None)
    if as_json:
        typer.echo(json.dumps(vars(done)))
    else:
        typer.echo(f"{done.sent} dead letters sent again, {done.pending} events pending again in their outbox")
        if done.too_large:
            typer.echo(f"too large for the log, left as they are: {', '.join(map(str, done.too_large))}")


@feedback_app.command("integrity")
def feedback_integrity(context: typer.Context, as_json: Json = False) -> None:
    """How many rigged votes would turn each comparison of checkpoints; texts sent by several; the busiest raters."""
    from feedback.integrity import examine

    with connect_to(context) as connection:
        found = examine(connection).model_dump()
    if as_json:
        typer.echo(json.dumps(found))
        return
    print_rows("Comparisons, the easiest to turn first", found["contests"], as_json=False)
    print_rows("Texts that several raters sent", found["repeated_texts"], as_json=False)
    print_rows("Busiest raters", found["busiest_raters"], as_json=False)


@feedback_app.command("erase")
def feedback_erase(
    context: typer.Context,
    user: Annotated[str, typer.Option(help="What requests call `user` and votes call `rater`.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Erase a person's prompts, answers and votes, for good; lists what has learnt from them."""
    from feedback.erasure import erase

    if not yes:
        typer.confirm(f"Erase everything of {user!r}? It can't be undone.", abort=True, err=True)
    with connect_to(context) as connection:
        erased = erase(connection, user)
    if as_json:
        typer.echo(erased.model_dump_json())
    else:
        from flywheel.terminal import print_fields

        print_fields("Erased", erased.model_dump())


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
