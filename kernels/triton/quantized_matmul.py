"""Products with weights of 8 or 4 bits, which are converted on load and multiplied in the activations' dtype, and with
those of experts, float ones too.

Called through `pdserve.kernels.selection`. The weight is the left operand: Hopper's wgmma reads that one from
registers, where it is converted, and a few tokens fill the short side of a tile better than the long one. With few
tokens, memory bounds the product; if the matrix also has few outputs, its inputs are split among programs and a second
kernel adds their partial sums in order: no atomics, and a deterministic result.

Rows of experts come sorted: a tile holds rows of one expert, which its program finds from the starts of all of them.

Zero points are subtracted before the product, where the difference is still an exact integer; scales of a group
multiply its part of the sum. Float8 is converted by the GPU where it can, and by shifting its bits elsewhere.

Target: ``max(bytes / (0.9 bandwidth), 2 T E F / (0.7 peak))`` with ``bytes = F E w``; w is the bytes per weight with
its share of scales and zeros: 1 for int8 per output, 0.53 for int4 in groups of 128. A split adds ``8 T F`` bytes,
which stay in L2.

Shape suffixes: T tokens, E input features, F output features, G groups of inputs, S splits of the inputs, R a run of
inputs, B stored elements of an output, X experts, Y = X + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch.nn.functional import pad

from pdserve.contracts.precision import FLOAT8_CAPABILITY, GROUP_SIZES
from pdserve.kernels.torch.dense import TorchLinear
from pdserve.kernels.triton import configs
from pdserve.kernels.triton.configs import PAIRED_KINDS, MatmulTile, matmul_tile, run_of_pair, split_inputs
from pdserve.kernels.triton.flash import load
from pdserve.kernels.weight_quantisation import GroupedWeight, dequantise, e2m1_codes, exponents, twice_e2m1

_GROUP_TILES = 8
"""Token tiles whose programs run together, so that they find their weights in L2."""
_SUM_TILE = 1024


def pack_linear(
    weight_FE: torch.Tensor | GroupedWeight, bias_F: torch.Tensor | None = None, *, dtype: torch.dtype = torch.float32
) -> TorchLinear | TritonLinear:
    """See `pdserve.kernels.operations.PackLinear`."""
    if isinstance(weight_FE, torch.Tensor):
        return TorchLinear(weight_FE, bias_F)
    return TritonLinear(pack(weight_FE), bias_F, dtype)


class PackedWeight(NamedTuple):
    """A weight as the kernel reads it, or those of experts, whose tensors have an axis before the others."""

    values: torch.Tensor
    """``[F, B]``: int8, float8_e4m3fn or float. For int4 and e2m1 two values a byte, of e2m1 their codes: of every two
    runs of inputs, byte i holds input i of the first in its low bits and of the second in its high bits; zeros pad the
    inputs to whole pairs of runs."""
    scales: torch.Tensor | None
    """float32 ``[F, G]``, or of kind ``e2m1`` their exponents, uint8."""
    zeros: torch.Tensor | None
    """int8 ``[F, G]``."""
    permutation: torch.Tensor | None
    """As in `GroupedWeight`, like ``kind``, which may be ``float``."""
    kind: str
    group: int | None
    """Inputs of a group; ``None``: one for all inputs."""
    num_inputs: int

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self if isinstance(part, torch.Tensor))


def stacked(weights: Sequence[PackedWeight]) -> PackedWeight:
    """Return experts' weights, all of the same form, as one."""
    forms = {tuple(part for part in weight if not isinstance(part, torch.Tensor)) for weight in weights}
    assert len(forms) == 1, forms
    tensors = [name for name, part in weights[0]._asdict().items() if isinstance(part, torch.Tensor)]
    parts: dict[str, Any] = {name: torch.stack([getattr(weight, name) for weight in weights]) for name in tensors}
    return weights[0]._replace(**parts)


def pack(weight: torch.Tensor | GroupedWeight) -> PackedWeight:
    """Pack a float weight, or one whose groups have 32, 64 or 128 inputs, or all, and whose zeros are integers."""
    if isinstance(weight, torch.Tensor):
        return PackedWeight(weight.contiguous(), None, None, None, "float", None, weight.shape[1])
    num_outputs, num_inputs = weight.values.shape
    group = None if weight.group_inputs >= num_inputs else weight.group_inputs
    assert group is None or group in GROUP_SIZES, group
    values, zeros = weight.values.contiguous(), None
    if weight.kind in PAIRED_KINDS:
        values = e2m1_codes(values) if weight.kind == "e2m1" else values
        run = run_of_pair(group)
        low_FGR, high_FGR = pad(values, (0, -num_inputs % (2 * run))).view(num_outputs, -1, 2, run).unbind(2)
        values = (low_FGR & 15 | high_FGR << 4).flatten(1)
    if weight.zeros is not None:
        zeros = weight.zeros.to(torch.int8)
        assert weight.kind in ("int8", "int4")
        assert torch.equal(zeros.float(), weight.zeros)
    scales_FG = exponents(weight.scales) if weight.kind == "e2m1" else weight.scales
    return PackedWeight(values, scales_FG.contiguous(), zeros, weight.permutation, weight.kind, group, num_inputs)


