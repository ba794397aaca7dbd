"""Errors of the rounds room.

RoundsError
├── NoPrompts       no prompt fits the policy update or the gate (more votes help, not a retry)
├── AdapterUnknown  a parent adapter is not one that this trainer can continue (no retry)
├── PolicyDiverged  the update left the KL budget before its first step was done, or gave NaN (another seed can help)
├── ForbiddenMove   the state table does not have this move (no retry)
├── RatingFileInvalid  a file of votes can't be read, or leaves strengths undefined (no retry)
├── LeaseLost       another controller drives the wheel (a retry can help)
├── WorkLost        a task died with its worker or its node (a retry can help)
└── WorkFailed      a task raised; its text is kept (a retry can help: memory, disk)
    └── WorkRefused a task judged what it was given; the same again is judged the same (no retry)
"""


class RoundsError(Exception):
    """Base of the room."""


class NoPrompts(RoundsError):
    """There is nothing to sample answers for."""


class AdapterUnknown(RoundsError):
    """The parent is not a complete LoRA adapter of a known layout."""


class PolicyDiverged(RoundsError):
    """No usable weights came out of the policy update."""


class ForbiddenMove(RoundsError):
    """A round was asked to move where its state does not lead."""


class RatingFileInvalid(RoundsError):
    """A file of votes can't be read, or says too little to rate anybody."""


class LeaseLost(RoundsError):
    """The lease ran out or another controller moved the round."""


class WorkLost(RoundsError):
    """The worker or its node went away before the task was done."""


class WorkFailed(RoundsError):
    """The task itself raised an error."""


class WorkRefused(WorkFailed):
    """The task can't do anything with what it was given: too few pairs, no prompts, nothing within the budget."""
