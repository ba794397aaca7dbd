"""The raters' true verdict on two checkpoints: their taste without the noise of their votes.

Only a simulation can know it; the platform never sees it. On prompts that were never voted on, the true
win rate is the share of answer pairs in which the taste likes the new answer more, a tie counting one half.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from loadtest.raters import Rater, Taste, words_of


@dataclass(frozen=True)
class TrueWinRate:
    """`rate` with a 95 % interval (`low`, `high`) clustered by prompt; `vote_share` is what noisy votes would say."""

    rate: float
    low: float
    high: float
    vote_share: float
    pairs: int
    mean_words_old: float
    mean_words_new: float


def true_win_rate(
    taste: Taste, prompts: Sequence[str], old: Sequence[Sequence[str]], new: Sequence[Sequence[str]]
) -> TrueWinRate:
    """Compare `new[i][j]` with `old[i][j]`, answers j to prompt i. Raises ValueError for fewer than two prompts.

    The interval is normal over prompts: the mean over a prompt's pairs is one observation.
    """
    if len(prompts) < 2:
        raise ValueError("a win rate needs at least two prompts")
    rater = Rater(taste)
    wins: list[float] = []
    shares: list[float] = []
    for prompt, before, after in zip(prompts, old, new, strict=True):
        differences = [
            rater.utility(prompt, newer) - rater.utility(prompt, older)
            for older, newer in zip(before, after, strict=True)
        ]
        wins.append(fmean(0.5 if abs(value) < 1e-9 else float(value > 0) for value in differences))
        shares.append(fmean(rater.prefers(prompt, newer, older) for older, newer in zip(before, after, strict=True)))
    rate = fmean(wins)
    width = 1.96 * stdev(wins) / math.sqrt(len(wins))
    return TrueWinRate(
        rate=rate,
        low=rate - width,
        high=rate + width,
        vote_share=fmean(shares),
        pairs=sum(map(len, old)),
        mean_words_old=fmean(len(words_of(text)) for texts in old for text in texts),
        mean_words_new=fmean(len(words_of(text)) for texts in new for text in texts),
    )
