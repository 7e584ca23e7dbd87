"""A large checkpoint on CPUs: how soon it is loaded, in how much memory, and its steps beside what memory allows.

    python -m pdserve.bench.large_model [--layers 28] [--folder FOLDER] [--json FILE]
    python -m pdserve.bench.large_model --planned moe | int4 [--seconds 240] [--json FILE]

Writes a checkpoint with the sizes of Qwen3-30B-A3B and random int4 weights of GPTQ in groups of 128, with fewer layers
(48 take 17 GB, and 28 take 10), unless ``--folder`` has one. Times a plain read of it and then the load by a worker's
executor, each with nothing of it in the page cache. Memory is that of the process beyond what it took before, without
mapped files and the KV pool.

*Bound* is the memory bandwidth over the bytes that a step reads: the matrices of all layers, of the experts as many as
the cost model expects the tokens to touch, and the output projection. The bandwidth is the best of plain sums over a
gibibyte, on as many threads; sums and steps take turns. Tokens/s of all 48 layers are scaled by these bytes. The prompt
is a step of 2,048 new tokens.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console

from pdserve.bench.script import publish, script_parser
from pdserve.bench.shapes import QWEN2_05B_CONFIG, QWEN3_30B_A3B_INT4_CONFIG
from pdserve.contracts.kv_layout import DTYPE_BYTES
from pdserve.contracts.precision import Precision
from pdserve.contracts.step import Executor, StepBatch
from pdserve.model.config.decoder_config import DecoderConfig
from pdserve.model.config.shape import ModelShape
from pdserve.model.cost import profiling
from pdserve.model.cost.cost_model import CostModel
from pdserve.model.cost.hardware import hardware
from pdserve.model.cost.profiling import ProfiledModel, profiled_executor, step_batch
from pdserve.model.cost.step_grid import Step, StepKind, StepRow
from pdserve.model.weights.random_checkpoint import write_random_weights
from pdserve.planner.cost_fit import TimedStep, fit_hardware
from pdserve.planner.layout import PlannedModel

BATCHES = (1, 8)
CONTEXT = 256
PROMPT_TOKENS = 2048
PLANNED = {"moe": ({**QWEN3_30B_A3B_INT4_CONFIG, "num_hidden_layers": 2}, "auto"), "int4": (QWEN2_05B_CONFIG, "int4")}
"""config.json, and quantization."""
_READ_BYTES = 2**23
_SUMMED_BYTES = 2**30
_KV_BLOCKS = max(1 + PROMPT_TOKENS // 16, max(BATCHES) * (1 + CONTEXT // 16))


def write_model(folder: Path, num_layers: int) -> None:
    config = {**QWEN3_30B_A3B_INT4_CONFIG, "num_hidden_layers": num_layers}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_random_weights(folder / "model.safetensors", DecoderConfig.from_folder(folder).shape, "bfloat16")


def forget(path: Path) -> None:
    """Drop the file from the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_s(path: Path) -> float:
    """Seconds of a plain read."""
    forget(path)
    buffer, began_s = bytearray(_READ_BYTES), time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return time.perf_counter() - began_s


