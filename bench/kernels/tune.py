"""Finds the fastest tile of every tiled kernel on the installed GPU, for the table of tiles.

    python -m pdserve.bench.kernels.tune [--only NAME] [--rounds 3] [--table FILE]

For each shape of the table: compiles the candidates; drops those that spill registers, need too much shared memory, or
do not use Hopper's matrix instruction where they should; and times the rest on some batches of that shape, in turn with
the tile in use. The table gets the tile with the largest gain (geometric mean over the batches) if it is worth a
change. `pdserve.kernels.triton.tuned_tiles` reads the table. The tests compile its tiles for sm_90, so only Hopper GPUs
can be tuned for.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from datetime import UTC, datetime
from itertools import product, repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from triton.errors import TritonError

from pdserve.bench.kernels.attention import AttentionCase, Row
from pdserve.bench.kernels.cases import LAYER_8B
from pdserve.bench.kernels.measure import OWN, difference
from pdserve.bench.kernels.products import ProductCase
from pdserve.bench.kernels.run import NoGpuError, commit, cuda_device
from pdserve.bench.kernels.tile_launches import tile_launch
from pdserve.bench.kernels.timing import CudaTimer, Timer, alternate
from pdserve.bench.kernels_compile import compile_launch, fits
from pdserve.kernels.triton.configs import MANY_TOKENS, AttentionTile, KvCut, MatmulTile, device_name
from pdserve.kernels.triton.tuned_tiles import TABLE, AttentionShape, Key, ProductShape, Tile, read_tiles, table_entry

TunedCase = AttentionCase | ProductCase
Run = Callable[[], torch.Tensor]
WORTH_IT = 1.02
"""Times faster: less is noise."""
_FINALISTS = 6
"""Candidates that are timed again, after one round of all."""
_TOLERANCE = 0.02
_HOPPER = (9, 0)


class Target(NamedTuple):
    """An entry that the table may get."""

    key: Key
    cases: Sequence[TunedCase]
    """That it is judged by."""
    candidates: Sequence[Tile]


class Found(NamedTuple):
    """The best tile of a target."""

    tile: Tile
    times_faster: float
    """Than the tile that serving takes now."""


def targets(device: str) -> Iterator[Target]:
    """The shapes of Llama-3.1-8B, Llama-3.1-70B and Llama-3.2-1B, and the matrices of the first."""
    for kernel, batches, candidates in (
        ("prefill_attention", _PROMPTS, prefill_candidates()),
        ("decode_attention", _DECODE_BATCHES, decode_candidates()),
        ("kv_split", _DECODE_BATCHES, _tiles(KvCut, (1, 2, 4, 8), (128, 256, 512, 1024))),
    ):
        for (num_heads, head_dim), kv_dtype in product(_HEADS, _KV_DTYPES):
            shape = AttentionShape("bfloat16", kv_dtype, head_dim, num_heads // 8)
            cases = [
                AttentionCase(
                    kernel="decode_attention" if kernel == "kv_split" else kernel,
                    rows=rows,
                    num_heads=num_heads,
                    head_dim=head_dim,
                    kv_dtype=getattr(torch, kv_dtype),
                )
                for rows in batches
            ]
            yield Target(Key(device, kernel, shape), cases, candidates)
    for weight, (num_inputs, num_outputs), (bucket, tokens) in product(
        ("int8", "int4"), LAYER_8B.values(), _TOKENS_OF_BUCKET.items()
    ):
        product_shape = ProductShape("bfloat16", weight, bucket, num_inputs, num_outputs)
        products = [
            ProductCase(weight=weight, num_tokens=count, num_inputs=num_inputs, num_outputs=num_outputs)
            for count in tokens
        ]
        key = Key(device, "quantized_matmul", product_shape)
        yield Target(key, products, product_candidates(bucket, is_int4=weight == "int4"))


_HEADS = ((32, 128), (64, 128), (32, 64))
"""Query heads, of 8 KV heads, and their dimension."""
_KV_DTYPES = ("bfloat16", "int8", "float8_e4m3fn")
_PROMPTS = ((Row(2048),) * 4, (Row(8192),), (Row(2048, 6144),))
_DECODE_BATCHES = ((Row(1, 16383),), (Row(1, 4095),) * 64, (Row(1, 1023),) * 256)
_TOKENS_OF_BUCKET = {16: (1, 16), 32: (32,), 64: (64,), MANY_TOKENS: (256, 4096)}


def prefill_candidates() -> list[Tile]:
    return _tiles(AttentionTile, (64, 128), (32, 64, 128), (4, 8), (2, 3, 4))


def decode_candidates() -> list[Tile]:
    return _tiles(AttentionTile, (16,), (16, 32, 64, 128), (2, 4, 8), (2, 3, 4, 5))


def product_candidates(bucket: int, *, is_int4: bool) -> list[Tile]:
    inputs = (128,) if is_int4 else (64, 128)
    if bucket == MANY_TOKENS:
        return _tiles(MatmulTile, (64, 128, 256), (64, 128), inputs, (4, 8), (2, 3, 4))
    return _tiles(MatmulTile, (bucket,), (64, 128), inputs, (4, 8), (2, 3, 4, 5))


def _tiles(kind: type[AttentionTile] | type[KvCut] | type[MatmulTile], *values: Sequence[int]) -> list[Tile]:
    return [dict(zip(kind._fields, chosen, strict=True)) for chosen in product(*values)]


def is_sound(key: Key, tile: Tile) -> bool:
    """Whether the kernel compiles with the tile to what its tests ask for."""
    launch = tile_launch(key, tile)
    try:
        kernels = compile_launch(launch)
    except (TritonError, RuntimeError):  # What the compiler cannot cut so.
        return False
    return all(map(fits, kernels)) and any(kernel.has_wgmma for kernel in kernels) == launch.is_wgmma


def sound_tiles(key: Key, tiles: Sequence[Tile], compilers: Executor) -> list[Tile]:
    """Those of ``tiles`` that are; the compiler's cache keeps what was made of them."""
    answers = compilers.map(is_sound, repeat(key), tiles)
    return [tile for tile, is_one in zip(tiles, answers, strict=True) if is_one]


