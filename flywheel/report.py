"""The demo's report: one dictionary, shown in the terminal, kept as JSON, and drawn as one HTML file.

The HTML file holds its plots as SVG and loads nothing from anywhere.
"""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, select_autoescape
from markupsafe import Markup
from rich.console import Console
from rich.table import Table

PAIRS_SHOWN = 12


def write_report(report: dict[str, Any], folder: Path) -> dict[str, Path]:
    """Write `report.json` and `report.html` into `folder`; returns their paths by kind."""
    paths = {"json": folder / "report.json", "html": folder / "report.html"}
    paths["json"].write_text(json.dumps(report, indent=2, ensure_ascii=False, default=_plain), encoding="utf-8")
    environment = Environment(loader=PackageLoader("flywheel", "."), autoescape=select_autoescape(default=True))
    page = environment.get_template("report.html.j2").render(
        report=report, facts=facts_of(report), plots=_plots(report), pairs=report["pairs"][:PAIRS_SHOWN]
    )
    paths["html"].write_text(page, encoding="utf-8")
    return paths


def print_report(report: dict[str, Any], paths: dict[str, Path], console: Console) -> None:
    """Show the decision, its numbers, the phases and the first pairs of answers."""
    table = Table(title=f"One turn of the wheel: {report['verdict']}", show_header=False)
    for name, value in facts_of(report):
        table.add_row(name, value)
    console.print(table)
    phases = Table("phase", "seconds", title=f"Time ({report['total_seconds']:.0f} s in all)")
    for name, seconds in report["phase_seconds"].items():
        phases.add_row(name, f"{seconds:.1f}")
    console.print(phases)
    answers = Table("prompt", "old", "new", title=f"The first {PAIRS_SHOWN} pairs, unselected", show_lines=True)
    for pair in report["pairs"][:PAIRS_SHOWN]:
        answers.add_row(pair["prompt"], pair["old"], pair["new"])
    if report["pairs"]:
        console.print(answers)
    console.print(f"Report: {paths['html']}  (numbers: {paths['json']})")


def facts_of(report: dict[str, Any]) -> list[tuple[str, str]]:
    """The report's headline as (name, value) rows, in words for people."""
    reward, ledger = report["reward"], report["ledger"]
    rows = [("decision", f"{report['verdict']}: {report['reason']}")]
    if report["true_win_rate"] is not None:
        rows.append(
            (
                "true win rate, new over old",
                f"{report['true_win_rate']:.1%} (95 % interval {report['true_win_rate_low']:.1%} to "
                f"{report['true_win_rate_high']:.1%}) on prompts never used; "
                f"{report['true_vote_share']:.1%} of noisy votes would say so",
            )
        )
    if report["mean_words_new"] is not None:
        rows.append(("words an answer", f"{report['mean_words_old']:.1f} → {report['mean_words_new']:.1f}"))
    if report["base_nll_new"] is not None:
        rows += [
            (
                "nats a token under the base",
                f"{report['base_nll_old']:.2f} → {report['base_nll_new']:.2f} (how odd the base finds the answers)",
            ),
            ("degenerate answers", f"{report['degenerate_share_old']:.1%} → {report['degenerate_share_new']:.1%}"),
        ]
    if report["reward_accuracy"] is not None:
        rows.append(("reward model, on held-out votes", reward["length_sentence"]))
    rows.append(
        (
            "ledger",
            f"{ledger['accepted']} events acknowledged, {ledger['stored']} stored, "
            f"{ledger['dead_lettered']} dead-lettered, {ledger['pending']} pending: "
            f"{'clean' if ledger['clean'] else 'NOT CLEAN'}",
        )
    )
    return rows


def _plots(report: dict[str, Any]) -> dict[str, Markup]:
    plots: dict[str, Markup] = {}
    history = report["policy"].get("history", [])
    if history:
        plots["Reward and distance from the base, by training step"] = svg(lambda axes: _draw_training(axes, history))
    if report["experiment_path"]:
        path = report["experiment_path"]
        plots["Share of decided votes for the new checkpoint"] = svg(lambda axes: _draw_experiment(axes, path))
    plots["Where the time went"] = svg(lambda axes: _draw_phases(axes, report["phase_seconds"]))
    return plots


def _draw_training(axes: Any, history: list[dict[str, float]]) -> None:
    steps = range(1, len(history) + 1)
    axes.plot(steps, [step["reward"] for step in history], marker="o", color="tab:blue")
    axes.set_xlabel("step")
    axes.set_ylabel("reward (standard deviations)", color="tab:blue")
    other = axes.twinx()
    other.plot(steps, [step["kl"] for step in history], marker="s", color="tab:orange")
    other.set_ylabel("KL to the base (nats an answer)", color="tab:orange")


def _draw_experiment(axes: Any, path: list[dict[str, float]]) -> None:
    votes = [point["vote"] for point in path]
    axes.fill_between(votes, [point["low"] for point in path], [point["high"] for point in path], alpha=0.25)
    axes.plot(votes, [point["share"] for point in path])
    axes.axhline(0.5, color="black", linewidth=0.8, linestyle="--")
    axes.set_xlabel("vote")
    axes.set_ylabel("share, with its always-valid interval")
    axes.set_ylim(0, 1)


def _draw_phases(axes: Any, seconds: dict[str, float]) -> None:
    names = list(seconds)[::-1]
    axes.barh(names, [seconds[name] for name in names])
    axes.set_xlabel("seconds")


def svg(draw: Callable[[Any], None]) -> Markup:
    """What `draw(axes)` draws, to be set into a page."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.2), layout="constrained")
    draw(figure.subplots())
    out = io.StringIO()
    with rc_context({"svg.fonttype": "none"}):  # letters as letters: they can be searched, and take less
        figure.savefig(out, format="svg")
    text = out.getvalue()
    return Markup(text[text.index("<svg") :])


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no place in a report")
