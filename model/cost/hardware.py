"""Figures of a machine: peak arithmetic, memory, links, price, and the shares of the peaks that kernels reach.

Read by the cost model, the planner and emulation; a lookup touches no device. GPU figures come from
`pdserve.model.cost.hardware_catalogue`, other devices from a user's file (`pdserve.planner.hardware_file`).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any

from pdserve.contracts.codec import ABOVE_ZERO, Fraction, NotNegative, Positive, Rule, between
from pdserve.model.cost import hardware_catalogue as catalogue
from pdserve.model.cost.curve import Curve
from pdserve.model.cost.hardware_catalogue import ALIASES, DRIVER_NAMES, GPUS, KERNEL_TIMES, OTHER_PARTS, Gpu

Range = Annotated[
    tuple[int, int], Rule(lambda ends: 0 <= ends[0] <= ends[1], "the fewest and the most, as in [1, 512]")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurements that a device's efficiencies were fitted to; predictions outside their ranges extrapolate."""

    date: str
    """ISO date, such as 2026-11-21."""
    model: str
    """Name of the measured model, with dtype and quantization."""
    step_tokens: Range
    """Fewest and most new tokens of a step."""
    batch_size: Range
    """Fewest and most sequences of a decode batch."""
    context_tokens: Range
    """Fewest and most cached tokens of one row."""
    errors: Mapping[str, NotNegative] = field(default_factory=dict, hash=False)
    """Median relative prediction error on held-out steps, keyed by kind of step: ``prefill``, ``decode``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One device that a worker's rank runs on: a GPU, or some cores of a CPU."""

    name: str
    peak_flops: Mapping[str, Positive] = field(hash=False)
    """Dense operations per second by dtype, without sparsity; a multiply-add counts as two."""
    compute_efficiency: Curve
    """Share of ``peak_flops`` that matrix products reach, by tokens of a step."""
    float8_efficiency: Fraction = 1.0
    """Share of ``compute_efficiency`` that float8 products reach, with the quantisation of their activations."""
    prefill_attention_efficiency: Curve
    """Share of ``peak_flops`` that attention reaches, by new tokens of one sequence."""
    memory_bytes: Annotated[int, ABOVE_ZERO]
    memory_reserve_bytes: Annotated[int, between(0, 2**60)]
    """Memory per device outside weights, activations and KV: the runtime, collective buffers, graphs."""
    memory_bandwidth: Positive
    """Bytes per second."""
    memory_efficiency: Fraction
    """Share of ``memory_bandwidth`` that weight reads reach."""
    decode_attention_efficiency: Fraction
    """Share of ``memory_bandwidth``, or of ``peak_flops`` where compute is the limit, that decode attention reaches."""
    link_bandwidth: Positive
    """Bytes per second, one direction, between a device and its host's other devices; sum over all links."""
    pair_bandwidth: NotNegative = 0.0
    """Part of ``link_bandwidth`` between one pair of devices, where no switch gives a pair all of it; 0: all of it."""
    link_latency_s: NotNegative
    """Fixed seconds of one all-reduce or message between devices of a host, on top of the transfer time."""
    link_efficiency: Fraction
    """Share of ``link_bandwidth`` and of ``network_bandwidth`` that large messages reach."""
    all_reduce_efficiency: Fraction = 0.6
    """Share of ``link_bandwidth`` that all-reduces reach."""
    network_bandwidth: Positive
    """Bytes per second, one direction, between devices on two hosts."""
    network_latency_s: NotNegative
    """Fixed seconds of one all-reduce or message between hosts, on top of the transfer time."""
    host_bandwidth: Positive
    """Bytes per second, one direction, of D2H and H2D copies."""
    memfd_bandwidth: Positive = 5.9e9
    """Bytes per second of one worker's pulls by ``memfd``: copies between two processes of a host."""
    tcp_bandwidth: Positive = 2.6e9
    """Bytes per second of one worker's pulls by ``tcp``, where the network carries as much."""
    pull_overhead_s: NotNegative = 1e-3
    """Fixed seconds of a pull: opening, verifying, telling both engines."""
    devices_per_host: Annotated[int, ABOVE_ZERO] = 8
    step_overhead_s: NotNegative
    """Seconds per step outside kernels: preparing inputs, sampling, reading results back."""
    ranks_overhead_s: NotNegative = 0.0
    """Seconds per step of a worker of several ranks, besides all-reduces: messages to their processes, their skew."""
    layer_overhead_s: NotNegative
    """Seconds per layer outside arithmetic and memory traffic: starts of kernels, gaps, small kernels."""
    layer_launch_s: NotNegative = 0.0
    """Seconds for the host to launch the kernels of a layer while the device computes; about 0 with CUDA graphs."""
    row_overhead_s: NotNegative = 0.0
    """Seconds per sampling row, without the output projection."""
    pipeline_depth: Annotated[int, between(1, 2)] = 2
    """Steps submitted before the first result is read: 2 on GPUs, 1 where the step loop computes itself."""
    price_per_hour_usd: Positive | None = None
    """On-demand list price of one device; None if unknown."""
    measured: Measured | None = None
    """Measurements behind the efficiencies; None for estimates."""
    sources: Mapping[str, str] = field(hash=False)
    """Source of each figure, keyed by field name."""

    def peak(self, dtype: str) -> float:
        """Dense operations per second in ``dtype``.

        Raises:
            ValueError: no figure for the dtype.
        """
        if dtype not in self.peak_flops:
            raise ValueError(f"{self.name} has no figure for {dtype!r}; use one of {', '.join(self.peak_flops)}")
        return self.peak_flops[dtype]

    def check_reads(self, kv_dtype: str) -> None:
        """Raise ValueError for float8 KV on a GPU with int8 units but no float8: it cannot convert it."""
        if kv_dtype == "float8_e4m3fn" and "int8" in self.peak_flops and "float8" not in self.peak_flops:
            raise ValueError(f"{self.name} has no float8; use kv_dtype int8")

    @property
    def is_host(self) -> bool:
        """A worker's pool is in host memory, where other processes reach it."""
        return self.pipeline_depth == 1

    @property
    def bandwidth(self) -> float:
        """Bytes per second of weight reads."""
        return self.memory_bandwidth * self.memory_efficiency


