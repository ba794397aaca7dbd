"""What an answer earns in a policy update.

reward of an answer = its reward-model score − kl_penalty × log(policy / base); a degenerate one has a fixed low score
instead, and one that the token limit cut loses unfinished_penalty × the share of the parent's answers that ended by
themselves. The checkpoint gate compares a candidate with its parent in the same way, so what is earned here is what
passes there: a parent that rarely ends within the limit does not make every answer a bad one.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rounds.readability import is_degenerate
from rounds.sampling import Answer
from rounds.settings import PolicySettings

Array = npt.NDArray[np.float64]


def rewards(
    answers: Sequence[Answer], scores: Array, gaps: Array, parent_finished_share: float, settings: PolicySettings
) -> tuple[Array, Array]:
    """(rewards, scores as counted), float64 [n] each, in standard deviations of the training answers' scores.

    scores: the reward model's. gaps: log(policy / base) of each answer, nats. parent_finished_share: 0 to 1.
    """
    degenerate = np.array([is_degenerate(answer.text) for answer in answers])
    cut = np.array([not answer.finished for answer in answers])
    counted = np.where(degenerate, np.minimum(scores, settings.degenerate_reward), scores)
    penalty = settings.kl_penalty * gaps + settings.unfinished_penalty * parent_finished_share * cut
    return counted - penalty, counted
