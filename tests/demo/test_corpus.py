from __future__ import annotations

import random

import pytest

from pdserve.demo.corpus import EXAMINED, TASKS, conversation, examine
from pdserve.demo.turns import draw_held_out


def test_the_same_seed_gives_the_same_conversation() -> None:
    assert conversation(random.Random("x"), 8) == conversation(random.Random("x"), 8)
    assert conversation(random.Random("x"), 8) != conversation(random.Random("y"), 8)


def test_training_shows_every_task_and_nothing_that_is_held_out() -> None:
    turns = conversation(random.Random(0), 3000)
    assert {turn.task for turn in turns} == set(EXAMINED)
    assert not any(turn.is_held_out for turn in turns)


@pytest.mark.parametrize("task", EXAMINED)
def test_an_examined_question_is_held_out_and_ends_the_conversation(task: str) -> None:
    for index in range(6):
        examined = examine(task, index)
        assert examined == examine(task, index)
        assert [message["role"] for message in examined.messages][-1] == "user"
        if task != EXAMINED[-1]:
            assert (len(examined.messages) > 1) == bool(index % 2)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_every_task_names_its_turns(task: object) -> None:
    known = next(known for known in TASKS if known is task)
    assert draw_held_out(known.draw, random.Random(0)).task == known.name
