"""Rotary position embedding: frequencies of every supported type, and angles of a step.

Su et al. 2021 (RoFormer); `pdserve.model.config.rope_config` names the sources of the scalings. Called by
`pdserve.model.decoder.decoder`; kernels rotate. Everything is float32 in the order of transformers' operations, because
checkpoints were trained and evaluated with its rounding.

Shape suffixes: T tokens, C = head_dim / 2 frequencies.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from pdserve.model.config.rope_config import RopeConfig


class RopeAngles(NamedTuple):
    """Cosine and sine, float32 ``[T, C]`` each."""

    cos: torch.Tensor
    sin: torch.Tensor


def rope_angles(positions_T: torch.Tensor, inv_freq_C: torch.Tensor, factor: float) -> RopeAngles:
    """Angles at ``positions_T`` (integers) for `inverse_frequencies`, cosines and sines multiplied by ``factor``."""
    angles_TC = positions_T.float()[:, None] * inv_freq_C
    return RopeAngles(angles_TC.cos() * factor, angles_TC.sin() * factor)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians per position of each pair of elements: float32 ``[C]``."""
    match rope.type:
        case "linear":
            return 1.0 / _wavelengths(rope.theta, head_dim) / rope.factor
        case "dynamic":
            return 1.0 / _wavelengths(_dynamic_theta(rope, head_dim), head_dim)
        case "llama3":
            return _scale_llama3(rope, 1.0 / _wavelengths(rope.theta, head_dim))
        case "yarn":
            return _scale_yarn(rope, head_dim)
    return 1.0 / _wavelengths(rope.theta, head_dim)


def _wavelengths(theta: float, head_dim: int) -> torch.Tensor:
    """Positions per radian."""
    exponents_C = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    wavelengths_C: torch.Tensor = theta**exponents_C
    return wavelengths_C


def _dynamic_theta(rope: RopeConfig, head_dim: int) -> float:
    """The base at which the lowest frequency turns as far over ``length`` as it did over ``trained_length``."""
    stretch = max(rope.length, rope.trained_length) / rope.trained_length
    grown: float = (rope.factor * stretch - (rope.factor - 1)) ** (head_dim / (head_dim - 2))
    return rope.theta * grown


def _scale_llama3(rope: RopeConfig, inv_freq_C: torch.Tensor) -> torch.Tensor:
    """Keep short wavelengths, divide the frequency of long ones by ``factor``, and blend in between."""
    turns_C = rope.trained_length / (2 * math.pi / inv_freq_C)
    smooth_C = (turns_C - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth_C = smooth_C.clamp(0.0, 1.0)
    return (1 - smooth_C) * inv_freq_C / rope.factor + smooth_C * inv_freq_C


def _scale_yarn(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Blend from the plain frequencies to the divided ones, along the dimensions (section 3.2 of the paper)."""

    def dimension(num_turns: float) -> float:
        """The dimension that turns ``num_turns`` times within the trained length."""
        return head_dim * math.log(rope.trained_length / (num_turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp_C = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept_C = 1 - ramp_C
    wavelengths_C = _wavelengths(rope.theta, head_dim)
    return 1.0 / (rope.factor * wavelengths_C) * (1 - kept_C) + 1.0 / wavelengths_C * kept_C
