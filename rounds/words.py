"""What a report's numbers allow to be said, in one sentence, and what they do not."""

from typing import Any

_GUARDRAILS = {
    "error_rate": "more answers fail",
    "abort_rate": "more people leave an answer",
    "time_to_first_token": "answers begin later",
    "length": "answers are of another length",
}


def conclude(report: dict[str, Any]) -> tuple[str, list[str]]:
    """(one sentence of what can be concluded, sentences of what can't)."""
    cannot = _cannot(report)
    if not report["sample_ratio"]["fits"]:
        return (
            "Nothing can be concluded: the arms have not got the units that their weights give them "
            f"(p = {report['sample_ratio']['p_value']:.2g}), so assignment or recording is broken.",
            cannot,
        )
    told = [_told(report, compared) for compared in report["compared"]]
    return "; ".join(told)[:1].upper() + "; ".join(told)[1:] + ".", cannot


def _told(report: dict[str, Any], compared: dict[str, Any]) -> str:
    arm, control = compared["arm"], report["arms"][0]["name"]
    breached = [finding for finding in compared["guardrails"] if finding["verdict"] == "breached"]
    trouble = " and ".join(_GUARDRAILS[finding["guardrail"]] for finding in breached)
    decided = compared["side_by_side"] if report["metric"] == "preference" else compared["effect"]
    if report["is_aa"]:
        found = decided is not None and decided["verdict"] != "open"
        return f"{arm} and {control} are one checkpoint, and " + (
            f"a difference was found all the same, as happens in {2 * report['alpha']:.0%} of such tests at most"
            if found
            else "no difference was found, as it should be"
        )
    if decided is None:
        said = f"nobody has voted in both arms yet, so {arm} can't be compared with {control}"
    elif report["metric"] == "preference":
        said = _preference(arm, control, decided)
    else:
        said = _effect(report, arm, control, decided)
    return f"{said}; but with {arm} {trouble}, beyond the limit" if trouble else said


def _preference(arm: str, control: str, found: dict[str, Any]) -> str:
    raters = found["wins"] + found["losses"]
    if not raters:
        return f"no rater has chosen between {arm} and {control} yet"
    between = (
        f"between {found['low']:.1%} and {found['high']:.1%} of choices are for {arm} ({raters} raters have chosen)"
    )
    if found["verdict"] == "open":
        return f"it is open whether people prefer {arm} or {control}: {between}"
    return f"people {'prefer' if found['verdict'] == 'better' else 'do not prefer'} {arm} to {control}: {between}"


def _effect(report: dict[str, Any], arm: str, control: str, found: dict[str, Any]) -> str:
    between = (
        f"of those who vote, {arm} changes {report['metric']} by {found['low']:+.1%} to {found['high']:+.1%} "
        f"({found['voters']} units have voted)"
    )
    if found["verdict"] == "open":
        return f"it is open whether {arm} is better or worse than {control}: {between}"
    return f"{arm} is {found['verdict']} than {control}: {between}"


def _cannot(report: dict[str, Any]) -> list[str]:
    said = [
        "Why: an arm that is liked more may merely be longer, quicker or more agreeable; the tables beside say which."
    ]
    if report["metric"] != "preference":
        said.append(
            "What those think who did not vote: they count as indifferent where all exposed units are meant, and are "
            "left out where voters are."
        )
    for compared in report["compared"]:
        decided = compared["side_by_side"] if report["metric"] == "preference" else compared["effect"]
        if decided is not None and decided["verdict"] == "open":
            said.append(
                f"That {compared['arm']} and {report['arms'][0]['name']} are equal: no difference was proven, no more."
            )
        if compared["segments"]:
            said.append("That a segment differs: there are several, each with an interval as if it were the only one.")
        still_open = [one["guardrail"] for one in compared["guardrails"] if one["verdict"] == "open"]
        if still_open:
            said.append(f"That {compared['arm']} keeps its guardrails: not proven yet for {', '.join(still_open)}.")
    if any(arm["fallbacks"] for arm in report["arms"]):
        said.append(
            "How good a checkpoint is that could not be served: another answered in its place for some units, which "
            "stay in their arm, so its effect is told too small."
        )
    if any(change["kind"] == "ramped" and change["detail"].get("weights") for change in report["changes"]):
        said.append(
            "That units saw one arm only: weights were changed, so some moved; a vote counts for its answer's arm."
        )
    return said