class TritonLinear:
    """Implements `pdserve.kernels.operations.Linear` for a quantised weight."""

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
        return self._weight.num_bytes + (0 if self._bias_F is None else self._bias_F.nbytes)

    def __call__(self, x_TE: torch.Tensor, add_to_TF: torch.Tensor | None = None) -> torch.Tensor:
        return quantized_matmul(x_TE, self._weight, self._bias_F, add_to_TF)

    def rows(self, ids_T: torch.Tensor) -> torch.Tensor:
        weight = self._weight
        assert weight.scales is not None
        values_TE, scales_TG = weight.values[ids_T], weight.scales[ids_T]
        if weight.kind in PAIRED_KINDS:
            bytes_TGR = values_TE.view(len(ids_T), -1, run_of_pair(weight.group))
            values_TE = torch.stack((bytes_TGR << 4 >> 4, bytes_TGR >> 4), dim=2).flatten(1)[:, : weight.num_inputs]
        if weight.kind == "e2m1":
            values_TE, scales_TG = twice_e2m1(values_TE & 15), (scales_TG.int() << 23).view(torch.float32)
        rows = GroupedWeight(
            values_TE,
            scales_TG,
            weight.kind,
            weight.group or weight.num_inputs,
            None if weight.zeros is None else weight.zeros[ids_T].float(),
            weight.permutation,
        )
        return dequantise(rows).to(self._dtype)


