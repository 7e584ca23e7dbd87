"""Rotary position embedding: inverse frequencies of the supported rope types, and the angles of a step.

Su et al. 2021 (RoFormer), and Llama 3.1's scaling of low frequencies. Called by `pdserve.model.decoder` once per step;
the rotation itself is a kernel's. Everything is float32 and computed in the order that transformers does, because the
rounding of position times frequency is part of what a checkpoint was trained and evaluated with.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from pdserve.model.config import DecoderConfig, Llama3RopeScaling


class RopeAngles(NamedTuple):
    """Cosine and sine for T tokens and C = head_dim / 2 frequencies: float32 ``[T, C]`` each."""

    cos: torch.Tensor
    sin: torch.Tensor


def inverse_frequencies(config: DecoderConfig) -> torch.Tensor:
    """Radians per position of each pair of elements: float32 ``[head_dim / 2]``."""
    exponents_C = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    inv_freq_C = 1.0 / config.rope_theta**exponents_C
    return inv_freq_C if config.rope_scaling is None else _scale_llama3(inv_freq_C, config.rope_scaling)


def _scale_llama3(inv_freq_C: torch.Tensor, scaling: Llama3RopeScaling) -> torch.Tensor:
    """Keep short wavelengths, divide the frequency of long ones by ``factor``, and blend in between."""
    wavelength_C = 2 * math.pi / inv_freq_C
    turns_C = scaling.original_max_position_embeddings / wavelength_C
    smooth_C = (turns_C - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth_C = smooth_C.clamp(0.0, 1.0)
    return (1 - smooth_C) * inv_freq_C / scaling.factor + smooth_C * inv_freq_C


def rope_angles(positions_T: torch.Tensor, inv_freq_C: torch.Tensor) -> RopeAngles:
    """Angles of tokens at ``positions_T`` (integers)."""
    angles_TC = positions_T.float()[:, None] * inv_freq_C
    return RopeAngles(angles_TC.cos(), angles_TC.sin())
