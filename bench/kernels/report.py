"""Report of a GPU benchmark: machine, rows, JSON document and tables.

Used by `pdserve.bench.kernels.run` and `pdserve.bench.gpu_model`.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import triton

from pdserve.bench.kernels.case import Limits
from pdserve.bench.kernels.measure import Result, Timer
from pdserve.bench.script import Echo, commit, show_table
from pdserve.model.cost.hardware import catalogue_name, hardware


class NoGpuError(RuntimeError):
    """No GPU to measure on."""


def cuda_device() -> torch.device:
    """Return the current GPU.

    Raises:
        NoGpuError: there is none.
    """
    if not torch.cuda.is_available():
        raise NoGpuError("no GPU here: --compile-only compiles the kernels without one")
    return torch.device("cuda", torch.cuda.current_device())


def machine(device: torch.device, name: str = "") -> dict[str, Any]:
    """Describe the device and the software; ``name`` overrides the device's name in the hardware catalogue."""
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    name = name or (catalogue_name(device_name) if device.type == "cuda" else "cpu")
    return {
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device_name,
        "hardware": name or None,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
    }


def limits_of(name: str) -> Limits:
    """Limits of a device of the catalogue.

    Raises:
        ValueError: it is not there.
    """
    found = hardware(name)
    return Limits(found.peak("bfloat16"), found.memory_bandwidth)


@torch.no_grad()
def measured_limits(device: torch.device, timer: Timer, *, size: int = 8192) -> dict[str, float]:
    """Speed of torch's product of two bfloat16 matrices of ``size``, and of its copy of four of them."""
    matrix = torch.randn(size, size, dtype=torch.bfloat16, device=device)
    copied = torch.empty(4, size, size, dtype=torch.bfloat16, device=device)
    source = torch.zeros_like(copied)
    return {
        "torch_matmul_tflops": 2 * size**3 / timer(lambda: matrix @ matrix) / 1e12,
        "torch_copy_gbytes_per_s": 2 * copied.nbytes / timer(lambda: copied.copy_(source)) / 1e9,
    }


def write_dated(document: Mapping[str, Any], folder: Path, *words: str | None) -> Path:
    """Write a document to a file named by its date and ``words``."""
    file = folder / f"{'_'.join(filter(None, (document['measured'][:10], *words)))}.json"
    file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return file


def show_kernels(document: Mapping[str, Any], results: Sequence[Result], echo: Echo) -> None:
    """Print a table for each kernel, its absent peers, and failures."""
    device = document["device"]
    if document["hardware"] is None:
        echo(f"{device} is not in the catalogue, so there are no limits: name one like it with --hardware")
    if "torch_matmul_tflops" in document:
        tflops, gbytes_per_s = document["torch_matmul_tflops"], document["torch_copy_gbytes_per_s"]
        echo(f"{device}: torch's large product {tflops:.0f} TFLOP/s, its large copy {gbytes_per_s:.0f} GB/s")
    for kernel, of_kernel in groupby(results, key=lambda result: result.case.kernel):
        rows = list(of_kernel)
        peers = list(dict.fromkeys(name for result in rows for name in result.ratios))
        header = ["shape", "us", "TFLOP/s", "GB/s", "% of limit", *peers]
        clocks = ", ".join(f"{name} {value}" for name, value in document["clocks"].get(kernel, {}).items())
        title = f"{kernel} on {device} ({clocks or 'clocks unknown'})"
        show_table(title, header, [_cells(result, peers) for result in rows], echo)
        for line in _notes(rows):
            echo(line)
    for shape, reason in document["failures"].items():
        echo(f"FAILED: {shape}: {reason}")


def _cells(result: Result, peers: Sequence[str]) -> list[str]:
    work, share = result.case.work, result.limit_share
    ratios = {name: f"{ratio:.2f}x{' !' * (name in result.disagreeing)}" for name, ratio in result.ratios.items()}
    return [
        result.case.shape,
        f"{result.own_s * 1e6:.1f}",
        f"{work.flops / result.own_s / 1e12:.1f}" if work.flops else "-",
        f"{work.num_bytes / result.own_s / 1e9:.0f}",
        "-" if share is None else f"{share:.0%}",
        *(ratios.get(name, "-") for name in peers),
    ]


def _notes(results: Sequence[Result]) -> list[str]:
    """Absent peers with their reasons, and peers with other results."""
    reasons = dict.fromkeys(item for result in results for item in result.absent.items())
    notes = []
    for name, reason in reasons:
        shapes = [result.case.shape for result in results if result.absent.get(name) == reason]
        where = "" if len(shapes) == len(results) else f" ({'; '.join(shapes)})"
        notes.append(f"  {name} is absent: {reason}{where}")
    return notes + [
        f"  ! {name} differs for {result.case.shape}: by {result.differences[name]:.2g} of the largest value"
        for result in results
        for name in result.disagreeing
    ]
