"""Commands about API keys and checkpoints: `flywheel key …`, `flywheel checkpoint …`."""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from flywheel.cli_parts import Json, connect_to, print_rows, settings_of

Alias = Annotated[str | None, typer.Option(help="The name that people use; the settings' alias when not given.")]
Reason = Annotated[str, typer.Option(help="Kept with the move.")]

key_app = typer.Typer(help="API keys.", no_args_is_help=True)
checkpoint_app = typer.Typer(help="Checkpoints in the registry.", no_args_is_help=True)


def add_to(app: typer.Typer) -> None:
    """Register the command groups on `app`."""
    app.add_typer(key_app, name="key")
    app.add_typer(checkpoint_app, name="checkpoint")


@key_app.command("create")
def key_create(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Who or what the key is for.")],
    scope: Annotated[list[str] | None, typer.Option(help="inference, feedback, evaluate, admin. Repeatable.")] = None,
    requests_per_minute: Annotated[int | None, typer.Option(min=1, help="Requests for answers.")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(min=1, help="Of prompts and answers together.")] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Requests under way at once.")] = None,
    as_json: Json = False,
) -> None:
    """Make a key; its secret is shown once and not kept."""
    from serving.keys import KeyLimits, create_key

    limits = KeyLimits(requests_per_minute, tokens_per_minute, concurrency)
    try:
        with connect_to(context) as connection:
            key_id, secret = create_key(connection, name, scope or ["inference", "feedback"], limits)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(json.dumps({"key_id": key_id, "secret": secret}) if as_json else f"{key_id}\n{secret}")


@key_app.command("list")
def key_list(context: typer.Context, as_json: Json = False) -> None:
    """All keys, without their secrets."""
    from serving.keys import list_keys

    with connect_to(context) as connection:
        keys = list_keys(connection)
    rows = [
        {
            "key_id": key.key_id,
            "name": key.name,
            "scopes": sorted(key.scopes),
            **vars(key.limits),
            "created_at": key.created_at,
            "revoked_at": key.revoked_at,
        }
        for key in keys
    ]
    print_rows("API keys", rows, as_json=as_json)


@key_app.command("revoke")
def key_revoke(context: typer.Context, key_id: Annotated[str, typer.Argument(help="As `key list` shows it.")]) -> None:
    """Stop a key for good; gateways refuse it within a second. Exit code 1 when no live key has this id."""
    from serving.keys import revoke_key

    with connect_to(context) as connection:
        revoked = revoke_key(connection, key_id)
    typer.echo(f"{key_id} is revoked" if revoked else f"no live key is called {key_id}", err=not revoked)
    raise typer.Exit(0 if revoked else 1)


@key_app.command("first", hidden=True)
def key_first(context: typer.Context) -> None:
    """Make the first key and write it to the home folder, unless the one there is good."""
    from flywheel.setup import ensure_first_key

    typer.echo(ensure_first_key(settings_of(context)))


@checkpoint_app.command("add")
def checkpoint_add(
    context: typer.Context,
    path: Annotated[Path, typer.Argument(help="A model directory or a LoRA adapter, safetensors.")],
    checkpoint_id: Annotated[str | None, typer.Option("--id", help="Its name for ever; made up when absent.")] = None,
    parent: Annotated[
        str | None, typer.Option(help="An adapter's parent; the model under the alias if absent.")
    ] = None,
    wait_s: Annotated[float, typer.Option(min=0, help="How long to wait for the engines' proof.")] = 120.0,
    as_json: Json = False,
) -> None:
    """Register a checkpoint, and wait until the engines loaded it and proved it. Exit code 1 when they refuse it."""
    from serving.checkpoint_files import read_checkpoint
    from serving.registry import register_checkpoint

    settings = settings_of(context)
    with connect_to(context) as connection:
        checkpoint = read_checkpoint(
            connection, path, alias=settings.serving.alias, checkpoint_id=checkpoint_id, parent_id=parent
        )
        register_checkpoint(connection, checkpoint)
    found = _wait_for_proof(context, checkpoint.checkpoint_id, wait_s)
    _print_checkpoint(found, as_json=as_json)
    raise typer.Exit(0 if found["servable"] else 1)


