"""Questions about the letters of words, and small JSON objects to fill from sentences."""

from __future__ import annotations

import json
import random

from pdserve.bench.demo.turns import Turn, phrase
from pdserve.bench.demo.words import CITIES, NAMES, draw_name, draw_word

_REVERSE = (
    "Reverse the word {word}.",
    "Reverse {word}.",
    "Write {word} backwards.",
    "Spell {word} backwards.",
    "What is {word} backwards?",
    "What is {word} in reverse?",
)
_SPELL = (
    "Spell the word {word}.",
    "Spell {word}.",
    "How do you spell {word}?",
    "Spell out {word}.",
    "What are the letters of {word}?",
)
_COUNT = (
    "How many times does the letter {letter} appear in {word}?",
    "How often does the letter {letter} appear in {word}?",
    "How often is {letter} in {word}?",
    "Count the letter {letter} in {word}.",
    "How many {letter}'s are in {word}?",
    "How many times is the letter {letter} in the word {word}?",
)
_FILL = (
    "Fill {form} from: {sentence}",
    "Fill in {form}: {sentence}",
    "Fill this object: {form} Text: {sentence}",
    "{sentence} Fill {form}.",
)
_PERSON = (
    "{name} is {age} years old and lives in {city}.",
    "{name} lives in {city} and is {age} years old.",
    "{name} is {age} and comes from {city}.",
    "At {age}, {name} moved to {city}.",
)
_EMPTY = {"name": "", "age": 0, "city": ""}
_FOLLOW_REVERSE = ("Reverse it.", "And backwards?", "Write it backwards.")
_FOLLOW_SPELL = ("Spell it.", "How do you spell it?")
_FOLLOW_COUNT = ("How often is {letter} in it?", "How many times does the letter {letter} appear in it?")
WORD_TEXTS = (
    *_REVERSE,
    *_SPELL,
    *_COUNT,
    *_FILL,
    *_PERSON,
    *_FOLLOW_REVERSE,
    *_FOLLOW_SPELL,
    *_FOLLOW_COUNT,
    *('{"name": "", "age": 0, "city": ""}', '{"age": 0, "name": "", "city": ""}', '{"city": "A", "age": 1}'),
)
"""All that is fixed in questions and answers."""


def draw_reverse(random: random.Random) -> Turn:
    word = draw_word(random)
    return _reverse(phrase(random, _REVERSE, word=_quoted(random, word)), word)


def draw_spell(random: random.Random) -> Turn:
    word = draw_word(random)
    return _spell(phrase(random, _SPELL, word=_quoted(random, word)), word)


def draw_count(random: random.Random) -> Turn:
    word = draw_word(random)
    letter = _draw_letter(random, word)
    text = phrase(random, _COUNT, word=_quoted(random, word), letter=letter)
    return _count(text, word, letter)


def draw_object(random: random.Random) -> Turn:
    values: dict[str, object] = {
        "name": draw_name(random, NAMES),
        "age": random.randint(1, 99),
        "city": draw_name(random, CITIES),
    }
    sentence = random.choice(_PERSON).format(**values)
    keys = random.sample(list(_EMPTY), random.choice((2, 3, 3)))
    form = json.dumps({key: _EMPTY[key] for key in keys})
    answer = json.dumps({key: values[key] for key in keys})
    return Turn("JSON objects", phrase(random, _FILL, form=form, sentence=sentence), answer, sentence)


def follow_word(random: random.Random, word: str) -> Turn:
    """A question about the word of the last one."""
    kind = random.randrange(3)
    if kind == 0:
        turn = _reverse(phrase(random, _FOLLOW_REVERSE), word)
    elif kind == 1:
        turn = _spell(phrase(random, _FOLLOW_SPELL), word)
    else:
        letter = _draw_letter(random, word)
        turn = _count(phrase(random, _FOLLOW_COUNT, letter=letter), word, letter)
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
