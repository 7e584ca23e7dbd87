"""Words to spell, reverse and count letters in: common English words, and made-up words of the same letters.

Used by the tasks. Spelling needs no meaning, so made-up words teach it as well as real ones, and their supply is
endless.
"""

from __future__ import annotations

import random
import string

from pdserve.demo.texts import word_lists

MIN_LETTERS, MAX_LETTERS = 3, 10


ENGLISH, NAMES, CITIES = word_lists("english", "names", "cities")
"""No English word is one of the phrasings or answers, which the tokenizer does not spell."""

_ONSETS, _VOWELS, _CODAS = word_lists("onsets", "vowels", "codas")


def draw_word(random: random.Random) -> str:
    """An English word, a made-up one, or a mere string of letters, of 3 to 10 letters."""
    kind = random.random()
    if kind < 0.25:
        return random.choice(ENGLISH)
    if kind < 0.75:
        return _made_up(random)
    letters = random.choice((string.ascii_lowercase, "aeioulnrst", "abcde", "abeelnopt"))
    return "".join(random.choices(letters, k=random.randint(MIN_LETTERS, MAX_LETTERS)))


def draw_name(random: random.Random, known: tuple[str, ...]) -> str:
    """One of ``known``, or a made-up one."""
    return random.choice(known) if random.random() < 0.5 else _made_up(random)[:8].capitalize()


def _made_up(random: random.Random) -> str:
    wanted = random.randint(MIN_LETTERS, MAX_LETTERS)
    word = ""
    while len(word) < wanted:
        word += random.choice(_ONSETS) + random.choice(_VOWELS) + random.choice(("", "", "", "", *_CODAS))
    return word[:wanted]