def memory_bytes() -> int:
    """Resident memory of this process, without mapped files."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return sum(int(lines[name].split()[0]) for name in ("RssAnon", "RssShmem")) * 1024


def step_bytes(shape: ModelShape, precision: Precision, num_tokens: int) -> float:
    """Bytes of weights that a decode step of so many rows reads."""
    cost = CostModel(shape, hardware("cpu"), precision)
    return cost.read_bytes(num_tokens) - shape.table_parameters * DTYPE_BYTES[precision.dtype]  # the embedding table


def measure(folder: Path, cores: tuple[int, ...], num_rounds: int) -> dict[str, Any]:
    weights, config = folder / "model.safetensors", DecoderConfig.from_folder(folder)
    precision = Precision(dtype="bfloat16")
    model = ProfiledModel(
        name="Qwen3-30B-A3B",
        folder=folder,
        config=config,
        has_weights=True,
        precision=precision,
        cores=cores,
        kv_memory_bytes=2**30,
        max_model_len=2 * PROMPT_TOKENS,
    )
    torch.set_num_threads(len(cores))
    plain_s = read_s(weights)
    forget(weights)
    before, began_s = memory_bytes(), time.perf_counter()
    with profiled_executor(model, _KV_BLOCKS) as (executor, layout):
        load_s, held = time.perf_counter() - began_s, memory_bytes() - before - layout.pool_bytes
        Console(stderr=True).print(f"read {plain_s:.1f} s, load {load_s:.1f} s, held {held / 1e9:.2f} GB")
        summed, sums_s = torch.ones(_SUMMED_BYTES // 4), list[float]()
        batches = {size: step_batch(Step((StepRow(1, CONTEXT),) * size), layout.block_size) for size in BATCHES}
        steps_s: dict[int, list[float]] = {size: [] for size in BATCHES}
        for number in range(num_rounds + 1):
            began_s = time.perf_counter()
            summed.sum()
            sums_s.append(time.perf_counter() - began_s)
            for size, batch in batches.items():
                seconds = executor.submit(batch).result().duration_s
                if number:
                    steps_s[size].append(seconds)
        prompt = step_batch(Step((StepRow(PROMPT_TOKENS, 0),)), layout.block_size)
        prompt_s = executor.submit(prompt).result().duration_s
    bandwidth, rows = _SUMMED_BYTES / min(sums_s), {}
    whole = ModelShape.from_hf_config(QWEN3_30B_A3B_INT4_CONFIG)
    for size, times_s in steps_s.items():
        num_bytes = step_bytes(config.shape, precision, size)
        bound_s, best_s = num_bytes / bandwidth, min(times_s)
        rows[f"{size} streams"] = {
            "step_gb": round(num_bytes / 1e9, 3),
            "tokens_per_s": round(size / best_s, 1),
            "tokens_per_s_median": round(size / statistics.median(times_s), 1),
            "bound_tokens_per_s": round(size / bound_s, 1),
            "of_bound": round(bound_s / best_s, 3),
            "all_layers_tokens_per_s": round(size / best_s * num_bytes / step_bytes(whole, precision, size), 1),
        }
    return {
        "layers": config.shape.num_layers,
        "file_gb": round(weights.stat().st_size / 1e9, 2),
        "plain_read_s": round(plain_s, 1),
        "load_s": round(load_s, 1),
        "held_over_file": round(held / weights.stat().st_size, 3),
        "bandwidth_gb_per_s": round(bandwidth / 1e9, 1),
        "decode": rows,
        "prompt_tokens_per_s": round(PROMPT_TOKENS / prompt_s, 1),
    }


def planned(name: str, budget_s: float) -> dict[str, Any]:
    """Errors of the cost model for held-out steps of one of `PLANNED`, as `pdserve profile` fits it on one core, but by
    the process's time, which other processes disturb least."""

    def run_s(executor: Executor, batch: StepBatch) -> float:
        began_s = time.process_time()
        executor.submit(batch).result()
        return time.process_time() - began_s

    values, quantization = PLANNED[name]
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "config.json").write_text(json.dumps(values), encoding="utf-8")
        config = DecoderConfig.from_folder(Path(scratch))
    profiled = ProfiledModel(
        name=name,
        folder=Path(scratch),
        config=config,
        has_weights=False,
        precision=Precision(dtype="bfloat16", quantization=quantization),
        cores=(max(os.sched_getaffinity(0)),),
        kv_memory_bytes=2**31,
        max_batch_size=64,
        max_model_len=2 * PROMPT_TOKENS,
    )
    with patch.object(profiling, "_run_s", run_s):
        profile = profiling.measure_model(profiled, budget_s, lambda *_: None)
    steps = [TimedStep(each.step, each.median_s, each.num_layers) for each in profile.steps]
    fitted_model = PlannedModel(shape=profiled.config.shape, name=profiled.name, precision=profiled.precision)
    fit = fit_hardware(hardware("cpu", num_cores=1), fitted_model, steps, date="", source="")
    errors = [abs(step.error) for step in fit.steps if step.is_held_out]
    return {
        "model": profiled.name,
        "errors": {kind.value: fit.errors(kind)._asdict() for kind in StepKind},
        "held_out": len(errors),
        "beyond_15_percent": sum(error > 0.15 for error in errors),
        "largest": round(max(errors), 3),
    }


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--folder", type=Path, help="of the checkpoint, which stays; written if it is not there")
    parser.add_argument("--cores", type=int, nargs="+", default=sorted(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--planned", choices=PLANNED, help="measure predictions of this model alone")
    parser.add_argument("--seconds", type=float, default=240.0, help="for its steps")
    arguments = parser.parse_args()
    if arguments.planned is not None:
        publish(planned(arguments.planned, arguments.seconds), arguments.json)
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.folder or Path(scratch)
        folder.mkdir(exist_ok=True)
        if not (folder / "model.safetensors").exists():
            write_model(folder, arguments.layers)
        result = measure(folder, tuple(arguments.cores), arguments.rounds)
    publish(result, arguments.json)


if __name__ == "__main__":
    main()
