from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from pdserve.contracts.request import SamplingParams
from pdserve.contracts.step import StepBatch, StepRow
from pdserve.model.executors import drafting
from pdserve.model.executors.drafting import NgramDrafter, num_right, with_guesses


def a_row(history: Sequence[int], max_guesses: int, sequence_id: int = 0) -> StepRow:
    return StepRow(
        sequence_id=sequence_id,
        tokens=history[-1:],
        cached_length=len(history) - 1,
        block_table=[0],
        sample=SamplingParams(),
        history=history,
        max_guesses=max_guesses,
    )


@pytest.mark.parametrize(
    ("history", "guesses"),
    [
        ([5, 6, 7, 8, 9, 5, 6], [7, 8, 9, 5]),
        ([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], [9, 2, 3, 8]),  # three tokens match before, two later
        ([2, 3, 9, 2, 3, 8, 2, 3], [8, 2, 3, 8]),  # the later of two matches, which goes on over its own end
        ([4, 4, 4], [4, 4, 4, 4]),
        ([1, 2, 1, 2, 1], [2, 1, 2, 1]),
        ([1, 2, 3, 4, 3], []),  # one token is no match
        ([1, 2, 3, 4, 5], []),
        ([7, 7], []),
        ([7], []),
        ([0xD800, 1_100_000, 0, 0xD800, 1_100_000], [0, 0xD800, 1_100_000, 0]),
    ],
)
def test_a_text_goes_on_as_after_the_longest_and_then_latest_match(history: list[int], guesses: list[int]) -> None:
    drafter = NgramDrafter()
    assert list(drafter.guess([a_row(history, 4)])[0]) == guesses
    assert list(drafter.guess([a_row(history, 2)])[0]) == guesses[:2]


def test_a_sequence_that_grew_is_read_on_and_another_one_under_its_number_anew() -> None:
    random = Random(3)
    grown, fresh = NgramDrafter(), NgramDrafter()
    history = [random.randrange(4) for _ in range(20)]
    for _ in range(50):
        assert grown.guess([a_row(history, 8)]) == NgramDrafter().guess([a_row(history, 8)])
        history += [random.randrange(4) for _ in range(random.randint(1, 3))]
    assert len(fresh.guess([a_row([1, 2, 3, 1, 2], 8)])[0]) == 8
    assert fresh.guess([a_row([6, 7], 8)]) == [()]


def test_the_least_recently_used_sequences_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting, "_MAX_KEPT_TOKENS", 25)
    drafter = NgramDrafter()
    for sequence_id in (0, 1, 0, 2):
        drafter.guess([a_row([sequence_id, 9] * 5, 1, sequence_id)])
    assert list(drafter._texts) == [0, 2]
    drafter.guess([a_row(list(range(40)), 1, 3)])
    assert list(drafter._texts) == [3]
    assert drafter._num_kept == 40


def test_only_rows_that_may_have_guesses_get_some() -> None:
    rows = [a_row([1, 2, 1, 2], 0), a_row([1, 2, 1, 2], 3), a_row([1, 2, 3], 3)]
    batch = StepBatch(step_id=0, rows=rows, may_guess=True)
    assert [list(row.guesses) for row in with_guesses(batch, NgramDrafter()).rows] == [[], [1, 2, 1], []]
    assert [list(row.guesses) for row in with_guesses(batch, None).rows] == [[], [], []]
    assert rows[1].guesses == ()


def test_guesses_are_right_up_to_the_first_that_is_not() -> None:
    assert [num_right([4, 5, 6], tokens) for tokens in ([4, 5, 6, 1], [4, 5, 1, 6], [1, 5, 6, 1])] == [3, 2, 0]
    assert num_right([], [4]) == 0


def test_a_fault_of_the_drafter_fails_the_step_alone() -> None:
    class Broken(NgramDrafter):
        def read(self, rows: Sequence[StepRow]) -> None:
            raise IndexError("9999")

    batch = StepBatch(step_id=0, rows=[a_row([1, 2], 3)], may_guess=True)
    rows, _, error = with_guesses(batch, Broken())
    assert rows == batch.rows
    with pytest.raises(RuntimeError, match=r"no guess could be made: IndexError\('9999'\)"):
        raise error or AssertionError
