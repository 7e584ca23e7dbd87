"""The decoder's dense operations in plain torch: the fallback where nothing compiles.

Chosen by `pdserve.kernels.selection`. Favours correctness over speed. Knows no model.

Shape suffixes: T tokens, E input features, F output features, I intermediate features.
"""

from __future__ import annotations

import torch
from torch.nn.functional import gelu, linear, rms_norm, silu

from pdserve.kernels.operations import SWIGLU_ALPHA, SWIGLU_LIMIT
from pdserve.kernels.weight_quantisation import GroupedWeight, dequantise


def pack_linear(
    weight_FE: torch.Tensor | GroupedWeight, bias_F: torch.Tensor | None = None, *, dtype: torch.dtype = torch.float32
) -> TorchLinear:
    """See `pdserve.kernels.operations.PackLinear`. A quantised weight is held as what its values stand for."""
    if isinstance(weight_FE, GroupedWeight):
        weight_FE = dequantise(weight_FE).to(dtype)
    dtype = matrix_dtype(weight_FE.dtype) if weight_FE.device.type == "cpu" else weight_FE.dtype
    return TorchLinear(weight_FE.to(dtype), None if bias_F is None else bias_F.to(dtype))


def matrix_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the storage dtype of matrices: float32 if this CPU has no instructions to multiply ``dtype``.

    Without them, products of more than one token measured 5 to 10 times slower than float32, which costs more memory.
    """
    native = {
        torch.float32: True,
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported(),
    }
    return dtype if native[dtype] else torch.float32


class TorchLinear:
    """Implements `pdserve.kernels.operations.Linear`."""

    def __init__(self, weight_FE: torch.Tensor, bias_F: torch.Tensor | None = None) -> None:
        self._weight_FE = weight_FE
        self._bias_F = bias_F

    @property
    def num_bytes(self) -> int:
        return self._weight_FE.nbytes + (0 if self._bias_F is None else self._bias_F.nbytes)

    def __call__(self, x_TE: torch.Tensor, add_to_TF: torch.Tensor | None = None) -> torch.Tensor:
        if add_to_TF is not None and self._bias_F is None and x_TE.dtype == add_to_TF.dtype == self._weight_FE.dtype:
            return add_to_TF.addmm_(x_TE, self._weight_FE.T)  # one launch on a GPU, rounded once
        y_TF = linear(x_TE.to(self._weight_FE.dtype), self._weight_FE, self._bias_F).to(x_TE.dtype)
        return y_TF if add_to_TF is None else add_to_TF.add_(y_TF)

    def rows(self, ids_T: torch.Tensor) -> torch.Tensor:
        return self._weight_FE[ids_T]


def rms_normalise(x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
    """See `pdserve.kernels.operations.RmsNormalise`."""
    return rms_norm(x_TE, weight_E.shape, weight_E, eps)


def gate(gate_up_TF: torch.Tensor, activation: str) -> torch.Tensor:
    """See `pdserve.kernels.operations.Gate`."""
    gate_TI, up_TI = gate_up_TF.chunk(2, dim=-1)
    if activation == "swiglu_oai":
        gate_TI, up_TI = gate_TI.clamp(max=SWIGLU_LIMIT), up_TI.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
        return (gate_TI * SWIGLU_ALPHA).sigmoid_().mul_(gate_TI).mul_(up_TI + 1)
    return (silu(gate_TI) if activation == "silu" else gelu(gate_TI, approximate="tanh")).mul_(up_TI)
