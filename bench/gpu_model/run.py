"""A whole model on a GPU, compared with the limits of its memory and tensor cores, and with transformers.

    python -m pdserve.bench.gpu_model [--quick] [--only PART] [--quantised] [--folder FOLDER] [--plot]

Random weights in the shape of Llama 3.1 8B, in bfloat16. The limit of a decode step, with 2k tokens of context a row,
is the time to read its weights and KV at the speed of a large copy; the limit of a prompt is the time of its operations
at the speed of a large product. Both speeds are measured in the same run. Goals: 85 % of the limit at 64 rows, and 70 %
in prompts. The KV of a prompt is transferred between two pools as between two workers of one host, and compared with
copies of as many bytes to pinned memory and back.

Needs torch, Triton, safetensors and grpcio, and transformers for the comparison. Rewrites a dated file of results after
each row, so that results survive a lack of time. ``--device cpu`` runs everything on a tiny model, as a check. Has not
run on a GPU yet.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import triton

from pdserve.bench.gpu_model.checkpoint import write_weights
from pdserve.bench.gpu_model.limits import DeviceLimits, Variant
from pdserve.bench.gpu_model.measure import Bench, DeviceLostError, tell
from pdserve.bench.gpu_model.plan import LLAMA, ON_CPU, QUICK, Plan
from pdserve.bench.gpu_model.plot import plot
from pdserve.bench.gpu_model.report import Report
from pdserve.bench.kernels.run import NoGpuError, commit, cuda_device, limits_of, measured_limits
from pdserve.bench.kernels.timing import CudaTimer, Timer
from pdserve.model.cost.hardware import catalogue_name

PARTS = ("decode", "prefill", "handoff", "peer")
_QUANTISED = (("int8", "auto"), ("int4", "auto"), ("none", "int8"), ("none", "float8_e4m3fn"))
_SCRATCH_BYTES = 20 * 10**9
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is to be measured, and where results go."""

    only: str = ""
    """One of `PARTS`; empty for all."""
    quick: bool = False
    quantised: bool = False
    """Decode with quantised weights and KV, too."""
    device: str = "cuda"
    folder: Path = Path()
    """Where the dated file goes."""
    scratch: Path | None = None
    """Where the weights lie meanwhile, 16 GB; by default in memory if they fit there, else with temporary files."""
    with_plot: bool = False


class WallTimer:
    """Implements `Timer` where work is done as it is asked for."""

    def round_s(self, run: Callable[[], Any]) -> float:
        run()
        started_s = perf_counter()
        run()
        return perf_counter() - started_s


def run(request: Request, echo: Callable[[str], None]) -> int:
    """Do it; returns the exit status: 1 if something of ours failed.

    Raises:
        ValueError: there is no such part, or no means to draw.
        NoGpuError: there is no GPU.
    """
    if request.only and request.only not in PARTS:
        raise ValueError(f"there is no part {request.only!r}: use one of {', '.join(PARTS)}")
    if request.with_plot and find_spec("matplotlib") is None:
        raise ValueError("pictures need matplotlib: pip install 'pdserve[bench]', or leave --plot out")
    if request.device != "cpu" and not torch.cuda.is_available():
        raise NoGpuError("no GPU here: --device cpu tries all of it on a tiny model")
    device = torch.device("cpu") if request.device == "cpu" else cuda_device()
    plan = ON_CPU if device.type == "cpu" else QUICK if request.quick else LLAMA
    timer: Timer = WallTimer() if device.type == "cpu" else CudaTimer(device)
    part = "_".join(filter(None, (request.only, "quick" if request.quick else "")))
    machine = {"part": part, **_machine(device)} | measured_limits(device, timer, size=plan.matrix_size)
    report = Report(machine)
    try:
        with tempfile.TemporaryDirectory(prefix="pdserve-", dir=_scratch(request)) as scratch:
            _measure(request, plan, device, report, Path(scratch))
    except DeviceLostError:
        tell("the device is lost: what was measured before is kept")
    file = report.write(request.folder)
    report.show(echo)
    if request.with_plot:
        plot(report, file.with_suffix(".png"))
    return 1 if report.failures else 0


def _measure(request: Request, plan: Plan, device: torch.device, report: Report, folder: Path) -> None:
    started_s = perf_counter()
    tell("drawing and writing weights")
    write_weights(folder, plan.sizes, plan.dtype, device)
    tell(f"wrote them in {perf_counter() - started_s:.1f} s")
    bench = Bench(
        folder=folder,
        plan=plan,
        device=device,
        limits=device_limits(report.machine),
        free_bytes=_free_bytes(device),
        report=report,
        keep=lambda: report.write(request.folder),
    )
    answer: list[int] = []
    if request.only in ("", "decode", "prefill"):
        plain = Variant(dtype=plan.dtype)
        answer = bench.own(plain, decode=request.only != "prefill", prefill=request.only != "decode")
    if request.only in ("", "handoff"):
        bench.handoff()
    if request.only in ("", "peer"):
        bench.peer(answer)
    if request.quantised:
        for quantization, kv_dtype in _QUANTISED:
            variant = Variant(dtype=plan.dtype, quantization=quantization, kv_dtype=kv_dtype)
            bench.own(variant, decode=True, prefill=False)


def device_limits(machine: Mapping[str, Any]) -> DeviceLimits:
    """Of `measured_limits`."""
    return DeviceLimits(flops=1e12 * machine["torch_matmul_tflops"], bandwidth=1e9 * machine["torch_copy_gbytes_per_s"])


def _free_bytes(device: torch.device) -> int | None:
    if device.type == "cpu":
        return None
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def _scratch(request: Request) -> Path | None:
    """Where the weights go; ``None`` is where temporary files do."""
    if request.scratch is not None:
        return request.scratch
    in_memory = _SHARED_MEMORY.is_dir() and shutil.disk_usage(_SHARED_MEMORY).free > _SCRATCH_BYTES
    return _SHARED_MEMORY if in_memory and request.device != "cpu" else None


def _machine(device: torch.device) -> dict[str, Any]:
    """What measures, with the limits of its data sheet where the catalogue has it."""
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else platform.machine()
    hardware = catalogue_name(name) if on_gpu else "cpu"
    told = {
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": name,
        "hardware": hardware or None,
        "driver": _driver() if on_gpu else None,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
    }
    if on_gpu and hardware:
        sheet = limits_of(hardware)
        told |= {"peak_tflops": sheet.flops / 1e12, "peak_gbytes_per_s": sheet.bandwidth / 1e9}
    return told


def _driver() -> str:
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=20).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError):
        return "unknown"
