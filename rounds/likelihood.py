"""How likely a model finds given answers, and how far a policy has moved from its base.

Log-probabilities are taken in float32 and in nats; an answer's end-of-turn token counts as its token.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rounds.sampling import Answer, padded

Array = npt.NDArray[np.float64]


@torch.inference_mode()
def token_log_probabilities(
    model: Any,
    answers: Sequence[Answer],
    *,
    pad_token_id: int,
    temperatures: Sequence[float],
    rows: int = 16,
) -> list[Array]:
    """Per answer float64 [n_temperatures, n_tokens]: `model`'s log-probabilities of the answer's tokens.

    rows: answers in one forward pass.
    """
    result: dict[int, Array] = {}
    order = sorted(
        range(len(answers)), key=lambda place: len(answers[place].prompt_ids) + len(answers[place].token_ids)
    )
    for start in range(0, len(order), rows):
        batch = order[start : start + rows]
        front, front_mask = padded([answers[place].prompt_ids for place in batch], pad_token_id, left=True)
        back, back_mask = padded([answers[place].token_ids for place in batch], pad_token_id, left=False)
        mask = torch.cat([front_mask, back_mask], 1).to(model.device)
        logits = model(
            input_ids=torch.cat([front, back], 1).to(model.device),
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0),
            use_cache=False,
            logits_to_keep=back.shape[1] + 1,
        ).logits[:, :-1]
        chosen = back.to(logits.device)[..., None]
        values = [
            torch.log_softmax(logits.float() / temperature, -1).gather(2, chosen)[..., 0].cpu().numpy()
            for temperature in temperatures
        ]
        for row, place in enumerate(batch):
            length = len(answers[place].token_ids)
            result[place] = np.stack([value[row, :length] for value in values]).astype(np.float64)
    return [result[place] for place in range(len(answers))]


def divergence(policy: Array, base: Array) -> float:
    """KL(policy ‖ base) of one answer in nats, estimated from its tokens' log-probabilities [n_tokens] under both.

    Σ exp(base − policy) − 1 − (base − policy): unbiased for tokens drawn from the policy, never negative
    (Schulman 2020, "Approximating KL divergence", estimator k3).
    """
    difference = base - policy
    return float((np.expm1(difference) - difference).sum())
