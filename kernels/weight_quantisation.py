"""Weights as small integers and scales: what the kernels of CPUs and GPUs hold of a quantised matrix.

Called as weights are packed. Symmetric rounding to the nearest: there are no zero points. Multiplies nothing.

Shape suffixes: F output features, E input features, G groups of `GROUP_INPUTS` inputs, R some rows, H half a group.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

INT8_MAX = 127
INT4_MAX = 7
GROUP_INPUTS = 128
"""Inputs of an output that share a scale in int4."""
_QUANTISED_ROWS = 1024


class QuantisedWeight(NamedTuple):
    """``values * scales[:, None]`` stands for the weight, no further than half a scale from it."""

    values: torch.Tensor
    """int8 ``[F, E]``, -127 to 127."""
    scales: torch.Tensor
    """float32 ``[F]``."""


class Int4Weight(NamedTuple):
    """Two's complement of four bits, two to a byte, -7 to 7, times a scale for every group of inputs."""

    packed: torch.Tensor
    """int8 ``[F, G * GROUP_INPUTS / 2]``: of a group, byte i holds input i in its low bits and input i + 64 in its
    high ones, so that either half of the bits is a run of inputs. Inputs are filled up with zeros to whole groups."""
    scales: torch.Tensor
    """float32 ``[F, G]``."""
    num_inputs: int
    """E."""


def quantise_int8(weight_FE: torch.Tensor) -> QuantisedWeight:
    """One scale per output; NaN for outputs with weights that are not finite."""
    values_FE = torch.empty(weight_FE.shape, dtype=torch.int8, device=weight_FE.device)
    scales_F = torch.empty(len(weight_FE), device=weight_FE.device)
    for start in range(0, len(weight_FE), _QUANTISED_ROWS):  # So that no copy of the whole weight is made.
        rows = slice(start, start + _QUANTISED_ROWS)
        values_FE[rows], scales_F[rows] = _rounded(weight_FE[rows].float(), INT8_MAX)
    return QuantisedWeight(values_FE, scales_F)


def quantise_int4(weight_FE: torch.Tensor) -> Int4Weight:
    """One scale per output and group; NaN for groups with weights that are not finite."""
    (num_outputs, num_inputs), device = weight_FE.shape, weight_FE.device
    num_groups = -(-num_inputs // GROUP_INPUTS)
    packed_FH = torch.empty(num_outputs, num_groups * GROUP_INPUTS // 2, dtype=torch.int8, device=device)
    scales_FG = torch.empty(num_outputs, num_groups, device=device)
    for start in range(0, num_outputs, _QUANTISED_ROWS):
        rows = slice(start, start + _QUANTISED_ROWS)
        part_RE = torch.nn.functional.pad(weight_FE[rows].float(), (0, -num_inputs % GROUP_INPUTS))
        values_RGE, scales_FG[rows] = _rounded(part_RE.view(-1, num_groups, GROUP_INPUTS), INT4_MAX)
        low_RGH, high_RGH = values_RGE.chunk(2, dim=-1)
        packed_FH[rows] = (low_RGH & 15 | high_RGH << 4).flatten(1)
    return Int4Weight(packed_FH, scales_FG, num_inputs)


def int4_values(weight: Int4Weight) -> torch.Tensor:
    """int8 ``[F, E]``, -7 to 7."""
    bytes_FGH = weight.packed.view(*weight.scales.shape, GROUP_INPUTS // 2)
    return torch.cat((bytes_FGH << 4 >> 4, bytes_FGH >> 4), dim=-1).flatten(1)[:, : weight.num_inputs]


def dequantise_int4(weight: Int4Weight) -> torch.Tensor:
    """float32 ``[F, E]``."""
    scales_FE = weight.scales.repeat_interleave(GROUP_INPUTS, dim=1)
    return int4_values(weight) * scales_FE[:, : weight.num_inputs]


def _rounded(part: torch.Tensor, largest_value: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers of a float32 tensor, and scales of vectors along its last axis."""
    scales = part.abs().amax(dim=-1) / largest_value
    # Where a scale is 0, NaN or infinite, values mean nothing and are 0; the scale alone says enough.
    inverse = scales.reciprocal().nan_to_num()
    return (part * inverse[..., None]).nan_to_num().round().to(torch.int8), scales
