"""`pdserve profile`: measures this machine with a model, fits the cost model to it, and writes a hardware file.

`pdserve.model.cost.profiling` measures and `pdserve.planner.cost_fit` fits; this module reads options and shows
results. It imports torch only after it has checked the arguments.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from pdserve.contracts.deployment import ModelConfig
from pdserve.contracts.errors import ConfigError, DeployError
from pdserve.contracts.worker_config import WorkerRole
from pdserve.deploy.cluster.host_facts import slow_dtype_reason
from pdserve.deploy.cluster.resources import split_cores
from pdserve.deploy.config import find_dtype
from pdserve.kv_transfer.host_limits import available_memory_bytes, usable_cores
from pdserve.model.config.decoder_config import DecoderConfig, download_hint
from pdserve.model.cost.hardware import Hardware, hardware
from pdserve.model.cost.step_grid import StepKind
from pdserve.planner.cost_fit import CostFit, TimedStep, fit_hardware
from pdserve.planner.hardware_file import read_hardware_file, write_hardware_file
from pdserve.planner.layout import PlannedModel

if TYPE_CHECKING:
    from pdserve.model.cost.profiling import MeasuredStep, ProfiledModel

_KV_MEMORY_SHARE, _MAX_KV_BYTES = 0.25, 2**31
"""Size of the KV pool during measurement: share of the available memory, and upper limit."""
_MIN_STEPS = 16
"""Fewer steps do not determine the fitted figures."""
_HIGH_NOISE = 0.1
_SHOWN_STEPS = 6
"""Held-out steps shown for each kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """Options of one `pdserve profile`."""

    model: ModelConfig
    """``path`` is a folder, or a config.json for which random weights are drawn."""
    num_cores: tuple[int, ...]
    """Cores of each worker to measure, one after another; empty takes the sizes that `pdserve up` gives by default."""
    output: Path
    json_output: Path | None = None
    budget_s: float = 120.0


def run_profile(request: ProfileRequest, console: Console) -> int:
    """Measure, fit, write the file and show the fit; returns the exit status.

    Raises:
        DeployError: the model cannot be measured, or the file cannot be written.
    """
    cores = usable_cores()
    counts = request.num_cores or _default_counts(cores)
    if max(counts) > len(cores):
        raise DeployError(f"--cores {max(counts)}: this machine has {len(cores)} usable cores; ask for fewer")
    for path in (request.output, request.json_output or request.output):
        if not path.resolve().parent.is_dir():
            raise DeployError(f"cannot write {path}: there is no folder {path.parent}; make it, or name another file")
    devices = _other_devices(request.output)
    results = []
    served, _ = find_dtype(request.model, slow_dtype_reason)
    for count in counts:
        budget_s = request.budget_s / len(counts)
        model = profiled_model(served, tuple(cores[:count]))
        fit, measured = _profile(model, count, budget_s, console)
        devices[fit.hardware.name] = fit.hardware
        show(fit, measured, console)
        results.append(_as_json(fit, measured))
    try:
        write_hardware_file(request.output, devices.values())
        if request.json_output is not None:
            request.json_output.write_text(json.dumps({"profiles": results}, indent=1) + "\n", "utf-8")
    except OSError as error:
        raise DeployError(f"cannot write {error.filename}: {error.strerror}; name another file") from error
    names = ", ".join(f"cpu-{count}" for count in counts)
    console.print(
        f"\n{request.output} holds {names}, each a --gpu of pdserve simulate --hardware-file {request.output}."
    )
    console.print("To predict with it, write into the deployment file:")
    console.print(f"model: {{profile: {request.output}}}", highlight=False, soft_wrap=True)
    return 0


def _default_counts(cores: Sequence[int]) -> tuple[int, ...]:
    """Cores of a prefill and of a decode worker; all cores if there are too few to divide."""
    split = split_cores(cores, [WorkerRole.PREFILL, WorkerRole.DECODE])
    return tuple(sorted({len(worker) or len(cores) for worker in split.worker_cores}))


