"""The search for tiles over the kernels themselves, with a timer that prefers some."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from typing import Any

import pytest
import torch

from pdserve.bench.kernels.attention import AttentionCase, Row
from pdserve.bench.kernels.products import ProductCase
from pdserve.bench.kernels.tune import gains, runner, search
from pdserve.kernels.triton.tuned_tiles import Tile
from tests.bench.kernels.fake_timer import FakeTimer

CPU = torch.device("cpu")
DECODE = AttentionCase(kernel="decode_attention", rows=(Row(1, 30),), num_heads=4, num_kv_heads=2, head_dim=32)
TILES: list[Tile] = [{"rows": 16, "keys": keys, "num_warps": 4, "num_stages": 2} for keys in (16, 32)]


def test_the_largest_gain_over_all_cases_wins() -> None:
    # Of each case: what serving takes now, and both candidates; first one round of all, then the finalists.
    screen = [4.0, 2.0, 8.0, 4.0, 1.0, 2.0]
    finals = [4.0, 1.0, 8.0, 4.0, 2.0, 1.0]  # 4 x and 2 x; 0.5 x and 4 x.
    found = search([DECODE, DECODE], TILES, CPU, FakeTimer(iter([*screen, *finals])), 1)
    assert found is not None
    assert found.tile == TILES[0]
    assert found.times_faster == pytest.approx(math.sqrt(8))


def test_a_candidate_that_computes_something_else_is_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong_with_32_keys(case: AttentionCase, device: torch.device) -> Callable[[Tile | None], Any]:
        run_of = runner(case, device)
        return lambda tile: run_of(tile) if tile != TILES[1] else lambda: run_of(tile)() + 1

    monkeypatch.setattr("pdserve.bench.kernels.tune.runner", wrong_with_32_keys)
    seconds: Iterator[float] = chain([2.0, 1.0], repeat(1.0))
    assert [found.tile for found in gains([DECODE], TILES, CPU, FakeTimer(seconds), 1)] == TILES[:1]


def test_cuts_are_those_asked_for() -> None:
    run_of = runner(DECODE, CPU)
    torch.testing.assert_close(run_of({"chunks_per_processor": 8, "chunk_tokens": 64})(), run_of(None)())
    with pytest.raises(AssertionError):
        run_of({"chunks_per_processor": 8, "chunk_tokens": 24})()


def test_tiles_of_products_are_those_asked_for() -> None:
    case = ProductCase(weight="int8", num_tokens=3, num_inputs=64, num_outputs=80)
    run_of = runner(case, CPU)
    tile = {"tokens": 16, "outputs": 32, "inputs": 32, "num_warps": 4, "num_stages": 2}
    torch.testing.assert_close(run_of(tile)(), run_of(None)(), atol=0.02, rtol=0.02)
