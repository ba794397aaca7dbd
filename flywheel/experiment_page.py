"""The report of an experiment as one HTML file: it holds its plots as SVG and loads nothing from anywhere."""

from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, select_autoescape
from markupsafe import Markup

from flywheel.report import svg

_GREEN, _RED, _GREY, _BLUE = "#2a7d3f", "#a33333", "#777777", "#1f77b4"


def write_page(report: dict[str, Any], file: Path) -> None:
    """Write the page."""
    environment = Environment(loader=PackageLoader("flywheel", "."), autoescape=select_autoescape(default=True))
    template = environment.get_template("experiment.html.j2")
    file.write_text(template.render(report=report, plots=_plots(report)), encoding="utf-8")


def _plots(report: dict[str, Any]) -> list[tuple[str, Markup]]:
    plots = []
    for compared in report["compared"]:
        arm = compared["arm"]
        path = compared["side_by_side"]["path"]
        if path:
            title = f"Share of choices for {arm}, vote by vote"
            plots.append((title, svg(lambda axes, path=path: _draw_path(axes, path, "share", 0.5))))
        effect = compared["effect"]
        if effect is not None:
            title = f"{arm} less {report['arms'][0]['name']}: {effect['metric']}, vote by vote"
            plots.append((title, svg(lambda axes, effect=effect: _draw_path(axes, effect["path"], "difference", 0.0))))
        if effect is not None and compared["segments"]:
            title = f"{arm} less {report['arms'][0]['name']}, by segment (95 %, each as if it were the only one)"
            plots.append((title, svg(lambda axes, compared=compared: _draw_segments(axes, compared))))
    plots.append(("Quality beside time and length", svg(lambda axes: _draw_arms(axes, report["arms"]))))
    return plots


def _draw_path(axes: Any, path: list[dict[str, Any]], name: str, nothing: float) -> None:
    votes = [point["vote"] for point in path]
    axes.fill_between(votes, [point["low"] for point in path], [point["high"] for point in path], alpha=0.25)
    axes.plot(votes, [point[name] for point in path])
    axes.axhline(nothing, color="black", linewidth=0.8, linestyle="--")
    axes.set_xlabel("units that have voted")
    axes.set_ylabel(f"{name}, valid at all times")
    if name == "share":
        axes.set_ylim(0, 1)
    else:
        last = path[-1]
        reach = 3 * max(abs(last["low"]), abs(last["high"]), 0.02)
        axes.set_ylim(max(-1.0, -reach), min(1.0, reach))


def _draw_segments(axes: Any, compared: dict[str, Any]) -> None:
    effect = compared["effect"]
    rows = [("all, valid at all times", effect), *((one["segment"], one) for one in compared["segments"])][::-1]
    for place, (_, found) in enumerate(rows):
        colour = _GREEN if found["low"] > 0 else _RED if found["high"] < 0 else _GREY
        axes.plot([found["low"], found["high"]], [place, place], color=colour)
        axes.plot([found["difference"]], [place], "o", color=colour)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.axvline(0, color="black", linewidth=0.8, linestyle="--")
    axes.set_xlabel("difference")


def _draw_arms(axes: Any, arms: list[dict[str, Any]]) -> None:
    """One group of bars for each number, relative to the control's."""
    numbers = [
        ("mean of votes", "vote_mean"),
        ("median time to first token", "time_to_first_token_median_s"),
        ("95th percentile of it", "time_to_first_token_p95_s"),
        ("tokens an answer", "mean_tokens"),
    ]
    known = [(label, name) for label, name in numbers if arms[0][name]]
    width = 0.8 / len(arms)
    for place, arm in enumerate(arms):
        ratios = [(arm[name] or 0.0) / arms[0][name] for _, name in known]
        axes.bar([index + place * width for index in range(len(known))], ratios, width=width, label=arm["name"])
    axes.set_xticks([index + 0.4 - width / 2 for index in range(len(known))], [label for label, _ in known])
    axes.axhline(1, color="black", linewidth=0.8, linestyle="--")
    axes.set_ylabel(f"beside {arms[0]['name']} = 1")
    axes.legend()
