"""The report of a reward model as one HTML file: it holds its plots as SVG and loads nothing from anywhere."""

from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, select_autoescape
from markupsafe import Markup

from flywheel.report import svg

_GREEN, _RED, _BLUE = "#2a7d3f", "#a33333", "#1f77b4"


def write_page(report: dict[str, Any], file: Path) -> None:
    """Write the page. report: a reward.report.RewardReport, as JSON's types."""
    environment = Environment(loader=PackageLoader("flywheel", "."), autoescape=select_autoescape(default=True))
    template = environment.get_template("reward.html.j2")
    file.write_text(template.render(report=report, models=_models(report), plots=_plots(report)), encoding="utf-8")


def _models(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of the first table: the model beside what it must beat."""
    rows = [
        {"name": "this model", "mean": report["held_out_accuracy"], "low": report["held_out_low"]}
        | {"high": report["held_out_high"], "correlation": report["correlation_with_length"]},
        {"name": "without length control", "mean": report["plain_accuracy"]}
        | {"correlation": report["plain_correlation"]},
        {"name": "with length control", "mean": report["controlled_accuracy"]}
        | {"correlation": report["controlled_correlation"]},
        {"name": "a linear model of the words", "mean": report["linear_accuracy"], "low": report["linear_low"]}
        | {"high": report["linear_high"]},
        {"name": "the length alone", "mean": report["length_only_accuracy"], "low": report["length_only_low"]}
        | {"high": report["length_only_high"]},
        {"name": "the reward model before it", "mean": report["previous_accuracy"]},
    ]
    return [row for row in rows if row["mean"] is not None]


def _plots(report: dict[str, Any]) -> list[tuple[str, Markup]]:
    plots = [("Right on held-out votes", svg(lambda axes: _draw_models(axes, _models(report))))]
    judged = report["evaluation"]
    if judged is None:
        return plots
    if judged["reliability"]:
        title = "Said and true: the favourite's probability, in bins of equal count"
        plots.append((title, svg(lambda axes: _draw_reliability(axes, judged["reliability"]))))
    if judged["best_of_n"]:
        title = "Over-optimisation: the best of n by this model, and what people thought of it"
        plots.append((title, svg(lambda axes: _draw_best_of_n(axes, judged["best_of_n"]))))
    if report["tricks"]:
        plots.append(("What the cheapest tricks earn", svg(lambda axes: _draw_tricks(axes, report["tricks"]))))
    return plots


def _draw_models(axes: Any, rows: list[dict[str, Any]]) -> None:
    for place, row in enumerate(rows[::-1]):
        if row.get("low") is not None:
            axes.plot([row["low"], row["high"]], [place, place], color=_BLUE)
        axes.plot([row["mean"]], [place], "o", color=_BLUE)
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows[::-1]])
    axes.axvline(0.5, color="black", linewidth=0.8, linestyle="--")
    axes.set_xlabel("share of decided pairs")


def _draw_reliability(axes: Any, bins: list[list[float]]) -> None:
    axes.plot([0.5, 1], [0.5, 1], color="black", linewidth=0.8, linestyle="--")
    axes.plot([said for said, _ in bins], [true for _, true in bins], "o-", color=_BLUE)
    axes.set_xlabel("probability said")
    axes.set_ylabel("share that was right")


def _draw_best_of_n(axes: Any, points: list[dict[str, Any]]) -> None:
    kl = [point["kl"] for point in points]
    axes.plot(kl, [point["win_share"] for point in points], "o-", color=_BLUE, label="votes won")
    peak = next(point for point in points if point["peak"])
    axes.plot([peak["kl"]], [peak["win_share"]], "o", markersize=12, fillstyle="none", color=_GREEN, label="peak")
    axes.set_xlabel("nats from the policy (KL)")
    axes.set_ylabel("share of votes won")
    scores = axes.twinx()
    scores.plot(kl, [point["score"] for point in points], "s--", color=_RED, label="score")
    scores.set_ylabel("mean score")
    axes.legend(loc="lower right")


def _draw_tricks(axes: Any, tricks: list[dict[str, Any]]) -> None:
    rows = tricks[::-1]
    axes.barh(
        [row["trick"] for row in rows],
        [row["change"] for row in rows],
        color=[_RED if row["change"] > 0 else _GREEN for row in rows],
    )
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_xlabel("change of the score, in deviations of the training answers' scores")
