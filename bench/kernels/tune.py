"""Finds the fastest tile of every tiled kernel on the installed GPU, for the table of tiles.

    python -m pdserve.bench.kernels.tune [--only NAME] [--table FILE]

For each shape: compiles the candidate tiles for sm_90; drops those that spill registers, need too much shared memory,
or miss Hopper's matrix instruction; and times the others on some batches of that shape, if they compute the same. The
tile with the largest gain (geometric mean over the batches) goes into the table that
`pdserve.kernels.triton.tuned_tiles` reads. The tests compile the table's tiles for sm_90, so only Hopper GPUs
can be tuned for.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from datetime import UTC, datetime
from itertools import product, repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from triton.errors import TritonError

from pdserve.bench.kernels import attention
from pdserve.bench.kernels.attention import Row, attention_case
from pdserve.bench.kernels.case import Case
from pdserve.bench.kernels.cases import LAYER_8B
from pdserve.bench.kernels.layers import product_case
from pdserve.bench.kernels.measure import Timer, difference, gpu_timer
from pdserve.bench.kernels.report import NoGpuError, cuda_device
from pdserve.bench.kernels_compile import Launch, compile_launch, fits
from pdserve.bench.script import commit
from pdserve.kernels.triton.configs import MANY_TOKENS, AttentionTile, KvCut, MatmulTile, device_name
from pdserve.kernels.triton.tuned_tiles import TABLE, AttentionShape, Key, ProductShape, Tile, read_tiles, table_entry

Batch = tuple[Row, ...] | int
"""Rows of attention, or tokens of a product."""
WORTH_IT = 1.02
"""Smallest gain that is not noise."""
_HOPPER = (9, 0)
_KV_HEADS = 8
_COMPILED_INPUTS, _COMPILED_OUTPUTS = 1024, 256
_HEADS = ((32, 128), (64, 128), (32, 64))
"""Query heads and head dims of Llama-3.1-8B, Llama-3.1-70B and Llama-3.2-1B, with 8 KV heads."""
_KV_DTYPES = ("bfloat16", "int8", "float8_e4m3fn")
_DECODE_BATCHES = ((Row(1, 16383),), (Row(1, 4095),) * 64, (Row(1, 1023),) * 256)
_BATCHES: Mapping[str, Sequence[Batch]] = {
    "prefill_attention": ((Row(2048),) * 4, (Row(8192),), (Row(2048, 6144),)),
    "decode_attention": _DECODE_BATCHES,
    "kv_split": _DECODE_BATCHES,
}
_TOKENS_OF_BUCKET: Mapping[int, Sequence[Batch]] = {16: (1, 16), 32: (32,), 64: (64,), MANY_TOKENS: (256, 4096)}


class Target(NamedTuple):
    """An entry that the table may get."""

    key: Key
    batches: Sequence[Batch]
    candidates: Sequence[Tile]


def targets(device: str) -> Iterator[Target]:
    candidates = {
        "prefill_attention": _tiles(AttentionTile, (64, 128), (32, 64, 128), (4, 8), (2, 3, 4)),
        "decode_attention": _tiles(AttentionTile, (16,), (16, 32, 64, 128), (2, 4, 8), (2, 3, 4, 5)),
        "kv_split": _tiles(KvCut, (1, 2, 4, 8), (128, 256, 512, 1024)),
    }
    for kernel, (num_heads, head_dim), kv_dtype in product(candidates, _HEADS, _KV_DTYPES):
        shape = AttentionShape("bfloat16", kv_dtype, head_dim, num_heads // _KV_HEADS)
        yield Target(Key(device, kernel, shape), _BATCHES[kernel], candidates[kernel])
    for weight, sizes, (bucket, tokens) in product(("int8", "int4"), LAYER_8B.values(), _TOKENS_OF_BUCKET.items()):
        inputs = (128,) if weight == "int4" else (64, 128)
        if bucket == MANY_TOKENS:
            tiles = _tiles(MatmulTile, (64, 128, 256), (64, 128), inputs, (4, 8), (2, 3, 4))
        else:
            tiles = _tiles(MatmulTile, (bucket,), (64, 128), inputs, (4, 8), (2, 3, 4, 5))
        product_shape = ProductShape("bfloat16", weight, bucket, *sizes)
        yield Target(Key(device, "quantized_matmul", product_shape), tokens, tiles)


def _tiles(kind: type[AttentionTile] | type[KvCut] | type[MatmulTile], *values: Sequence[int]) -> list[Tile]:
    return [dict(zip(kind._fields, chosen, strict=True)) for chosen in product(*values)]


def tiled_case(key: Key, batch: Batch, tile: Tile | None, *, num_kv_heads: int = _KV_HEADS) -> Case:
    """A batch of the key's shape; cut by a tile, or for None as in serving.

    Raises:
        TypeError: the fields are not those of the kernel's tile.
    """
    shape = key.shape
    dtype: torch.dtype = getattr(torch, shape.dtype)
    if isinstance(shape, ProductShape):
        assert isinstance(batch, int)
        matmul_tile = None if tile is None else MatmulTile(**tile)
        return product_case(shape.weight, batch, shape.num_inputs, shape.num_outputs, dtype, matmul_tile)
    assert not isinstance(batch, int)
    step = attention.AttentionShape(
        kernel="decode_attention" if key.kernel == "kv_split" else key.kernel,
        rows=batch,
        num_heads=num_kv_heads * shape.group,
        num_kv_heads=num_kv_heads,
        head_dim=shape.head_dim,
        dtype=dtype,
        kv_dtype=getattr(torch, shape.kv_dtype),
    )
    if tile is None:
        return attention_case(step)
    if key.kernel == "kv_split":
        return attention_case(step, cut=KvCut(**tile))
    return attention_case(step, tile=AttentionTile(**tile))


def tile_launches(tiles: Mapping[Key, Tile]) -> list[Launch]:
    return [tile_launch(key, tile) for key, tile in tiles.items()]


def tile_launch(key: Key, tile: Tile) -> Launch:
    """The launch of a shape with a tile, for compilation: tensors are small, in host memory."""
    name = f"{key.kernel} {' '.join(map(str, key.shape))} {' '.join(map(str, tile.values()))} for {key.device}"
    batch: Batch = (Row(3), Row(2)) if key.kernel == "prefill_attention" else (Row(1), Row(1))
    if isinstance(key.shape, ProductShape):
        batch = key.shape.num_tokens
        key = key._replace(shape=key.shape._replace(num_inputs=_COMPILED_INPUTS, num_outputs=_COMPILED_OUTPUTS))
    run = tiled_case(key, batch, tile, num_kv_heads=2).own(torch.device("cpu")).run
    has_products = key.kernel in ("prefill_attention", "quantized_matmul")
    return Launch(name, run, is_wgmma=has_products and key.shape.dtype != "float32")


def is_sound(key: Key, tile: Tile) -> bool:
    """Whether the kernel compiles with the tile to code that the tests accept."""
    launch = tile_launch(key, tile)
    try:
        kernels = compile_launch(launch)
    except (TritonError, RuntimeError):  # The compiler cannot cut like that.
        return False
    return all(map(fits, kernels)) and any(kernel.has_wgmma for kernel in kernels) == launch.is_wgmma


@torch.no_grad()
def gain(key: Key, batches: Sequence[Batch], tile: Tile, device: torch.device, timer: Timer, **sizes: int) -> float:
    """How many times faster than today's tile it is, as the geometric mean over the batches; 0 if results differ."""
    logs = []
    for batch in batches:
        cases = [tiled_case(key, batch, of, **sizes) for of in (None, tile)]
        runs = []
        for case in cases:
            torch.manual_seed(0)  # The same inputs for both.
            runs.append(case.own(device).run)
        if not difference(runs[0]().clone(), runs[1]()) <= cases[0].tolerance:
            return 0.0
        logs.append(math.log(timer(runs[0]) / timer(runs[1])))
    return math.exp(sum(logs) / len(logs))


