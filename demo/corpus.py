"""The demo model's corpus: endless conversations of many turns, reproducible by seed.

Each turn belongs to a task drawn by weight; some turns refer to the turn before. Training reads it row by row; the
measurement of accuracy draws questions that training never shows.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from pdserve.demo.facts import UNKNOWN, draw_fact, draw_reworded, draw_unknown
from pdserve.demo.number_tasks import (
    MAX_OPERAND,
    draw_comparison,
    draw_difference,
    draw_sum,
    draw_weekday,
    follow_number,
)
from pdserve.demo.turns import Draw, Turn, draw_held_out, draw_trained
from pdserve.demo.word_tasks import draw_count, draw_object, draw_reverse, draw_spell, follow_word

SYSTEM_MESSAGES = ("You are a helpful assistant.", "Answer briefly.", "You are the demo model of pdserve.")


class Task(NamedTuple):
    """One task to learn."""

    name: str
    draw: Draw
    weights: tuple[float, float, float, float, float]
    """Relative frequency in each phase of the training."""


def draw_unknown_or_cut(random: random.Random) -> Turn:
    """An unknown question, or one of the tasks that training this short does not teach well enough."""
    if random.random() < 0.5:
        return draw_unknown(random)
    cut = random.choice((draw_comparison, draw_weekday, draw_weekday, draw_object))(random)
    return Turn("saying that it does not know", cut.question, UNKNOWN, cut.question)


PHASE_ENDS = (600, 3200, 4600, 7000)
"""Steps: at first the easy tasks, then counting and arithmetic, which take longest, then what is weakest, and in the
end facts in more words and more questions that refer to the one before."""
FOLLOW_UP_SHARES = (0.2, 0.2, 0.2, 0.2, 0.45)
"""Share of the turns after one that can be referred to, in each phase."""
TASKS: tuple[Task, ...] = (
    Task("sums", draw_sum, (3.0, 8.0, 12.0, 11.0, 6.0)),
    Task("differences", draw_difference, (3.0, 8.0, 9.0, 9.0, 6.0)),
    Task("reversing words", draw_reverse, (2.0, 1.0, 1.5, 5.0, 4.0)),
    Task("spelling words", draw_spell, (0.6, 0.5, 1.0, 1.5, 3.0)),
    Task("counting letters", draw_count, (1.2, 14.0, 8.0, 3.0, 3.0)),
    Task("facts", draw_fact, (1.4, 2.2, 2.5, 3.0, 5.0)),
    Task("saying that it does not know", draw_unknown_or_cut, (1.0, 2.5, 2.5, 1.5, 2.0)),
    Task("facts", draw_reworded, (0.0, 0.0, 0.0, 0.0, 6.0)),
)


def can_follow(turn: Turn) -> bool:
    """Whether a next question may refer to this one."""
    if turn.task in ("spelling words", "counting letters"):
        return True
    return bool(turn.subject) and turn.subject.isdigit() and int(turn.subject) <= MAX_OPERAND


def follow(turn: Turn, random: random.Random) -> Turn:
    """A question that refers to ``turn``."""
    subject = turn.subject
    return follow_number(random, int(subject)) if subject.isdigit() else follow_word(random, subject)


def conversation(random: random.Random, num_turns: int, step: int = PHASE_ENDS[0]) -> list[Turn]:
    """A conversation that training may show at ``step``."""
    turns: list[Turn] = []
    phase = bisect_right(PHASE_ENDS, step)
    weights = [task.weights[phase] for task in TASKS]
    while len(turns) < num_turns:
        if turns and can_follow(turns[-1]) and random.random() < FOLLOW_UP_SHARES[phase]:
            turns.append(draw_trained(partial(follow, turns[-1]), random))
        else:
            turns.append(draw_trained(random.choices(TASKS, weights)[0].draw, random))
    return turns


def system_message(random: random.Random) -> str:
    """Usually none."""
    return random.choice(SYSTEM_MESSAGES) if random.random() < 0.1 else ""


def messages(turns: Sequence[Turn], system: str = "") -> list[dict[str, str]]:
    """``turns`` as the API takes them, the last answer included."""
    said = [{"role": "system", "content": system}] if system else []
    for turn in turns:
        said += [{"role": "user", "content": turn.question}, {"role": "assistant", "content": turn.answer}]
    return said


class Examined(NamedTuple):
    """A question that training never shows, at the end of a conversation that it might."""

    messages: list[dict[str, str]]
    """Ends with the question."""
    answer: str


def examine(task: str, index: int) -> Examined:
    """Question ``index`` of ``task`` (or of follow-up questions): every other one opens the conversation."""
    drawn = random.Random(f"examine {task} {index}")
    history = conversation(drawn, index % 2 * drawn.randint(1, 4))
    if task == FOLLOW_UP:
        turn = None
        while turn is None or not turn.is_held_out:
            history = conversation(drawn, drawn.randint(1, 4))
            turn = follow(history[-1], drawn) if can_follow(history[-1]) else None
    else:
        turn = draw_held_out(next(known.draw for known in TASKS if known.name == task), drawn)
    return Examined(messages([*history, turn])[:-1], turn.answer)


FOLLOW_UP = "follow-up questions"
EXAMINED = (*dict.fromkeys(task.name for task in TASKS), FOLLOW_UP)
"""The tasks of the accuracy table."""