_GPU_RESERVE_BYTES = 2 * 10**9
_NVLINK_S, _PCIE_S, _NETWORK_S = 5e-6, 30e-6, 30e-6
_LINK_EFFICIENCY = 0.6
_NVLINK_ALL_REDUCE = 0.28
_FLOAT8_EFFICIENCY = 0.72
_ESTIMATE = "estimate, not measured"
_PULL_SOURCES = {
    **dict.fromkeys(
        ("memfd_bandwidth", "tcp_bandwidth"),
        "measured 2026-11-26 by pdserve bench transfer on an AMD EPYC virtual machine of 2 cores: 256 blocks of 2 MiB",
    ),
    "pull_overhead_s": "measured on hosts of four cores: the middle of 0.2 to 4.5 ms",
}
_NVLINK_SOURCE = (
    f"{KERNEL_TIMES.format('H100 and A100 SXM')}: vLLM's all-reduces of 8 KB to 64 MB, fitted to 2 and 4 GPUs; on 8 "
    "GPUs each is 24 % off"
)


def _gpu(row: Gpu) -> Hardware:
    """Build the device of a catalogue row."""
    rates = {"float32": row.float32_tflops, "bfloat16": row.half_tflops, "float16": row.half_tflops}
    rates |= {"float8": row.float8_tflops, "int8": row.int8_tops}
    is_pcie = row.link_gb_per_s <= row.host_gb_per_s
    return Hardware(
        name=row.name,
        peak_flops={dtype: tera * 1e12 for dtype, tera in rates.items() if tera},
        compute_efficiency=Curve(row.kernels.compute),
        prefill_attention_efficiency=Curve(row.kernels.prefill_attention),
        memory_bytes=int(row.memory_gb * 1e9),
        memory_reserve_bytes=_GPU_RESERVE_BYTES,
        memory_bandwidth=row.memory_gb_per_s * 1e9,
        memory_efficiency=row.kernels.memory,
        decode_attention_efficiency=row.kernels.decode_attention,
        link_bandwidth=row.link_gb_per_s * 1e9,
        pair_bandwidth=row.pair_gb_per_s * 1e9,
        link_latency_s=_PCIE_S if is_pcie else _NVLINK_S,
        link_efficiency=_LINK_EFFICIENCY,
        all_reduce_efficiency=_LINK_EFFICIENCY if is_pcie else _NVLINK_ALL_REDUCE,
        network_bandwidth=row.network_gb_per_s * 1e9,
        network_latency_s=_NETWORK_S,
        host_bandwidth=row.host_gb_per_s * 1e9,
        float8_efficiency=_FLOAT8_EFFICIENCY,
        step_overhead_s=catalogue.STEP_OVERHEAD_S,
        ranks_overhead_s=catalogue.RANKS_OVERHEAD_S,
        layer_overhead_s=row.kernels.layer_overhead_us * 1e-6,
        row_overhead_s=catalogue.ROW_OVERHEAD_S,
        price_per_hour_usd=row.usd_per_hour,
        sources={
            **dict.fromkeys(("peak_flops", "memory_bytes", "memory_bandwidth", "host_bandwidth"), row.sheet),
            **row.kernels.sources,
            **_PULL_SOURCES,
            "memory_reserve_bytes": f"{_ESTIMATE}: the CUDA context, buffers of NCCL, CUDA graphs",
            **dict.fromkeys(("link_bandwidth", "pair_bandwidth"), row.link),
            "link_latency_s": _ESTIMATE if is_pcie else _NVLINK_SOURCE,
            "link_efficiency": f"{_ESTIMATE}: large messages between two devices",
            "all_reduce_efficiency": _ESTIMATE if is_pcie else _NVLINK_SOURCE,
            "network_bandwidth": row.network,
            "network_latency_s": _ESTIMATE,
            "devices_per_host": "assumed: eight, as in most servers",
            "pipeline_depth": "of the executor",
            "float8_efficiency": f"as large products of three engines: {KERNEL_TIMES.format('H100 SXM')}",
            **dict.fromkeys(("step_overhead_s", "ranks_overhead_s", "row_overhead_s"), catalogue.HOST_COSTS_SOURCE),
            "layer_launch_s": "assumed: none, with CUDA graphs",
            "price_per_hour_usd": row.price_source,
        },
    )


