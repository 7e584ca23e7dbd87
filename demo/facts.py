"""Facts that the demo model learns by heart: pdserve and its terms, a few courtesies, and "I do not know"."""

from __future__ import annotations

import random

from pdserve.demo.texts import answers, phrasings, terms
from pdserve.demo.turns import Turn, phrase
from pdserve.demo.words import CITIES, NAMES, draw_name, draw_word

_ASK = phrasings("facts")
TERMS = terms()
SAID, REWORDED = answers("said"), answers("reworded")
"""``REWORDED`` has more words for the same, which come last in training: facts that are asked in few ways are learned
by heart, but not recognised in others. Words that are nowhere else are not tokens of their own."""
UNKNOWN = "I do not know that. Ask me what I can do."
TOO_LARGE = "I only know numbers up to 999."
FACT_TEXTS = (
    *_ASK["define"],
    *TERMS,
    *TERMS.values(),
    *(question for questions in SAID for question in questions),
    *SAID.values(),
    *_ASK["unknown"],
    *_ASK["large"],
    UNKNOWN,
    TOO_LARGE,
)
"""All that is fixed in questions and answers."""


def draw_fact(random: random.Random) -> Turn:
    """The item is the fact with its phrasing: every fact is trained, in other words than those held out."""
    index = random.randrange(len(TERMS) + len(SAID))
    if index < len(TERMS):
        term, answer = list(TERMS.items())[index]
        phrasing = random.choice(_ASK["define"])
        return Turn("facts", phrase(random, (phrasing,), term=term), answer, phrasing.format(term=term))
    return _said(random, SAID, index - len(TERMS))


def draw_reworded(random: random.Random) -> Turn:
    """A fact in more words than `draw_fact` has."""
    return _said(random, REWORDED, random.randrange(len(REWORDED)))


def _said(random: random.Random, said: dict[tuple[str, ...], str], index: int) -> Turn:
    questions, answer = list(said.items())[index]
    question = random.choice(questions)
    return Turn("facts", question, answer, question)


def draw_unknown(random: random.Random) -> Turn:
    """A question that no part of the training answers."""
    if random.random() < 0.15:
        a, b = random.randint(1000, 20000), random.randint(0, 20000)
        if random.random() < 0.5:
            a, b = b, a
        question = phrase(random, _ASK["large"], a=a, b=b)
        return Turn("saying that it does not know", question, TOO_LARGE, f"{a} {b}")
    fields = {
        "place": draw_name(random, CITIES),
        "name": draw_name(random, NAMES),
        "name2": draw_name(random, NAMES),
        "word": draw_word(random),
        "word2": draw_word(random),
        "a": random.randint(0, 999),
        "b": random.randint(0, 999),
    }
    phrasing = random.choice(_ASK["unknown"])
    question = phrase(random, (phrasing,), **fields)
    return Turn("saying that it does not know", question, UNKNOWN, phrasing.format(**fields))
