"""Questions about numbers: sums, differences, comparisons, days of the week."""

from __future__ import annotations

import random
from itertools import chain

from pdserve.demo.texts import phrasings
from pdserve.demo.turns import Turn, phrase

MAX_OPERAND = 999
MAX_DAYS = 50
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_ASK = phrasings("numbers")
_YES_NO = ("No.", "Yes.")
NUMBER_TEXTS = (
    *chain(*_ASK.values()),
    *_YES_NO,
    *WEEKDAYS,
    "1 day.",
)
"""All that is fixed in questions and answers."""


def draw_number(random: random.Random) -> int:
    """0 to 99; one digit more often than one time in ten."""
    return random.randrange(random.choice((10, 100, 100, 100, 100, 100, 100)))


def draw_sum(random: random.Random) -> Turn:
    a, b = draw_number(random), draw_number(random)
    return _sum(phrase(random, _ASK["sums"], a=a, b=b), a, b)


def draw_difference(random: random.Random) -> Turn:
    a, b = draw_number(random), draw_number(random)
    if a < b and random.random() < 0.7:
        a, b = b, a
    return _difference(phrase(random, _ASK["differences"], a=a, b=b), a, b)


def draw_comparison(random: random.Random) -> Turn:
    a = draw_number(random)
    b = draw_number(random) if random.random() < 0.6 else max(0, min(MAX_OPERAND, a + random.randint(-20, 20)))
    if a == b:
        b = (a + 1) % (MAX_OPERAND + 1)
    phrasings, answer = random.choice(
        (
            (_ASK["larger"], str(max(a, b))),
            (_ASK["smaller"], str(min(a, b))),
            (_ASK["is_larger"], _YES_NO[a > b]),
            (_ASK["is_smaller"], _YES_NO[a < b]),
        )
    )
    return Turn("comparing numbers", phrase(random, phrasings, a=a, b=b), answer, f"{a} {b}")


def draw_weekday(random: random.Random) -> Turn:
    index, n = random.randrange(7), random.randint(1, MAX_DAYS)
    sign, phrasings = random.choice(((1, _ASK["later"]), (-1, _ASK["earlier"])))
    day, answer = WEEKDAYS[index], WEEKDAYS[(index + sign * n) % 7]
    text = phrase(random, phrasings, n=n, day=day)
    if n == 1:
        text = text.replace("1 days", "1 day")
    return Turn("weekdays", text, f"{answer}.", f"{day} {sign * n}")


def follow_number(random: random.Random, before: int) -> Turn:
    """A question about the number that was the last answer."""
    b = draw_number(random)
    if random.random() < 0.5 or b > before:
        text = phrase(random, _ASK["follow_sum"], b=b)
        turn = _sum(text, before, b)
    else:
        text = phrase(random, _ASK["follow_difference"], b=b)
        turn = _difference(text, before, b)
    return Turn("follow-up questions", text, turn.answer, turn.item, turn.subject)


def _sum(question: str, a: int, b: int) -> Turn:
    return Turn("sums", question, str(a + b), f"{a} + {b}", str(a + b))


def _difference(question: str, a: int, b: int) -> Turn:
    return Turn("differences", question, str(a - b), f"{a} - {b}", str(a - b))
