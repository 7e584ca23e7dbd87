"""Gains of tiles over the kernels themselves, with a timer that returns given seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from pdserve.bench.kernels import tune
from pdserve.bench.kernels.attention import Row
from pdserve.bench.kernels.case import OWN, Case, Make
from pdserve.bench.kernels.tune import Batch, gain, tiled_case
from pdserve.kernels.triton.tuned_tiles import AttentionShape, Key, ProductShape, Tile
from tests.bench.kernels.scripted_case import fake_timer

CPU = torch.device("cpu")
DECODE = Key("cpu", "decode_attention", AttentionShape("bfloat16", "bfloat16", 32, 2))
ROWS = (Row(1, 30),)
TILE = {"rows": 16, "keys": 32, "num_warps": 4, "num_stages": 2}


def result(key: Key, batch: Batch, tile: Tile | None) -> torch.Tensor:
    torch.manual_seed(0)
    value: torch.Tensor = tiled_case(key, batch, tile, num_kv_heads=2).own(CPU).run()
    return value


def test_gains_are_averaged_over_the_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds_of: dict[Callable[[], Any], float] = {}

    def timed(key: Key, batch: Batch, tile: Tile | None, **sizes: int) -> Case:
        case = tiled_case(key, batch, tile, **sizes)

        def make(device: torch.device) -> Mapping[str, Make]:
            own = case.own(device)
            seconds_of[own.run] = (4.0, 4.0, 8.0, 2.0)[len(seconds_of)]
            return {OWN: lambda: own}

        return case._replace(make=make)

    monkeypatch.setattr(tune, "tiled_case", timed)
    # Equal in the first batch, 4 x in the second.
    assert gain(DECODE, [ROWS, ROWS], TILE, CPU, lambda run: seconds_of[run], num_kv_heads=2) == pytest.approx(2.0)


def test_a_tile_with_other_results_gains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(key: Key, batch: Batch, tile: Tile | None, **sizes: int) -> Case:
        case = tiled_case(key, batch, tile, **sizes)
        if tile is None:
            return case
        own = case.own(CPU)
        changed = own._replace(run=lambda: own.run() + 1)
        return case._replace(make=lambda device: {"pdserve": lambda: changed})

    monkeypatch.setattr(tune, "tiled_case", wrong)
    assert gain(DECODE, [ROWS], TILE, CPU, fake_timer(iter([2.0, 1.0])), num_kv_heads=2) == 0


def test_cuts_are_those_asked_for() -> None:
    key = DECODE._replace(kernel="kv_split")
    torch.testing.assert_close(
        result(key, ROWS, {"chunks_per_processor": 8, "chunk_tokens": 64}), result(key, ROWS, None)
    )
    with pytest.raises(AssertionError):
        result(key, ROWS, {"chunks_per_processor": 8, "chunk_tokens": 24})


def test_tiles_of_products_are_those_asked_for() -> None:
    key = Key("cpu", "quantized_matmul", ProductShape("bfloat16", "int8", 16, 64, 80))
    tile = {"tokens": 16, "outputs": 32, "inputs": 32, "num_warps": 4, "num_stages": 2}
    torch.testing.assert_close(result(key, 3, tile), result(key, 3, None), atol=0.02, rtol=0.02)
