"""Every answer of the corpus is checked against its question, read anew."""

from __future__ import annotations

import json
import random
import re
from datetime import date, timedelta

import pytest

from pdserve.demo import facts, number_tasks, word_tasks
from pdserve.demo.turns import Turn

SEEDS = range(60)


def numbers(text: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", text)]


@pytest.mark.parametrize("seed", SEEDS)
def test_sums_and_differences(seed: int) -> None:
    turn = number_tasks.draw_sum(random.Random(seed))
    assert int(turn.answer) == sum(numbers(turn.question))
    turn = number_tasks.draw_difference(random.Random(seed))
    first, second = numbers(turn.question)
    if re.search("subtract|take", turn.question, re.IGNORECASE):
        first, second = second, first
    assert int(turn.answer) == first - second


@pytest.mark.parametrize("seed", SEEDS)
def test_comparisons(seed: int) -> None:
    turn = number_tasks.draw_comparison(random.Random(seed))
    a, b = numbers(turn.question)
    wants_smaller = bool(re.search("smaller|less", turn.question))
    if re.match(r".*\bis \d", turn.question, re.IGNORECASE):
        assert turn.answer == ("Yes." if (a < b) == wants_smaller else "No.")
    else:
        assert int(turn.answer) == (min(a, b) if wants_smaller else max(a, b))


@pytest.mark.parametrize("seed", SEEDS)
def test_weekdays(seed: int) -> None:
    turn = number_tasks.draw_weekday(random.Random(seed))
    (n,) = numbers(turn.question)
    first = re.search("|".join(number_tasks.WEEKDAYS), turn.question)
    assert first is not None
    is_past = bool(re.search("before|ago|earlier", turn.question))
    monday = date(2024, 1, 1)
    start = monday + timedelta(days=number_tasks.WEEKDAYS.index(first[0]))
    assert turn.answer == f"{start + timedelta(days=-n if is_past else n):%A}."


@pytest.mark.parametrize("seed", SEEDS)
def test_words(seed: int) -> None:
    turn = word_tasks.draw_reverse(random.Random(seed))
    assert turn.answer[::-1] in turn.question
    turn = word_tasks.draw_spell(random.Random(seed))
    assert turn.answer.replace("-", "") in turn.question
    turn = word_tasks.draw_count(random.Random(seed))
    assert turn.subject in turn.question
    letter = turn.item[0]
    assert re.search(rf"\b{letter}\b", turn.question)
    assert turn.subject.count(letter) == int(turn.answer)


@pytest.mark.parametrize("seed", SEEDS)
def test_objects(seed: int) -> None:
    turn = word_tasks.draw_object(random.Random(seed))
    form = re.search(r"\{.*\}", turn.question)
    assert form is not None
    empty, filled = json.loads(form[0]), json.loads(turn.answer)
    assert list(empty) == list(filled)
    for key, value in filled.items():
        assert type(value) is type(empty[key])
        assert str(value) in turn.item


def test_a_question_may_refer_to_the_one_before() -> None:
    for seed in SEEDS:
        turn = number_tasks.follow_number(random.Random(seed), 100)
        (b,) = numbers(turn.question)
        assert int(turn.answer) in (100 + b, 100 - b)
        turn = word_tasks.follow_word(random.Random(seed), "planet")
        assert turn.answer in ("tenalp", "p-l-a-n-e-t", *"0123456789")
        assert turn.subject == "planet"


def test_no_question_has_two_answers() -> None:
    drawn = random.Random(0)
    known: dict[str, Turn] = {}
    for _ in range(4000):
        for draw in (facts.draw_fact, facts.draw_unknown):
            turn = draw(drawn)
            assert known.setdefault(turn.question, turn).answer == turn.answer


def test_numbers_that_are_too_large_are_refused() -> None:
    drawn = random.Random(0)
    answers = {}
    for _ in range(2000):
        turn = facts.draw_unknown(drawn)
        answers[turn.answer] = max(numbers(turn.question), default=0)
    assert answers[facts.TOO_LARGE] > number_tasks.MAX_OPERAND >= answers[facts.UNKNOWN]


def test_reworded_facts_are_facts_in_other_words() -> None:
    assert set(facts.REWORDED.values()) <= set(facts.SAID.values())
    questions = [question for said in (facts.SAID, facts.REWORDED) for group in said for question in group]
    again = [question for question in questions if questions.count(question) > 1]
    assert again == []
