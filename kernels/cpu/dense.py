"""C++ linear layers, experts, norm and gate, called through ctypes. Arguments are asserted here; C++ checks nothing.

`pdserve.kernels.selection` chooses them; `pdserve.kernels.cpu.build` compiles dense.cpp and pointwise.cpp. Activations
are float32; weights keep the checkpoint's dtype or are quantised. A row's result depends on neither the other rows nor
the number of threads (`pdserve.kernels.cpu.threads`).

Shape suffixes: T tokens, E input features, F output features, I = F / 2, P panels, W outputs of a panel, L = W / 2, G
groups of inputs, B blocks of inputs, K experts of a token, Y experts and one. Of rows, P are pairs of a token and an
expert.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from ctypes import c_float, c_int64, c_void_p
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from pdserve.kernels.cpu.build import kernel
from pdserve.kernels.weight_quantisation import GroupedWeight, e2m1_codes, exponents

# As declared in those.
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_QUANTISED_KINDS = {"int8": 3, "int4": 4, "e4m3": 5, "e2m1": 6}
_FIRST_OF_PAIRS = 7
_MAX_DEPTH = 256
_GATE = (c_void_p, c_void_p, c_int64, c_int64)
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "dense_panel_width": (),
    "dense_multiplies_bfloat16": (),
    "dense_multiply": (c_void_p, c_void_p, c_void_p, c_int64, c_int64),
    "dense_multiply_grouped": (c_void_p, c_int64, c_void_p, c_void_p, c_void_p),
    "dense_combine": (c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64),
    "dense_rows": (c_void_p, c_void_p, c_int64, c_void_p),
    "dense_rms_normalise": (c_void_p, c_void_p, c_float, c_void_p, c_int64, c_int64),
    "dense_gate_silu": _GATE,
    "dense_gate_gelu_tanh": _GATE,
    "dense_gate_swiglu_oai": _GATE,
}


class _Weight(ctypes.Structure):
    """Mirrors ``struct Weight`` of dense.cpp."""

    _fields_ = (
        ("kind", c_int64),
        ("num_outputs", c_int64),
        ("num_inputs", c_int64),
        ("depth", c_int64),
        ("num_scales", c_int64),
        ("panels", c_void_p),
        ("scales", c_void_p),
        ("block_scales", c_void_p),
        ("block_exponents", c_void_p),
        ("zeros", c_void_p),
        ("bias", c_void_p),
    )


class _Held(NamedTuple):
    """A packed weight in the layout of dense.cpp."""

    kind: int
    panels: torch.Tensor
    """``[P, E, W]``; ``[P, E, L]`` for int4 and e2m1. In pairs of inputs ``[P, S, W, 2]`` and ``[P, S, L, 2]``."""
    depth: int = _MAX_DEPTH
    """Inputs of a block."""
    scales: torch.Tensor | None = None
    """``[P, 1, W]``."""
    block_scales: torch.Tensor | None = None
    """``[P, B, W]``, or of one block for all."""
    block_exponents: torch.Tensor | None = None
    """uint8 ``[P, B, W]``: of scales that are powers of two, in their place."""
    zeros: torch.Tensor | None = None
    """int8, as ``block_scales``."""
    permutation: torch.Tensor | None = None
    """Inputs in the order of the panels: ``[E]``."""


def pack_linear(
    weight_FE: torch.Tensor | GroupedWeight, bias_F: torch.Tensor | None = None, *, dtype: torch.dtype = torch.float32
) -> CpuLinear:
    """See `pdserve.kernels.operations.PackLinear`. Products in bfloat16 sum in float32."""
    in_pairs = dtype == torch.bfloat16 and multiplies_bfloat16()
    if isinstance(weight_FE, GroupedWeight):
        return CpuLinear(_hold(weight_FE, in_pairs), weight_FE.values.shape, bias_F)
    kind = _KINDS[weight_FE.dtype]
    if weight_FE.dtype == torch.bfloat16 and in_pairs:
        return CpuLinear(_Held(kind + _FIRST_OF_PAIRS, _pack_pairs(weight_FE)), weight_FE.shape, bias_F)
    panels = _pack(weight_FE)
    if weight_FE.dtype == torch.bfloat16:
        panels = _halves_in_turns(panels)
    return CpuLinear(_Held(kind, panels), weight_FE.shape, bias_F)


@cache
def multiplies_bfloat16() -> bool:
    """Report whether this CPU multiplies pairs of bfloat16 (AVX-512 BF16)."""
    function = _function("dense_multiplies_bfloat16")
    function.restype = c_int64
    return bool(function())


def _hold(weight: GroupedWeight, in_pairs: bool) -> _Held:
    kind, permutation = _QUANTISED_KINDS[weight.kind], weight.permutation
    scales_FG, num_inputs = weight.scales, weight.values.shape[1]
    size, depth = min(weight.group_inputs, num_inputs), _MAX_DEPTH
    if size < num_inputs:  # As much of a group as a block has room for.
        depth = max(depth for depth in range(1, _MAX_DEPTH + 1) if size % depth == 0)
    in_pairs &= depth % 2 == 0
    kind += in_pairs * _FIRST_OF_PAIRS
    values_FE = weight.values.view(torch.int8)
    if weight.kind == "e2m1":
        values_FE = e2m1_codes(values_FE)
    panels = _pack_pairs(values_FE) if in_pairs else _pack(values_FE)
    if weight.kind in ("int4", "e2m1"):
        low, high = panels.chunk(2, dim=2)
        if weight.kind == "int4":
            low = low & 15 if in_pairs else low + 8
        panels = low | high << 4
    if weight.kind == "e4m3":
        scales_FG = torch.where(_has_nan(weight), torch.nan, scales_FG) * 2**8
    assert weight.zeros is None or weight.kind in ("int8", "int4")

    def packed(scales_FB: torch.Tensor) -> torch.Tensor:
        scales_PBW = _pack(scales_FB)
        if weight.kind == "int4" and not in_pairs:
            scales_PBW[..., _panel_width() // 2 :] /= 16
        return scales_PBW

    if scales_FG.shape[1] == 1 and weight.zeros is None:
        return _Held(kind, panels, scales=packed(scales_FG), permutation=permutation)

    def of_blocks(groups_FG: torch.Tensor) -> torch.Tensor:
        if size == num_inputs:
            return groups_FG
        return groups_FG.repeat_interleave(-(-size // depth), dim=1)[:, : -(-num_inputs // depth)]

    if weight.kind == "e2m1":
        of_groups_PBW = _pack(of_blocks(exponents(scales_FG)))
        return _Held(kind, panels, depth, block_exponents=of_groups_PBW, permutation=permutation)
    zeros = None
    if weight.zeros is not None:
        zeros = _pack(of_blocks(weight.zeros).to(torch.int8))
        assert torch.equal(weight.zeros.to(torch.int8).float(), weight.zeros)
    return _Held(kind, panels, depth, block_scales=packed(of_blocks(scales_FG)), zeros=zeros, permutation=permutation)


def _has_nan(weight: GroupedWeight) -> torch.Tensor:
    """Which groups have a NaN of e4m3: ``[F, G]``."""
    (num_outputs, num_inputs), is_nan_FE = weight.values.shape, weight.values.view(torch.int8) & 127 == 127
    size = min(weight.group_inputs, num_inputs)
    return pad(is_nan_FE, (0, -num_inputs % size)).view(num_outputs, -1, size).any(dim=-1)


class CpuLinear:
    """Implements `pdserve.kernels.operations.Linear` for float32 activations."""

    def __init__(self, held: _Held, shape_FE: torch.Size, bias_F: torch.Tensor | None) -> None:
        num_outputs, num_inputs = shape_FE
        assert bias_F is None or bias_F.shape == (num_outputs,)
        self._num_outputs, self._num_inputs = num_outputs, num_inputs
        self._held = held
        self._bias_F = None if bias_F is None else bias_F.float()
        self.weight = _Weight(
            held.kind,
            num_outputs,
            num_inputs,
            held.depth,
            next((each.shape[1] for each in (held.block_scales, held.block_exponents) if each is not None), 1),
            held.panels.data_ptr(),
            *(
                None if part is None else part.data_ptr()
                for part in (held.scales, held.block_scales, held.block_exponents, held.zeros, self._bias_F)
            ),
        )
        self._struct = ctypes.byref(self.weight)
        self._multiply, self._rows = _function("dense_multiply"), _function("dense_rows")

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in (*self._held, self._bias_F) if isinstance(part, torch.Tensor))

    def __call__(self, x_TE: torch.Tensor, add_to_TF: torch.Tensor | None = None) -> torch.Tensor:
        num_rows, num_inputs = x_TE.shape
        assert num_inputs == self._num_inputs
        x_TE = self.permuted(x_TE)
        _assert_float32(x_TE)
        if add_to_TF is None:
            y_TF, adds = torch.empty(num_rows, self._num_outputs), 0
        else:
            y_TF, adds = add_to_TF, 1
            assert y_TF.shape == (num_rows, self._num_outputs)
            _assert_float32(y_TF)
        self._multiply(self._struct, x_TE.data_ptr(), y_TF.data_ptr(), num_rows, adds)
        return y_TF

    def parts(self) -> list[dict[str, Any]]:
        """Whatever makes up the weight, for `of_parts`."""
        return [
            {
                **self._held._asdict(),
                "num_outputs": self._num_outputs,
                "num_inputs": self._num_inputs,
                "bias": self._bias_F,
            }
        ]

    @classmethod
    def of_parts(cls, parts: Sequence[Mapping[str, Any]]) -> CpuLinear:
        (part,) = parts
        held = {name: part[name] for name in _Held._fields}
        return cls(_Held(**held), torch.Size((part["num_outputs"], part["num_inputs"])), part["bias"])

    @property
    def form(self) -> tuple[object, ...]:
        """What C++ and `CpuExperts` take to be the same of a layer's experts."""
        held = self._held
        return (held.kind, held.depth, self._num_outputs, self._num_inputs, held.zeros is None, self.is_permuted)

    @property
    def is_permuted(self) -> bool:
        return self._held.permutation is not None

    def permuted(self, x_TE: torch.Tensor) -> torch.Tensor:
        """Inputs in the order in which the weight has them."""
        return x_TE if self._held.permutation is None else x_TE.index_select(1, self._held.permutation)

    def rows(self, ids_T: torch.Tensor) -> torch.Tensor:
        assert ids_T.dtype == torch.int64
        assert ids_T.is_contiguous()
        rows_TE = torch.empty(len(ids_T), self._num_inputs)
        self._rows(self._struct, ids_T.data_ptr(), len(ids_T), rows_TE.data_ptr())
        if self._held.permutation is None:
            return rows_TE
        return torch.empty_like(rows_TE).index_copy_(1, self._held.permutation, rows_TE)


