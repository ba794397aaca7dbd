"""Settings of the reward room."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Precision = Literal["auto", "bfloat16", "float32"]


class TuningSettings(BaseModel):
    """How a backbone is fine-tuned (modes `lora` and `full`).

    lora_rank, lora_alpha: of the adapter, on every linear layer of the backbone.
    epochs: over the training prompts. prompts_per_step: of one update, each with all its pairs, but at most
        `pairs_per_prompt` of them at once. learning_rate: AdamW's, with a cosine schedule; warmup_share: of the steps.
    strip_tokens: computed in one pass; more only helps a GPU.
    validation_share: of the training prompts, kept out to choose the checkpoint and to calibrate.
    checkpoint_steps: updates between two checkpoints, each judged on the validation prompts.
    report_to: trackers that transformers knows (`tensorboard`, `wandb`); each must be installed.
    workers: processes, each with a GPU where there are GPUs, that share the batches (Ray Train); 1 trains in this one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    lora_rank: int = Field(default=16, ge=1)
    lora_alpha: int = Field(default=32, ge=1)
    epochs: float = Field(default=2, gt=0)
    prompts_per_step: int = Field(default=8, ge=1)
    pairs_per_prompt: int = Field(default=8, ge=1)
    learning_rate: float = Field(default=2e-4, gt=0)
    warmup_share: float = Field(default=0.1, ge=0, lt=1)
    weight_decay: float = Field(default=0.01, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    strip_tokens: int = Field(default=512, ge=16)
    validation_share: float = Field(default=0.1, ge=0, lt=1)
    checkpoint_steps: int = Field(default=25, ge=1)
    report_to: tuple[str, ...] = ()
    seed: int = Field(default=0, ge=0)
    workers: int = Field(default=1, ge=1)


class RewardSettings(BaseModel):
    """How a reward model is trained and judged.

    mode: `frozen` fits a head on hidden states of the base as it is, in seconds; `lora` and `full` fine-tune.
    mean_layers, last_layers: hidden layers of the frozen backbone (1 is the first block's output) whose mean over
        the answer's tokens, and whose state at the answer's last token, are the features. Layers beyond
        the model's depth are scaled down in proportion.
    max_length: tokens of prompt and answer together; a longer pair loses the front of its prompt.
    batch_tokens: tokens (padding included) of one forward pass.
    heads: of the ensemble whose disagreement is the uncertainty; each is fitted to a bootstrap sample of the prompts.
    tie_weight: weight of a tie against a decided vote; 0 drops ties.
    penalties: L2 penalties to choose from by cross-validation, in whose folds prompts stay whole. At penalty 1 the
        prior gives the hidden-state part of an answer's score a variance of about 1.
    length_scales: prior standard deviation of the length part over that of the hidden-state part, to choose from.
    length_control: whether scores are made independent of length: what they owe to it, linearly, on the training
        answers is taken away. The report tells the accuracy with and without.
    length_tail: share of the training answers at either end whose length counts as the tail's limit.
    folds: folds of that cross-validation.
    trick_answers: held-out answers on which the cheapest tricks are tried, for the report.
    minimum_train_pairs, minimum_heldout_pairs: below either, training is refused.
    confidence: of every interval in the report.
    minimum_accuracy: the gate wants the held-out interval above this.
    precision: of the backbone's arithmetic; "auto" takes the faster one on this machine.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: Literal["frozen", "lora", "full"] = "frozen"
    tuning: TuningSettings = TuningSettings()
    heads: int = Field(default=8, ge=2)
    mean_layers: tuple[int, ...] = (20,)
    last_layers: tuple[int, ...] = (20,)
    max_length: int = Field(default=512, ge=16)
    batch_tokens: int = Field(default=4096, ge=256)
    tie_weight: float = Field(default=0.5, ge=0, le=1)
    penalties: tuple[float, ...] = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
    length_scales: tuple[float, ...] = (0.3, 1.0, 3.0)
    length_control: bool = False
    length_tail: float = Field(default=0.02, ge=0, lt=0.5)
    folds: int = Field(default=5, ge=2)
    trick_answers: int = Field(default=40, ge=0)
    minimum_train_pairs: int = Field(default=40, ge=4)
    minimum_heldout_pairs: int = Field(default=20, ge=2)
    confidence: float = Field(default=0.95, gt=0, lt=1)
    minimum_accuracy: float = Field(default=0.5, ge=0, le=1)
    precision: Precision = "auto"
