"""Tiles of a table, compiled for a Hopper GPU."""

from __future__ import annotations

import pytest

from pdserve.bench.kernels.tile_launches import tile_launch, tile_launches
from pdserve.bench.kernels_compile import compile_launch, compiled_kernels
from pdserve.kernels.triton.tuned_tiles import AttentionShape, Key, ProductShape, Shape, Tile

BF16_128 = AttentionShape("bfloat16", "bfloat16", 128, 4)
INT8_128 = AttentionShape("bfloat16", "int8", 128, 8)


@pytest.mark.parametrize(
    ("kernel", "shape", "tile"),
    [
        ("prefill_attention", BF16_128, {"rows": 64, "keys": 64, "num_warps": 4, "num_stages": 2}),
        ("decode_attention", INT8_128, {"rows": 16, "keys": 32, "num_warps": 4, "num_stages": 3}),
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
    key = Key("GPU", "kv_split", BF16_128)
    kernels = [
        compiled_kernels(tile_launch(key, {"chunks_per_processor": 8, "chunk_tokens": tokens})) for tokens in (256, 512)
    ]
    assert [len(of_one) for of_one in kernels] == [2, 2]
    assert kernels[0][0] is not kernels[1][0]
    with pytest.raises(AssertionError):
        tile_launch(key, {"chunks_per_processor": 8, "chunk_tokens": 24}).run()


def test_a_table_gives_a_launch_for_each_entry() -> None:
    tile = {"rows": 64, "keys": 64, "num_warps": 4, "num_stages": 2}
    tiles = {Key(device, "prefill_attention", BF16_128): tile for device in ("GPU 1", "GPU 2")}
    names = [launch.name for launch in tile_launches(tiles)]
    assert names == [f"prefill_attention bfloat16 bfloat16 128 4 64 64 4 2 for GPU {number}" for number in (1, 2)]


def test_a_tile_of_other_fields_is_an_error() -> None:
    with pytest.raises(TypeError, match="tokens"):
        tile_launch(Key("GPU", "prefill_attention", BF16_128), {"tokens": 64})