def with_entry(table: Sequence[Mapping[str, Any]], entry: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The table with an entry in place of the one for the same device, kernel and shape."""

    def key(of: Mapping[str, Any]) -> tuple[Any, ...]:
        return of["device"], of["kernel"], tuple(of["shape"].items())

    return [*(other for other in table if key(other) != key(entry)), entry]


def tune(device: torch.device, timer: Timer, compilers: Executor, *, only: str, file: Path) -> None:
    """Search for every target, and write the table after each, so that it survives a run cut short."""
    for key, batches, candidates in targets(device_name(device)):
        name = f"{key.kernel} {' '.join(map(str, key.shape))}"
        if only not in name:
            continue
        answers = compilers.map(is_sound, repeat(key), candidates)
        sound = [tile for tile, answer in zip(candidates, answers, strict=True) if answer]
        gains = [gain(key, batches, tile, device, timer) for tile in sound]
        tile = sound[gains.index(max(gains))] if any(gains) else None
        # Measured again, because the largest of many noisy gains is too large.
        best = 0.0 if tile is None else gain(key, batches, tile, device, timer)
        sys.stderr.write(f"{name}: {len(sound)} of {len(candidates)} candidates fit; gain {best:.3f}\n")
        if tile is not None and best >= WORTH_IT:
            measured = {"measured": datetime.now(UTC).date().isoformat(), "commit": commit()}
            entry = table_entry(key, tile, **measured, times_faster=round(best, 3))
            text = json.dumps(with_entry(json.loads(file.read_text()), entry), indent=1) + "\n"
            read_tiles(text)
            file.write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="shapes with this in their names, such as decode_attention")
    parser.add_argument("--table", type=Path, default=TABLE, help="the table that gets the entries")
    arguments = parser.parse_args()
    try:
        device = cuda_device()
    except NoGpuError:
        sys.stderr.write("no GPU here: a table of tiles is measured on its own GPU\n")
        return 1
    if torch.cuda.get_device_capability(device) != _HOPPER:
        sys.stderr.write("not a Hopper GPU: the tests compile the table's tiles for sm_90\n")
        return 1
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as compilers:
        tune(device, gpu_timer, compilers, only=arguments.only, file=arguments.table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
