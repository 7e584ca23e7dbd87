"""Times of the CPU's products by form of the weight, of the products of experts beside dense ones of as many bytes, and
of products and a model's steps in bfloat16 beside float32.

    python -m pdserve.bench.quantised_products [--only products experts bfloat16 steps] [--rounds 20] [--json FILE]

Of products in bfloat16, ``x1`` is the kernels': activations are rounded to it. ``x2`` and ``x3`` add the products of
what rounding lost, and of what that rounding lost; each is a product more. ``oneDNN`` is torch's, whose result is
bfloat16.

All run on one thread and count process time. Forms take turns, and each figure is the least of all rounds, because
other programs disturb it in one direction only.

Shape suffixes: T tokens, E input features, F output features, K experts of a token, P pairs of both, Y = experts + 1.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console

from pdserve.bench.script import publish, script_parser
from pdserve.bench.shapes import QWEN2_05B_CONFIG
from pdserve.contracts.precision import CPU_PRODUCTS, Precision
from pdserve.contracts.step import Executor, StepBatch, StepOutput
from pdserve.kernels.cpu.threads import use_threads
from pdserve.kernels.operations import Experts, Linear
from pdserve.kernels.selection import CPU_KERNELS
from pdserve.kernels.weight_quantisation import GroupedWeight, dequantise
from pdserve.model.config.decoder_config import DecoderConfig
from pdserve.model.cost.profiling import ProfiledModel, profiled_executor, step_batch
from pdserve.model.cost.step_grid import Step, StepRow

SHAPES = ((896, 9728), (4096, 4096))
"""Inputs and outputs."""
NUM_ROWS = (1, 2, 64)
FORMS = ("bf16", "int8", "e4m3", "int4 128", "int4 128 zeros", "int4 32", "int4 32 zeros", "int8 32")
NUM_EXPERTS, PER_TOKEN, HIDDEN, FEATURES = 48, 8, 2048, 768
"""Of the layer of experts: those of Qwen3-30B-A3B, of which there are 128."""
NUM_TOKENS = (1, 8, 256)
BFLOAT16_SHAPES = ((896, 9728), (4864, 896), (896, 1152), (4096, 4096))
"""Those of Qwen2-0.5B, and a larger one."""
BFLOAT16_ROWS = (1, 8, 64, 256)
STEPS = {
    **{f"{count} decode": Step((StepRow(1, 256),) * count) for count in (1, 8, 16)},
    "prompt of 2048": Step((StepRow(2048, 0),)),
}


def weight_of(form: str, num_outputs: int, num_inputs: int) -> torch.Tensor | GroupedWeight:
    """Random values: ``kind``, or ``kind group``, or ``kind group zeros``."""
    if form == "bf16":
        return torch.randn(num_outputs, num_inputs).bfloat16()
    kind, group, *zeros = [*form.split(), str(num_inputs)] if " " not in form else form.split()
    lowest, end = {"int4": (-8, 8), "int8": (-128, 128), "e4m3": (0, 120)}[kind]
    values_FE = torch.randint(lowest, end, (num_outputs, num_inputs), dtype=torch.int8)
    scales_FG = torch.rand(num_outputs, -(-num_inputs // int(group)))
    return GroupedWeight(
        values_FE.view(torch.float8_e4m3fn) if kind == "e4m3" else values_FE,
        scales_FG,
        kind,
        int(group),
        torch.full_like(scales_FG, 3) if zeros else None,
    )


def fastest_s(runs: Mapping[str, Callable[[], object]], num_rounds: int) -> dict[str, float]:
    """Least seconds of each, in turns."""
    least = dict.fromkeys(runs, float("inf"))
    for _ in range(num_rounds):
        for name, run in runs.items():
            run()  # Brings its weights as far into the caches as they fit.
            began = time.process_time()
            run()
            least[name] = min(least[name], time.process_time() - began)
    return least


def products(num_rounds: int) -> list[dict[str, Any]]:
    found = []
    for num_inputs, num_outputs in SHAPES:
        linears = {form: CPU_KERNELS.pack_linear(weight_of(form, num_outputs, num_inputs)) for form in FORMS}
        for num_rows in NUM_ROWS:
            x_TE = torch.randn(num_rows, num_inputs)
            runs = {form: partial(linear, x_TE) for form, linear in linears.items()}
            times = fastest_s(runs, num_rounds if num_rows < 64 else num_rounds // 4)
            microseconds = {form: round(seconds * 1e6) for form, seconds in times.items()}
            found.append({"inputs": num_inputs, "outputs": num_outputs, "rows": num_rows, "us": microseconds})
    return found


def bfloat16_products(num_rounds: int) -> list[dict[str, Any]]:
    found = []
    for form, (num_inputs, num_outputs) in product(("bf16", "int8", "int4 128"), BFLOAT16_SHAPES):
        weight = weight_of(form, num_outputs, num_inputs)
        whole_FE = weight if isinstance(weight, torch.Tensor) else dequantise(weight)
        plain, rounded = (CPU_KERNELS.pack_linear(weight, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
        for num_rows in BFLOAT16_ROWS:
            x_TE = torch.randn(num_rows, num_inputs)
            runs: dict[str, Callable[[], torch.Tensor]] = {"float32": partial(plain, x_TE)}
            most_parts = 3 if form == "bf16" else 1
            runs |= {f"x{num}": partial(_in_parts, rounded, x_TE, num) for num in range(1, most_parts + 1)}
            if form == "bf16":
                runs["oneDNN"] = partial(torch.mm, x_TE.bfloat16(), whole_FE.T)
            exact_TF = x_TE.double() @ whole_FE.double().T
            times = fastest_s(runs, num_rounds if num_rows < 64 else num_rounds // 4)
            size = float(exact_TF.square().mean().sqrt())
            errors = {
                name: float((run().double() - exact_TF).square().mean().sqrt()) / size for name, run in runs.items()
            }
            found.append(
                {
                    "weight": form,
                    "inputs": num_inputs,
                    "outputs": num_outputs,
                    "rows": num_rows,
                    "us": {name: round(1e6 * seconds) for name, seconds in times.items()},
                    "rms_error": {name: float(f"{error:.1e}") for name, error in errors.items()},
                }
            )
    return found


def _in_parts(rounded: Linear, x_TE: torch.Tensor, num_parts: int) -> torch.Tensor:
    if num_parts == 1:
        return rounded(x_TE)
    first_TE = x_TE.bfloat16().float()
    return rounded(first_TE, _in_parts(rounded, x_TE - first_TE, num_parts - 1))


def steps(num_rounds: int) -> list[dict[str, Any]]:
    """Of a model of Qwen2-0.5B's shape in bfloat16, with random weights."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        (folder / "config.json").write_text(json.dumps(QWEN2_05B_CONFIG))
        executors = {}
        for cpu_products in CPU_PRODUCTS:
            model = ProfiledModel(
                name="qwen2-0.5b",
                folder=folder,
                config=DecoderConfig.from_folder(folder),
                has_weights=False,
                precision=Precision(dtype="bfloat16", cpu_products=cpu_products),
                cores=(0,),
                kv_memory_bytes=2**28,
            )
            executors[cpu_products], layout = stack.enter_context(profiled_executor(model, 16 * 17))
        found = []
        for description, step in STEPS.items():
            batch = step_batch(step, layout.block_size)
            runs = {name: partial(_run, executor, batch) for name, executor in executors.items()}
            times = fastest_s(runs, num_rounds if step.num_new < 64 else 1 + num_rounds // 12)
            per_second = {name: round(step.num_new / seconds, 1) for name, seconds in times.items()}
            Console(stderr=True).print(f"{description}: {per_second} tokens/s")
            found.append({"step": description, "tokens_per_s": per_second})
    return found


def _run(executor: Executor, batch: StepBatch) -> StepOutput:
    return executor.submit(batch).result()


def experts(num_rounds: int) -> list[dict[str, Any]]:
    """Gate, up and down of one layer, and a dense MLP of as many bytes as the experts that the tokens reach."""
    found = []
    for form, num_tokens in product(("bf16", "int4 128"), NUM_TOKENS):
        chosen_TK = torch.rand(num_tokens, NUM_EXPERTS).argsort(dim=1)[:, :PER_TOKEN]
        pairs = CPU_KERNELS.sort_pairs(chosen_TK, range(NUM_EXPERTS))
        num_touched = int((pairs.starts.diff() > 0).sum())
        gate_up, down = (
            CPU_KERNELS.pack_experts(weight_of(form, *shape) for _ in range(NUM_EXPERTS))
            for shape in ((2 * FEATURES, HIDDEN), (HIDDEN, FEATURES))
        )
        dense_up = CPU_KERNELS.pack_linear(weight_of(form, 2 * FEATURES * num_touched, HIDDEN))
        dense_down = CPU_KERNELS.pack_linear(weight_of(form, HIDDEN, FEATURES * num_touched))
        num_rows = -(-num_tokens * PER_TOKEN // num_touched)  # as many multiplications
        runs = {
            "experts": partial(_routed, gate_up, down, torch.randn(num_tokens * PER_TOKEN, HIDDEN), pairs.starts),
            "dense": partial(_dense, dense_up, dense_down, torch.randn(num_rows, HIDDEN)),
        }
        times = fastest_s(runs, num_rounds if num_tokens < 64 else num_rounds // 4)
        milliseconds = {f"{name}_ms": round(seconds * 1e3, 3) for name, seconds in times.items()}
        found.append({"form": form, "tokens": num_tokens, "touched": num_touched, "rows": num_rows, **milliseconds})
    return found


def _routed(gate_up: Experts, down: Experts, x_PE: torch.Tensor, starts_Y: torch.Tensor) -> torch.Tensor:
    return down(CPU_KERNELS.gate(gate_up(x_PE, starts_Y), "silu"), starts_Y)


def _dense(gate_up: Linear, down: Linear, x_TE: torch.Tensor) -> torch.Tensor:
    return down(CPU_KERNELS.gate(gate_up(x_TE), "silu"))


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parts = {"products": products, "experts": experts, "bfloat16": bfloat16_products, "steps": steps}
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    use_threads(1)
    result = {name: parts[name](arguments.rounds) for name in arguments.only}
    for row in result.get("products", []):
        ratios = {form: round(row["us"][form] / row["us"]["int4 128"], 2) for form in FORMS}
        Console(stderr=True).print(f"{row['inputs']} -> {row['outputs']}, {row['rows']} rows, of int4 128: {ratios}")
    publish(result, arguments.json)


if __name__ == "__main__":
    main()
