"""The form of a quantised matrix between a checkpoint and the kernels: values of 8 or 4 bits, and scales of groups.

The loader makes it, one matrix at a time, and kernels pack it into layouts of their own. Multiplies nothing.

Shape suffixes: F output features, E input features, G groups of inputs, I inputs of a group, R some rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from pdserve.contracts.precision import INT4_GROUP_INPUTS

INT8_MAX = 127
INT4_MAX = 7
_QUANTISED_ROWS = 1024
_TWICE_E2M1 = torch.tensor([sign * twice for sign in (1, -1) for twice in (0, 1, 2, 3, 4, 6, 8, 12)], dtype=torch.int8)


class GroupedWeight(NamedTuple):
    """``(values - zeros) * scales``: a matrix ``[F, E]`` with scales for each output and group of inputs."""

    values: torch.Tensor
    """``[F, E]``, a value each: int8, of kind ``int4`` from -8 to 7, of kind ``e2m1`` twice what they stand for, or
    float8_e4m3fn."""
    scales: torch.Tensor
    """float32 ``[F, G]`` with ``G = ceil(E / group_inputs)``; of kind ``e2m1`` powers of two, or 0."""
    kind: str
    """``int8``, ``int4``, ``e2m1`` or ``e4m3``."""
    group_inputs: int
    """Consecutive inputs of a group; E or more where an output has one scale."""
    zeros: torch.Tensor | None = None
    """float32 ``[F, G]``, in units of the values. None: all are 0."""
    permutation: torch.Tensor | None = None
    """int64 ``[E]``: input i of the values is input ``permutation[i]`` of the matrix. None: they are in order."""

    def inputs(self, inputs: range) -> GroupedWeight:
        """Some inputs, in memory of their own: whole groups, where there are several. They must be in order."""
        assert self.permutation is None
        num_inputs, size = self.values.shape[1], self.group_inputs
        groups = slice(0, 1)
        if size < num_inputs:
            assert inputs.start % size == 0, (inputs, size)
            assert inputs.stop % size == 0 or inputs.stop == num_inputs, (inputs, size)
            groups = slice(inputs.start // size, -(-inputs.stop // size))
        return self._replace(
            values=self.values[:, inputs.start : inputs.stop].contiguous(),
            scales=self.scales[:, groups].contiguous(),
            zeros=None if self.zeros is None else self.zeros[:, groups].contiguous(),
        )


def quantise(weight_FE: torch.Tensor, kind: str) -> GroupedWeight:
    """Round to the nearest value, symmetrically; a scale is NaN where a weight of its group is not finite.

    Args:
        kind: ``int8``: one scale per output; ``int4``: values from -7 to 7 in groups of `INT4_GROUP_INPUTS`.
    """
    (num_outputs, num_inputs), device = weight_FE.shape, weight_FE.device
    largest, group_inputs = {"int8": (INT8_MAX, num_inputs), "int4": (INT4_MAX, INT4_GROUP_INPUTS)}[kind]
    num_groups = -(-num_inputs // group_inputs)
    values_FE = torch.empty(num_outputs, num_inputs, dtype=torch.int8, device=device)
    scales_FG = torch.empty(num_outputs, num_groups, device=device)
    for start in range(0, num_outputs, _QUANTISED_ROWS):  # Avoids a float32 copy of the whole weight.
        rows = slice(start, start + _QUANTISED_ROWS)
        part_RE = pad(weight_FE[rows].float(), (0, -num_inputs % group_inputs))
        values_RGI, scales_FG[rows] = _rounded(part_RE.view(-1, num_groups, group_inputs), largest)
        values_FE[rows] = values_RGI.flatten(1)[:, :num_inputs]
    return GroupedWeight(values_FE, scales_FG, kind, group_inputs)


def twice_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Twice the numbers of one bit of sign, two of exponent and one of mantissa (OCP Microscaling Formats 1.0, 2023):
    int8, of codes from 0 to 15."""
    return _TWICE_E2M1.to(codes.device).index_select(0, codes.flatten().int()).view(codes.shape)


def e2m1_codes(values: torch.Tensor) -> torch.Tensor:
    """Codes of values of kind ``e2m1``: int8 from 0 to 15; that of -0 is 0."""
    magnitudes = torch.bucketize(values.abs(), _TWICE_E2M1[:8].to(values.device)).to(torch.int8)
    return magnitudes | (values < 0).to(torch.int8) << 3


def exponents(scales: torch.Tensor) -> torch.Tensor:
    """Of powers of two, with the bias of 127 of float32: uint8; 0 for 0."""
    bits = scales.view(torch.int32)
    assert not (bits & 0x7FFFFF).any()
    return (bits >> 23).to(torch.uint8)


def dequantise(weight: GroupedWeight) -> torch.Tensor:
    """float32 ``[F, E]``, its inputs in the order of the matrix: what every product is measured by."""
    values_FE = weight.values.float()
    if weight.zeros is not None:
        values_FE -= of_inputs(weight.zeros, weight)
    values_FE *= of_inputs(weight.scales, weight)
    if weight.permutation is None:
        return values_FE
    return torch.empty_like(values_FE).index_copy_(1, weight.permutation, values_FE)


def of_inputs(groups_FG: torch.Tensor, weight: GroupedWeight) -> torch.Tensor:
    """What each input's group has: ``[F, E]``."""
    num_inputs = weight.values.shape[1]
    return groups_FG.repeat_interleave(min(weight.group_inputs, num_inputs), dim=1)[:, :num_inputs]


def joined(weights: Sequence[GroupedWeight]) -> GroupedWeight:
    """Concatenate the outputs of weights of the same kind, groups and permutation."""
    first = weights[0]
    for other in weights[1:]:
        assert (other.kind, other.group_inputs) == (first.kind, first.group_inputs)
        assert (other.permutation is None) == (first.permutation is None)
        assert first.permutation is None or torch.equal(first.permutation, other.permutation)  # type: ignore[arg-type]
    zeros = [weight.zeros for weight in weights if weight.zeros is not None]
    assert len(zeros) in (0, len(weights))
    return first._replace(
        values=torch.cat([weight.values for weight in weights]),
        scales=torch.cat([weight.scales for weight in weights]),
        zeros=torch.cat(zeros) if zeros else None,
    )


def _rounded(part: torch.Tensor, largest_value: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rounded integers of a float32 tensor and one scale per vector along its last axis."""
    scales = part.abs().amax(dim=-1) / largest_value
    scales.masked_fill_(scales.isinf(), torch.nan)
    # Values are 0 where the scale is 0 or NaN: the scale alone then determines the result.
    inverse = scales.reciprocal().nan_to_num()
    return (part * inverse[..., None]).nan_to_num().round().to(torch.int8), scales
