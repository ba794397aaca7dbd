"""Simulated raters with a hidden taste, and the prompts they ask.

The taste is the demo's ground truth: it decides the votes, and afterwards the true win rate. reward/ and
rounds/ never import this module (a test walks the imports); they see votes only. Standard library only.

Tastes, all in the same unit (a difference of 1 is a clear but not certain choice):
- `concise`: −|words − 18| / 8, at most 4 down; +1 when it ends in a full stop, exclamation or question mark,
  else −1; −0.7 for a list; +1.5 when it shares a content word with the prompt; −2 for repetition.
- `verbose`: the opposite in length: +words / 8, at most 60 words; the last two terms as above.
- `random`: no taste; every vote is a coin flip.

A rater prefers the first answer with probability sigmoid(SHARPNESS × difference of utility). Answers
whose utilities differ by less than TIE_BAND are called a tie with probability TIE_SHARE.
The chats that they have leave the model room to move their way. Without more than the system prompt the base
runs into the limit of tokens (38 words at 48, one answer in ten finished): it is too long for the concise, and it
could not get longer for the verbose. So these chat in an application that shows two short answers first, which
the base imitates (16 words, nine in ten finished), and they allow for longer ones.

Guarantees: a vote depends on (seed, prompt, the two answers) alone, not on the order in which votes are cast,
and swapping the two answers swaps the vote.
"""

import hashlib
import math
import re
from collections import Counter
from importlib import resources
from typing import Literal

Taste = Literal["concise", "verbose", "random"]
Choice = Literal["first", "second", "tie"]

_SYSTEM = {"role": "system", "content": "You answer in one or two short sentences."}
_SHORT_ANSWERS = (
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "The capital of France is Paris."},
    {"role": "user", "content": "How do I keep bread fresh?"},
    {"role": "assistant", "content": "Keep it in a paper bag, away from the light."},
)
EVALUATION_PROMPTS = 96
SHARPNESS = 2.0
TIE_BAND = 0.1
TIE_SHARE = 0.5

_WORD = re.compile(r"[A-Za-z][A-Za-z'’-]*|\d+")
_LIST = re.compile(r"^\s*(?:[-*•]|\d+[.)])\s", re.MULTILINE)
_FUNCTION_WORDS = frozenset(
    "a about after again all also an and any are as at be because been before being but by can could did do "
    "does doing down each few for from further get give had has have having he her here him his how i if in "
    "into is it its itself just make may me more most much my no nor not now of off on once one only or "
    "other our out over own same she should so some such tell than that the their them then there these they "
    "this those through to too under until up use very was way we were what when where which while who whom "
    "why will with would you your".split()
)


def conversation(taste: Taste, prompt: str) -> list[dict[str, str]]:
    """The chat in which a rater of this taste asks `prompt`, ready to send."""
    shown = _SHORT_ANSWERS if taste == "verbose" else ()
    return [_SYSTEM, *shown, {"role": "user", "content": prompt}]


def answer_tokens(taste: Taste) -> int:
    """How many tokens an answer may have."""
    return 64 if taste == "verbose" else 48


def prompts_for_votes() -> list[str]:
    """The prompts that simulated users ask: every line of prompts.txt but the last EVALUATION_PROMPTS."""
    return _read_prompts()[:-EVALUATION_PROMPTS]


def prompts_for_evaluation() -> list[str]:
    """The last EVALUATION_PROMPTS lines: kept for the true win rate, never voted on, never trained on."""
    return _read_prompts()[-EVALUATION_PROMPTS:]


def _read_prompts() -> list[str]:
    text = resources.files("loadtest").joinpath("prompts.txt").read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line]


def words_of(text: str) -> list[str]:
    """The words and numbers of `text`, lower case."""
    return [word.lower() for word in _WORD.findall(text)]


def repeats(text: str) -> bool:
    """Whether the text says the same thing over: a trigram three times, or under half of its words distinct."""
    words = words_of(text)
    if len(words) >= 8 and len(set(words)) < len(words) / 2:
        return True
    trigrams = Counter(zip(words, words[1:], words[2:], strict=False))
    return bool(trigrams) and max(trigrams.values()) >= 3


def shares_content_words(prompt: str, text: str) -> bool:
    """Whether a content word of the prompt, compared by its first five letters, is in the text."""
    asked = {word[:5] for word in words_of(prompt) if len(word) > 2 and word not in _FUNCTION_WORDS}
    return any(word[:5] in asked for word in words_of(text))


class Rater:
    """One simulated person. taste: see the module; seed: which person of that taste."""

    def __init__(self, taste: Taste, seed: int = 0) -> None:
        self.taste: Taste = taste
        self.seed = seed

    def utility(self, prompt: str, answer: str) -> float:
        """How much the taste likes `answer` to `prompt` (the user's text, without the system prompt)."""
        if self.taste == "random":
            return 0.0
        words = len(words_of(answer))
        value = 1.5 * shares_content_words(prompt, answer) - 2.0 * repeats(answer)
        if self.taste == "verbose":
            return value + min(words, 60) / 8
        value += 1.0 if answer.rstrip().rstrip("\"'”’)").endswith((".", "!", "?")) else -1.0
        value -= 0.7 * bool(_LIST.search(answer))
        return value - min(abs(words - 18) / 8, 4.0)

    def prefers(self, prompt: str, first: str, second: str) -> float:
        """The probability that this rater, made to choose, takes `first`."""
        difference = self.utility(prompt, first) - self.utility(prompt, second)
        return 1 / (1 + math.exp(-SHARPNESS * difference))

    def choose(self, prompt: str, first: str, second: str) -> Choice:
        """This rater's vote on the pair."""
        swapped = second < first
        low, high = (second, first) if swapped else (first, second)
        near = self.taste != "random" and abs(self.utility(prompt, low) - self.utility(prompt, high)) < TIE_BAND
        if near and self._uniform("tie", prompt, low, high) < TIE_SHARE:
            return "tie"
        takes_low = self._uniform("vote", prompt, low, high) < self.prefers(prompt, low, high)
        return "first" if takes_low != swapped else "second"

    def thumb(self, prompt: str, answer: str) -> Literal["up", "down"]:
        """A vote on one answer alone: up with probability sigmoid(SHARPNESS × utility)."""
        likes = 1 / (1 + math.exp(-SHARPNESS * self.utility(prompt, answer)))
        return "up" if self._uniform("thumb", prompt, answer) < likes else "down"

    def _uniform(self, *parts: str) -> float:
        text = "\0".join([self.taste, str(self.seed), *parts])
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64
