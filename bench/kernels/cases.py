"""Benchmark cases of the kernels: the shapes of Llama-3.1-8B and 70B, and tables of sizes.

Reads nothing and measures nothing. ``quick`` keeps a few shapes of each kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from pdserve.bench.kernels.attention import AttentionCase, Row
from pdserve.bench.kernels.contest import Case
from pdserve.bench.kernels.copies import CopyCase
from pdserve.bench.kernels.draws import DrawCase, TopPCase
from pdserve.bench.kernels.pointwise import GateCase, NormCase, RopeCase
from pdserve.bench.kernels.products import ProductCase

_BF16, _INT8, _FLOAT8 = torch.bfloat16, torch.int8, torch.float8_e4m3fn
_HEADS_8B, _HEADS_70B = 32, 64
MAX_DECODE_TOKENS = 2**21
"""Of KV that a batch reads: 8 GiB in bfloat16, which peers need again in layouts of their own."""
_PREFILL_TOKENS = 16384
"""Of a batch, as papers have it: the shorter the rows, the more of them."""
_NORM_MIB = (1, 4, 16, 32, 64, 256)
"""Read and written together."""
_MIXED_CONTEXTS = (128, 32768, 1024, 4096, 512, 16384, 2048, 8192)
LAYER_8B = {"qkv": (4096, 6144), "output": (4096, 4096), "gate_up": (4096, 28672), "down": (14336, 4096)}
"""Inputs and outputs of the matrices of Llama-3.1-8B."""
PRODUCT_TOKENS = (1, 4, 16, 64, 256, 4096)


def prefill_cases(*, quick: bool) -> Sequence[Case]:
    """Whole prompts of 1k to 16k tokens, and chunks over a cached prefix."""
    lengths = (2048, 8192) if quick else (1024, 2048, 4096, 8192, 16384)
    chunks = ((2048, 6144),) if quick else ((2048, 2048), (2048, 6144), (2048, 14336), (512, 3584), (512, 15872))
    prompts = [(Row(length),) * (_PREFILL_TOKENS // length) for length in lengths]
    after = [(Row(new, cached),) for new, cached in chunks]
    many_heads = [] if quick else [(Row(8192),) * 2, (Row(2048, 6144),)]
    return [
        *(AttentionCase(kernel="prefill_attention", rows=rows, num_heads=_HEADS_8B) for rows in (*prompts, *after)),
        *(AttentionCase(kernel="prefill_attention", rows=rows, num_heads=_HEADS_70B) for rows in many_heads),
        *(
            AttentionCase(kernel="prefill_attention", rows=rows, num_heads=_HEADS_8B, kv_dtype=kv_dtype)
            for kv_dtype in (_INT8, _FLOAT8)
            for rows in after
        ),
    ]


def decode_cases(*, quick: bool) -> Sequence[Case]:
    """One new token a row, of batches whose rows are alike and of one whose rows are not."""
    batches = ((1, 16384), (64, 4096)) if quick else _decode_batches()
    alike = [(Row(1, context - 1),) * num_rows for num_rows, context in batches]
    mixed = tuple(Row(1, context - 1) for context in _MIXED_CONTEXTS * 4)
    of_70b = [] if quick else [(Row(1, 16383),), (Row(1, 4095),) * 64]
    return [
        *(
            AttentionCase(kernel="decode_attention", rows=rows, num_heads=_HEADS_8B, kv_dtype=kv_dtype)
            for kv_dtype in (_BF16, _INT8, _FLOAT8)
            for rows in (*alike, mixed)
        ),
        *(AttentionCase(kernel="decode_attention", rows=rows, num_heads=_HEADS_70B) for rows in of_70b),
    ]


def _decode_batches() -> list[tuple[int, int]]:
    return [
        (num_rows, context)
        for num_rows in (1, 8, 64, 256)
        for context in (1024, 4096, 8192, 16384, 32768)
        if num_rows * context <= MAX_DECODE_TOKENS
    ]


def norm_cases(*, quick: bool) -> Sequence[Case]:
    sizes = (4, 64) if quick else _NORM_MIB
    return [
        NormCase(num_tokens=mib * 2**20 // (4 * features), num_features=features)
        for features in ((4096,) if quick else (4096, 8192))
        for mib in sizes
    ]


def gate_cases(*, quick: bool) -> Sequence[Case]:
    return [GateCase(num_tokens=num_tokens) for num_tokens in ((64, 2048) if quick else (1, 16, 64, 256, 2048, 8192))]


def rope_cases(*, quick: bool) -> Sequence[Case]:
    batches = (64,) if quick else (1, 64, 256)
    prompts = (4096,) if quick else (2048, 8192)
    tokens = [*((size, False) for size in batches), *((size, True) for size in prompts)]
    return [
        RopeCase(num_tokens=num_tokens, is_prompt=is_prompt, kv_dtype=kv_dtype)
        for kv_dtype in (_BF16, _INT8, _FLOAT8)
        for num_tokens, is_prompt in tokens
    ]


def product_cases(*, quick: bool) -> Sequence[Case]:
    names = ("gate_up",) if quick else tuple(LAYER_8B)
    tokens = (1, 16, 4096) if quick else PRODUCT_TOKENS
    return [
        ProductCase(weight=weight, num_tokens=num_tokens, num_inputs=LAYER_8B[name][0], num_outputs=LAYER_8B[name][1])
        for weight in ("int8", "int4")
        for name in names
        for num_tokens in tokens
    ]


def copy_cases(*, quick: bool) -> Sequence[Case]:
    return [
        CopyCase(num_blocks=num_blocks, is_gather=is_gather, moved_heads=moved_heads, to_host=to_host)
        for num_blocks in ((64,) if quick else (8, 64, 256))
        for is_gather in (True, False)
        for moved_heads, to_host in ((8, False), (4, False), (8, True))
    ]


def draw_cases(*, quick: bool) -> Sequence[Case]:
    return [DrawCase(num_rows=num_rows) for num_rows in ((64,) if quick else (1, 16, 64, 256))]


def top_p_cases(*, quick: bool) -> Sequence[Case]:
    return [TopPCase(num_rows=num_rows) for num_rows in ((64,) if quick else (1, 16, 64, 256))]


KERNELS: Mapping[str, Callable[..., Sequence[Case]]] = {
    "prefill_attention": prefill_cases,
    "decode_attention": decode_cases,
    "rms_norm": norm_cases,
    "gate": gate_cases,
    "rope_and_write_kv": rope_cases,
    "quantized_matmul": product_cases,
    "block_copy": copy_cases,
    "draw_tokens": draw_cases,
    "find_top_p": top_p_cases,
}
"""Cases by kernel; each takes ``quick``."""


def chosen_cases(only: str, *, quick: bool) -> list[Case]:
    """Cases of the kernels with ``only`` in their names; all of them if it is empty.

    Raises:
        ValueError: there is no such kernel.
    """
    names = [name for name in KERNELS if only in name]
    if not names:
        raise ValueError(f"no kernel is named {only!r}: use one of {', '.join(KERNELS)}")
    return [case for name in names for case in KERNELS[name](quick=quick)]
