"""Repairs of Triton's interpreter, for tests that run kernels without a GPU.

Triton 3.6.0 and 3.7.1 multiply the bit patterns of bfloat16, truncate where a GPU rounds to the nearest even, and lose
carries on the way to float8, and 3.6.0 trips over numpy 2.4; `install` puts that right, through torch. Installed by the
conftest in processes that run with ``TRITON_INTERPRET=1``, before any kernel is imported. Only what our kernels use is
repaired.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

_REPAIRED_VERSIONS = ("3.6.0", "3.7.1")
_TORCH = {
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
}
_BITS = {tl.bfloat16: torch.uint16, tl.float8e4nv: torch.uint8}
"""numpy has none of these: they are held as integers."""
_cast = interpreter.InterpreterBuilder.cast_impl
_binary = interpreter.InterpreterBuilder.binary_op
_dot = interpreter.InterpreterBuilder.create_dot
_patch_tensor = interpreter._patch_lang_tensor
_patch_language = interpreter._patch_lang


def install() -> None:
    """Repair the interpreter of this process."""
    assert triton.__version__ in _REPAIRED_VERSIONS, f"look again at the interpreter of Triton {triton.__version__}"
    builder = interpreter.InterpreterBuilder
    builder.cast_impl, builder.binary_op, builder.create_dot = _repaired_cast, _repaired_binary, _repaired_dot
    builder.create_fp_to_fp = lambda self, source, to, mode: _repaired_cast(self, source, to)
    builder.get_bf16 = lambda self, value: _convert(_handle(np.array([value], np.float32), tl.float32), tl.bfloat16)
    interpreter._patch_lang_tensor = _repaired_patch_tensor
    interpreter._patch_lang = _patch_language_once
    # A GPU does not tell of infinities and NaN.
    np.seterr(all="ignore")


def _handle(data: np.ndarray, dtype: Any) -> Any:
    return interpreter.TensorHandle(data, dtype)


def _convert(source: Any, to: Any) -> Any:
    """Floats of another dtype, rounded to the nearest even; what is out of its range is left to torch."""
    source_dtype, to_dtype = source.dtype.scalar, to.scalar
    given = torch.from_numpy(np.ascontiguousarray(source.data))
    rounded = (given.view(_TORCH[source_dtype]) if source_dtype in _BITS else given).to(_TORCH[to_dtype])
    values = rounded.view(_BITS[to_dtype]).numpy() if to_dtype in _BITS else rounded.numpy()
    return _handle(values.reshape(source.data.shape), to_dtype)


def _repaired_cast(self: Any, source: Any, to: Any) -> Any:
    source_dtype, to_dtype = source.dtype.scalar, to.scalar
    if source_dtype == to_dtype:
        return source
    if source_dtype in _TORCH and to_dtype in _TORCH:
        return _convert(source, to)
    if source_dtype in _BITS:
        return _cast(self, _convert(source, tl.float32), to)
    if to_dtype in _BITS:
        return _convert(_cast(self, source, tl.float32), to)
    return _cast(self, source, to)


def _repaired_binary(self: Any, left: Any, right: Any, operation: Any) -> Any:
    if left.dtype.scalar != tl.bfloat16:
        return _binary(self, left, right, operation)
    result = operation(_convert(left, tl.float32).data, _convert(right, tl.float32).data)
    if result.dtype == np.bool_:
        return _handle(result, tl.int1)
    return _convert(_handle(result.astype(np.float32), tl.float32), tl.bfloat16)


def _repaired_dot(self: Any, left: Any, right: Any, added: Any, precision: Any, max_imprecise: Any) -> Any:
    def widen(operand: Any) -> Any:
        # float16 too, whose products numpy computes slowly.
        return _convert(operand, tl.float32) if operand.dtype.scalar in (tl.bfloat16, tl.float16) else operand

    return _dot(self, widen(left), widen(right), added, precision, max_imprecise)


def _repaired_patch_tensor(tensor: Any, scope: Any) -> None:
    _patch_tensor(tensor, scope)
    # Bounds of loops are arrays of one element, which numpy 2.4 does not take for integers.
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _patch_language_once(kernel: Any) -> Any:
    """Triton does it again for every function that a kernel calls, which took a fifth of the time."""
    languages = [value for value in kernel.__globals__.values() if value is tl or value is tl.core]
    is_patched = languages and not any(tl.core.is_builtin(language.load) for language in languages)
    return interpreter._LangPatchScope() if is_patched else _patch_language(kernel)
