"""Benchmark cases of the kernels: the shapes of Llama-3.1-8B and 70B, and tables of sizes.

``quick`` keeps a few shapes of each kernel. Measures nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product

import torch

from pdserve.bench.kernels.attention import AttentionShape, Row, attention_case
from pdserve.bench.kernels.case import Case
from pdserve.bench.kernels.layers import (
    draw_case,
    experts_case,
    gate_case,
    norm_case,
    product_case,
    rope_case,
    top_p_case,
)

_BF16, _INT8, _FLOAT8 = torch.bfloat16, torch.int8, torch.float8_e4m3fn
_HEADS_8B, _HEADS_70B = 32, 64
MAX_DECODE_TOKENS = 2**21
"""KV tokens of a batch: 8 GiB in bfloat16, which peers need again in their own layouts."""
_PREFILL_TOKENS = 16384
"""Tokens of a batch, as in papers: the shorter the rows, the more of them."""
_NORM_MIB = (1, 4, 16, 32, 64, 256)
"""Bytes read and written together."""
_MIXED_CONTEXTS = (128, 32768, 1024, 4096, 512, 16384, 2048, 8192)
LAYER_8B = {"qkv": (4096, 6144), "output": (4096, 4096), "gate_up": (4096, 28672), "down": (14336, 4096)}
"""Inputs and outputs of the matrices of Llama-3.1-8B."""


def _prefill_cases(*, quick: bool) -> Iterator[Case]:
    """Whole prompts of 1k to 16k tokens, and chunks over a cached prefix."""
    lengths = (2048, 8192) if quick else (1024, 2048, 4096, 8192, 16384)
    chunks = ((2048, 6144),) if quick else ((2048, 2048), (2048, 6144), (2048, 14336), (512, 3584), (512, 15872))
    prompts = [(Row(length),) * (_PREFILL_TOKENS // length) for length in lengths]
    after = [(Row(new, cached),) for new, cached in chunks]
    many_heads: list[tuple[Row, ...]] = [] if quick else [(Row(8192),) * 2, (Row(2048, 6144),)]
    yield from _attention("prefill_attention", [*prompts, *after])
    yield from _attention("prefill_attention", many_heads, num_heads=_HEADS_70B)
    for kv_dtype in (_INT8, _FLOAT8):
        yield from _attention("prefill_attention", after, kv_dtype)


def _decode_cases(*, quick: bool) -> Iterator[Case]:
    """One new token per row, in uniform batches and one mixed batch."""
    sizes = product((1, 8, 64, 256), (1024, 4096, 8192, 16384, 32768))
    batches = [(rows, context) for rows, context in sizes if rows * context <= MAX_DECODE_TOKENS]
    uniform = [(Row(1, context - 1),) * rows for rows, context in (((1, 16384), (64, 4096)) if quick else batches)]
    mixed = tuple(Row(1, context - 1) for context in _MIXED_CONTEXTS * 4)
    for kv_dtype in (_BF16, _INT8, _FLOAT8):
        yield from _attention("decode_attention", [*uniform, mixed], kv_dtype)
    of_70b: list[tuple[Row, ...]] = [] if quick else [(Row(1, 16383),), (Row(1, 4095),) * 64]
    yield from _attention("decode_attention", of_70b, num_heads=_HEADS_70B)


def _attention(
    kernel: str, batches: Sequence[tuple[Row, ...]], kv_dtype: torch.dtype = _BF16, num_heads: int = _HEADS_8B
) -> Iterator[Case]:
    for rows in batches:
        yield attention_case(AttentionShape(kernel=kernel, rows=rows, num_heads=num_heads, kv_dtype=kv_dtype))


def _rope_cases(*, quick: bool) -> Iterator[Case]:
    batches = (
        ((64, False), (4096, True)) if quick else ((1, False), (64, False), (256, False), (2048, True), (8192, True))
    )
    for kv_dtype, (num_tokens, is_prompt) in product((_BF16, _INT8, _FLOAT8), batches):
        yield rope_case(num_tokens, is_prompt=is_prompt, kv_dtype=kv_dtype)


def _product_cases(*, quick: bool) -> Iterator[Case]:
    names, tokens = (("gate_up",), (1, 16, 4096)) if quick else (tuple(LAYER_8B), (1, 4, 16, 64, 256, 4096))
    for weight, name, num_tokens in product(("int8", "int4"), names, tokens):
        yield product_case(weight, num_tokens, *LAYER_8B[name])


def _experts_cases(*, quick: bool) -> Iterator[Case]:
    for weight, num_tokens in product(("bf16", "int4"), (1, 2048) if quick else (1, 4, 16, 64, 256, 2048)):
        yield experts_case(weight, num_tokens)


def _norm_cases(*, quick: bool) -> Iterator[Case]:
    sizes = ((4096,), (4, 64)) if quick else ((4096, 8192), _NORM_MIB)
    for num_features, mib in product(*sizes):
        yield norm_case(mib * 2**20 // (4 * num_features), num_features)


def _by_size(case: Callable[[int], Case], sizes: Sequence[int], few: Sequence[int]) -> Callable[..., Iterator[Case]]:
    return lambda *, quick: map(case, few if quick else sizes)


KERNELS: Mapping[str, Callable[..., Iterator[Case]]] = {
    "prefill_attention": _prefill_cases,
    "decode_attention": _decode_cases,
    "rms_norm": _norm_cases,
    "gate": _by_size(gate_case, (1, 16, 64, 256, 2048, 8192), (64, 2048)),
    "rope_and_write_kv": _rope_cases,
    "quantized_matmul": _product_cases,
    "experts": _experts_cases,
    "draw_tokens": _by_size(draw_case, (1, 16, 64, 256), (64,)),
    "find_top_p": _by_size(top_p_case, (1, 16, 64, 256), (64,)),
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
