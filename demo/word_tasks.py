"""Questions about the letters of words, and small JSON objects to fill from sentences."""

from __future__ import annotations

import json
import random
from itertools import chain

from pdserve.demo.texts import phrasings
from pdserve.demo.turns import Turn, phrase
from pdserve.demo.words import CITIES, NAMES, draw_name, draw_word

_ASK = phrasings("words")
_EMPTY = {"name": "", "age": 0, "city": ""}
WORD_TEXTS = (
    *chain(*_ASK.values()),
    *('{"name": "", "age": 0, "city": ""}', '{"age": 0, "name": "", "city": ""}', '{"city": "A", "age": 1}'),
)
"""All that is fixed in questions and answers."""


def draw_reverse(random: random.Random) -> Turn:
    word = draw_word(random)
    return _reverse(phrase(random, _ASK["reverse"], word=_quoted(random, word)), word)


def draw_spell(random: random.Random) -> Turn:
    word = draw_word(random)
    return _spell(phrase(random, _ASK["spell"], word=_quoted(random, word)), word)


def draw_count(random: random.Random) -> Turn:
    word = draw_word(random)
    letter = _draw_letter(random, word)
    text = phrase(random, _ASK["count"], word=_quoted(random, word), letter=letter)
    return _count(text, word, letter)


def draw_object(random: random.Random) -> Turn:
    values: dict[str, object] = {
        "name": draw_name(random, NAMES),
        "age": random.randint(1, 99),
        "city": draw_name(random, CITIES),
    }
    sentence = random.choice(_ASK["person"]).format(**values)
    keys = random.sample(list(_EMPTY), random.choice((2, 3, 3)))
    form = json.dumps({key: _EMPTY[key] for key in keys})
    answer = json.dumps({key: values[key] for key in keys})
    return Turn("JSON objects", phrase(random, _ASK["fill"], form=form, sentence=sentence), answer, sentence)


def follow_word(random: random.Random, word: str) -> Turn:
    """A question about the word of the last one."""
    kind = random.randrange(3)
    if kind == 0:
        turn = _reverse(phrase(random, _ASK["follow_reverse"]), word)
    elif kind == 1:
        turn = _spell(phrase(random, _ASK["follow_spell"]), word)
    else:
        letter = _draw_letter(random, word)
        turn = _count(phrase(random, _ASK["follow_count"], letter=letter), word, letter)
    return Turn("follow-up questions", turn.question, turn.answer, turn.item, word)


def _reverse(question: str, word: str) -> Turn:
    return Turn("reversing words", question, word[::-1], word, word)


def _spell(question: str, word: str) -> Turn:
    return Turn("spelling words", question, "-".join(word), word, word)


def _count(question: str, word: str, letter: str) -> Turn:
    return Turn("counting letters", question, str(word.count(letter)), f"{letter} {word}", word)


def _draw_letter(random: random.Random, word: str) -> str:
    return random.choice(word) if random.random() < 0.8 else random.choice("abcdefghijklmnopqrstuvwxyz")


def _quoted(random: random.Random, word: str) -> str:
    return random.choice((word, word, word, f'"{word}"', f"'{word}'"))
