"""What an experiment is: its arms, its plan, and how it stands. No storage here (serving/experiments.py)."""

from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from serving.assignment import check_allocation

Unit = Literal["user", "session", "response"]
State = Literal["running", "promoted", "rejected", "stopped"]
MOVES: dict[State, frozenset[State]] = {
    "running": frozenset({"promoted", "rejected", "stopped"}),
    "promoted": frozenset(),
    "rejected": frozenset(),
    "stopped": frozenset(),
}
"""From each state to which; those that lead nowhere are ends."""
_ON_ANSWERS = r"thumb|rating|score:.{1,256}|signal:(copied|regenerated|abandoned|shared)"
_TOLERANCE = 1e-3
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
_Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class Arm(BaseModel):
    """One of the checkpoints. weight: its part (0 to 1) of the units in the experiment."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: _Name
    checkpoint_id: str
    weight: _Share


class Guardrails(BaseModel):
    """How much worse than the control an arm may be; null: not watched.

    error_rate, abort_rate: largest rise of the share (0 to 1) of units that met an answer that failed, or left one.
    time_to_first_token, length: largest ratio of the mean to the control's; for length also its inverse. People may
    like other lengths, so length is not watched unless asked for.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    error_rate: float | None = Field(default=0.02, gt=0, le=1)
    abort_rate: float | None = Field(default=0.05, gt=0, le=1)
    time_to_first_token: float | None = Field(default=2.0, gt=1, le=100)
    length: float | None = Field(default=None, gt=1, le=100)


class Plan(BaseModel):
    """What is fixed when an experiment starts.

    unit: what is assigned; where a request has no user the session stands in, else the response. metric: what decides,
    `preference` (side-by-side choices), or votes on single answers: `thumb`, `rating`, `score:NAME`, `signal:NAME`.
    further_metrics: told beside it, and decide nothing. window_s: a vote counts when it comes within so many seconds
    after its unit was first shown an answer. alpha: the chance (0 to 1) of promoting an arm that is no better,
    whenever one looks. planned_units: for who wants a fixed-horizon test beside it, units after which to look once.
    testers: unit → arm that it always sees; not counted. shadow_share: part of the alias's answered prompts that the
    candidate answers too, unseen.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    unit: Unit = "user"
    metric: str = Field(default="preference", pattern=f"^(preference|{_ON_ANSWERS})$")
    further_metrics: tuple[Annotated[str, Field(pattern=f"^({_ON_ANSWERS})$")], ...] = Field(default=(), max_length=8)
    window_s: float = Field(default=86_400.0, gt=0, le=366 * 86_400)
    alpha: float = Field(default=0.05, gt=0, lt=0.5)
    planned_units: int | None = Field(default=None, ge=2)
    guardrails: Guardrails = Guardrails()
    testers: dict[Annotated[str, Field(min_length=1, max_length=256)], str] = Field(default={}, max_length=1000)
    shadow_share: _Share = 0.0


class Start(Plan):
    """An experiment to start on `alias`: the first arm is the control. share: part of the alias's units, 0 to 1."""

    alias: str = Field(min_length=1)
    namespace: _Name | None = None
    share: _Share = 1.0
    arms: tuple[Arm, ...] = Field(min_length=2, max_length=16)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        normalised(self.arms)
        names = {arm.name for arm in self.arms}
        for unit, arm in self.testers.items():
            if arm not in names:
                raise ValueError(f"`testers` sends {unit} to {arm}, which is no arm")
        return self

    @property
    def plan(self) -> Plan:
        return Plan(**self.model_dump(include=set(Plan.model_fields)))


def candidate_start(alias: str, control_id: str, candidate_id: str, candidate_weight: float, **plan: Any) -> Start:
    """The usual experiment: `control` against `candidate`, which gets so much (0 to 1) of the alias's units."""
    arms = (
        Arm(name="control", checkpoint_id=control_id, weight=1 - candidate_weight),
        Arm(name="candidate", checkpoint_id=candidate_id, weight=candidate_weight),
    )
    return Start(alias=alias, arms=arms, **plan)


def normalised(arms: tuple[Arm, ...]) -> tuple[Arm, ...]:
    """The arms with weights that add up to 1 exactly, for people write thirds as .333.

    Raises ValueError when names repeat, or the sum is off by more than a thousandth.
    """
    if len({arm.name for arm in arms}) != len(arms):
        raise ValueError("every arm needs a name of its own")
    total = sum(arm.weight for arm in arms)
    if abs(total - 1) > _TOLERANCE:
        raise ValueError(f"the weights of the arms must add up to 1, not {total:g}")
    return tuple(arm.model_copy(update={"weight": arm.weight / total}) for arm in arms)


class Experiment(BaseModel):
    """An experiment as it stands. allocation: of its units, to its arms by name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    experiment_id: str
    alias: str
    namespace: str
    salt: str
    share: float = 1.0
    arms: tuple[Arm, ...]
    allocation: Annotated[Any, AfterValidator(check_allocation)]
    plan: Plan = Plan()
    state: State = "running"
    report: dict[str, Any] | None = None
    started_at: datetime | None = None
    stopped_at: datetime | None = None

    @property
    def control(self) -> Arm:
        """What the others are compared with."""
        return self.arms[0]

    def arm(self, name: str) -> Arm:
        """The arm of that name. Raises KeyError."""
        return {arm.name: arm for arm in self.arms}[name]

    @property
    def same_everywhere(self) -> bool:
        """Whether all arms are one checkpoint: an A/A test, which must find nothing."""
        return len({arm.checkpoint_id for arm in self.arms}) == 1


class Namespace(BaseModel):
    """Whose stretch each unit of the namespace falls on. allocation: to experiments, by id."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    namespace: str
    unit: Unit
    allocation: Annotated[Any, AfterValidator(check_allocation)]
