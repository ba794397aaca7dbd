"""Is this text an answer at all? Rules on the text alone, the same for every taste.

A policy can earn reward with nonsense that the reward model never saw; these are the cheap signs of it.
Does not judge whether an answer is true or good: the base model's log-probability of it says more.
"""

import re
from collections import Counter

_WORD = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*")
_STRETCHED = re.compile(r"(\S)\1{4,}")
_VOWELS = frozenset("aeiouyäöüàáâèéêëìíîïòóôùúûåæøœ")


def words_in(text: str) -> list[str]:
    """The words of `text`, as written."""
    return _WORD.findall(text)


def is_empty(text: str) -> bool:
    """Not one word or number."""
    return not words_in(text) and not re.search(r"\d", text)


def is_repeating(text: str) -> bool:
    """Stuck: a word four times in a row, a trigram three times, or under half of ten or more words distinct."""
    words = [word.lower() for word in words_in(text)]
    if len(words) >= 10 and len(set(words)) < len(words) / 2:
        return True
    if any(len(set(words[place : place + 4])) == 1 for place in range(len(words) - 3)):
        return True
    trigrams = Counter(zip(words, words[1:], words[2:], strict=False))
    return bool(trigrams) and max(trigrams.values()) >= 3


def is_gibberish(text: str) -> bool:
    """Not words: stretched characters, shouting, or a third of the words without a vowel or over-long.

    Numbers, code and other scripts than Latin are not judged by their vowels.
    """
    words = words_in(text)
    if _STRETCHED.search(re.sub(r"[.\-_=*#~\s]+", " ", text)):
        return True
    long_words = [word for word in words if len(word) >= 4]
    if len(long_words) >= 3 and sum(word.isupper() for word in long_words) > len(long_words) / 2:
        return True
    latin = [word.lower() for word in words if word.isascii() and len(word) >= 3]
    odd = [word for word in latin if not _VOWELS.intersection(word) or max(map(len, re.split("['-]", word))) > 22]
    return len(odd) > max(1, len(latin) / 3)


def is_degenerate(text: str) -> bool:
    """Empty, repeating or gibberish."""
    return is_empty(text) or is_repeating(text) or is_gibberish(text)
