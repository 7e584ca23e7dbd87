"""A question with its answer, and the rule that holds questions out of training."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass

_HELD_OUT_OF_256 = 16
"""One item in sixteen is held out."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One exchange of a conversation."""

    task: str
    question: str
    answer: str
    item: str
    """Subject of the question, whatever the phrasing: it decides whether the turn is held out."""
    subject: str = ""
    """The word or the number that the next question may refer to."""

    @property
    def is_held_out(self) -> bool:
        """Whether training never shows this item."""
        return hashlib.sha256(f"{self.task}: {self.item}".encode()).digest()[0] < _HELD_OUT_OF_256


Draw = Callable[[random.Random], Turn]
"""Draws any turn of a task."""


def draw_trained(draw: Draw, random: random.Random) -> Turn:
    """A turn that training may show."""
    while (turn := draw(random)).is_held_out:
        pass
    return turn


def draw_held_out(draw: Draw, random: random.Random) -> Turn:
    """A turn that training never shows."""
    while not (turn := draw(random)).is_held_out:
        pass
    return turn


_OPENINGS = ("", "", "", "", "", "", "", "", "", "Please ", "Can you help? ", "Now ", "Quick question: ", "Hi! ")
_CLOSINGS = ("", "", "", "", "", "", " Thanks.", " Please.")
COURTESIES = tuple(sorted({*_OPENINGS, *_CLOSINGS}))


def phrase(random: random.Random, phrasings: tuple[str, ...], **fields: object) -> str:
    """One of the phrasings with its fields filled in, now and then with a courtesy or without its last mark."""
    text = random.choice(phrasings).format(**fields)
    opening, closing = random.choice(_OPENINGS), random.choice(_CLOSINGS)
    if opening in ("Please ", "Now ") or random.random() < 0.05:
        text = text[0].lower() + text[1:]
    if not closing and random.random() < 0.1 and text[-1] in ".?":
        text = text[:-1]
    return opening + text + closing
