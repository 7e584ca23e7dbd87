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

import torch
import triton
import triton.language as tl

from pdserve.kernels.torch.dense import TorchLinear
from pdserve.kernels.triton.configs import MatmulTile, matmul_tile, split_inputs
from pdserve.kernels.triton.flash import load
from pdserve.kernels.weight_quantisation import (
    GROUP_INPUTS,
    Int4Weight,
    QuantisedWeight,
    dequantise_int4,
    kept_inputs,
    quantise_int4,
    quantise_int8,
)

_GROUP_TILES = 8
"""Token tiles whose programs run together, so that they find their weights in L2."""
_SUM_TILE = 1024


def pack_linear(
    weight_FE: torch.Tensor,
    bias_F: torch.Tensor | None = None,
    quantization: str = "none",
    inputs: range | None = None,
) -> TorchLinear | TritonLinear:
    """See `pdserve.kernels.operations.PackLinear`."""
    match quantization:
        case "int8":
            return TritonLinear(quantise_int8(weight_FE, inputs), bias_F, weight_FE.dtype)
        case "int4":
            return TritonLinear(quantise_int4(weight_FE, inputs), bias_F, weight_FE.dtype)
        case "none":
            return TorchLinear(kept_inputs(weight_FE, inputs), bias_F)
    raise AssertionError(f"quantization {quantization!r} got past the configuration")


class TritonLinear:
    """Implements `pdserve.kernels.operations.Linear` for an int8 or int4 weight."""

    def __init__(self, weight: QuantisedWeight | Int4Weight, bias_F: torch.Tensor | None, dtype: torch.dtype) -> None:
        """
        Args:
            dtype: dtype of the activations.
        """
        self._weight = weight
        self._bias_F = bias_F
        self._dtype = dtype

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in (*self._weight, self._bias_F) if isinstance(part, torch.Tensor))

    def __call__(self, x_TE: torch.Tensor, add_to_TF: torch.Tensor | None = None) -> torch.Tensor:
        return quantized_matmul(x_TE, self._weight, self._bias_F, add_to_TF)

    def rows(self, ids_T: torch.Tensor) -> torch.Tensor:
        weight = self._weight
        if isinstance(weight, Int4Weight):
            some = weight._replace(packed=weight.packed[ids_T], scales=weight.scales[ids_T])
            return dequantise_int4(some).to(self._dtype)
        return (weight.values[ids_T] * weight.scales[ids_T, None]).to(self._dtype)


def quantized_matmul(
    x_TE: torch.Tensor,
    weight: QuantisedWeight | Int4Weight,
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
    values = weight.packed if isinstance(weight, Int4Weight) else weight.values
    num_outputs = len(values)
    assert num_inputs == (weight.num_inputs if isinstance(weight, Int4Weight) else values.shape[1])
    assert bias_F is None or bias_F.shape == (num_outputs,)
    y_TF = x_TE.new_empty((num_tokens, num_outputs)) if add_to_TF is None else add_to_TF
    assert (y_TF.shape, y_TF.dtype) == ((num_tokens, num_outputs), x_TE.dtype)
    assert all(matrix.is_contiguous() for matrix in (x_TE, y_TF, values, weight.scales))
    tile = tile or matmul_tile(x_TE, is_int4=isinstance(weight, Int4Weight))
    assert tile.inputs == GROUP_INPUTS or not isinstance(weight, Int4Weight)
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
        GROUP=GROUP_INPUTS if isinstance(weight, Int4Weight) else None,
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
    a group; scales ``[F]`` or ``[F, G]``; bias ``[F]`` or none; y ``[T, F]``; partial ``[S, T, F]``, float32, in place
    of y where there are splits."""
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
