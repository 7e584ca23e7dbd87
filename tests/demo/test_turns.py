from __future__ import annotations

import random

import pytest

from pdserve.demo.turns import Turn, draw_held_out, draw_trained, phrase


def draw(random: random.Random) -> Turn:
    number = random.randrange(2000)
    return Turn("task", f"What about {number}?", "ok", str(number))


def test_no_item_is_both_trained_and_held_out() -> None:
    drawn = random.Random(0)
    trained = {draw_trained(draw, drawn).item for _ in range(3000)}
    held_out = {draw_held_out(draw, drawn).item for _ in range(300)}
    assert held_out
    assert not trained & held_out


def test_one_item_in_sixteen_is_held_out() -> None:
    drawn = random.Random(1)
    share = sum(draw(drawn).is_held_out for _ in range(4000)) / 4000
    assert 0.04 < share < 0.09


def test_an_item_is_held_out_in_every_phrasing() -> None:
    turn = Turn("task", "Which one?", "ok", "7")
    assert turn.is_held_out == Turn("task", "Tell me which one.", "other", "7").is_held_out


@pytest.mark.parametrize("seed", range(5))
def test_a_phrasing_keeps_its_fields(seed: int) -> None:
    text = phrase(random.Random(seed), ("Add {a} and {b}.",), a=17, b=25)
    assert "17 and 25" in text