@checkpoint_app.command("list")
def checkpoint_list(context: typer.Context, as_json: Json = False) -> None:
    """All checkpoints, with the aliases that name them."""
    query = """
        select checkpoint_id, kind, parent_id, state, created_at,
               (select array_agg(alias order by alias) from aliases a
                where a.checkpoint_id = c.checkpoint_id) as aliases
        from checkpoints c order by created_at, checkpoint_id
        """
    with connect_to(context) as connection:
        rows = connection.execute(query).fetchall()
    print_rows("Checkpoints", rows, as_json=as_json)


@checkpoint_app.command("show")
def checkpoint_show(
    context: typer.Context, checkpoint_id: Annotated[str, typer.Argument()], as_json: Json = False
) -> None:
    """One checkpoint: where it comes from, and what each engine replica found when it proved it."""
    _print_checkpoint(_describe(context, checkpoint_id), as_json=as_json)


@checkpoint_app.command("promote")
def checkpoint_promote(
    context: typer.Context,
    checkpoint_id: Annotated[str, typer.Argument()],
    alias: Alias = None,
    reason: Reason = "promoted by hand",
    wait_s: Annotated[float, typer.Option(min=0, help="How long to wait for the engines' proof.")] = 120.0,
) -> None:
    """Point the alias at a checkpoint, once every engine replica has proven it."""
    from serving.registry import promote

    name = alias or settings_of(context).serving.alias
    _wait_for_proof(context, checkpoint_id, wait_s)
    with connect_to(context) as connection:
        promote(connection, name, checkpoint_id, reason)
    typer.echo(f"{name} → {checkpoint_id}")


@checkpoint_app.command("rollback")
def checkpoint_rollback(context: typer.Context, alias: Alias = None, reason: Reason = "rolled back by hand") -> None:
    """Point the alias back at the checkpoint that it named before."""
    from serving.registry import rollback

    name = alias or settings_of(context).serving.alias
    with connect_to(context) as connection:
        checkpoint_id = rollback(connection, name, reason)
    typer.echo(f"{name} → {checkpoint_id}")


@checkpoint_app.command("retire")
def checkpoint_retire(context: typer.Context, checkpoint_id: Annotated[str, typer.Argument()]) -> None:
    """Take a checkpoint out of service; engines unload it when the requests on it are done."""
    from serving.registry import retire_checkpoint

    with connect_to(context) as connection:
        retire_checkpoint(connection, checkpoint_id)
    typer.echo(f"{checkpoint_id} is retired")


def _describe(context: typer.Context, checkpoint_id: str) -> dict[str, Any]:
    from serving.registry import describe

    with connect_to(context) as connection:
        return describe(connection, checkpoint_id, settings_of(context).serving.replica_timeout_s)


def _wait_for_proof(context: typer.Context, checkpoint_id: str, wait_s: float) -> dict[str, Any]:
    """Its description, once every live engine replica of its model has tried it, or after `wait_s`."""
    from rich.console import Console

    deadline = time.monotonic() + wait_s
    with Console(stderr=True).status(f"waiting for the engines to prove {checkpoint_id}"):
        found = _describe(context, checkpoint_id)
        while not found["settled"] and time.monotonic() < deadline:
            time.sleep(0.5)
            found = _describe(context, checkpoint_id)
    return found


def _print_checkpoint(found: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(found, default=str))
        return
    from flywheel.terminal import print_fields

    proofs = found.pop("proofs")
    print_fields(found["checkpoint_id"], found)
    for proof in proofs:
        print_fields(f"{proof['replica_id']}: {proof['status']}", {"reason": proof["reason"]})
        print_rows("nats a token from the manifest, by canary", proof["sequences"], as_json=False)
