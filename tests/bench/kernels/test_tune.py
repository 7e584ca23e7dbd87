"""The search for tiles without a GPU: candidates, compilation, gains with a scripted timer, and the table."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.bench.kernels import tune
from pdserve.bench.kernels.tune import Target, is_sound, targets, tile_launch, tile_launches, with_entry
from pdserve.bench.kernels_compile import compile_launch, compiled_kernels
from pdserve.kernels.triton.tuned_tiles import AttentionShape, Key, ProductShape, Shape, Tile, read_tiles, table_entry
from tests.bench.kernels.scripted_case import fake_timer

SHAPE = AttentionShape("bfloat16", "bfloat16", 128, 4)
INT8_SHAPE = AttentionShape("bfloat16", "int8", 128, 8)
KEY = Key("GPU", "prefill_attention", SHAPE)
TILE = {"rows": 64, "keys": 32, "num_warps": 4, "num_stages": 2}


def test_targets_differ_and_have_candidates_of_their_kernel() -> None:
    listed = list(targets("GPU"))
    assert len({target.key for target in listed}) == len(listed) == 3 * 9 + 2 * 4 * 4
    for target in listed:
        assert len({tuple(tile.values()) for tile in target.candidates}) == len(target.candidates)
    # With the fields of another tile, none could be launched.
    for target in listed[::9]:
        assert tile_launch(target.key, target.candidates[0]).name.startswith(target.key.kernel)
        case = tune.tiled_case(target.key, target.batches[0], target.candidates[0])
        assert case.kernel == target.key.kernel.replace("kv_split", "decode_attention")


@pytest.mark.parametrize(
    ("kernel", "shape", "tile"),
    [
        ("prefill_attention", SHAPE, {"rows": 64, "keys": 64, "num_warps": 4, "num_stages": 2}),
        ("decode_attention", INT8_SHAPE, {"rows": 16, "keys": 32, "num_warps": 4, "num_stages": 3}),
        (
            "quantized_matmul",
            ProductShape("bfloat16", "int8", 16, 14336, 4096),
            {"tokens": 16, "outputs": 64, "inputs": 64, "num_warps": 4, "num_stages": 3},
        ),
        (
            "quantized_matmul",
            ProductShape("bfloat16", "int4", 16, 4096, 4096),
            {"tokens": 16, "outputs": 64, "inputs": 128, "num_warps": 4, "num_stages": 3},
        ),
    ],
)
def test_an_entry_is_compiled_with_its_tile(kernel: str, shape: Shape, tile: Tile) -> None:
    launch = tile_launch(Key("GPU", kernel, shape), tile)
    first = compiled_kernels(launch)[0]
    assert (first.metadata.num_warps, first.metadata.num_stages) == (tile["num_warps"], tile["num_stages"])
    assert any(compiled.has_wgmma for compiled in compile_launch(launch)) == launch.is_wgmma


def test_a_split_is_compiled_with_its_chunks() -> None:
    key = Key("GPU", "kv_split", SHAPE)
    kernels = [
        compiled_kernels(tile_launch(key, {"chunks_per_processor": 8, "chunk_tokens": tokens})) for tokens in (256, 512)
    ]
    assert [len(of_one) for of_one in kernels] == [2, 2]
    assert kernels[0][0] is not kernels[1][0]
    with pytest.raises(AssertionError):
        tile_launch(key, {"chunks_per_processor": 8, "chunk_tokens": 24}).run()


def test_a_table_gives_a_launch_for_each_entry() -> None:
    tile = {"rows": 64, "keys": 64, "num_warps": 4, "num_stages": 2}
    tiles = {Key(device, "prefill_attention", SHAPE): tile for device in ("GPU 1", "GPU 2")}
    names = [launch.name for launch in tile_launches(tiles)]
    assert names == [f"prefill_attention bfloat16 bfloat16 128 4 64 64 4 2 for GPU {number}" for number in (1, 2)]


def test_a_tile_of_other_fields_is_an_error() -> None:
    with pytest.raises(TypeError, match="tokens"):
        tile_launch(KEY, {"tokens": 64})


def test_the_compiler_drops_candidates_that_do_not_fit() -> None:
    assert is_sound(KEY, TILE)
    assert not is_sound(KEY, {**TILE, "rows": 16})  # Too few for Hopper's product.
    assert not is_sound(KEY, {**TILE, "keys": 24})  # Not a power of two.
    decode, tile = KEY._replace(kernel="decode_attention"), {**TILE, "rows": 16}
    assert is_sound(decode, tile)
    assert not is_sound(decode, {**tile, "keys": 64, "num_warps": 1})  # Spills.
    assert not is_sound(decode, {**tile, "keys": 128, "num_stages": 9})  # More shared memory than there is.


def test_an_entry_replaces_its_own_shape_only() -> None:
    other = table_entry(Key("GPU 2", "prefill_attention", SHAPE), TILE)
    table = with_entry([other, table_entry(KEY, TILE)], table_entry(KEY, {**TILE, "keys": 64}))
    read = read_tiles(json.dumps(table))
    assert [(key.device, tile["keys"]) for key, tile in read.items()] == [("GPU 2", 32), ("GPU", 64)]


@pytest.mark.parametrize(("gains", "num_entries"), [([1.5, 1.4], 1), ([1.5, 1.01], 0), ([0.8, 0.8], 0), ([0.0], 0)])
def test_the_table_gets_gains_that_are_seen_twice(
    gains: list[float], num_entries: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[Tile] = []

    def gain(key: Key, batches: Any, tile: Tile, *_: Any) -> float:
        timed.append(tile)
        return gains[len(timed) - 1]

    too_small = {**TILE, "rows": 16}
    monkeypatch.setattr(tune, "targets", lambda device: [Target(KEY, [], [too_small, TILE])])
    monkeypatch.setattr(tune, "is_sound", lambda key, tile: tile != too_small)
    monkeypatch.setattr(tune, "gain", gain)
    file = tmp_path / "table.json"
    file.write_text("[]")
    with ThreadPoolExecutor(1) as compilers:
        for only in ("prefill", "decode"):
            tune.tune(torch.device("cpu"), fake_timer(), compilers, only=only, file=file)
    assert timed == [TILE] * len(gains)
    table = json.loads(file.read_text())
    assert len(table) == num_entries
    if table:
        assert read_tiles(file.read_text()) == {KEY: TILE}
        assert table[0]["times_faster"] == gains[1]
        assert set(table[0]) > {"measured", "commit"}


def test_needs_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["tune"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tune.main() == 1
    monkeypatch.setattr(tune, "cuda_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert tune.main() == 1
    no_gpu, no_hopper = capsys.readouterr().err.splitlines()
    assert no_gpu.startswith("no GPU here")
    assert no_hopper.startswith("not a Hopper GPU")