def _other_devices(path: Path) -> dict[str, Hardware]:
    """Devices in the output file, which stay unless they are measured again."""
    try:
        return read_hardware_file(path) if path.exists() else {}
    except ConfigError as error:
        raise DeployError(f"{error}; repair it, or name another --output") from error


def profiled_model(model: ModelConfig, cores: tuple[int, ...]) -> ProfiledModel:
    path = Path(model.path)
    folder = path if path.is_dir() else path.parent
    if not (folder / "config.json").is_file() or (path != folder and path.name != "config.json"):
        remedy = f"give --model a folder with config.json, or that config.json{download_hint(path)}"
        raise DeployError(f"no model at {path}; {remedy}")
    try:
        config = DecoderConfig.from_folder(folder)
        config.limits(model.max_model_len)
    except ValueError as error:
        raise DeployError(" ".join(str(error).split())) from error

    from pdserve.model.cost.profiling import ProfiledModel

    return ProfiledModel(
        name=path.resolve().name if path == folder else folder.resolve().name,
        folder=folder,
        config=config,
        has_weights=path == folder and any(folder.glob("*.safetensors")),
        precision=model.precision,
        block_size=model.block_size,
        max_model_len=model.max_model_len,
        cores=cores,
        kv_memory_bytes=min(_MAX_KV_BYTES, int(_KV_MEMORY_SHARE * available_memory_bytes())),
    )


def _profile(
    model: ProfiledModel, num_cores: int, budget_s: float, console: Console
) -> tuple[CostFit, list[MeasuredStep]]:
    from pdserve.model.cost.profiling import measure_model

    with restored_affinity(), progress_bar(console) as bar:
        task = bar.add_task(f"{num_cores} cores", total=1.0, step="")
        try:
            profile = measure_model(
                model, budget_s, lambda share, step: bar.update(task, completed=share, step=step[:60])
            )
        except (ValueError, OSError) as error:
            raise DeployError(" ".join(str(error).split())) from error
    if len(profile.steps) < _MIN_STEPS:
        raise DeployError(
            f"{budget_s:.0f} s were enough for {len(profile.steps)} steps of this model, and {_MIN_STEPS} are needed: "
            "raise --budget, or profile a smaller model"
        )
    if profile.left_out:
        console.print(f"[yellow]{len(profile.left_out)} of the largest steps were left out: raise --budget[/]")
    date = datetime.now(UTC).date().isoformat()
    source = f"pdserve profile of {model.name}, {model.precision.dtype}, on {num_cores} cores of {_processor()}"
    base = hardware("cpu", num_cores=num_cores)
    copied = dict.fromkeys(("host_bandwidth", "link_bandwidth"), f"measured {date}, copying KV blocks: {source}")
    base = replace(
        base,
        name=f"cpu-{num_cores}",
        host_bandwidth=profile.host_bandwidth,
        link_bandwidth=profile.host_bandwidth,
        sources={**base.sources, **copied},
    )
    planned = PlannedModel(
        shape=model.config.shape,
        name=model.name,
        precision=model.precision,
    )
    steps = [TimedStep(entry.step, entry.median_s, entry.num_layers) for entry in profile.steps]
    return fit_hardware(base, planned, steps, date=date, source=source), profile.steps


@contextmanager
def restored_affinity() -> Iterator[None]:
    """Restore this process's cores afterwards: measuring pins it."""
    affinity = os.sched_getaffinity(0)
    try:
        yield
    finally:
        os.sched_setaffinity(0, affinity)


