"""What a machine can do: peak arithmetic, memory, links, each figure with its source.

Read by the cost model, the planner and emulation. A catalogue, not a probe: looking a name up touches no device.
Figures are peaks; the efficiencies beside them say how much of a peak good kernels reach.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One device that a worker's rank runs on: a GPU, or some cores of a CPU."""

    name: str
    peak_flops: Mapping[str, float]
    """Dense floating-point operations per second by dtype, a multiply and an add counting two."""
    compute_efficiency: float
    """Share of ``peak_flops`` that large matrix products reach."""
    memory_bytes: int
    memory_bandwidth: float
    """Bytes per second."""
    memory_efficiency: float
    """Share of ``memory_bandwidth`` that streaming kernels reach."""
    link_bandwidth: float
    """Bytes per second, one direction, between two devices of a host."""
    network_bandwidth: float
    """Bytes per second, one direction, between devices of two hosts."""
    host_bandwidth: float
    """Bytes per second, one direction, between the device's memory and its host's."""
    step_overhead_s: float
    """Seconds of a step that no kernel accounts for: preparing inputs, sampling, reading results back."""
    layer_overhead_s: float
    """Seconds per layer that arithmetic and memory do not account for: launches, gaps, small kernels."""
    sources: Mapping[str, str]
    """Where each figure comes from, by field name."""

    def flops(self, dtype: str) -> float:
        """Operations per second that large products of ``dtype`` reach.

        Raises:
            ValueError: no figure for the dtype.
        """
        if dtype not in self.peak_flops:
            raise ValueError(f"{self.name} has no figure for {dtype!r}; use one of {', '.join(self.peak_flops)}")
        return self.peak_flops[dtype] * self.compute_efficiency

    @property
    def bandwidth(self) -> float:
        """Bytes per second that streaming kernels reach."""
        return self.memory_bandwidth * self.memory_efficiency


_H100_SXM = Hardware(
    name="h100-sxm",
    peak_flops=MappingProxyType({"bfloat16": 989e12, "float16": 989e12, "float32": 67e12}),
    compute_efficiency=0.76,
    memory_bytes=80 * 10**9,
    memory_bandwidth=3.35e12,
    memory_efficiency=0.90,
    link_bandwidth=450e9,
    network_bandwidth=50e9,
    host_bandwidth=64e9,
    step_overhead_s=300e-6,
    layer_overhead_s=15e-6,
    sources=MappingProxyType(
        {
            "peak_flops": "NVIDIA H100 datasheet, SXM column, without sparsity",
            "compute_efficiency": "755 TFLOP/s of cuBLAS bf16 products, published with FlashAttention-3",
            "memory_bytes": "NVIDIA H100 datasheet, SXM column",
            "memory_bandwidth": "NVIDIA H100 datasheet, SXM column",
            "memory_efficiency": "published for streaming kernels by quack and FlashMLA",
            "link_bandwidth": "NVIDIA H100 datasheet: NVLink 900 GB/s, both directions together",
            "network_bandwidth": "DGX H100 user guide: one 400 Gb/s adapter per GPU",
            "host_bandwidth": "NVIDIA H100 datasheet: PCIe Gen5 128 GB/s, both directions together",
            "step_overhead_s": "estimate, not measured",
            "layer_overhead_s": "estimate, not measured: about ten kernels of 1.5 us in a CUDA graph",
        }
    ),
)

_CORE_FLOPS = 80e9
_CORE_BANDWIDTH, _SOCKET_BANDWIDTH = 22e9, 30e9
_CPU_SOURCE = "measured 2026-11-21 on an AMD EPYC (Zen 3, AVX2) virtual machine of 4 cores with torch 2.13"


def _cpu(num_cores: int) -> Hardware:
    """``num_cores`` cores of a small x86 server without matrix units."""
    return Hardware(
        name="cpu",
        peak_flops=MappingProxyType(dict.fromkeys(("float32", "bfloat16", "float16"), _CORE_FLOPS * num_cores)),
        compute_efficiency=1.0,
        memory_bytes=num_cores * 6 * 10**9,
        memory_bandwidth=min(_CORE_BANDWIDTH * num_cores, _SOCKET_BANDWIDTH),
        memory_efficiency=1.0,
        link_bandwidth=9e9,
        network_bandwidth=1.25e9,
        host_bandwidth=9e9,
        step_overhead_s=500e-6,
        layer_overhead_s=300e-6,
        sources=MappingProxyType(
            {
                "peak_flops": f"{_CPU_SOURCE}: float32 products of 512 x 4096 x 4096, in which half types compute too",
                "compute_efficiency": "1: the peak is what was measured",
                "memory_bytes": f"{_CPU_SOURCE}, and 24 GB",
                "memory_bandwidth": f"{_CPU_SOURCE}: sum of 256 MB by 1 and 2 threads",
                "memory_efficiency": "1: the bandwidth is what was measured",
                "link_bandwidth": f"{_CPU_SOURCE}: copy of 256 MB by 1 thread",
                "network_bandwidth": "assumed: 10 Gb/s Ethernet",
                "host_bandwidth": f"{_CPU_SOURCE}: copy of 256 MB by 1 thread",
                "step_overhead_s": f"{_CPU_SOURCE}: decode steps of 2 and 10 layers of width 64 at batch 1",
                "layer_overhead_s": f"{_CPU_SOURCE}: decode steps of 2 and 10 layers of width 64 at batch 1",
            }
        ),
    )


_ALIASES = {"h100": "h100-sxm"}
HARDWARE_NAMES = ("cpu", "h100-sxm")
"""Names that `hardware` knows, in alphabetical order."""


def hardware(name: str, *, num_cores: int = 1) -> Hardware:
    """Look a device up, in any case of letters; ``h100`` is ``h100-sxm``.

    Args:
        name: one of `HARDWARE_NAMES`.
        num_cores: of the CPU, for ``cpu``; a GPU ignores it.

    Raises:
        ValueError: an unknown name; the known ones are listed, the nearest first.
    """
    key = _ALIASES.get(name.lower(), name.lower())
    if key == "cpu":
        assert num_cores >= 1
        return _cpu(num_cores)
    if key == _H100_SXM.name:
        return _H100_SXM
    nearest = sorted(HARDWARE_NAMES, key=lambda known: -difflib.SequenceMatcher(None, key, known).ratio())
    raise ValueError(f"unknown hardware {name!r}; use one of {', '.join(nearest)}")
