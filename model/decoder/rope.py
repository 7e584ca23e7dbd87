"""Rotary position embedding: the frequencies of every supported type, and the angles of a step.

Su et al. 2021 (RoFormer); `pdserve.model.config.rope_config` names the sources of the scalings. Called by
`pdserve.model.decoder.decoder` once per step; the rotation itself is a kernel's. Everything is float32 and computed in
the order that transformers does, because the rounding of position times frequency is part of what a checkpoint was
trained and evaluated with.

Shape suffixes: T tokens, C = head_dim / 2 frequencies.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from pdserve.model.config.rope_config import DynamicScaling, LinearScaling, Llama3Scaling, RopeConfig, YarnScaling


class RopeAngles(NamedTuple):
    """Cosine and sine, float32 ``[T, C]`` each."""

    cos: torch.Tensor
    sin: torch.Tensor


class Rope:
    """One rotary embedding, for heads of ``head_dim`` elements."""

    def __init__(self, config: RopeConfig, head_dim: int, device: torch.device | str = "cpu") -> None:
        self._inv_freq_C = inverse_frequencies(config, head_dim).to(device)
        self._factor = config.scaling.attention_factor if isinstance(config.scaling, YarnScaling) else 1.0

    def angles(self, positions_T: torch.Tensor) -> RopeAngles:
        """Angles of tokens at ``positions_T`` (integers, on the device)."""
        angles_TC = positions_T.float()[:, None] * self._inv_freq_C
        return RopeAngles(angles_TC.cos() * self._factor, angles_TC.sin() * self._factor)


def inverse_frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians per position of each pair of elements: float32 ``[C]``."""
    match config.scaling:
        case LinearScaling(factor=factor):
            return _plain(config.theta, head_dim) / factor
        case DynamicScaling() as scaling:
            return _plain(_dynamic_theta(config.theta, head_dim, scaling), head_dim)
        case Llama3Scaling() as scaling:
            return _scale_llama3(_plain(config.theta, head_dim), scaling)
        case YarnScaling() as scaling:
            return _scale_yarn(config.theta, head_dim, scaling)
    return _plain(config.theta, head_dim)


def _plain(theta: float, head_dim: int) -> torch.Tensor:
    return 1.0 / _wavelengths(theta, head_dim)


def _wavelengths(theta: float, head_dim: int) -> torch.Tensor:
    """Positions per radian."""
    exponents_C = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    wavelengths_C: torch.Tensor = theta**exponents_C
    return wavelengths_C


def _dynamic_theta(theta: float, head_dim: int, scaling: DynamicScaling) -> float:
    """The base at which the lowest frequency turns as far over ``length`` as it did over ``trained_length``."""
    stretch = max(scaling.length, scaling.trained_length) / scaling.trained_length
    grown: float = (scaling.factor * stretch - (scaling.factor - 1)) ** (head_dim / (head_dim - 2))
    return theta * grown


def _scale_llama3(inv_freq_C: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Keep short wavelengths, divide the frequency of long ones by ``factor``, and blend in between."""
    turns_C = scaling.trained_length / (2 * math.pi / inv_freq_C)
    smooth_C = (turns_C - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth_C = smooth_C.clamp(0.0, 1.0)
    return (1 - smooth_C) * inv_freq_C / scaling.factor + smooth_C * inv_freq_C


def _scale_yarn(theta: float, head_dim: int, scaling: YarnScaling) -> torch.Tensor:
    """Blend from the plain frequencies to the divided ones, along the dimensions (section 3.2 of the paper)."""

    def dimension(num_turns: float) -> float:
        """Where a dimension turns ``num_turns`` times within the trained length."""
        return head_dim * math.log(scaling.trained_length / (num_turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp_C = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept_C = 1 - ramp_C
    wavelengths_C = _wavelengths(theta, head_dim)
    return 1.0 / (scaling.factor * wavelengths_C) * (1 - kept_C) + 1.0 / wavelengths_C * kept_C
