"""Questions about numbers: sums, differences, comparisons, days of the week."""

from __future__ import annotations

import random

from pdserve.bench.demo.turns import Turn, phrase

MAX_OPERAND = 999
MAX_DAYS = 50
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

_SUMS = (
    "What is {a} + {b}?",
    "What is {a} plus {b}?",
    "{a} + {b}",
    "{a} + {b}",
    "{a}+{b}",
    "{a}+{b}=",
    "How much is {a} plus {b}?",
    "Add {a} and {b}.",
    "Add {b} to {a}.",
    "What is the sum of {a} and {b}?",
    "Calculate {a} + {b}.",
)
_DIFFERENCES = (
    "What is {a} - {b}?",
    "What is {a} minus {b}?",
    "{a} - {b}",
    "{a} - {b}",
    "{a}-{b}",
    "{a}-{b}=",
    "How much is {a} minus {b}?",
    "Subtract {b} from {a}.",
    "Take {b} away from {a}.",
    "What is the difference of {a} and {b}?",
    "Calculate {a} - {b}.",
)
_LARGER = (
    "Which is larger, {a} or {b}?",
    "Which number is greater: {a} or {b}?",
    "What is the larger of {a} and {b}?",
    "Which is bigger, {a} or {b}?",
)
_SMALLER = (
    "Which is smaller, {a} or {b}?",
    "Which number is less: {a} or {b}?",
    "What is the smaller of {a} and {b}?",
)
_IS_LARGER = ("Is {a} larger than {b}?", "Is {a} greater than {b}?", "Is {a} more than {b}?")
_IS_SMALLER = ("Is {a} smaller than {b}?", "Is {a} less than {b}?")
_LATER = (
    "What day is {n} days after {day}?",
    "Which day comes {n} days after {day}?",
    "Today is {day}. What day is it in {n} days?",
    "If today is {day}, which weekday is it {n} days later?",
)
_EARLIER = (
    "What day is {n} days before {day}?",
    "Which day comes {n} days before {day}?",
    "Today is {day}. What day was it {n} days ago?",
    "If today is {day}, which weekday was it {n} days earlier?",
)
_FOLLOW_SUM = ("Add {b}.", "Add {b} to that.", "And plus {b}?")
_FOLLOW_DIFFERENCE = ("Subtract {b}.", "Subtract {b} from that.", "And minus {b}?")
_YES_NO = ("No.", "Yes.")
NUMBER_TEXTS = (
    *_SUMS,
    *_DIFFERENCES,
    *_LARGER,
    *_SMALLER,
    *_IS_LARGER,
    *_IS_SMALLER,
    *_LATER,
    *_EARLIER,
    *_FOLLOW_SUM,
    *_FOLLOW_DIFFERENCE,
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
    return _sum(phrase(random, _SUMS, a=a, b=b), a, b)


def draw_difference(random: random.Random) -> Turn:
    a, b = draw_number(random), draw_number(random)
    if a < b and random.random() < 0.7:
        a, b = b, a
    return _difference(phrase(random, _DIFFERENCES, a=a, b=b), a, b)


def draw_comparison(random: random.Random) -> Turn:
    a = draw_number(random)
    b = draw_number(random) if random.random() < 0.6 else max(0, min(MAX_OPERAND, a + random.randint(-20, 20)))
    if a == b:
        b = (a + 1) % (MAX_OPERAND + 1)
    phrasings, answer = random.choice(
        (
            (_LARGER, str(max(a, b))),
            (_SMALLER, str(min(a, b))),
            (_IS_LARGER, _YES_NO[a > b]),
            (_IS_SMALLER, _YES_NO[a < b]),
        )
    )
    return Turn("comparing numbers", phrase(random, phrasings, a=a, b=b), answer, f"{a} {b}")


def draw_weekday(random: random.Random) -> Turn:
    index, n = random.randrange(7), random.randint(1, MAX_DAYS)
    sign, phrasings = random.choice(((1, _LATER), (-1, _EARLIER)))
    day, answer = WEEKDAYS[index], WEEKDAYS[(index + sign * n) % 7]
    text = phrase(random, phrasings, n=n, day=day)
    if n == 1:
        text = text.replace("1 days", "1 day")
    return Turn("weekdays", text, f"{answer}.", f"{day} {sign * n}")


def follow_number(random: random.Random, before: int) -> Turn:
    """A question about the number that was the last answer."""
    b = draw_number(random)
    if random.random() < 0.5 or b > before:
        text = phrase(random, _FOLLOW_SUM, b=b)
        turn = _sum(text, before, b)
    else:
        text = phrase(random, _FOLLOW_DIFFERENCE, b=b)
        turn = _difference(text, before, b)
    return Turn("follow-up questions", text, turn.answer, turn.item, turn.subject)


def _sum(question: str, a: int, b: int) -> Turn:
    return Turn("sums", question, str(a + b), f"{a} + {b}", str(a + b))


def _difference(question: str, a: int, b: int) -> Turn:
    return Turn("differences", question, str(a - b), f"{a} - {b}", str(a - b))
