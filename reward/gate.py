"""The reward gate: may this reward model steer a policy? Pure functions of its report."""

import math

from pydantic import BaseModel, ConfigDict

from reward.report import RewardReport
from reward.settings import RewardSettings


class GateReport(BaseModel):
    """A gate's verdict: passed or not, why (in words, for a person), and the numbers it looked at."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    passed: bool
    reason: str
    numbers: dict[str, float]


def judge_reward(report: RewardReport, settings: RewardSettings) -> GateReport:
    """Release only what beats chance on held-out votes beyond noise, and does not fall below its predecessor.

    "Falls below" is a paired test on the same votes: refused when the whole interval of the difference
    (new − previous) lies under zero. That length alone would explain the votes is told, not refused:
    people may really like short answers.
    """
    share = f"{report.held_out_accuracy:.3f} ({report.held_out_low:.3f} to {report.held_out_high:.3f})"
    votes = f"{report.held_out_votes} held-out votes on {report.held_out_prompts} prompts"
    numbers = {
        "held_out_accuracy": report.held_out_accuracy,
        "held_out_low": report.held_out_low,
        "held_out_high": report.held_out_high,
        "held_out_votes": float(report.held_out_votes),
        "length_only_accuracy": report.length_only_accuracy,
        "calibration_error": report.calibration_error,
        "minimum_accuracy": settings.minimum_accuracy,
    }
    if report.previous_gain is not None:
        numbers["previous_gain"] = report.previous_gain
        numbers["previous_gain_high"] = report.previous_gain_high or 0.0

    # Written so that a NaN refuses.
    if not (math.isfinite(report.held_out_low) and report.held_out_low > settings.minimum_accuracy):
        reason = (
            f"refused: right on {share} of {votes}; the interval does not lie above {settings.minimum_accuracy:g}, "
            "so the votes may be chance"
        )
        return GateReport(passed=False, reason=reason, numbers=numbers)
    if report.previous_gain is not None and not (report.previous_gain_high or 0.0) >= 0.0:
        reason = (
            f"refused: right on {share} of {votes}, but {-report.previous_gain:.3f} below the previous reward model "
            f"on the same votes (the difference's interval ends at {report.previous_gain_high:.3f})"
        )
        return GateReport(passed=False, reason=reason, numbers=numbers)
    compared = "" if report.previous_gain is None else f", {report.previous_gain:+.3f} against the previous one"
    reason = f"released: right on {share} of {votes}{compared}. {report.length_sentence}"
    return GateReport(passed=True, reason=reason, numbers=numbers)
