"""``pdserve bench kernels``: every GPU kernel against its limit and its peers, or compiled without a GPU.

    python -m pdserve.bench.kernels [--only NAME] [--quick] [--folder FOLDER] [--plot] [--compile-only] [--json]

Called by the command line and by `pdserve.bench.kernels.__main__`, which needs neither typer nor rich. Prints tables,
and rewrites a dated file of results after each kernel, so that results survive a lack of time.
"""

from __future__ import annotations

import gc
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import triton
from triton.errors import TritonError

from pdserve.bench.kernels.cases import chosen_cases
from pdserve.bench.kernels.contest import Case, Limits
from pdserve.bench.kernels.measure import measure
from pdserve.bench.kernels.plot import plot
from pdserve.bench.kernels.report import Report
from pdserve.bench.kernels.tile_launches import tile_launches
from pdserve.bench.kernels.timing import CudaTimer, Timer, clocks_under
from pdserve.bench.kernels_compile import compile_all, launches
from pdserve.kernels.triton.tuned_tiles import tuned_tiles
from pdserve.model.cost.hardware import catalogue_name, hardware


class NoGpuError(RuntimeError):
    """There is nothing to measure on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is to be measured, and where results go."""

    only: str = ""
    """Kernels, or launches with ``compile_only``, with this in their names; empty for all."""
    quick: bool = False
    num_rounds: int = 3
    compile_only: bool = False
    as_json: bool = False
    """Print JSON instead of tables."""
    folder: Path = Path()
    """Where the dated file goes."""
    with_plot: bool = False
    hardware: str = ""
    """The catalogue's name of the device; by default the one that CUDA's name stands for."""
    skipped_peers: tuple[str, ...] = ()


def run(request: Request, echo: Callable[[str], None]) -> int:
    """Do it; returns the exit status: 1 if a kernel failed, or differs from a peer.

    Raises:
        ValueError: no kernel has such a name, or no hardware.
        NoGpuError: there is no GPU.
    """
    if request.compile_only:
        named = [launch for launch in (*launches(), *tile_launches(tuned_tiles())) if request.only in launch.name]
        if not named:
            raise ValueError(f"no launch is named {request.only!r}: use a part of a kernel's name, such as gate")
        return compile_all(named, echo, as_json=request.as_json)
    cases = chosen_cases(request.only, quick=request.quick)
    if request.with_plot and find_spec("matplotlib") is None:
        raise ValueError("pictures need matplotlib: pip install 'pdserve[bench]', or leave --plot out")
    device = cuda_device()
    name = request.hardware or catalogue_name(torch.cuda.get_device_name(device))
    limits = limits_of(name) if name else None
    timer = CudaTimer(device)
    machine = _machine(device, name) | measured_limits(device, timer)
    report = Report(machine, [], {}, {})
    for _ in measure_all(cases, device, timer, request, limits=limits, report=report):
        write(report, request)
    return publish(report, request, echo)


def cuda_device() -> torch.device:
    """The current one.

    Raises:
        NoGpuError: there is none.
    """
    if not torch.cuda.is_available():
        raise NoGpuError("no GPU here: --compile-only compiles the kernels without one")
    return torch.device("cuda", torch.cuda.current_device())


def limits_of(name: str) -> Limits:
    """Of a device of the catalogue.

    Raises:
        ValueError: it is not there.
    """
    found = hardware(name)
    return Limits(found.peak("bfloat16"), found.memory_bandwidth, found.host_bandwidth)


@torch.no_grad()
def measured_limits(device: torch.device, timer: Timer, *, size: int = 8192) -> dict[str, float]:
    """What torch reaches on this very device with a large product in bfloat16, and with a large copy.

    Args:
        size: rows and columns of the matrices; a copy is of four of them.
    """
    matrix = torch.randn(size, size, dtype=torch.bfloat16, device=device)
    copied = torch.empty(4, size, size, dtype=torch.bfloat16, device=device)
    source = torch.zeros_like(copied)
    return {
        "torch_matmul_tflops": 2 * size**3 / timer.round_s(lambda: matrix @ matrix) / 1e12,
        "torch_copy_gbytes_per_s": 2 * copied.nbytes / timer.round_s(lambda: copied.copy_(source)) / 1e9,
    }


def measure_all(
    cases: list[Case],
    device: torch.device,
    timer: Timer,
    request: Request,
    *,
    limits: Limits | None,
    report: Report,
) -> Iterator[str]:
    """One case after the other, into the report; yields the names of kernels that are done.

    A case that our kernel fails in does not stop the others, unless the device is lost with it.
    """
    for kernel, of_kernel in groupby(cases, key=lambda case: case.kernel):
        measured: Case | None = None
        for case in of_kernel:
            try:
                with torch.no_grad():
                    result = measure(
                        case,
                        device,
                        timer,
                        limits=limits,
                        num_rounds=request.num_rounds,
                        skipped=request.skipped_peers,
                    )
            except (RuntimeError, TritonError) as error:
                report.failures[f"{kernel}: {case.shape}"] = str(error).splitlines()[0]
                _tell(f"{kernel}: {case.shape}: FAILED: {error}")
                if isinstance(error, torch.AcceleratorError):
                    yield kernel
                    return
            else:
                measured = case
                report.results.append(result)
                _tell(f"{kernel}: {case.shape}: {result.own_s * 1e6:.1f} us")
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        if device.type == "cuda" and measured is not None:
            report.clocks[kernel] = clocks_under(measured.contest(device).own.run, device)
        yield kernel


def write(report: Report, request: Request) -> Path:
    """Write the dated file, and a picture beside it where one is asked for."""
    machine = report.machine
    words = (machine["measured"][:10], "kernels", request.only, machine["hardware"])
    file = request.folder / f"{'_'.join(filter(None, words))}.json"
    file.write_text(json.dumps(report.as_dict(), indent=1) + "\n")
    if request.with_plot and machine["hardware"] and report.results:
        plot(report.results, f"{machine['device']}, {machine['commit']}", file.with_suffix(".png"))
    return file


def publish(report: Report, request: Request, echo: Callable[[str], None]) -> int:
    """Print a report; returns the exit status."""
    if request.as_json:
        echo(json.dumps(report.as_dict()))
    else:
        report.show(echo)
    return 1 if report.failures or any(result.disagreeing for result in report.results) else 0


def _machine(device: torch.device, name: str) -> dict[str, Any]:
    return {
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device),
        "hardware": name or None,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
    }


def commit() -> str:
    """Of the code that runs, if git knows it."""
    asked = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (FileNotFoundError, subprocess.CalledProcessError):
        return "unknown"


def _tell(line: str) -> None:
    """Progress, which is no part of what is printed."""
    sys.stderr.write(f"{line}\n")