def pack_experts(
    weights: Iterable[torch.Tensor | GroupedWeight],
    biases_XF: torch.Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> CpuExperts:
    """See `pdserve.kernels.operations.PackExperts`."""
    return CpuExperts(
        [
            pack_linear(weight, None if biases_XF is None else biases_XF[index], dtype=dtype)
            for index, weight in enumerate(weights)
        ]
    )


class CpuExperts:
    """Implements `pdserve.kernels.operations.Experts`: all products in one round of the threads."""

    def __init__(self, linears: Sequence[CpuLinear]) -> None:
        assert len({linear.form for linear in linears}) == 1
        self._linears = linears
        self._weights = (_Weight * len(linears))(*(linear.weight for linear in linears))
        self._multiply = _function("dense_multiply_grouped")

    @property
    def num_bytes(self) -> int:
        return sum(linear.num_bytes for linear in self._linears)

    def parts(self) -> list[dict[str, Any]]:
        """Whatever makes up the weights, for `of_parts`."""
        return [part for linear in self._linears for part in linear.parts()]

    @classmethod
    def of_parts(cls, parts: Sequence[Mapping[str, Any]]) -> CpuExperts:
        return cls([CpuLinear.of_parts([part]) for part in parts])

    def __call__(self, x_PE: torch.Tensor, starts_Y: torch.Tensor) -> torch.Tensor:
        assert starts_Y.dtype == torch.int64
        assert starts_Y.shape == (len(self._linears) + 1,)
        assert x_PE.shape[1] == self._weights[0].num_inputs
        y_PF = torch.empty(len(x_PE), self._weights[0].num_outputs)
        if self._linears[0].is_permuted:
            bounds = zip(self._linears, pairwise(starts_Y.tolist()), strict=True)
            x_PE = torch.cat([linear.permuted(x_PE[start:end]) for linear, (start, end) in bounds])
        _assert_float32(x_PE)
        starts_Y = starts_Y.contiguous()
        self._multiply(self._weights, len(self._linears), starts_Y.data_ptr(), x_PE.data_ptr(), y_PF.data_ptr())
        return y_PF


def combine(y_PE: torch.Tensor, places_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """See `pdserve.kernels.operations.Combine`."""
    (num_rows, num_slots), width = places_TK.shape, y_PE.shape[1]
    assert weights_TK.shape == places_TK.shape
    assert places_TK.dtype == torch.int64
    assert places_TK.is_contiguous()
    _assert_float32(y_PE)
    _assert_float32(weights_TK)
    sum_TE = torch.empty(num_rows, width)
    pointers = (tensor.data_ptr() for tensor in (y_PE, places_TK, weights_TK, sum_TE))
    _function("dense_combine")(*pointers, num_rows, num_slots, width)
    return sum_TE


def rms_normalise(x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
    """See `pdserve.kernels.operations.RmsNormalise`."""
    num_rows, width = x_TE.shape
    assert weight_E.shape == (width,)
    _assert_float32(x_TE)
    _assert_float32(weight_E)
    y_TE = torch.empty(num_rows, width)
    _function("dense_rms_normalise")(x_TE.data_ptr(), weight_E.data_ptr(), eps, y_TE.data_ptr(), num_rows, width)
    return y_TE


def gate(gate_up_TF: torch.Tensor, activation: str) -> torch.Tensor:
    """See `pdserve.kernels.operations.Gate`."""
    num_rows, both_widths = gate_up_TF.shape
    assert both_widths % 2 == 0
    _assert_float32(gate_up_TF)
    gated_TI = torch.empty(num_rows, both_widths // 2)
    _function(f"dense_gate_{activation}")(gate_up_TF.data_ptr(), gated_TI.data_ptr(), num_rows, both_widths // 2)
    return gated_TI


def _pack(weight_FE: torch.Tensor) -> torch.Tensor:
    """Lay the weight out as panels ``[P, E, W]`` of dense.cpp; zeros pad the last panel."""
    (num_outputs, num_inputs), width = weight_FE.shape, _panel_width()
    num_whole, num_left = divmod(num_outputs, width)
    panels_PEW = torch.empty(num_whole + (num_left > 0), num_inputs, width, dtype=weight_FE.dtype)
    whole_FE, left_FE = weight_FE.split_with_sizes([num_whole * width, num_left])
    panels_PEW[:num_whole] = whole_FE.reshape(num_whole, width, num_inputs).transpose(1, 2)
    if num_left:
        panels_PEW[-1, :, :num_left] = left_FE.T
        panels_PEW[-1, :, num_left:] = 0
    return panels_PEW


def _halves_in_turns(panels_PEW: torch.Tensor) -> torch.Tensor:
    """Outputs in the order 0, L, 1, L + 1 ..., as the float32 products of bfloat16 have them."""
    num_panels, num_inputs, width = panels_PEW.shape
    return panels_PEW.view(num_panels, num_inputs, 2, width // 2).transpose(2, 3).reshape(panels_PEW.shape)


def _pack_pairs(weight_FE: torch.Tensor) -> torch.Tensor:
    """`_pack` with inputs in pairs: ``[P, S, W, 2]`` with S = E / 2; zeros pad the last one."""
    num_inputs, pair = weight_FE.shape[1], {1: torch.int16, 2: torch.int32}[weight_FE.itemsize]
    even_FE = pad(weight_FE, (0, num_inputs % 2)) if num_inputs % 2 else weight_FE.contiguous()
    return _pack(even_FE.view(pair))[..., None].view(weight_FE.dtype)


@cache
def _panel_width() -> int:
    function = _function("dense_panel_width")
    function.restype = c_int64
    return int(function())


def _assert_float32(tensor: torch.Tensor) -> None:
    assert tensor.dtype == torch.float32
    assert tensor.is_contiguous()


@cache
def _function(name: str) -> Any:
    return kernel(name, *_ARGUMENTS[name])
