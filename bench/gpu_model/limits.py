"""Lower bounds of the time of a whole-model step: the bytes or operations that every implementation needs.

Called by `pdserve.bench.gpu_model.measure`. Uses the limits of the same device, measured in the same run. Touches no
device.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.contracts.kv_layout import kv_vector_bytes
from pdserve.model.config.shape import ModelShape
from pdserve.model.weights.bytes import weight_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLimits:
    """What torch reaches on the device."""

    flops: float
    """In a large product, a second."""
    bandwidth: float
    """In a large copy, bytes a second, read and written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """How a model is held."""

    dtype: str
    quantization: str = "none"
    kv_dtype: str = "auto"

    @property
    def held_kv_dtype(self) -> str:
        return self.dtype if self.kv_dtype == "auto" else self.kv_dtype

    @property
    def name(self) -> str:
        weights = self.dtype if self.quantization == "none" else self.quantization
        return f"{weights} weights, {self.held_kv_dtype} KV"


def kv_token_bytes(shape: ModelShape, variant: Variant) -> int:
    """Of one token, in all layers."""
    return shape.num_layers * shape.num_kv_heads * 2 * kv_vector_bytes(shape.head_dim, variant.held_kv_dtype)


def decode_bytes(shape: ModelShape, variant: Variant, num_rows: int, context_tokens: float) -> float:
    """That a decode step reads: the matrices of all layers, the output projection, and each row's KV."""
    weights = weight_bytes(shape, variant.dtype, variant.quantization)
    return weights.layers + weights.table + num_rows * context_tokens * kv_token_bytes(shape, variant)


def prefill_flops(shape: ModelShape, num_tokens: int) -> float:
    """Of a prompt: two for every token and weight of a layer, causal attention, and one row of logits."""
    products = 2.0 * num_tokens * shape.num_layers * shape.layer_parameters + 2.0 * shape.table_parameters
    # Two products, of each query with half of the keys on average.
    attention = 2.0 * num_tokens * num_tokens * shape.num_layers * shape.num_heads * shape.head_dim
    return products + attention


def decode_limit_s(
    shape: ModelShape, variant: Variant, num_rows: int, context_tokens: float, limits: DeviceLimits
) -> float:
    return decode_bytes(shape, variant, num_rows, context_tokens) / limits.bandwidth


def prefill_limit_s(shape: ModelShape, num_tokens: int, limits: DeviceLimits) -> float:
    return prefill_flops(shape, num_tokens) / limits.flops