_GPUS = {name: _gpu(row) for name, row in GPUS.items()}

_CORE_FLOPS = 80e9
_CORE_BANDWIDTH, _SOCKET_BANDWIDTH = 22e9, 30e9
_CPU_SOURCE = "measured 2026-11-21 on an AMD EPYC (Zen 3, AVX2) virtual machine of 4 cores with torch 2.13"
_CPU_FIT = (
    f"{_CPU_SOURCE}: fitted as pdserve profile does, to the CPU time of one core in 72 steps of decoders of width 256 "
    "and 1024, with one layer and with four, in float32; more cores are taken to compute in proportion"
)


def _cpu(num_cores: int) -> Hardware:
    """``num_cores`` cores of a small x86 server without matrix units."""
    return Hardware(
        name="cpu",
        peak_flops=dict.fromkeys(("float32", "bfloat16", "float16"), _CORE_FLOPS * num_cores),
        compute_efficiency=Curve(((1, 0.37), (4, 0.35), (8, 0.56), (16, 0.72), (64, 0.91), (256, 0.92))),
        prefill_attention_efficiency=Curve(((2, 0.35), (16, 0.37), (128, 0.55))),
        memory_bytes=num_cores * 6 * 10**9,
        memory_reserve_bytes=0,
        memory_bandwidth=min(_CORE_BANDWIDTH * num_cores, _SOCKET_BANDWIDTH),
        memory_efficiency=0.84,
        decode_attention_efficiency=0.31,
        link_bandwidth=9e9,
        link_latency_s=10e-6,
        link_efficiency=1.0,
        all_reduce_efficiency=1.0,
        network_bandwidth=1.25e9,
        network_latency_s=50e-6,
        host_bandwidth=9e9,
        pipeline_depth=1,
        step_overhead_s=290e-6,
        layer_overhead_s=130e-6,
        row_overhead_s=15e-6,
        sources={
            **_PULL_SOURCES,
            "peak_flops": f"{_CPU_SOURCE}: float32 products of 512 x 4096 x 4096, in which half types compute too",
            "compute_efficiency": _CPU_FIT,
            "prefill_attention_efficiency": _CPU_FIT,
            "memory_bytes": f"{_CPU_SOURCE}, and 24 GB",
            "memory_reserve_bytes": "none: what processes take is counted by who starts them",
            "memory_bandwidth": f"{_CPU_SOURCE}: sum of 256 MB by 1 and 2 threads",
            "memory_efficiency": _CPU_FIT,
            "decode_attention_efficiency": _CPU_FIT,
            "link_bandwidth": f"{_CPU_SOURCE}: copy of 256 MB by 1 thread",
            "link_latency_s": _ESTIMATE,
            **dict.fromkeys(("link_efficiency", "all_reduce_efficiency"), "1: the bandwidth is what was measured"),
            "float8_efficiency": "no float8 units",
            "pair_bandwidth": "as link_bandwidth",
            "network_bandwidth": "assumed: 10 Gb/s Ethernet",
            "network_latency_s": _ESTIMATE,
            "host_bandwidth": f"{_CPU_SOURCE}: copy of 256 MB by 1 thread",
            "devices_per_host": "assumed",
            "pipeline_depth": "of the executor",
            "step_overhead_s": _CPU_FIT,
            "ranks_overhead_s": "none: the leader computes its share meanwhile",
            "layer_launch_s": "none: the host is the device",
            "layer_overhead_s": _CPU_FIT,
            "row_overhead_s": _CPU_FIT,
            "price_per_hour_usd": "no list price known; give one in a hardware file",
        },
    )


