"""Speed of CPU matrix products: a layer's products with weights of every form, against torch's in float32.

    python -m pdserve.bench.cpu_kernels [--threads 1,4] [--shapes tiny,half] [--rounds 3] [--json FILE]

Each form of weight is measured in a separate process, because threads of torch and of the kernels would disturb each
other. Rounds of all forms alternate, and the fastest round of each counts. A product of few rows cycles through as many
matrices as the model has layers, so that caches help no more than in a step.

Also prints two references: torch's rate with large float32 matrices, for the GFLOP/s of many rows, and its speed of
reading memory, for the GB/s of one row.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch.nn.functional import linear

from pdserve.bench.script import publish, script_parser
from pdserve.bench.shapes import SHAPES
from pdserve.kernels.cpu.threads import use_threads
from pdserve.kernels.selection import CPU_KERNELS

NUM_ROWS = (1, 8, 32, 256, 2048)
FORMS = ("torch", "float32", "bfloat16", "float16", "int8", "int4")
"""``torch`` is `torch.nn.functional.linear` in float32; the others are the kernels' forms of weight."""
MAX_WEIGHTS = 2**27
"""Weights of all copies of one matrix: 512 MiB in float32, beyond any cache."""
MAX_CALL_FLOP = 2e10
"""Operations of one timed call. Products of many rows that need more get fewer copies: caches help them anyway."""
CASE_S = 0.3
PROCESS_TIMEOUT_S = 1800.0
CEILING_SIZE = 2048
READ_VALUES = 2**27


class Case(NamedTuple):
    """One product of a layer, for so many rows."""

    shape: str
    product: str
    num_inputs: int
    num_outputs: int
    num_copies: int
    num_rows: int

    @property
    def name(self) -> str:
        return f"{self.shape} {self.product} {self.num_inputs}->{self.num_outputs}, {self.num_rows} rows"


