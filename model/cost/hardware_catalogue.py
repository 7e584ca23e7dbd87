"""GPU figures in data-sheet units, with sources. A table that `pdserve.model.cost.hardware` reads.

Peak rates are dense; NVIDIA's sheets list twice that for tensor cores, with sparsity. A gigabyte of memory counts as
10^9 bytes; devices have a few per cent more. Link figures are one direction, half of the sheets' totals.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Kernels(NamedTuple):
    """Kernel efficiencies and overheads on a device."""

    compute: tuple[tuple[int, float], ...]
    """(tokens of a step, share of the peak)."""
    prefill_attention: tuple[tuple[int, float], ...]
    """(new tokens of a row, share of the peak)."""
    memory: float
    """Share of the bandwidth that weight reads reach."""
    decode_attention: float
    """Share of the bandwidth that KV reads reach."""
    layer_overhead_us: float
    sources: Mapping[str, str]
    """Keyed by field of `pdserve.model.cost.hardware.Hardware`."""


_ESTIMATE = "estimate, not measured"
KERNEL_TIMES = "kernel times on {} published in aiconfigurator-core 0.12.0 (Apache-2.0)"
"""The files ``gemm_perf``, ``generation_attention_perf``, ``context_attention_perf`` and ``custom_allreduce_perf`` of
vLLM 0.24.0 on H100 and 0.14.0 on A100."""
_H100_TIMES, _A100_TIMES = KERNEL_TIMES.format("H100 SXM"), KERNEL_TIMES.format("A100 SXM")
_SMALL_KERNELS = "small kernels of a layer by Vidur's profile (MIT)"
_HOPPER = Kernels(
    compute=((32, 0.27), (128, 0.35), (256, 0.56), (512, 0.77), (2048, 0.8)),
    prefill_attention=((128, 0.15), (512, 0.3), (2048, 0.45), (8192, 0.6)),
    memory=0.88,
    decode_attention=0.85,
    layer_overhead_us=44,
    sources={
        "compute_efficiency": f"fitted to 12,000 {_H100_TIMES}, bfloat16: 7 % off on average",
        "prefill_attention_efficiency": f"64 heads, less 12 us a kernel: {_H100_TIMES}",
        "memory_efficiency": f"as compute_efficiency: {_H100_TIMES}",
        "decode_attention_efficiency": f"between large and middle batches, less 12 us a kernel: {_H100_TIMES}",
        "layer_overhead_s": (
            f"4 products with 4.2 us each besides arithmetic and reads and 12 us of attention: {_H100_TIMES}; 15 us of "
            f"{_SMALL_KERNELS}"
        ),
    },
)
_AMPERE = Kernels(
    compute=((32, 0.2), (128, 0.43), (256, 0.64), (512, 0.71), (2048, 0.8), (8192, 0.84)),
    prefill_attention=((128, 0.12), (512, 0.27), (2048, 0.48), (8192, 0.57)),
    memory=0.75,
    decode_attention=0.7,
    layer_overhead_us=62,
    sources={
        "compute_efficiency": f"fitted to 7,000 {_A100_TIMES}, bfloat16: 8 % off on average",
        "prefill_attention_efficiency": f"64 heads, less 12 us a kernel: {_A100_TIMES}",
        "memory_efficiency": f"as compute_efficiency: {_A100_TIMES}",
        "decode_attention_efficiency": f"fitted: {_A100_TIMES}",
        "layer_overhead_s": (
            f"4 products with 6 us each besides arithmetic and reads and 18 us of attention: {_A100_TIMES}; 20 us of "
            f"{_SMALL_KERNELS}"
        ),
    },
)
_OTHER = Kernels(
    compute=((32, 0.2), (128, 0.35), (256, 0.5), (512, 0.6), (2048, 0.7)),
    prefill_attention=((128, 0.15), (512, 0.25), (2048, 0.4), (8192, 0.5)),
    memory=0.85,
    decode_attention=0.65,
    layer_overhead_us=50,
    sources={
        "compute_efficiency": f"{_ESTIMATE}: somewhat less than of the A100 and the H100",
        "prefill_attention_efficiency": _ESTIMATE,
        "memory_efficiency": _ESTIMATE,
        "decode_attention_efficiency": _ESTIMATE,
        "layer_overhead_s": f"{_ESTIMATE}: between those of the H100 and the A100",
    },
)


STEP_OVERHEAD_S, RANKS_OVERHEAD_S, ROW_OVERHEAD_S = 260e-6, 1000e-6, 11e-6
"""Host costs with CUDA graphs: fields of `pdserve.model.cost.hardware.Hardware`."""
HOST_COSTS_SOURCE = (
    "not measured, since pdserve has not run on a GPU yet: vLLM's, fitted on 2026-11-24 by pdserve.bench.cost_check to "
    "five open-loop runs of vLLM 0.15.1 on H100 (7B to 70B, 1 and 4 ranks) published by inference-sim"
)


def _lambda(usd_per_hour: float, offer: str) -> tuple[float, str]:
    return usd_per_hour, f"Lambda on-demand, {offer}, lambda.ai/instances as read on 2026-09-20"


_NO_PRICE = (None, "no list price known; give one in a hardware file")


class Gpu(NamedTuple):
    """One row of the catalogue."""

    name: str
    float32_tflops: float
    half_tflops: float
    """bfloat16 and float16."""
    float8_tflops: float
    """0 without float8 units."""
    int8_tops: float
    memory_gb: float
    memory_gb_per_s: float
    link_gb_per_s: float
    link: str
    """Source of the link figure."""
    host_gb_per_s: float
    network_gb_per_s: float
    network: str
    """Source of the network figure."""
    sheet: str
    """Source of arithmetic, memory and host link."""
    kernels: Kernels
    usd_per_hour: float | None
    price_source: str
    pair_gb_per_s: float = 0.0
    """Part of the link figure between one pair of devices; 0 for all of it."""


_NVLINK_3, _NVLINK_4 = "NVLink 600 GB/s, both directions together", "NVLink 900 GB/s, both directions together"
_PCIE_4, _PCIE_5 = "PCIe Gen4 x16, 64 GB/s both directions together", "PCIe Gen5 x16, 128 GB/s both directions together"
_BRIDGE_4, _BRIDGE = (f"{pcie}; a bridge, where there is one, joins pairs only" for pcie in (_PCIE_4, _PCIE_5))
_DGX_A100, _DGX_H100 = "DGX A100: one 200 Gb/s adapter per GPU", "DGX H100: one 400 Gb/s adapter per GPU"
_ASSUMED = "assumed: one 100 Gb/s adapter for two GPUs"
_AMD_LINKS = "Infinity Fabric: 7 links of 128 GB/s, both directions together; between one pair of devices 64 GB/s"

# fmt: off
_ROWS = (
    #   name            fp32   half    fp8    int8   GB   GB/s  link        host  network          sheet and price
    Gpu("a100-40gb-sxm", 19.5, 312, 0, 624, 40, 1555, 300, _NVLINK_3, 32, 25, _DGX_A100,
        "NVIDIA A100 data sheet, SXM", _AMPERE, *_lambda(1.99, "8x A100 SXM 40 GB")),
    Gpu("a100-80gb-sxm", 19.5, 312, 0, 624, 80, 2039, 300, _NVLINK_3, 32, 25, _DGX_A100,
        "NVIDIA A100 data sheet, SXM", _AMPERE, *_lambda(2.79, "8x A100 SXM 80 GB")),
    Gpu("a100-40gb-pcie", 19.5, 312, 0, 624, 40, 1555, 32, _BRIDGE_4, 32, 6.25, _ASSUMED,
        "NVIDIA A100 data sheet, PCIe", _AMPERE, *_NO_PRICE),
    Gpu("a100-80gb-pcie", 19.5, 312, 0, 624, 80, 1935, 32, _BRIDGE_4, 32, 6.25, _ASSUMED,
        "NVIDIA A100 data sheet, PCIe", _AMPERE, *_NO_PRICE),
    Gpu("h100-sxm", 67, 989, 1979, 1979, 80, 3350, 450, _NVLINK_4, 64, 50, _DGX_H100,
        "NVIDIA H100 data sheet, SXM", _HOPPER, *_lambda(3.99, "8x H100 SXM")),
    Gpu("h100-pcie", 51, 756, 1513, 1513, 80, 2000, 64, _BRIDGE, 64, 6.25, _ASSUMED,
        "NVIDIA H100 data sheet, PCIe", _HOPPER, *_lambda(3.29, "1x H100 PCIe")),
    Gpu("h100-nvl", 60, 835, 1671, 1671, 94, 3900, 64, _BRIDGE, 64, 6.25, _ASSUMED,
        "NVIDIA H100 data sheet, NVL", _HOPPER,
        3.19, "RunPod secure cloud, runpod.io/pricing as read on 2026-11-09"),
    Gpu("h200", 67, 989, 1979, 1979, 141, 4800, 450, _NVLINK_4, 64, 50, _DGX_H100,
        "NVIDIA H200 data sheet, SXM", _HOPPER,
        4.59, "RunPod, runpod.io/pricing as read on 2026-10-07"),
    Gpu("h200-nvl", 60, 835, 1671, 1671, 141, 4800, 64, _BRIDGE, 64, 6.25, _ASSUMED,
        "NVIDIA H200 data sheet, NVL", _HOPPER, *_NO_PRICE),
    Gpu("b200", 75, 2250, 4500, 4500, 180, 8000, 900, "NVLink 1.8 TB/s, both directions together", 64, 50,
        "HGX B200: one 400 Gb/s adapter per GPU", "NVIDIA HGX B200 data sheet, an eighth of it", _HOPPER,
        *_lambda(6.69, "8x B200 SXM6")),
    Gpu("l40s", 91.6, 362, 733, 733, 48, 864, 32, _PCIE_4, 32, 6.25, _ASSUMED,
        "NVIDIA L40S data sheet", _OTHER, 1.95, "Modal, modal.com/pricing as reported on 2026-05-07"),
    Gpu("l4", 30.3, 121, 242, 242, 24, 300, 32, _PCIE_4, 32, 6.25, _ASSUMED,
        "NVIDIA L4 data sheet", _OTHER, 0.80, "Modal, modal.com/pricing as reported on 2026-05-07"),
    Gpu("a10", 31.2, 125, 0, 250, 24, 600, 32, _PCIE_4, 32, 6.25, _ASSUMED,
        "NVIDIA A10 data sheet", _OTHER, *_lambda(1.29, "1x A10")),
    Gpu("rtx-4090", 82.6, 165, 330, 661, 24, 1008, 32, f"{_PCIE_4}, through the host's memory", 32, 1.25,
        "assumed: 10 Gb/s Ethernet", "NVIDIA Ada architecture white paper, float32 accumulation", _OTHER, *_NO_PRICE),
    Gpu("mi300x", 163.4, 1307, 2615, 2615, 192, 5300, 448, _AMD_LINKS, 64, 50,
        "assumed: one 400 Gb/s adapter per GPU", "AMD Instinct MI300X data sheet", _OTHER, *_NO_PRICE,
        pair_gb_per_s=64),
)
# fmt: on
GPUS = {row.name: row for row in _ROWS}
"""Every GPU of the catalogue, by name."""

ALIASES = {
    "a100": "a100-80gb-sxm",
    "a100-40gb": "a100-40gb-sxm",
    "a100-80gb": "a100-80gb-sxm",
    "h100": "h100-sxm",
    "h100-80gb": "h100-sxm",
    "h200-sxm": "h200",
    "b200-sxm": "b200",
    "4090": "rtx-4090",
    "rtx4090": "rtx-4090",
}
"""Other names of the catalogue's GPUs."""

DRIVER_NAMES = (
    ("H200 NVL", "h200-nvl"),
    ("H200", "h200"),
    ("H100 PCIe", "h100-pcie"),
    ("H100 NVL", "h100-nvl"),
    ("H100", "h100-sxm"),
    ("B200", "b200"),
    ("A100-SXM4-40GB", "a100-40gb-sxm"),
    ("A100-PCIE-40GB", "a100-40gb-pcie"),
    ("A100 80GB PCIe", "a100-80gb-pcie"),
    ("A100-SXM4?-80GB", "a100-80gb-sxm"),
    ("L40S", "l40s"),
    ("L4", "l4"),
    ("A10", "a10"),
    ("RTX 4090", "rtx-4090"),
)
"""(pattern in the driver's device name, such as ``NVIDIA H100 80GB HBM3``, catalogue name); the first match wins."""
OTHER_PARTS = r"\b(MIG|Laptop|Max-Q|RTX 4090 D)\b"
"""Pattern of devices that are less than the one that their name begins with."""