def _processor() -> str:
    """Processor name, such as ``AMD EPYC 7763 64-Core Processor``."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else os.uname().machine


def progress_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[step]}"),
        console=console,
        transient=True,
    )


def show(fit: CostFit, measured: Sequence[MeasuredStep], console: Console) -> None:
    """Print the measurements, the fitted figures, their error and their range."""
    console.print(_errors_table(fit, measured))
    console.print(_steps_table(fit))
    console.print(_figures_table(fit.hardware))
    noise = _noise(measured)
    if noise > _HIGH_NOISE:
        console.print(
            f"[yellow]Repeats of a step differed by ± {noise:.0%}: something else ran here. Profile again when it is "
            "quiet, or with a larger --budget[/]"
        )
    limits = fit.hardware.measured
    assert limits is not None
    console.print(
        f"Measured up to {limits.step_tokens[1]} new tokens a step, {limits.batch_size[1]} sequences decoding together "
        f"and {limits.context_tokens[1]} cached tokens of a sequence. Beyond that, predictions are extrapolated."
    )


def _errors_table(fit: CostFit, measured: Sequence[MeasuredStep]) -> Table:
    table = Table(title=f"{fit.hardware.name}: steps measured, and errors of predictions", title_justify="left")
    for column in ("steps", "measured", "from", "to", "noise", "held out", "median error", "p90"):
        table.add_column(column, justify="left" if column == "steps" else "right")
    for kind in StepKind:
        of_kind = [entry for entry in measured if entry.step.kind is kind]
        if not of_kind:
            continue
        times_s = sorted(entry.median_s for entry in of_kind)
        errors = fit.errors(kind)
        held_out = [str(errors.num_steps), f"{errors.median:.1%}", f"{errors.p90:.1%}"] if errors.num_steps else ["0"]
        table.add_row(
            kind.value, str(len(of_kind)), _ms(times_s[0]), _ms(times_s[-1]), f"± {_noise(of_kind):.1%}", *held_out
        )
    return table


def _noise(measured: Sequence[MeasuredStep]) -> float:
    """Half the interquartile range of a step's repeats, for the median step."""
    return sorted(entry.spread for entry in measured)[len(measured) // 2]


def _steps_table(fit: CostFit) -> Table:
    table = Table(title="Some of the steps that were held out", title_justify="left")
    table.add_column("new tokens, cached ones")
    for column in ("measured", "predicted", "error"):
        table.add_column(column, justify="right")
    for kind in StepKind:
        held_out = [step for step in fit.steps if step.is_held_out and step.step.kind is kind]
        for step in held_out[:: max(1, len(held_out) // _SHOWN_STEPS)]:
            figures = _ms(step.seconds), _ms(step.predicted_s), f"{step.error:+.1%}"
            table.add_row(f"{kind.value}: {step.step}", *figures)
    return table


def _figures_table(device: Hardware) -> Table:
    table = Table(title="Fitted figures", title_justify="left", show_header=False)
    for name, unit in (("peak_flops", "GFLOP/s"), ("memory_bandwidth", "GB/s"), ("host_bandwidth", "GB/s")):
        value: Any = getattr(device, name)
        table.add_row(name, f"{(max(value.values()) if name == 'peak_flops' else value) / 1e9:.1f} {unit}")
    for name in ("compute_efficiency", "prefill_attention_efficiency"):
        points = getattr(device, name).points
        table.add_row(name, ", ".join(f"{share:.2f} at {count}" for count, share in points))
    for name in ("memory_efficiency", "decode_attention_efficiency"):
        table.add_row(name, f"{getattr(device, name):.3f}")
    for name in ("step_overhead_s", "layer_overhead_s", "row_overhead_s"):
        table.add_row(name, f"{getattr(device, name) * 1e6:.0f} us")
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def _as_json(fit: CostFit, measured: Sequence[MeasuredStep]) -> dict[str, Any]:
    return {
        "device": fit.hardware.name,
        "errors": {kind.value: fit.errors(kind)._asdict() for kind in StepKind},
        "steps": [
            {
                "rows": [list(row) for row in entry.step.rows],
                "num_layers": entry.num_layers,
                "median_s": entry.median_s,
                "fastest_s": entry.fastest_s,
                "num_repeats": entry.num_repeats,
                "predicted_s": fitted.predicted_s,
                "is_held_out": fitted.is_held_out,
            }
            for entry, fitted in zip(measured, fit.steps, strict=True)
        ],
    }
