"""What a trained reward model says about itself."""

from pydantic import BaseModel, ConfigDict

from reward.judging import Evaluation
from reward.tricks import TrickResult


class RewardReport(BaseModel):
    """Numbers of one reward model. Accuracies are shares of decided held-out votes; intervals are clustered by prompt.

    held_out_*: the model on votes over prompts it never saw. length_only_*: the same votes, a model that sees the
    answer's length alone. gain_over_length_*: the paired difference of the two. previous_*: the earlier reward
    model on the same votes, and the paired difference new − previous; null without an earlier one.
    linear_*: the same votes, a linear model of the answer's words.
    controlled_accuracy, controlled_correlation: of the scores less what they owe to length (settings.length_control);
    plain_accuracy, plain_correlation: without that.
    previous_disagreement: share of the held-out votes on which the previous model prefers the other answer.
    evaluation: all that `evaluate` tells, on the held-out votes. tricks: what the cheapest ones earn.
    epochs: over the training prompts, of the kept weights; null unless a network was tuned.
    length_sentence: in words, whether length alone would explain the votes.
    correlation_with_length: Pearson, of the score with the number of tokens, over the held-out answers.
    calibration_error: expected, on held-out votes. group_gains: group of features → nats per vote by which the
    out-of-fold loss grows when the group is left out. out_of_fold_loss: nats per vote; log 2 is chance.
    counters: pairs used and left out, texts cut. seconds: wall time, total and of the feature pass.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    reward_model_id: str
    snapshot_id: str
    base_digest: str
    train_pairs: int
    train_prompts: int
    held_out_votes: int
    held_out_prompts: int
    held_out_accuracy: float
    held_out_low: float
    held_out_high: float
    length_only_accuracy: float
    length_only_low: float
    length_only_high: float
    gain_over_length: float
    gain_over_length_low: float
    gain_over_length_high: float
    length_sentence: str
    correlation_with_length: float
    linear_accuracy: float | None = None
    linear_low: float | None = None
    linear_high: float | None = None
    plain_accuracy: float | None = None
    plain_correlation: float | None = None
    controlled_accuracy: float | None = None
    controlled_correlation: float | None = None
    calibration_error: float
    out_of_fold_loss: float
    group_gains: dict[str, float]
    penalty: float | None = None
    length_scale: float | None = None
    mode: str = "frozen"
    epochs: float | None = None
    previous_accuracy: float | None = None
    previous_gain: float | None = None
    previous_gain_low: float | None = None
    previous_gain_high: float | None = None
    previous_disagreement: float | None = None
    evaluation: Evaluation | None = None
    tricks: list[TrickResult] = []
    counters: dict[str, int]
    seconds: float
    feature_seconds: float
