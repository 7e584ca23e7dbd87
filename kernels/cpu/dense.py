"""C++ linear layers, RMS norm and gate, called through ctypes. Arguments are asserted here; C++ checks nothing.

`pdserve.kernels.selection` chooses them; `pdserve.kernels.cpu.build` compiles dense.cpp and pointwise.cpp. Activations
are float32; weights keep the checkpoint's dtype or become int8 or int4. A row's result depends on neither the other
rows nor the number of threads (`pdserve.kernels.cpu.threads`).

Shape suffixes: T tokens, E input features, F output features, I = F / 2, P panels, W outputs of a panel, L = W / 2, G
groups of inputs.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64, c_void_p
from functools import cache
from typing import Any, NamedTuple

import torch

from pdserve.kernels.cpu.build import kernel
from pdserve.kernels.weight_quantisation import GROUP_INPUTS, GroupedWeight

# As declared in those.
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
_INT4_KIND = 4
_GATE = (c_void_p, c_void_p, c_int64, c_int64)
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "dense_panel_width": (),
    "dense_multiply": (c_void_p, c_void_p, c_void_p, c_int64, c_int64),
    "dense_rows": (c_void_p, c_void_p, c_int64, c_void_p),
    "dense_rms_normalise": (c_void_p, c_void_p, c_float, c_void_p, c_int64, c_int64),
    "dense_gate_silu": _GATE,
    "dense_gate_gelu_tanh": _GATE,
}


class _Weight(ctypes.Structure):
    """Mirrors ``struct Weight`` of dense.cpp."""

    _fields_ = (
        ("kind", c_int64),
        ("num_outputs", c_int64),
        ("num_inputs", c_int64),
        ("panels", c_void_p),
        ("scales", c_void_p),
        ("group_scales", c_void_p),
        ("bias", c_void_p),
    )


class _Held(NamedTuple):
    """A packed weight in the layout of dense.cpp."""

    kind: int
    panels: torch.Tensor
    """``[P, E, W]``; ``[P, E, L]`` for int4."""
    scales: torch.Tensor | None = None
    """``[F]``."""
    group_scales: torch.Tensor | None = None
    """``[P, G, W]``."""


def pack_linear(
    weight_FE: torch.Tensor | GroupedWeight, bias_F: torch.Tensor | None = None, *, dtype: torch.dtype = torch.float32
) -> CpuLinear:
    """See `pdserve.kernels.operations.PackLinear`."""
    if isinstance(weight_FE, GroupedWeight):
        return CpuLinear(_hold(weight_FE), weight_FE.values.shape, bias_F)
    return CpuLinear(_Held(_KINDS[weight_FE.dtype], _pack(weight_FE)), weight_FE.shape, bias_F)


def _hold(weight: GroupedWeight) -> _Held:
    assert weight.zeros is None
    assert weight.permutation is None
    if weight.kind == "int8":
        assert weight.scales.shape[1] == 1
        return _Held(_KINDS[torch.int8], _pack(weight.values), scales=weight.scales.flatten())
    assert (weight.kind, weight.group_inputs) == ("int4", GROUP_INPUTS)
    low_PEL, high_PEL = _pack(weight.values).chunk(2, dim=-1)
    low_PGL, high_PGL = _pack(weight.scales).chunk(2, dim=-1)
    scales_PGW = torch.cat((low_PGL / 2**28, high_PGL / 16), dim=-1)
    return _Held(_INT4_KIND, low_PEL + 16 * high_PEL, group_scales=scales_PGW)


class CpuLinear:
    """Implements `pdserve.kernels.operations.Linear` for float32 activations."""

    def __init__(self, held: _Held, shape_FE: torch.Size, bias_F: torch.Tensor | None) -> None:
        num_outputs, num_inputs = shape_FE
        assert bias_F is None or bias_F.shape == (num_outputs,)
        self._num_outputs, self._num_inputs = num_outputs, num_inputs
        self._held = held
        self._bias_F = None if bias_F is None else bias_F.float()
        struct = _Weight(
            held.kind,
            num_outputs,
            num_inputs,
            held.panels.data_ptr(),
            *(None if scales is None else scales.data_ptr() for scales in (held.scales, held.group_scales)),
            None if self._bias_F is None else self._bias_F.data_ptr(),
        )
        self._struct = ctypes.byref(struct)
        self._multiply, self._rows = _function("dense_multiply"), _function("dense_rows")

    @property
    def num_bytes(self) -> int:
        parts = (self._held.panels, self._held.scales, self._held.group_scales, self._bias_F)
        return sum(part.nbytes for part in parts if part is not None)

    def __call__(self, x_TE: torch.Tensor, add_to_TF: torch.Tensor | None = None) -> torch.Tensor:
        num_rows, num_inputs = x_TE.shape
        assert num_inputs == self._num_inputs
        _assert_float32(x_TE)
        if add_to_TF is None:
            y_TF, adds = torch.empty(num_rows, self._num_outputs), 0
        else:
            y_TF, adds = add_to_TF, 1
            assert y_TF.shape == (num_rows, self._num_outputs)
            _assert_float32(y_TF)
        self._multiply(self._struct, x_TE.data_ptr(), y_TF.data_ptr(), num_rows, adds)
        return y_TF

    def rows(self, ids_T: torch.Tensor) -> torch.Tensor:
        assert ids_T.dtype == torch.int64
        assert ids_T.is_contiguous()
        rows_TE = torch.empty(len(ids_T), self._num_inputs)
        self._rows(self._struct, ids_T.data_ptr(), len(ids_T), rows_TE.data_ptr())
        return rows_TE


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
    panels_PEW = torch.zeros(num_whole + (num_left > 0), num_inputs, width, dtype=weight_FE.dtype)
    whole_FE, left_FE = weight_FE.split_with_sizes([num_whole * width, num_left])
    panels_PEW[:num_whole] = whole_FE.reshape(num_whole, width, num_inputs).transpose(1, 2)
    if num_left:
        panels_PEW[-1, :, :num_left] = left_FE.T
    if weight_FE.dtype == torch.bfloat16:
        halves_PE2L = panels_PEW.view(-1, num_inputs, 2, width // 2)
        panels_PEW = halves_PE2L.transpose(2, 3).reshape(-1, num_inputs, width)
    return panels_PEW


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
