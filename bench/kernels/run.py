"""Benchmarks of the Triton kernels on a GPU: device time, share of the formula's limit, and speed of the peers.

Run by ``pdserve bench kernels`` and ``python -m pdserve.bench.kernels``; needs torch and Triton only. Rewrites its
dated file of results after each kernel, so that results survive a run cut short.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from triton.errors import TritonError

from pdserve.bench.kernels.case import Case
from pdserve.bench.kernels.cases import chosen_cases
from pdserve.bench.kernels.measure import Result, clocks_under, gpu_timer, measure
from pdserve.bench.kernels.report import (
    cuda_device,
    limits_of,
    machine,
    measured_limits,
    show_kernels,
    write_dated,
)
from pdserve.bench.kernels_compile import HOPPER, MAX_SHARED_BYTES, compile_all, launches
from pdserve.bench.script import Echo, log


def run(
    echo: Echo,
    *,
    only: str = "",
    quick: bool = False,
    num_rounds: int = 3,
    compile_only: bool = False,
    capability: int = HOPPER,
    as_json: bool = False,
    folder: Path = Path(),
    hardware: str = "",
) -> int:
    """Compile or measure, and return the exit status: 1 if a kernel failed, or differs from a peer.

    Args:
        only: kernels, or launches with ``compile_only``, with this in their names; empty for all.
        capability: of the GPU to compile for: a key of `pdserve.bench.kernels_compile.MAX_SHARED_BYTES`.
        as_json: print JSON instead of tables.
        folder: of the dated file.
        hardware: the device's name in the catalogue; by default found by CUDA's name.

    Raises:
        ValueError: unknown kernel or hardware.
        NoGpuError: there is no GPU.
    """
    if compile_only:
        if capability not in MAX_SHARED_BYTES:
            known = ", ".join(map(str, MAX_SHARED_BYTES))
            raise ValueError(f"kernels are not compiled for capability {capability}: use one of {known}")
        named = [launch for launch in launches(capability) if only in launch.name]
        if not named:
            raise ValueError(f"no launch is named {only!r}: use a part of a kernel's name, such as gate")
        return compile_all(named, echo, capability=capability, as_json=as_json)
    cases = chosen_cases(only, quick=quick)
    device = cuda_device()
    document = machine(device, hardware) | {"clocks": {}, "failures": {}}
    limits = limits_of(document["hardware"]) if document["hardware"] else None
    document |= measured_limits(device, gpu_timer)
    write = partial(write_dated, document, folder, "kernels", only, document["hardware"])
    results = measure_all(
        cases, device, partial(measure, timer=gpu_timer, limits=limits, num_rounds=num_rounds), document, write
    )
    if as_json:
        echo(json.dumps(document))
    else:
        show_kernels(document, results, echo)
    return 1 if document["failures"] or any(result.disagreeing for result in results) else 0


def measure_all(
    cases: list[Case],
    device: torch.device,
    measure: Callable[[Case, torch.device], Result],
    document: dict[str, Any],
    write: Callable[[], object],
) -> list[Result]:
    """Measure cases one by one, and ``write`` the document after each kernel. A case in which our kernel fails does not
    stop the others, unless the device is lost with it."""
    results: list[Result] = []
    for kernel, of_kernel in groupby(cases, key=lambda case: case.kernel):
        measured: Case | None = None
        lost = False
        for case in of_kernel:
            try:
                result = measure(case, device)
            except (RuntimeError, TritonError) as error:
                document["failures"][f"{kernel}: {case.shape}"] = str(error).splitlines()[0]
                log(f"{kernel}: {case.shape}: FAILED: {error}")
                if lost := isinstance(error, torch.AcceleratorError):
                    break
            else:
                measured = case
                results.append(result)
                log(f"{kernel}: {case.shape}: {result.own_s * 1e6:.1f} us")
            free_memory(device)
        if device.type == "cuda" and measured is not None and not lost:
            document["clocks"][kernel] = clocks_under(measured.own(device).run, device)
        document["results"] = [result.as_dict() for result in results]
        write()
        if lost:
            break
    return results


def free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
