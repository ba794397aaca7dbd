"""Settings of the rounds room."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from reward.settings import Precision
from serving.experiment_plan import Guardrails


class PolicySettings(BaseModel):
    """How the policy is improved against a reward model (GRPO with LoRA).

    max_steps: updates at most; kl_budget may end it sooner.
    prompts_per_step × completions_per_prompt: answers sampled for one update.
    max_new_tokens: of an answer; the same as the votes' answers had, or the reward model judges a stranger.
    temperature: of sampling; log-probabilities and KL are of the distribution at that temperature.
    learning_rate: AdamW's, constant. max_grad_norm: gradients are clipped to it.
    lora_rank, lora_alpha: of the adapter, on every linear layer; one that continues a parent keeps the parent's.
    advantage_scale: an answer's reward minus its prompt's mean is divided by the standard deviation within the
        prompt ("group") or over the step ("batch": prompts on whose answers people agree count for little).
    kl_penalty: reward lost per nat by which an answer is likelier under the policy than under the base.
    kl_budget: nats; what an update may add to the parent's mean over answers of the KL to the base, summed over an
        answer's tokens. The checkpoint kept is the last one measured within it.
    degenerate_reward: what an empty, repeating or non-word answer earns instead of its score, in standard
        deviations of the training answers' scores. unfinished_penalty: in the same unit, what an answer loses when
        the token limit cuts it, times the share of the parent's answers that ended by themselves.
    micro_batch: answers in one backward pass; on a CPU few are faster, since fresh memory is dearer than arithmetic.
    max_prompt_tokens: longer prompts are left out, and counted.
    precision: of the arithmetic; "auto" takes the faster one on this machine.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_steps: int = Field(default=8, ge=1)
    prompts_per_step: int = Field(default=4, ge=1)
    completions_per_prompt: int = Field(default=8, ge=2)
    max_new_tokens: int = Field(default=48, ge=1)
    temperature: float = Field(default=0.8, gt=0)
    learning_rate: float = Field(default=2e-4, gt=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    lora_rank: int = Field(default=16, ge=1)
    lora_alpha: int = Field(default=32, ge=1)
    advantage_scale: Literal["group", "batch"] = "group"
    kl_penalty: float = Field(default=0.05, ge=0)
    kl_budget: float = Field(default=5.0, gt=0)
    degenerate_reward: float = -3.0
    unfinished_penalty: float = Field(default=2.0, ge=0)
    micro_batch: int = Field(default=4, ge=1)
    max_prompt_tokens: int = Field(default=256, ge=16)
    precision: Precision = "auto"


class CheckpointGateSettings(BaseModel):
    """What a checkpoint must show on held-out prompts, against its parent, before users meet it.

    prompts: held-out prompts answered, once by each side. max_new_tokens, temperature: of those answers.
    confidence: of every interval; the shares are judged one-sided.
    minimum_reward_gain: standard deviations of reward that the gain's interval must lie above.
    base_nll_margin: nats a token by which the answers may be less likely under the base than the parent's.
    degenerate_margin: share (0 to 1) by which empty, repeating or non-word answers may grow beyond noise.
    degenerate_maximum: share of them that is refused whatever the parent does.
    unfinished_margin: the same growth for answers that end at the token limit.
    kl_maximum: nats an answer to the base, estimated on each side's own answers, more than the parent has.
    batch_size: answers sampled at a time. precision: of the arithmetic; "auto" takes the faster one here.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompts: int = Field(default=48, ge=4)
    max_new_tokens: int = Field(default=48, ge=1)
    temperature: float = Field(default=0.8, gt=0)
    confidence: float = Field(default=0.95, gt=0, lt=1)
    minimum_reward_gain: float = 0.0
    base_nll_margin: float = Field(default=0.8, ge=0)
    degenerate_margin: float = Field(default=0.03, ge=0, le=1)
    degenerate_maximum: float = Field(default=0.15, ge=0, le=1)
    unfinished_margin: float = Field(default=0.10, ge=0, le=1)
    kl_maximum: float = Field(default=6.0, gt=0)
    batch_size: int = Field(default=48, ge=1)
    precision: Precision = "auto"


class ExperimentSettings(BaseModel):
    """How live votes decide about a candidate.

    candidate_weight: share (0 to 1) of the alias's traffic that the candidate answers.
    alpha: at most this share of candidates that are no better is ever promoted, however often one looks.
    minimum_votes: decided votes (one for each rater) before anything is decided. maximum_votes: votes after which a
    candidate that is not proven better is rejected. maximum_days: after them one that is not decided about is rejected.
    guardrails: a candidate that breaches one is rejected, whatever the votes say (serving/experiment_plan.py).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    candidate_weight: float = Field(default=0.5, gt=0, lt=1)
    alpha: float = Field(default=0.05, gt=0, lt=1)
    minimum_votes: int = Field(default=30, ge=1)
    maximum_votes: int = Field(default=400, ge=1)
    maximum_days: float = Field(default=14, gt=0)
    guardrails: Guardrails = Guardrails()


class ControllerSettings(BaseModel):
    """When a round starts and how its work is run.

    new_preferences: decided preferences, new since the last snapshot, that start a round.
    heldout_share: share (0 to 1) of the prompts that a snapshot keeps for judging.
    seed: of the training runs; the round's number is added. maximum_attempts: of a step whose work fails.
    poll_interval_s: pause between looks at a condition. lease_s: a controller that is silent for so long
    loses the wheel to another. work_cpus, work_gpus: what a training task asks of Ray.
    work_threads: of a training task; 0 takes one for each core.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    new_preferences: int = Field(default=500, ge=1)
    heldout_share: float = Field(default=0.25, gt=0, lt=1)
    seed: int = 0
    maximum_attempts: int = Field(default=2, ge=1)
    poll_interval_s: float = Field(default=0.5, gt=0)
    lease_s: float = Field(default=15.0, gt=1)
    work_cpus: float = Field(default=1, ge=0)
    work_gpus: float = Field(default=0, ge=0)
    work_threads: int = Field(default=0, ge=0)


class RoundsSettings(BaseModel):
    """Everything that turns the wheel."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    controller: ControllerSettings = ControllerSettings()
    experiment: ExperimentSettings = ExperimentSettings()

    policy: PolicySettings = PolicySettings()
    checkpoint_gate: CheckpointGateSettings = CheckpointGateSettings()
