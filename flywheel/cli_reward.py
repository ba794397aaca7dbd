"""Commands about reward models: `flywheel reward …`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flywheel.cli_parts import Json, connect_to, print_rows, settings_of

if TYPE_CHECKING:
    from flywheel.settings import Settings
    from reward.errors import RewardModelUnknown
    from reward.settings import RewardSettings
    from reward.training import SnapshotLike

MODES = ("lora", "full", "frozen")
reward_app = typer.Typer(help="Reward models: train, judge, score.", no_args_is_help=True)
Model = Annotated[
    str, typer.Option(help="A directory, or an id as `reward list` shows it; the one in use when absent.")
]
Pairs = Annotated[Path, typer.Option(help="JSON Lines (also .gz) or Parquet with prompt, chosen, rejected.")]


def add_to(app: typer.Typer) -> None:
    """Register the command group on `app`."""
    app.add_typer(reward_app, name="reward")


@reward_app.command("train")
def train(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="Where the model goes: a directory that is not there yet.")],
    pairs: Annotated[
        Path | None, typer.Option(help="JSON Lines (also .gz) or Parquet with prompt, chosen, rejected.")
    ] = None,
    snapshot: Annotated[Path | None, typer.Option(help="A snapshot's directory.")] = None,
    dataset: Annotated[str, typer.Option(help="A name that Hugging Face `datasets` can load, or a folder.")] = "",
    mode: Annotated[
        str, typer.Option(help="lora, full, or frozen: a head on the base as it is, in minutes on a laptop.")
    ] = "lora",
    seed: Annotated[int | None, typer.Option(help="Of everything that is drawn.")] = None,
    length_control: Annotated[bool, typer.Option(help="Take away what scores owe to length.")] = False,
    page: Annotated[Path | None, typer.Option(help="Write the report with its plots to this HTML file.")] = None,
    as_json: Json = False,
) -> None:
    """Train a reward model; judge it on the held-out side. A training that was killed goes on where it was."""
    from flywheel.terminal import print_fields
    from reward.training import train_reward_model

    if [pairs is None, snapshot is None, not dataset].count(False) != 1:
        raise typer.BadParameter("give one of --pairs, --snapshot and --dataset")
    if mode not in MODES:
        raise typer.BadParameter(f"modes are {', '.join(MODES)}", param_hint="--mode")
    if out.exists():
        raise typer.BadParameter(f"{out} is there already", param_hint="--out")
    settings = settings_of(context)
    data: SnapshotLike
    if pairs is not None:
        from reward.pair_files import read_pairs

        data = read_pairs(pairs, settings.rounds.controller.heldout_share)
    elif dataset:
        from reward.pair_files import read_dataset

        data = read_dataset(dataset, settings.rounds.controller.heldout_share)
    else:
        from feedback.snapshots import read_snapshot

        assert snapshot is not None
        data = read_snapshot(snapshot)
    reward = _chosen(settings.reward, mode, seed, length_control=length_control)
    base = _base_model(settings)
    with _Progress() as progress:
        report = train_reward_model(data, base, out.absolute(), reward, None, progress)
    if page is not None:
        from flywheel.reward_page import write_page

        write_page(report.model_dump(mode="json"), page)
    if as_json:
        typer.echo(report.model_dump_json())
        return
    shown = report.model_dump(mode="json", exclude={"group_gains", "counters", "evaluation", "tricks"})
    print_fields(f"Reward model {out}", {name: value for name, value in shown.items() if value is not None})
    print_rows("What the cheapest tricks earn", [_rounded(row.model_dump()) for row in report.tricks], as_json=False)


@reward_app.command("evaluate")
def evaluate(context: typer.Context, pairs: Pairs, model: Model = "", as_json: Json = False) -> None:
    """Judge a reward model on any file of pairs: all of them, whatever its `split` says."""
    from flywheel.terminal import print_fields
    from reward.judging import evaluate as judge
    from reward.pair_files import read_pairs
    from reward.scoring import RewardModel

    settings = settings_of(context)
    data = read_pairs(pairs).all
    loaded = RewardModel.load(_model_path(context, model), _base_model(settings))
    found = judge(loaded, data, settings.reward.confidence)
    if as_json:
        typer.echo(found.model_dump_json())
        return
    told = found.model_dump(mode="json")
    slices = {
        name: told.pop(name) for name in ("by_length_difference", "by_kind", "by_position", "by_rater", "best_of_n")
    }
    reliability = told.pop("reliability")
    print_fields(f"{found.reward_model_id} on {pairs}", told)
    for name, rows in slices.items():
        if rows:
            print_rows(name.replace("_", " "), [_rounded(row) for row in rows], as_json=False)
    rows = [{"said": f"{said:.1%}", "was right": f"{right:.1%}"} for said, right in reliability]
    print_rows("Probability of the favourite, in bins of equal count", rows, as_json=False)


@reward_app.command("score")
def score(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="JSON Lines with `prompt` (text or messages) and `answer`.")],
    model: Model = "",
) -> None:
    """Score answers; prints each row with its `score` as JSON Lines. Mean 0, deviation 1 over the training answers."""
    from reward.pair_files import read_answers
    from reward.scoring import RewardModel

    rows = read_answers(file)
    loaded = RewardModel.load(_model_path(context, model), _base_model(settings_of(context)))
    scores = loaded.score([row.prompt for row in rows], [row.answer for row in rows])
    for row, value in zip(rows, scores, strict=True):
        typer.echo(json.dumps({**row.fields, "score": float(value)}, ensure_ascii=False))


@reward_app.command("list")
def list_(context: typer.Context, as_json: Json = False) -> None:
    """All reward models that rounds trained, oldest first; which one is in use; what a person promoted."""
    with connect_to(context) as connection:
        rows = connection.execute(
            "select reward_model_id, released, promoted_reason, "
            "reward_model_id = (select reward_model_id from reward_model_in_use) as in_use, snapshot_id, "
            "(report ->> 'held_out_accuracy')::float8 as accuracy, "
            "(report ->> 'length_only_accuracy')::float8 as length_only, created_at "
            "from reward_models order by created_at"
        ).fetchall()
    print_rows("Reward models", rows if as_json else [_rounded(row) for row in rows], as_json=as_json)


@reward_app.command("show")
def show(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A directory, or an id as `reward list` shows it.")],
    page: Annotated[Path | None, typer.Option(help="Write the report with its plots to this HTML file.")] = None,
    as_json: Json = False,
) -> None:
    """One reward model: its report on held-out votes."""
    from flywheel.terminal import print_fields

    if Path(model).is_dir():
        from storage.artifacts import read_manifest

        manifest = read_manifest(Path(model))
        row = {"reward_model_id": manifest.get("reward_model_id"), "path": model, "report": manifest.get("report", {})}
    else:
        row = _row(context, model)
    if page is not None:
        from flywheel.reward_page import write_page

        write_page(row["report"], page)
    if as_json:
        typer.echo(json.dumps(row, default=str))
    else:
        print_fields(model, {"path": row["path"], "released": row.get("released"), **row["report"]})


@reward_app.command("promote")
def promote(
    context: typer.Context,
    reward_model_id: Annotated[str, typer.Argument(help="As `reward list` shows it.")],
    reason: Annotated[str, typer.Option(help="Why; it is kept.")],
) -> None:
    """Put a reward model in use for the rounds to come, whatever the gate said; a later release takes over."""
    if not reason.strip():
        raise typer.BadParameter("say why", param_hint="--reason")
    with connect_to(context) as connection:
        changed = connection.execute(
            "update reward_models set promoted_at = now(), promoted_reason = %s where reward_model_id = %s",
            (reason.strip(), reward_model_id),
        ).rowcount
    if not changed:
        raise _unknown(reward_model_id)
    typer.echo(f"{reward_model_id} is in use")


def _row(context: typer.Context, reward_model_id: str) -> dict[str, Any]:
    with connect_to(context) as connection:
        if reward_model_id:
            row = connection.execute(
                "select * from reward_models where reward_model_id = %s", (reward_model_id,)
            ).fetchone()
        else:
            row = connection.execute("select * from reward_model_in_use").fetchone()
    if row is None:
        raise _unknown(reward_model_id)
    return row


def _unknown(reward_model_id: str) -> "RewardModelUnknown":
    from reward.errors import RewardModelUnknown

    told = f"no reward model is called {reward_model_id}" if reward_model_id else "no reward model is released yet"
    return RewardModelUnknown(f"{told}; `flywheel reward list` shows them")


def _chosen(settings: "RewardSettings", mode: str, seed: int | None, *, length_control: bool) -> "RewardSettings":
    """The settings with what the command line says."""
    from reward.settings import RewardSettings

    told = settings.model_dump() | {"mode": mode}
    if length_control:
        told["length_control"] = True
    if seed is not None:
        told["tuning"] |= {"seed": seed}
    return RewardSettings.model_validate(told)


def _model_path(context: typer.Context, model: str) -> Path:
    if model and Path(model).is_dir():
        return Path(model)
    return Path(_row(context, model)["path"])


def _base_model(settings: "Settings") -> Path:
    from flywheel.model import prepare_base_model

    with _Progress() as progress:
        return prepare_base_model(settings, lambda text: progress(text, 0.0))


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}


class _Progress:
    """A bar on stderr; call it with what is under way and the share that is done."""

    def __enter__(self) -> "_Progress":
        from rich.console import Console
        from rich.progress import Progress

        self._bar = Progress(console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task("", total=1.0)
        self._bar.start()
        return self

    def __call__(self, what: str, share: float) -> None:
        self._bar.update(self._task, description=what, completed=share)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