def quantized_matmul(
    x_TE: torch.Tensor,
    weight: PackedWeight,
    bias_F: torch.Tensor | None = None,
    add_to_TF: torch.Tensor | None = None,
    *,
    starts_Y: torch.Tensor | None = None,
    tile: MatmulTile | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Compute ``x W^T + b``: ``[T, F]`` in the dtype of ``x_TE``, summed in float32 and rounded once.

    Args:
        x_TE: float32 (computed without TF32), bfloat16 or float16, contiguous.
        bias_F: contiguous, any float dtype; of a weight of experts ``[X, F]``.
        add_to_TF: contiguous, same dtype as ``x_TE``; receives the product in place and is returned.
        starts_Y: of a weight of experts, as in `pdserve.kernels.operations.Experts`.
        tile: by default as in serving; its inputs are those of `matmul_tile` if the weight has groups or four bits.
        num_splits: most splits of the inputs; by default as many as keep the GPU busy.
    """
    x_TE = _in_stored_order(x_TE, weight, starts_Y)
    num_tokens, num_outputs = len(x_TE), weight.values.shape[-2]
    num_experts = 1 if starts_Y is None else len(starts_Y) - 1
    assert x_TE.shape[1] == weight.num_inputs
    assert bias_F is None or bias_F.shape == (weight.values.shape[:-1])
    assert bias_F is None or bias_F.is_contiguous()
    y_TF = x_TE.new_empty((num_tokens, num_outputs)) if add_to_TF is None else add_to_TF
    assert (y_TF.shape, y_TF.dtype) == ((num_tokens, num_outputs), x_TE.dtype)
    assert all(matrix.is_contiguous() for matrix in (x_TE, y_TF, *weight) if isinstance(matrix, torch.Tensor))
    assert weight.values.numel() == num_experts * num_outputs * weight.values.shape[-1]
    serving_tile = matmul_tile(x_TE, weight.kind, weight.group, num_experts)
    tile = tile or serving_tile
    assert tile.inputs == serving_tile.inputs or (weight.group is None and weight.kind not in PAIRED_KINDS)
    num_tiles = triton.cdiv(num_outputs, tile.outputs)
    token_tiles = triton.cdiv(num_tokens, tile.tokens)
    if starts_Y is not None:
        # Each expert's last tile may be short of all rows but one.
        token_tiles = min(num_tokens, (num_tokens + num_experts * (tile.tokens - 1)) // tile.tokens)
        num_splits = 1
    per_split = split_inputs(x_TE.device, num_tokens, num_tiles, weight.num_inputs, tile.inputs, num_splits)
    num_splits = triton.cdiv(weight.num_inputs, per_split)
    partial_STF = None
    if num_splits > 1:
        partial_STF = x_TE.new_empty((num_splits, num_tokens, num_outputs), dtype=torch.float32)
    written = {"bias_ptr": bias_F, "ADDS": add_to_TF is not None, "NUM_OUTPUTS": num_outputs}
    converts = weight.kind != "e4m3" or divmod(configs.compute_capability(x_TE.device), 10) >= FLOAT8_CAPABILITY
    _multiply_kernel[token_tiles, num_tiles, num_splits](
        x_TE,
        weight.values if converts else weight.values.view(torch.int8),
        weight.scales,
        weight.zeros,
        starts_Y,
        y_TF,
        partial_STF,
        num_tokens=num_tokens,
        **written,
        NUM_INPUTS=weight.num_inputs,
        NUM_EXPERTS=num_experts,
        KIND=weight.kind,
        GROUP=weight.group,
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


def _in_stored_order(x_TE: torch.Tensor, weight: PackedWeight, starts_Y: torch.Tensor | None) -> torch.Tensor:
    """Inputs in the order of the values that multiply them, contiguous."""
    if weight.permutation is None:
        return x_TE
    if starts_Y is None:
        return x_TE.index_select(1, weight.permutation)
    row_T = torch.arange(len(x_TE), device=x_TE.device)
    return x_TE.gather(1, weight.permutation[torch.searchsorted(starts_Y[1:-1], row_T, right=True)])


@triton.jit(do_not_specialize=["num_tokens"])
def _multiply_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    y_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    num_tokens: tl.tensor,
    NUM_INPUTS: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    SPLIT_INPUTS: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ADDS: tl.constexpr,
    GROUP_TILES: tl.constexpr,
):
    """Grid ``(tiles of T, tiles of F, S)``. Pointers: x ``[T, E]``; weight, scales and zeros (or none) as in
    `PackedWeight`, float8 as int8 where the GPU does not convert it; starts ``[Y]``, int64, or none; bias ``[F]``,
    or of each expert, or none; y ``[T, F]``; partial ``[S, T, F]``, float32, in place of y where there are splits."""
    token_tile, output_tile = tl.swizzle2d(
        tl.program_id(0), tl.program_id(1), tl.num_programs(0), tl.num_programs(1), GROUP_TILES
    )
    output_F = output_tile * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output_F = output_F < NUM_OUTPUTS
    flat_F = output_F.to(tl.int64)
    if starts_ptr is None:
        token_T = token_tile * TOKENS + tl.arange(0, TOKENS)
        is_token_T = token_T < num_tokens
    else:
        expert, first_token, end_token = _rows_of_tile(starts_ptr, token_tile, NUM_EXPERTS, TOKENS)
        if expert >= NUM_EXPERTS:
            return
        token_T = first_token + tl.arange(0, TOKENS)
        is_token_T = token_T < end_token
        flat_F += expert.to(tl.int64) * NUM_OUTPUTS
    flat_T = token_T.to(tl.int64)
    first = tl.program_id(2) * SPLIT_INPUTS
    end = tl.minimum(first + SPLIT_INPUTS, NUM_INPUTS)
    # A step takes one run of inputs, or the two whose values share bytes.
    RUNS: tl.constexpr = 2 if KIND == "int4" or KIND == "e2m1" else 1
    RUN: tl.constexpr = INPUTS // RUNS
    NUM_BYTES: tl.constexpr = tl.cdiv(NUM_INPUTS, INPUTS) * RUN if RUNS == 2 else NUM_INPUTS
    NUM_GROUPS: tl.constexpr = 1 if GROUP is None else tl.cdiv(NUM_INPUTS, GROUP)
    x_T_ptr, weight_F_ptr, group_F = x_ptr + flat_T * NUM_INPUTS, weight_ptr + flat_F * NUM_BYTES, flat_F * NUM_GROUPS
    acc_FT = tl.zeros([OUTPUTS, TOKENS], tl.float32)
    for step in tl.range(first // INPUTS, tl.cdiv(end, INPUTS)):
        byte_R = step * RUN + tl.arange(0, RUN)
        stored_FR = load(
            weight_F_ptr[:, None] + byte_R[None, :],
            is_output_F[:, None] & (byte_R < NUM_BYTES)[None, :],
            NUM_BYTES % RUN != 0 or NUM_OUTPUTS % OUTPUTS != 0,
        )
        for run in tl.static_range(RUNS):
            input_R = step * INPUTS + run * RUN + tl.arange(0, RUN)
            is_x_RT = (input_R < NUM_INPUTS)[:, None] & is_token_T[None, :]
            x_RT = tl.load(x_T_ptr[None, :] + input_R[:, None], mask=is_x_RT, other=0)
            weight_FR = _values(stored_FR, KIND, run).to(x_RT.dtype)
            group = 0 if GROUP is None else (step * INPUTS + run * RUN) // GROUP
            # The last of two runs may be padding.
            is_group_F = is_output_F if NUM_INPUTS % INPUTS == 0 else is_output_F & (group < NUM_GROUPS)
            if zeros_ptr is not None:
                zero_F = tl.load(zeros_ptr + group_F + group, mask=is_group_F, other=0)
                weight_FR -= zero_F.to(x_RT.dtype)[:, None]
            if GROUP is None:
                acc_FT = tl.dot(weight_FR, x_RT, acc_FT, input_precision="ieee")
            else:
                if run * RUN % GROUP == 0:
                    part_FT = tl.dot(weight_FR, x_RT, input_precision="ieee")
                else:
                    part_FT = tl.dot(weight_FR, x_RT, part_FT, input_precision="ieee")
                if (run + 1) * RUN % GROUP == 0:
                    scale_F = _scales(tl.load(scales_ptr + group_F + group, mask=is_group_F, other=0))
                    acc_FT += part_FT * scale_F[:, None]
    if GROUP is None and scales_ptr is not None:
        acc_FT *= _scales(tl.load(scales_ptr + flat_F, mask=is_output_F, other=0))[:, None]
    is_result_FT = is_output_F[:, None] & is_token_T[None, :]
    place_FT = flat_T[None, :] * NUM_OUTPUTS + output_F[:, None]
    if partial_ptr is not None:
        split_start = tl.program_id(2).to(tl.int64) * num_tokens * NUM_OUTPUTS
        tl.store(partial_ptr + split_start + place_FT, acc_FT, mask=is_result_FT)
    else:
        if bias_ptr is not None:
            acc_FT += tl.load(bias_ptr + flat_F, mask=is_output_F, other=0).to(tl.float32)[:, None]
        if ADDS:
            acc_FT += tl.load(y_ptr + place_FT, mask=is_result_FT, other=0).to(tl.float32)
        tl.store(y_ptr + place_FT, acc_FT.to(y_ptr.dtype.element_ty), mask=is_result_FT)


@triton.jit
def _rows_of_tile(starts_ptr: tl.tensor, tile: tl.tensor, NUM_EXPERTS: tl.constexpr, TOKENS: tl.constexpr):
    """``expert, first, end``: the expert of a tile, ``NUM_EXPERTS`` or more where there is none, its first row, and
    where the expert's rows end. Every expert's rows begin a tile."""
    expert_X = tl.arange(0, triton.next_power_of_2(NUM_EXPERTS))
    is_expert_X = expert_X < NUM_EXPERTS
    start_X = tl.load(starts_ptr + expert_X, mask=is_expert_X, other=0).to(tl.int32)
    end_X = tl.load(starts_ptr + 1 + expert_X, mask=is_expert_X, other=0).to(tl.int32)
    tiles_X = tl.cumsum((end_X - start_X + TOKENS - 1) // TOKENS)
    is_before_X = tiles_X <= tile
    expert = tl.sum(is_before_X.to(tl.int32))
    first_tile = tl.max(tl.where(is_before_X, tiles_X, 0))
    is_own_X = expert_X == expert
    first = tl.sum(tl.where(is_own_X, start_X, 0)) + (tile - first_tile) * TOKENS
    return expert, first, tl.sum(tl.where(is_own_X, end_X, 0))


@triton.jit
def _scales(stored_F: tl.tensor):
    """Scales, also of their exponents."""
    return stored_F if stored_F.dtype == tl.float32 else (stored_F.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _values(stored_FR: tl.tensor, KIND: tl.constexpr, RUN: tl.constexpr):
    """Values of the first or second run of inputs that is stored in these bytes."""
    values_FR = stored_FR
    if KIND == "int4":
        # Two's complement: shifted to the byte's end and back, the sign spreads.
        values_FR = (stored_FR << (4 - 4 * RUN)) >> 4
    elif KIND == "e2m1":
        # Exponent and mantissa are those of a float16 with a bias of 1, not 15; twice the value.
        wide_FR = stored_FR.to(tl.int16)
        bits_FR = ((wide_FR << (9 - 4 * RUN)) & 0x0E00) | ((wide_FR << (12 - 4 * RUN)) & -32768)
        values_FR = bits_FR.to(tl.float16, bitcast=True) * 32768.0
    elif KIND == "e4m3" and not stored_FR.dtype.is_fp8():
        # Its exponent and mantissa are those of a float16 with a bias of 7, not 15; the sign spreads.
        bits_FR = (stored_FR.to(tl.int16) << 7) & -16385
        values_FR = tl.where((stored_FR & 127) == 127, float("nan"), bits_FR.to(tl.float16, bitcast=True) * 256.0)
    return values_FR


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
