"""Times of the CPU's products by form of the weight, and of the products of experts beside dense ones of as many bytes.

    python -m pdserve.bench.quantised_products [--rounds 20] [--json FILE]

All run on one thread and count process time. Forms take turns, and each figure is the least of all rounds, because
other programs disturb it in one direction only.

Shape suffixes: T tokens, E input features, F output features, K experts of a token, P pairs of both, Y = experts + 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import Any

import torch
from rich.console import Console

from pdserve.bench.script import publish, script_parser
from pdserve.kernels.cpu.threads import use_threads
from pdserve.kernels.operations import Experts, Linear
from pdserve.kernels.selection import CPU_KERNELS
from pdserve.kernels.weight_quantisation import GroupedWeight

SHAPES = ((896, 9728), (4096, 4096))
"""Inputs and outputs."""
NUM_ROWS = (1, 2, 64)
FORMS = ("bf16", "int8", "e4m3", "int4 128", "int4 128 zeros", "int4 32", "int4 32 zeros", "int8 32")
NUM_EXPERTS, PER_TOKEN, HIDDEN, FEATURES = 48, 8, 2048, 768
"""Of the layer of experts: those of Qwen3-30B-A3B, of which there are 128."""
NUM_TOKENS = (1, 8, 256)


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
    arguments = parser.parse_args()
    torch.manual_seed(0)
    use_threads(1)
    result = {"products": products(arguments.rounds), "experts": experts(arguments.rounds)}
    for row in result["products"]:
        ratios = {form: round(row["us"][form] / row["us"]["int4 128"], 2) for form in FORMS}
        Console(stderr=True).print(f"{row['inputs']} -> {row['outputs']}, {row['rows']} rows, of int4 128: {ratios}")
    publish(result, arguments.json)


if __name__ == "__main__":
    main()
