"""Measurements of `pdserve.bench.gpu_model`: shapes, cut to the device's memory. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pdserve.bench.gpu_model.checkpoint import LLAMA_8B, TINY
from pdserve.bench.gpu_model.limits import Variant, kv_token_bytes
from pdserve.bench.gpu_model.own import BLOCK_SIZE
from pdserve.model.config.shape import ModelShape
from pdserve.model.weights.bytes import weight_bytes

_ACTIVATION_BYTES = 6 * 10**9
"""Left for activations, logits and graphs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured of one model."""

    sizes: Mapping[str, Any]
    dtype: str
    decode_rows: tuple[int, ...]
    context_tokens: int
    num_steps: int
    """Of each decode shape."""
    prompt_tokens: tuple[int, ...]
    num_prompts: int
    """Of each length."""
    matrix_size: int
    """Of the products and copies that limits are measured by."""
    peer_options: Mapping[str, Any] | None = None


LLAMA = Plan(
    sizes=LLAMA_8B,
    dtype="bfloat16",
    decode_rows=(1, 16, 64, 256),
    context_tokens=2048,
    num_steps=32,
    prompt_tokens=(2048, 8192),
    num_prompts=8,
    matrix_size=8192,
)
QUICK = replace(LLAMA, decode_rows=(1, 64), num_steps=16, prompt_tokens=(2048,), num_prompts=4)
ON_CPU = Plan(
    sizes=TINY,
    dtype="float32",
    decode_rows=(1, 3),
    context_tokens=64,
    num_steps=6,
    prompt_tokens=(40,),
    num_prompts=3,
    matrix_size=256,
    peer_options={"num_blocks": 24, "page_size": 16, "max_batch_tokens": 128, "auto_switch_to_flash": False},
)
"""Shows that all of it works; its figures mean nothing."""


class DecodeShape(NamedTuple):
    num_rows: int
    context_tokens: int


def decode_shapes(plan: Plan, shape: ModelShape, variant: Variant, free_bytes: int | None) -> Iterator[DecodeShape]:
    """Those that fit, with less context where all of it does not fit.

    Args:
        free_bytes: of the device's memory before anything is there; ``None`` where it is enough.
    """
    for num_rows in plan.decode_rows:
        context = plan.context_tokens
        if free_bytes is not None:
            weights = weight_bytes(shape, variant.dtype, variant.quantization).total
            room_tokens = (free_bytes - weights - _ACTIVATION_BYTES) // kv_token_bytes(shape, variant)
            context = min(context, room_tokens // num_rows // BLOCK_SIZE * BLOCK_SIZE)
        if 2 * context >= plan.context_tokens:
            yield DecodeShape(num_rows, context)


def num_blocks(plan: Plan, shapes: list[DecodeShape]) -> int:
    """Of a pool for any one of them, or any one prompt."""
    most = max((rows * -(-context // BLOCK_SIZE) for rows, context in shapes), default=0)
    return max(most, -(-max(plan.prompt_tokens) // BLOCK_SIZE))
