"""Weight quantisation: a matrix as int8 or int4 values with scales, for CPU and GPU kernels.

Kernels call it while they pack weights. Symmetric round-to-nearest, without zero points. Multiplies nothing.

Shape suffixes: F output features, E input features, G groups of `GROUP_INPUTS` inputs, R some rows, H half a group.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

INT8_MAX = 127
INT4_MAX = 7
GROUP_INPUTS = 128
"""Inputs of one output that share an int4 scale."""
_QUANTISED_ROWS = 1024


class QuantisedWeight(NamedTuple):
    """``values * scales[:, None]`` approximates the weight to within half a scale."""

    values: torch.Tensor
    """int8 ``[F, E]``, -127 to 127."""
    scales: torch.Tensor
    """float32 ``[F]``."""


class Int4Weight(NamedTuple):
    """Four-bit two's complement values from -7 to 7, two per byte, with one scale per group of inputs."""

    packed: torch.Tensor
    """int8 ``[F, G * GROUP_INPUTS / 2]``: byte i of a group holds input i in its low bits and input i + 64 in its high
    bits, so that each half is a contiguous run of inputs. Zeros pad the inputs to whole groups."""
    scales: torch.Tensor
    """float32 ``[F, G]``."""
    num_inputs: int
    """E, without padding."""


def kept_inputs(matrix_FE: torch.Tensor, inputs: range | None) -> torch.Tensor:
    """Columns ``inputs`` of ``matrix_FE``, in memory of their own; the matrix itself if ``inputs`` is None."""
    return matrix_FE if inputs is None else matrix_FE[:, inputs.start : inputs.stop].contiguous()


def quantise_int8(weight_FE: torch.Tensor, inputs: range | None = None) -> QuantisedWeight:
    """Quantise with one scale per output; the scale is NaN where a weight is not finite.

    Args:
        inputs: inputs to keep of the quantised weight; by default all.
    """
    values_FE = torch.empty(weight_FE.shape, dtype=torch.int8, device=weight_FE.device)
    scales_F = torch.empty(len(weight_FE), device=weight_FE.device)
    for start in range(0, len(weight_FE), _QUANTISED_ROWS):  # Avoids a float32 copy of the whole weight.
        rows = slice(start, start + _QUANTISED_ROWS)
        values_FE[rows], scales_F[rows] = _rounded(weight_FE[rows].float(), INT8_MAX)
    return QuantisedWeight(kept_inputs(values_FE, inputs), scales_F)


def quantise_int4(weight_FE: torch.Tensor, inputs: range | None = None) -> Int4Weight:
    """Quantise with one scale per output and group; the scale is NaN where a weight is not finite.

    Args:
        inputs: inputs to keep of the quantised weight, in whole groups; by default all.
    """
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
    if inputs is None:
        return Int4Weight(packed_FH, scales_FG, num_inputs)
    assert inputs.start % GROUP_INPUTS == 0, inputs
    assert inputs.stop % GROUP_INPUTS == 0 or inputs.stop == num_inputs, inputs
    groups = range(inputs.start // GROUP_INPUTS, -(-inputs.stop // GROUP_INPUTS))
    halves = range(groups.start * GROUP_INPUTS // 2, groups.stop * GROUP_INPUTS // 2)
    return Int4Weight(kept_inputs(packed_FH, halves), kept_inputs(scales_FG, groups), len(inputs))


def int4_values(weight: Int4Weight) -> torch.Tensor:
    """int8 ``[F, E]``, -7 to 7."""
    bytes_FGH = weight.packed.view(*weight.scales.shape, GROUP_INPUTS // 2)
    return torch.cat((bytes_FGH << 4 >> 4, bytes_FGH >> 4), dim=-1).flatten(1)[:, : weight.num_inputs]


def dequantise_int4(weight: Int4Weight) -> torch.Tensor:
    """float32 ``[F, E]``."""
    scales_FE = weight.scales.repeat_interleave(GROUP_INPUTS, dim=1)
    return int4_values(weight) * scales_FE[:, : weight.num_inputs]


def _rounded(part: torch.Tensor, largest_value: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rounded integers of a float32 tensor and one scale per vector along its last axis."""
    scales = part.abs().amax(dim=-1) / largest_value
    # Values are 0 where the scale is 0, NaN or infinite: the scale alone then determines the result.
    inverse = scales.reciprocal().nan_to_num()
    return (part * inverse[..., None]).nan_to_num().round().to(torch.int8), scales
