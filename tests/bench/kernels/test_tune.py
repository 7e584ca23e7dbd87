"""The search for tiles, without a GPU: what is listed, what the compiler drops, and what becomes of the table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.bench.kernels import tune
from pdserve.bench.kernels.tile_launches import tile_launch
from pdserve.bench.kernels.tune import Found, Target, is_sound, targets, with_entry, write_table
from pdserve.kernels.triton.tuned_tiles import AttentionShape, Key, Tile, read_tiles, table_entry
from tests.bench.kernels.fake_timer import FakeTimer

SHAPE = AttentionShape("bfloat16", "bfloat16", 128, 4)
KEY = Key("GPU", "prefill_attention", SHAPE)
TILE = {"rows": 64, "keys": 32, "num_warps": 4, "num_stages": 2}


def test_targets_are_the_shapes_of_their_cases() -> None:
    listed = list(targets("GPU"))
    assert len({target.key for target in listed}) == len(listed) == 3 * 9 + 2 * 4 * 4
    for target in listed:
        kernel = "decode_attention" if target.key.kernel == "kv_split" else target.key.kernel
        assert {case.kernel for case in target.cases} == {kernel}
        assert len({tuple(tile.values()) for tile in target.candidates}) == len(target.candidates)
    # Of other fields than the kernel's tile, none could be launched.
    for target in listed[::9]:
        assert tile_launch(target.key, target.candidates[0]).name.startswith(target.key.kernel)


def test_the_compiler_drops_what_does_not_fit() -> None:
    assert is_sound(KEY, TILE)
    assert not is_sound(KEY, {**TILE, "rows": 16})  # Too few for Hopper's product.
    assert not is_sound(KEY, {**TILE, "keys": 24})  # Not a power of two.
    decode, tile = KEY._replace(kernel="decode_attention"), {**TILE, "rows": 16}
    assert is_sound(decode, tile)
    assert not is_sound(decode, {**tile, "keys": 64, "num_warps": 1})  # Spills.
    assert not is_sound(decode, {**tile, "keys": 128, "num_stages": 9})  # More shared memory than there is.


def test_an_entry_takes_the_place_of_its_own_shape_only(tmp_path: Path) -> None:
    other = table_entry(Key("GPU 2", "prefill_attention", SHAPE), TILE)
    table = with_entry([other, table_entry(KEY, TILE)], table_entry(KEY, {**TILE, "keys": 64}))
    write_table(table, tmp_path / "table.json")
    read = read_tiles((tmp_path / "table.json").read_text())
    assert [(key.device, tile["keys"]) for key, tile in read.items()] == [("GPU 2", 32), ("GPU", 64)]


def test_a_table_that_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no entry"):
        write_table([{"device": "GPU"}], tmp_path / "table.json")
    assert not (tmp_path / "table.json").exists()


@pytest.mark.parametrize(("times_faster", "num_entries"), [(1.5, 1), (1.01, 0), (0.8, 0), (None, 0)])
def test_the_table_gets_what_is_worth_it(
    times_faster: float | None, num_entries: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[Sequence[Tile]] = []

    def search(cases: Any, candidates: Sequence[Tile], *_: Any) -> Found | None:
        searched.append(candidates)
        return None if times_faster is None else Found(candidates[0], times_faster)

    too_small = {**TILE, "rows": 16}
    monkeypatch.setattr(tune, "targets", lambda device: [Target(KEY, [], [too_small, TILE])])
    monkeypatch.setattr(tune, "is_sound", lambda key, tile: tile != too_small)
    monkeypatch.setattr(tune, "search", search)
    file = tmp_path / "table.json"
    file.write_text("[]")
    with ThreadPoolExecutor(1) as compilers:
        for only in ("prefill", "decode"):
            tune.tune(torch.device("cpu"), FakeTimer(), compilers, only=only, num_rounds=1, file=file)
    assert searched == [[TILE]]
    table = json.loads(file.read_text())
    assert len(table) == num_entries
    if table:
        assert read_tiles(file.read_text()) == {KEY: TILE}
        assert table[0]["times_faster"] == times_faster
        assert set(table[0]) > {"measured", "commit"}


def test_what_it_needs_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["tune"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tune.main() == 1
    monkeypatch.setattr(tune, "cuda_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert tune.main() == 1
    no_gpu, no_hopper = capsys.readouterr().err.splitlines()
    assert no_gpu.startswith("no GPU here")
    assert no_hopper.startswith("not a Hopper GPU")
