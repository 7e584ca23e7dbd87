"""Gates of an MLP by their definitions."""

from __future__ import annotations

import torch
from torch.nn.functional import gelu, silu

ACTIVATIONS = ("silu", "gelu_tanh", "swiglu_oai")


def reference_gate(gate_up_TF: torch.Tensor, activation: str) -> torch.Tensor:
    """float64 ``[T, I]``."""
    gate_TI, up_TI = gate_up_TF.double().chunk(2, dim=-1)
    if activation == "swiglu_oai":  # As transformers' GptOssExperts.
        gate_TI, up_TI = gate_TI.clamp(max=7.0), up_TI.clamp(-7.0, 7.0)
        return (up_TI + 1) * (gate_TI * torch.sigmoid(1.702 * gate_TI))
    return (silu(gate_TI) if activation == "silu" else gelu(gate_TI, approximate="tanh")) * up_TI
