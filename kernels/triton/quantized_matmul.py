"""Products with int8 or int4 weights, which are dequantised on load and multiplied in the activations' dtype.

Called through `pdserve.kernels.selection`. The weight is the left operand: Hopper's wgmma reads that one from
registers, where it is converted, and a few tokens fill the short side of a tile better than the long one. With few
tokens, memory bounds the product; if the matrix also has few outputs, its inputs are split among programs and a second
kernel adds their partial sums in order: no atomics, and a deterministic result.

Target: ``max(bytes / (0.9 bandwidth), 2 T E F / (0.7 peak))`` with ``bytes = F E w``; w is the bytes per weight with
its share of a scale, 1 for int8 and 0.53 for int4. A split adds ``8 T F`` bytes, which stay in L2.

Shape suffixes: T tokens, E input features, F output features, G groups of inputs, S splits of the inputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pdserve.kernels.torch.dense import TorchLinear
from pdserve.kernels.triton.configs import MatmulTile, matmul_tile, split_inputs
from pdserve.kernels.triton.flash import load
from pdserve.kernels.weight_quantisation import GROUP_INPUTS, GroupedWeight

_GROUP_TILES = 8
"""Token tiles whose programs run together, so that they find their weights in L2."""
_SUM_TILE = 1024


class PackedWeight(NamedTuple):
    """A quantised weight as these kernels read it."""

    values: torch.Tensor
    """int8 ``[F, E]``; int4 ``[F, G * GROUP_INPUTS / 2]``: byte i of a group holds input i in its low bits and input
    i + 64 in its high bits, so that each half is a contiguous run of inputs. Zeros pad the inputs to whole groups."""
    scales: torch.Tensor
    """float32 ``[F, G]``."""
    num_inputs: int
    is_int4: bool


def packed(weight: GroupedWeight) -> PackedWeight:
    assert weight.zeros is None
    assert weight.permutation is None
    num_outputs, num_inputs = weight.values.shape
    if weight.kind == "int8":
        assert weight.scales.shape[1] == 1
        return PackedWeight(weight.values, weight.scales, num_inputs, is_int4=False)
    assert (weight.kind, weight.group_inputs) == ("int4", GROUP_INPUTS)
    padded_FE = torch.nn.functional.pad(weight.values, (0, -num_inputs % GROUP_INPUTS))
    low_FGH, high_FGH = padded_FE.view(num_outputs, -1, GROUP_INPUTS).chunk(2, dim=-1)
    return PackedWeight((low_FGH & 15 | high_FGH << 4).flatten(1), weight.scales, num_inputs, is_int4=True)


def pack_linear(
    weight_FE: torch.Tensor | GroupedWeight, bias_F: torch.Tensor | None = None, *, dtype: torch.dtype = torch.float32
) -> TorchLinear | TritonLinear:
    """See `pdserve.kernels.operations.PackLinear`."""
    if isinstance(weight_FE, GroupedWeight):
        return TritonLinear(packed(weight_FE), bias_F, dtype)
    return TorchLinear(weight_FE, bias_F)


class TritonLinear:
    """Implements `pdserve.kernels.operations.Linear` for an int8 or int4 weight."""

    def __init__(self, weight: PackedWeight, bias_F: torch.Tensor | None, dtype: torch.dtype) -> None:
        """
        Args:
            dtype: dtype of the activations.
        """
        self._weight = weight
        self._bias_F = bias_F
        self._dtype = dtype

    @property
    def num_bytes(self) -> int:
        parts = (self._weight.values, self._weight.scales, self._bias_F)
        return sum(part.nbytes for part in parts if part is not None)

    def __call__(self, x_TE: torch.Tensor, add_to_TF: torch.Tensor | None = None) -> torch.Tensor:
        return quantized_matmul(x_TE, self._weight, self._bias_F, add_to_TF)

    def rows(self, ids_T: torch.Tensor) -> torch.Tensor:
        values_TE, scales_TG = self._weight.values[ids_T], self._weight.scales[ids_T]
        if not self._weight.is_int4:
            return (values_TE * scales_TG).to(self._dtype)
        bytes_TGH = values_TE.view(*scales_TG.shape, GROUP_INPUTS // 2)
        values_TGI = torch.cat((bytes_TGH << 4 >> 4, bytes_TGH >> 4), dim=-1)
        return (values_TGI * scales_TG[..., None]).flatten(1)[:, : self._weight.num_inputs].to(self._dtype)


def quantized_matmul(
    x_TE: torch.Tensor,
    weight: PackedWeight,
    bias_F: torch.Tensor | None = None,
    add_to_TF: torch.Tensor | None = None,
    *,
    tile: MatmulTile | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Compute ``x W^T + b``: ``[T, F]`` in the dtype of ``x_TE``, summed in float32 and rounded once.

    Args:
        x_TE: float32 (computed without TF32), bfloat16 or float16, contiguous.
        bias_F: contiguous, any float dtype.
        add_to_TF: contiguous, same dtype as ``x_TE``; receives the product in place and is returned.
        tile: by default as in serving. For an int4 weight, its inputs are one group.
        num_splits: most splits of the inputs; by default as many as keep the GPU busy.
    """
    num_tokens, num_inputs = x_TE.shape
    values, num_outputs = weight.values, len(weight.values)
    assert num_inputs == weight.num_inputs
    assert bias_F is None or bias_F.shape == (num_outputs,)
    y_TF = x_TE.new_empty((num_tokens, num_outputs)) if add_to_TF is None else add_to_TF
    assert (y_TF.shape, y_TF.dtype) == ((num_tokens, num_outputs), x_TE.dtype)
    assert all(matrix.is_contiguous() for matrix in (x_TE, y_TF, values, weight.scales))
    tile = tile or matmul_tile(x_TE, is_int4=weight.is_int4)
    assert tile.inputs == GROUP_INPUTS or not weight.is_int4
    num_tiles = triton.cdiv(num_outputs, tile.outputs)
    per_split = split_inputs(x_TE.device, num_tokens, num_tiles, num_inputs, tile.inputs, num_splits)
    num_splits = triton.cdiv(num_inputs, per_split)
    partial_STF = None
    if num_splits > 1:
        partial_STF = x_TE.new_empty((num_splits, num_tokens, num_outputs), dtype=torch.float32)
    written = {"bias_ptr": bias_F, "ADDS": add_to_TF is not None, "NUM_OUTPUTS": num_outputs}
    _multiply_kernel[triton.cdiv(num_tokens, tile.tokens), num_tiles, num_splits](
        x_TE,
        values,
        weight.scales,
        y_TF,
        partial_STF,
        num_tokens=num_tokens,
        **written,
        NUM_INPUTS=num_inputs,
        GROUP=GROUP_INPUTS if weight.is_int4 else None,
        SPLIT_INPUTS=per_split,
        TOKENS=tile.tokens,
        OUTPUTS=tile.outputs,
        INPUTS=tile.inputs,
        GROUP_TILES=_GROUP_TILES,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if partial_STF is not None:
        _sum_kernel[num_tokens, triton.cdiv(num_outputs, _SUM_TILE)](
            partial_STF, y_TF, **written, NUM_SPLITS=num_splits, TILE=_SUM_TILE, num_warps=4
        )
    return y_TF


@triton.jit(do_not_specialize=["num_tokens"])
def _multiply_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    y_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    num_tokens: tl.tensor,
    NUM_INPUTS: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    SPLIT_INPUTS: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ADDS: tl.constexpr,
    GROUP_TILES: tl.constexpr,
):
    """Grid ``(tiles of T, tiles of F, S)``. Pointers: x ``[T, E]``; weight ``[F, E]``, or packed with ``GROUP`` inputs
    a group; scales ``[F, G]``, G = 1 if not packed; bias ``[F]`` or none; y ``[T, F]``; partial ``[S, T, F]``, float32,
    in place of y where there are splits."""
    token_tile, output_tile = tl.swizzle2d(
        tl.program_id(0), tl.program_id(1), tl.num_programs(0), tl.num_programs(1), GROUP_TILES
    )
    token_T = token_tile * TOKENS + tl.arange(0, TOKENS)
    output_F = output_tile * OUTPUTS + tl.arange(0, OUTPUTS)
    is_token_T, is_output_F = token_T < num_tokens, output_F < NUM_OUTPUTS
    flat_T, flat_F = token_T.to(tl.int64), output_F.to(tl.int64)
    first = tl.program_id(2) * SPLIT_INPUTS
    end = tl.minimum(first + SPLIT_INPUTS, NUM_INPUTS)
    x_T_ptr = x_ptr + flat_T * NUM_INPUTS
    acc_FT = tl.zeros([OUTPUTS, TOKENS], tl.float32)
    if GROUP is None:
        CHECKED: tl.constexpr = NUM_INPUTS % INPUTS != 0
        for start in tl.range(first, end, INPUTS):
            input_E = start + tl.arange(0, INPUTS)
            is_input_E = input_E < NUM_INPUTS
            is_weight_FE = is_output_F[:, None] & is_input_E[None, :]
            weight_FE = load(
                weight_ptr + flat_F[:, None] * NUM_INPUTS + input_E[None, :],
                is_weight_FE,
                CHECKED or NUM_OUTPUTS % OUTPUTS != 0,
            )
            x_ET = tl.load(x_T_ptr[None, :] + input_E[:, None], mask=is_input_E[:, None] & is_token_T[None, :], other=0)
            acc_FT = tl.dot(weight_FE.to(x_ET.dtype), x_ET, acc_FT, input_precision="ieee")
        acc_FT *= tl.load(scales_ptr + output_F, mask=is_output_F, other=0)[:, None]
    else:
        HALF: tl.constexpr = GROUP // 2
        NUM_GROUPS: tl.constexpr = (NUM_INPUTS + GROUP - 1) // GROUP
        for group in tl.range(first // GROUP, tl.cdiv(end, GROUP)):
            byte_E = tl.arange(0, HALF)
            packed_FE = load(
                weight_ptr + flat_F[:, None] * (NUM_GROUPS * HALF) + (group * HALF + byte_E)[None, :],
                is_output_F[:, None],
                NUM_OUTPUTS % OUTPUTS != 0,
            )
            low_ET = _inputs(x_T_ptr, group * GROUP + byte_E, is_token_T, NUM_INPUTS)
            high_ET = _inputs(x_T_ptr, group * GROUP + HALF + byte_E, is_token_T, NUM_INPUTS)
            # Two's complement: shifted to the byte's end and back, the sign spreads.
            part_FT = tl.dot(((packed_FE << 4) >> 4).to(low_ET.dtype), low_ET, input_precision="ieee")
            part_FT = tl.dot((packed_FE >> 4).to(low_ET.dtype), high_ET, part_FT, input_precision="ieee")
            scale_F = tl.load(scales_ptr + flat_F * NUM_GROUPS + group, mask=is_output_F, other=0)
            acc_FT += part_FT * scale_F[:, None]
    is_result_FT = is_output_F[:, None] & is_token_T[None, :]
    place_FT = flat_T[None, :] * NUM_OUTPUTS + output_F[:, None]
    if partial_ptr is not None:
        split_start = tl.program_id(2).to(tl.int64) * num_tokens * NUM_OUTPUTS
        tl.store(partial_ptr + split_start + place_FT, acc_FT, mask=is_result_FT)
    else:
        if bias_ptr is not None:
            acc_FT += tl.load(bias_ptr + output_F, mask=is_output_F, other=0).to(tl.float32)[:, None]
        if ADDS:
            acc_FT += tl.load(y_ptr + place_FT, mask=is_result_FT, other=0).to(tl.float32)
        tl.store(y_ptr + place_FT, acc_FT.to(y_ptr.dtype.element_ty), mask=is_result_FT)


@triton.jit
def _inputs(x_T_ptr: tl.tensor, input_E: tl.tensor, is_token_T: tl.tensor, NUM_INPUTS: tl.constexpr):
    """``[E, T]`` of x."""
    is_x_ET = (input_E < NUM_INPUTS)[:, None] & is_token_T[None, :]
    return tl.load(x_T_ptr[None, :] + input_E[:, None], mask=is_x_ET, other=0)


@triton.jit
def _sum_kernel(
    partial_ptr: tl.tensor,
    y_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    NUM_OUTPUTS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    ADDS: tl.constexpr,
):
    """Grid ``(T, tiles of F)``; pointers as `_multiply_kernel`."""
    token = tl.program_id(0).to(tl.int64)
    output_F = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_output_F = output_F < NUM_OUTPUTS
    place_F = token * NUM_OUTPUTS + output_F
    split_stride = tl.num_programs(0).to(tl.int64) * NUM_OUTPUTS
    acc_F = tl.zeros([TILE], tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        acc_F += tl.load(partial_ptr + split * split_stride + place_F, mask=is_output_F, other=0)
    if bias_ptr is not None:
        acc_F += tl.load(bias_ptr + output_F, mask=is_output_F, other=0).to(tl.float32)
    if ADDS:
        acc_F += tl.load(y_ptr + place_F, mask=is_output_F, other=0).to(tl.float32)
    tl.store(y_ptr + place_F, acc_F.to(y_ptr.dtype.element_ty), mask=is_output_F)