def runner(case: TunedCase, device: torch.device) -> Callable[[Tile | None], Run]:
    """Inputs on the device, and launches over them by tile, or by cut; None is what serving takes now."""

    if isinstance(case, ProductCase):
        x_TE, weight = case.inputs(device)
        return lambda tile: case.launch(x_TE, weight, None if tile is None else MatmulTile(**tile))
    inputs = case.inputs(device)

    def launch(tile: Tile | None) -> Run:
        if tile is None:
            return case.launch(inputs)
        if "rows" in tile:
            return case.launch(inputs, AttentionTile(**tile))
        return case.launch(inputs, split=KvCut(**tile).split(device, case.num_kv_heads))

    return launch


def search(
    cases: Sequence[TunedCase], candidates: Sequence[Tile], device: torch.device, timer: Timer, num_rounds: int
) -> Found | None:
    """The candidate with the largest gain over all cases; None where none of them is right."""
    finalists = sorted(gains(cases, candidates, device, timer, 1), key=lambda found: -found.times_faster)[:_FINALISTS]
    again = gains(cases, [found.tile for found in finalists], device, timer, num_rounds)
    return max(again, key=lambda found: found.times_faster, default=None)


def gains(
    cases: Sequence[TunedCase], candidates: Sequence[Tile], device: torch.device, timer: Timer, num_rounds: int
) -> list[Found]:
    """Of every candidate that computes what serving computes, in every case."""
    logs: dict[int, list[float]] = {place: [] for place in range(len(candidates))}
    for case in cases:
        run_of = runner(case, device)
        now = run_of(None)
        value = now().clone()
        runs = {str(place): run_of(candidates[place]) for place in logs}
        right = {name: run for name, run in runs.items() if difference(value, run()) <= _TOLERANCE}
        seconds = alternate({OWN: now, **right}, timer, num_rounds)
        logs = {int(name): [*logs[int(name)], math.log(seconds[OWN] / seconds[name])] for name in right}
    return [Found(candidates[place], math.exp(sum(log) / len(log))) for place, log in logs.items()]


def with_entry(table: Sequence[Mapping[str, Any]], entry: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The table with an entry in place of the one for the same device, kernel and shape."""

    def key(of: Mapping[str, Any]) -> tuple[Any, ...]:
        return of["device"], of["kernel"], tuple(of["shape"].items())

    return [*(other for other in table if key(other) != key(entry)), entry]


def write_table(table: Sequence[Mapping[str, Any]], file: Path) -> None:
    text = json.dumps(table, indent=1) + "\n"
    read_tiles(text)
    file.write_text(text)


@torch.no_grad()
def tune(device: torch.device, timer: Timer, compilers: Executor, *, only: str, num_rounds: int, file: Path) -> None:
    """Search for every target, and write the table after each: a run that is cut short has not been for nothing."""
    for target in targets(device_name(device)):
        name = f"{target.key.kernel} {' '.join(map(str, target.key.shape))}"
        if only not in name:
            continue
        sound = sound_tiles(target.key, target.candidates, compilers)
        found = search(target.cases, sound, device, timer, num_rounds)
        gain = "none is right" if found is None else f"{found.times_faster:.3f} x with {dict(found.tile)}"
        sys.stderr.write(f"{name}: {len(sound)} of {len(target.candidates)} candidates fit, {gain}\n")
        if found is not None and found.times_faster >= WORTH_IT:
            measured = {
                "measured": datetime.now(UTC).date().isoformat(),
                "commit": commit(),
                "times_faster": round(found.times_faster, 3),
            }
            entry = table_entry(target.key, found.tile, **measured)
            write_table(with_entry(json.loads(file.read_text()), entry), file)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="shapes with this in their names, such as decode_attention")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--table", type=Path, default=TABLE, help="the table that gets the entries")
    arguments = parser.parse_args()
    try:
        device = cuda_device()
    except NoGpuError:
        sys.stderr.write("no GPU here: a table of tiles is measured on the GPU that it is for\n")
        return 1
    if torch.cuda.get_device_capability(device) != _HOPPER:
        sys.stderr.write("not a Hopper GPU: what is in the table is compiled for sm_90 by the tests\n")
        return 1
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as compilers:
        tune(
            device,
            CudaTimer(device),
            compilers,
            only=arguments.only,
            num_rounds=arguments.rounds,
            file=arguments.table,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
