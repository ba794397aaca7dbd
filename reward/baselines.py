"""What needs no language model: a linear model of an answer's words, to set a reward model's accuracy beside."""

import itertools
import re
import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy import sparse

from reward.logistic import calibrate, fit, log_loss, out_of_fold
from reward.pairs import Comparisons

Array = npt.NDArray[np.float64]
_WIDTH = 1 << 15
_PENALTIES = (1.0, 4.0, 16.0, 64.0)
_WORD = re.compile(r"\w+|[^\w\s]")


def word_features(answers: Sequence[str]) -> sparse.csr_array:
    """float64 [n, 32768]: 1 where a word, or two words in a row, occurs, at the place of its hash; rows of length 1."""
    rows, columns, values = [], [], []
    for row, answer in enumerate(answers):
        words = _WORD.findall(answer.lower())
        terms = {*words, *(" ".join(both) for both in itertools.pairwise(words))}
        places = {zlib.crc32(term.encode()) % _WIDTH for term in terms}
        rows += [row] * len(places)
        columns += sorted(places)
        values += [1 / np.sqrt(max(len(places), 1))] * len(places)
    return sparse.csr_array((values, (rows, columns)), shape=(len(answers), _WIDTH))


def word_margins(train: Comparisons, heldout: Comparisons, folds: int) -> Array:
    """Score differences [n decided held-out pairs] of the words' model, its penalty chosen by cross-validation."""
    seen = word_features(train.answers)
    differences = seen[train.chosen] - seen[train.rejected]
    losses = []
    for penalty in _PENALTIES:
        margins = out_of_fold(differences, train.target, train.weight, train.group, penalty, folds)
        temperature = calibrate(margins, train.target, train.weight)
        losses.append(log_loss(temperature * margins, train.target, train.weight))
    beta = fit(differences, train.target, train.weight, _PENALTIES[int(np.argmin(losses))])
    scores = word_features(heldout.answers) @ beta
    decided = heldout.decided
    return np.asarray(scores[heldout.chosen[decided]] - scores[heldout.rejected[decided]])
