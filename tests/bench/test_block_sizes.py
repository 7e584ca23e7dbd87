from __future__ import annotations

import numpy as np
import pytest

from pdserve.bench.block_sizes import SIZES, found_at_head, microseconds, wasted


def test_ends_of_last_blocks_are_wasted() -> None:
    assert [wasted(np.array([16, 17]), size) for size in SIZES] == [
        0,
        pytest.approx(1 - 33 / 48),
        pytest.approx(1 - 33 / 128),
    ]


def test_whole_blocks_of_an_earlier_beginning_are_found() -> None:
    first = bytes(range(100))  # 25 tokens
    second = first[:80] + b"other and more"  # which begin with 20 of them
    num_tokens = 25 + (len(second) // 4)
    assert found_at_head([first, second], 1) == pytest.approx(20 / num_tokens)
    assert found_at_head([first, second], 16) == pytest.approx(16 / num_tokens)
    assert found_at_head([first, second], 64) == 0
    assert found_at_head([first, b"x" + first], 1) == 0


def test_each_part_is_timed_for_each_size() -> None:
    found = microseconds(1)
    assert [[*times] for times in found.values()] == [[*SIZES]] * 3
    assert min(min(times.values()) for times in found.values()) > 0
