"""Benchmark cases of products with quantised weights, against torch with the same weights in bfloat16.

Cases of `pdserve.kernels.triton.quantized_matmul`. The peer on a GPU is cuBLAS: the ratio is the gain of smaller
weights.

Shape suffixes: T tokens, E inputs, F outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.functional import linear

from pdserve.bench.kernels.contest import Contender, Contest, Work
from pdserve.kernels.triton.configs import MatmulTile
from pdserve.kernels.triton.quantized_matmul import quantized_matmul
from pdserve.kernels.weight_quantisation import (
    GROUP_INPUTS,
    Int4Weight,
    QuantisedWeight,
    dequantise_int4,
    quantise_int4,
    quantise_int8,
)

_FLOPS_SHARE = 0.7
"""Of the peak, that large products reach."""
_SCALE_BYTES = 4
_TOLERANCE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductCase:
    """One matrix of a layer, for some tokens."""

    weight: str
    """``int8`` or ``int4``."""
    num_tokens: int
    num_inputs: int
    num_outputs: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def kernel(self) -> str:
        return "quantized_matmul"

    @property
    def shape(self) -> str:
        return f"{self.weight} {self.num_inputs} -> {self.num_outputs}, {self.num_tokens} tokens"

    @property
    def work(self) -> Work:
        num_weights = self.num_inputs * self.num_outputs
        weight_bytes = float(num_weights + _SCALE_BYTES * self.num_outputs)
        if self.weight == "int4":
            weight_bytes = num_weights / 2 + _SCALE_BYTES * num_weights / GROUP_INPUTS
        return Work(weight_bytes, flops=2 * self.num_tokens * num_weights, flops_share=_FLOPS_SHARE)

    def inputs(self, device: torch.device) -> tuple[torch.Tensor, QuantisedWeight | Int4Weight]:
        """Random activations and weights."""
        x_TE = torch.randn(self.num_tokens, self.num_inputs, device=device).to(self.dtype)
        weight_FE = torch.randn(self.num_outputs, self.num_inputs, device=device)
        return x_TE, (quantise_int4 if self.weight == "int4" else quantise_int8)(weight_FE)

    def launch(
        self, x_TE: torch.Tensor, weight: QuantisedWeight | Int4Weight, tile: MatmulTile | None = None
    ) -> Callable[[], torch.Tensor]:
        """Our kernel, cut as ``tile`` says, or as in serving."""
        return partial(quantized_matmul, x_TE, weight, tile=tile)

    def contest(self, device: torch.device) -> Contest:
        x_TE, weight = self.inputs(device)

        def by_torch() -> Contender:
            if isinstance(weight, Int4Weight):
                weight_FE = dequantise_int4(weight)
            else:
                weight_FE = weight.values * weight.scales[:, None]
            return Contender(partial(linear, x_TE, weight_FE.to(self.dtype)))

        return Contest(Contender(self.launch(x_TE, weight)), {"torch bf16": by_torch}, _TOLERANCE)
