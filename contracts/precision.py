"""The precision of a model: dtypes of weights, activations and KV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pdserve.contracts.codec import one_of
from pdserve.contracts.kv_layout import KV_DTYPE_SETTINGS

QUANTIZATION_SETTINGS = ("auto", "none", "int8", "int4", "fp8")

DTYPES = ("float32", "bfloat16", "float16")

CPU_PRODUCTS = ("auto", "float32")
"""Values of `Precision.cpu_products`."""

GROUP_SIZES = (32, 64, 128)
"""Inputs of an output that may share a scale, if not all do: those for which there are kernels on every device."""
INT4_GROUP_INPUTS = 128
"""Inputs of an output that share a scale with the setting ``int4``."""
FLOAT8_CAPABILITY = (8, 9)
"""Compute capability of Ada, the first NVIDIA generation that converts float8."""

Dtype = Annotated[str, one_of(*DTYPES)]
DtypeSetting = Annotated[str, one_of("auto", *DTYPES)]
KvDtype = Annotated[str, one_of(*KV_DTYPE_SETTINGS)]
Quantization = Annotated[str, one_of(*QUANTIZATION_SETTINGS)]
CpuProducts = Annotated[str, one_of(*CPU_PRODUCTS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Shared by all workers of a deployment."""

    dtype: Dtype = "float32"
    """Weights and activations."""
    kv_dtype: KvDtype = "auto"
    """``auto``, which is ``dtype``, or ``int8`` or ``float8_e4m3fn``: about a fourth of float32's memory, and a little
    less accurate. ``float8_e4m3fn`` is for GPUs; on CPUs plain torch attends to it, slowly."""
    quantization: Quantization = "auto"
    """``auto``: matrices of the layers as the checkpoint has them. Or how those in 16 or 32 bits are held: ``none``, as
    they are; ``int8``, with one scale per output; ``int4``, with one per output and group of 128 inputs. ``fp8``, with
    one scale per output, is for planning: no engine of ours computes with it."""
    cpu_products: CpuProducts = "auto"
    """What matrices of a bfloat16 model are multiplied in on CPUs: ``auto``, bfloat16 with sums in float32 where the
    CPU has instructions for it (AVX-512 BF16), else ``float32``; or ``float32``, so that all CPUs compute alike, those
    with such instructions at half the speed."""