HARDWARE_NAMES = tuple(sorted(("cpu", *GPUS)))
"""Names that `hardware` knows, in alphabetical order."""


def catalogue_name(driver_name: str) -> str:
    """Name in the catalogue of a GPU with this driver name; empty for an unknown one and for one that is less."""
    if re.search(OTHER_PARTS, driver_name):
        return ""
    return next((name for words, name in DRIVER_NAMES if re.search(rf"\b{words}\b", driver_name)), "")


def hardware(name: str, *, num_cores: int = 1, added: Mapping[str, Hardware] | None = None) -> Hardware:
    """Look up a device by name or alias, ignoring case: ``h100`` is ``h100-sxm``.

    Args:
        name: one of `HARDWARE_NAMES`, or a key of ``added``.
        num_cores: CPU cores, for ``cpu``; ignored for GPUs.
        added: a user's devices by name; they take precedence.

    Raises:
        ValueError: unknown name; the message lists the known names, the nearest first.
    """
    added = added or {}
    key = name.lower()
    if key not in added:
        key = ALIASES.get(key, key)
    if key in added:
        return added[key]
    if key == "cpu":
        assert num_cores >= 1
        return _cpu(num_cores)
    if key in _GPUS:
        return _GPUS[key]
    labels = [*HARDWARE_NAMES, *added, *ALIASES]
    nearest = difflib.get_close_matches(key, labels, n=len(labels), cutoff=0.0)
    known = dict.fromkeys(ALIASES.get(label, label) for label in nearest)
    raise ValueError(f"unknown hardware {name!r}; use one of {', '.join(known)}")


def slowed(device: Hardware, time_scale: float) -> Hardware:
    """Return ``device`` with every step and transfer ``time_scale`` times as long, for emulation with a time scale.

    Workers and the router then predict real durations, so that the policy, which compares predictions with objectives
    in real seconds, decides as at full speed with objectives shorter by the same factor.
    """
    assert time_scale > 0
    changes: dict[str, Any] = {"peak_flops": {dtype: flops / time_scale for dtype, flops in device.peak_flops.items()}}
    for figure in fields(device):
        # Field names carry units; time scales durations and rates only.
        if figure.name.endswith("_s"):
            changes[figure.name] = getattr(device, figure.name) * time_scale
        elif figure.name.endswith("_bandwidth"):
            changes[figure.name] = getattr(device, figure.name) / time_scale
    return replace(device, **changes)