def cases(shapes: list[str]) -> Iterator[Case]:
    """Products of each shape's layers."""
    for name in shapes:
        shape = SHAPES[name]
        hidden, intermediate = shape["hidden_size"], shape["intermediate_size"]
        num_qkv = hidden + 2 * hidden // shape["num_heads"] * shape["num_kv_heads"]
        products = {
            "qkv": (hidden, num_qkv),
            "output": (hidden, hidden),
            "gate_up": (hidden, 2 * intermediate),
            "down": (intermediate, hidden),
        }
        for product, (num_inputs, num_outputs) in products.items():
            num_copies = max(1, min(shape["num_layers"], MAX_WEIGHTS // (num_inputs * num_outputs)))
            for num_rows in NUM_ROWS:
                yield Case(name, product, num_inputs, num_outputs, num_copies, num_rows)


def measure(form: str, num_threads: int, shapes: list[str]) -> dict[str, float]:
    """Seconds of one product of each case, and for ``torch`` the ceilings. In this process."""
    results: dict[str, float] = {}
    if form == "torch":
        torch.set_num_threads(num_threads)
        results |= _ceilings()
    else:
        use_threads(num_threads)
    for _, of_product in groupby(cases(shapes), key=lambda case: (case.shape, case.product)):
        first, *others = of_product
        copies = [_matrix(form, first) for _ in range(first.num_copies)]
        for case in (first, *others):
            flop = 2 * case.num_rows * case.num_inputs * case.num_outputs
            some = copies[: max(1, int(MAX_CALL_FLOP / flop))]
            x_TE = torch.randn(case.num_rows, case.num_inputs)
            results[case.name] = _fastest_s(partial(_multiply_all, some, x_TE)) / len(some)
    return results


Multiply = Callable[[torch.Tensor], torch.Tensor]


def _multiply_all(copies: list[Multiply], x_TE: torch.Tensor) -> None:
    for multiply in copies:
        multiply(x_TE)


def _matrix(form: str, case: Case) -> Multiply:
    weight_FE = torch.randn(case.num_outputs, case.num_inputs) / case.num_inputs**0.5
    if form == "torch":
        return lambda x_TE: linear(x_TE, weight_FE)
    if form in ("int8", "int4"):
        return CPU_KERNELS.pack_linear(weight_FE.bfloat16(), None, form)
    return CPU_KERNELS.pack_linear(weight_FE.to(getattr(torch, form)))


def _ceilings() -> dict[str, float]:
    square = torch.randn(CEILING_SIZE, CEILING_SIZE)
    memory = torch.zeros(READ_VALUES)
    return {
        "gflops": 2 * CEILING_SIZE**3 / _fastest_s(lambda: square @ square) / 1e9,
        "read_gbytes_per_s": memory.nbytes / _fastest_s(lambda: memory.sum()) / 1e9,
    }


@torch.inference_mode()
def _fastest_s(body: Callable[[], object]) -> float:
    """The fastest of as many calls as `CASE_S` has time for, and of three at least, after one to warm up."""
    body()
    times: list[float] = []
    while len(times) < 3 or sum(times) < CASE_S:
        started_s = time.perf_counter()
        body()
        times.append(time.perf_counter() - started_s)
    return min(times)


def _measure_apart(form: str, num_threads: int, shapes: list[str]) -> dict[str, float]:
    """`measure` in a process of its own."""
    command = [sys.executable, "-m", "pdserve.bench.cpu_kernels", "--form", form]
    command += ["--threads", str(num_threads), "--shapes", ",".join(shapes)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=PROCESS_TIMEOUT_S)
    results: dict[str, float] = json.loads(done.stdout)
    return results


def compare(num_threads: int, shapes: list[str], num_rounds: int, console: Console) -> dict[str, Any]:
    """The fastest of all rounds, as rates and as ratios to torch."""
    fastest: dict[str, dict[str, float]] = {form: {} for form in FORMS}
    for number in range(num_rounds):
        for form in FORMS:
            console.print(f"{num_threads} threads, round {number + 1} of {num_rounds}: {form}")
            for name, value in _measure_apart(form, num_threads, shapes).items():
                better = max if name in ("gflops", "read_gbytes_per_s") else min
                fastest[form][name] = better(value, fastest[form].get(name, value))
    ceilings = {name: round(fastest["torch"][name], 1) for name in ("gflops", "read_gbytes_per_s")}
    table = [_entry(case, {form: fastest[form][case.name] for form in FORMS}) for case in cases(shapes)]
    console.print(_as_table(num_threads, ceilings, table))
    return {"threads": num_threads, "ceilings": ceilings, "products": table}


def _entry(case: Case, seconds: dict[str, float]) -> dict[str, Any]:
    value_bytes = {"torch": 4, "float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "int4": 0.5}
    num_weights = case.num_inputs * case.num_outputs
    return {
        **case._asdict(),
        "forms": {
            form: {
                "us": round(seconds[form] * 1e6, 1),
                "gflops": round(2 * case.num_rows * num_weights / seconds[form] / 1e9, 1),
                "weight_gbytes_per_s": round(num_weights * value_bytes[form] / seconds[form] / 1e9, 1),
                "times_torch": round(seconds["torch"] / seconds[form], 2),
            }
            for form in FORMS
        },
    }


def _as_table(num_threads: int, ceilings: dict[str, float], entries: list[dict[str, Any]]) -> Table:
    title = (
        f"{num_threads} threads; torch's large float32 product {ceilings['gflops']} GFLOP/s, "
        f"reading {ceilings['read_gbytes_per_s']} GB/s"
    )
    table = Table(title=title, caption="GFLOP/s, GB/s of weights, and speed as a multiple of torch's")
    for column in ("product", "rows", *FORMS):
        table.add_column(column, justify="left" if column == "product" else "right")
    for entry in entries:
        cells = [
            f"{form['gflops']:.0f}  {form['weight_gbytes_per_s']:.1f}  {form['times_torch']:.2f}x"
            for form in entry["forms"].values()
        ]
        product = f"{entry['shape']} {entry['product']} {entry['num_inputs']}->{entry['num_outputs']}"
        table.add_row(product, str(entry["num_rows"]), *cells)
    return table


def main() -> None:
    parser = script_parser(__doc__)
    all_threads = ",".join(map(str, dict.fromkeys((1, len(os.sched_getaffinity(0))))))
    parser.add_argument("--threads", default=all_threads, help="numbers of threads, separated by commas")
    parser.add_argument("--shapes", default=",".join(SHAPES), help=f"some of {', '.join(SHAPES)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--form", choices=FORMS, help="measure this form alone, in this process")
    arguments = parser.parse_args()
    threads = [int(count) for count in arguments.threads.split(",")]
    shapes = arguments.shapes.split(",")
    if arguments.form:
        sys.stdout.write(json.dumps(measure(arguments.form, threads[0], shapes)))
        return
    console = Console(stderr=True, width=160)
    results = [compare(count, shapes, arguments.rounds, console) for count in threads]
    publish({"torch": torch.__version__, "rounds": arguments.rounds, "results": results}, arguments.json)


if __name__ == "__main__":
    main()
