"""Compares the cost model with published step times: its error on GPUs that are not here.

    python -m pdserve.bench.cost_check --data FOLDER [--json FILE]

FOLDER has two files of 2023, each with its sources in comments at the beginning:

- ``simdistserve_fit_a100_80g.csv``: coefficients that DistServe's authors fitted to OPT-13B and OPT-66B on A100 GPUs,
  under their engine and under vLLM of that time.
- ``splitwise_perf_model_median.csv``: medians of Llama-2-70B on A100 and H100 GPUs under the Splitwise paper's engine.

Prints two errors for each engine, model and number of ranks. *Catalogue* uses the catalogue's device, whose overheads
assume CUDA graphs, which these engines lacked. *Fitted* uses the efficiencies and overheads that fit one kind of the
engine's rows best: OPT-13B if there are both models, and four ranks of Llama-2-70B. All other rows are held out.
Attention of prompts is not fitted, because these steps cannot separate it from linear layers. The catalogue's A100,
except its overheads, comes from the fit of DistServe's own engine.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from math import log
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from pdserve.bench.models import LLAMA_2_70B, OPT_13B, OPT_66B
from pdserve.bench.script import publish, script_parser
from pdserve.contracts.precision import Precision
from pdserve.model.cost.cost_model import CostModel
from pdserve.model.cost.curve import Curve
from pdserve.model.cost.hardware import Hardware, hardware
from pdserve.planner.arrays import FloatArray

SHAPES = {"opt-13b": OPT_13B.shape, "opt-66b": OPT_66B.shape, "llama-2-70b": LLAMA_2_70B.shape}
PROMPT_TOKENS = (64, 128, 256, 512, 1024, 2000)
"""Prompt lengths within the range of the fitted coefficients, up to 2048."""
BATCH_SIZES = (1, 4, 16, 64, 128, 192)
CONTEXT_TOKENS = (64, 512, 1500)
MAX_CONTEXT_TOKENS = 60_000
"""Largest batch that fitted into the measured pools."""


class Group(NamedTuple):
    """Rows that are judged together."""

    engine: str
    device: str
    model: str
    tensor_parallel: int
    phase: str
    is_seen: bool
    """By the fit of its engine and device."""


class Row(NamedTuple):
    group: Group
    rows: list[tuple[int, int]]
    """(new tokens, cached tokens) of each row of the step."""
    seconds: float


def _records(path: Path) -> Iterator[dict[str, str]]:
    with path.open() as file:
        yield from csv.DictReader(line for line in file if not line.startswith("#"))


def distserve_rows(path: Path) -> Iterator[Row]:
    """Steps within the range that the coefficients were fitted to, as long as the coefficients say."""
    for record in _records(path):
        model = record["model"].removeprefix("facebook/")
        ranks, phase = int(record["tp"]), record["phase"]
        if SHAPES[model].num_heads % ranks or ranks == 3:
            continue
        start, per_token, last = (float(record[key]) / 1e3 for key in ("a_ms", "b_ms_per_token", "c"))
        engine = "DistServe" if record["engine"] == "distserve" else "vLLM, 2023"
        group = Group(
            engine, "a100-80gb-sxm", model, ranks, "prefill" if phase == "prefill" else "decode", model == "opt-13b"
        )
        if phase == "prefill":
            for count in PROMPT_TOKENS:
                yield Row(group, [(count, 0)], start + per_token * count + last * count * count)
            continue
        for size in BATCH_SIZES:
            is_large = size >= int(record["bs_threshold"])
            for context in CONTEXT_TOKENS:
                if is_large == phase.endswith("largebs") and size * context <= MAX_CONTEXT_TOKENS:
                    yield Row(group, [(1, context)] * size, start + per_token * size * context + last * size)


def splitwise_rows(path: Path) -> Iterator[Row]:
    """Medians of Llama-2-70B by 4 and 8 ranks; on 2, the largest batches did not fit."""
    devices = {"a100-80gb": "a100-80gb-sxm", "h100-80gb": "h100-sxm"}
    for record in _records(path):
        ranks, device = int(record["tensor_parallel"]), devices.get(record["hardware"])
        if record["model"] != "llama2-70b" or device is None or ranks == 2:
            continue
        prompt, size, answer = (int(record[key]) for key in ("prompt_size", "batch_size", "token_size"))
        for phase, tokens in (("prefill", (prompt, 0)), ("decode", (1, prompt + answer // 2))):
            group = Group("Splitwise", device, "llama-2-70b", ranks, phase, ranks == 4)
            key = "prompt_time_ms" if phase == "prefill" else "token_time_ms"
            yield Row(group, [tokens] * size, float(record[key]) / 1e3)


def errors(rows: list[Row], device: Hardware) -> FloatArray:
    """Relative errors of predictions: above 0 where they are too long."""
    costs: dict[tuple[str, int], CostModel] = {}
    for row in rows:
        key = row.group.model, row.group.tensor_parallel
        if key not in costs:
            costs[key] = CostModel(SHAPES[key[0]], device, Precision(dtype="float16"), key[1])
    predicted = [costs[row.group.model, row.group.tensor_parallel].step_s(row.rows) for row in rows]
    relative: FloatArray = np.array(predicted) / np.array([row.seconds for row in rows]) - 1
    return relative


_COMPUTE_TOKENS = (32, 128, 512, 2048)
_START: dict[Any, float] = {
    **dict(zip(_COMPUTE_TOKENS, (0.2, 0.4, 0.6, 0.7), strict=True)),
    "memory_efficiency": 0.9,
    "decode_attention_efficiency": 0.6,
    "link_efficiency": 0.5,
    "link_latency_s": 10e-6,
    "layer_overhead_s": 150e-6,
    "step_overhead_s": 1e-3,
}
MEMORY_EFFICIENCY_LIMIT = 0.92
"""Share that plain copies reach: beyond it, a fit takes time from the memory that belongs to overhead."""


def _device(base: Hardware, figures: dict[Any, float]) -> Hardware:
    changes: dict[str, Any] = {name: value for name, value in figures.items() if isinstance(name, str)}
    changes["compute_efficiency"] = Curve(tuple((count, figures[count]) for count in _COMPUTE_TOKENS))
    return replace(base, **changes)


def fit(rows: list[Row], base: Hardware) -> Hardware:
    """The device that predicts ``rows`` best: least squares of log(predicted / measured), each figure in its turn."""

    def loss(figures: dict[Any, float]) -> float:
        too_large = any(
            isinstance(name, int) or not name.endswith("_s") for name, value in figures.items() if value > 1
        )
        if too_large or figures["memory_efficiency"] > MEMORY_EFFICIENCY_LIMIT:
            return float("inf")
        try:
            device = _device(base, figures)
        except ValueError:  # a curve on which more work would take less time
            return float("inf")
        return float(np.mean(np.log1p(errors(rows, device)) ** 2))

    figures: dict[Any, float] = dict(_START)
    best, factor = loss(figures), 1.4
    while log(factor) > 0.002:
        before = best
        for name in figures:
            for changed in (figures[name] * factor, figures[name] / factor):
                trial = {**figures, name: changed}
                if (found := loss(trial)) < best:
                    best, figures = found, trial
        if best == before:
            factor **= 0.5
    return _device(base, figures)


def check(rows: list[Row]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Errors by group, and the figures of the fits, by engine and device."""
    groups, fits = [], {}
    rows = sorted(rows, key=lambda row: row.group)
    for (engine, device_name), of_engine in groupby(rows, key=lambda row: row.group[:2]):
        mine = list(of_engine)
        base = hardware(device_name)
        fitted = fit([row for row in mine if row.group.is_seen], base)
        fits[f"{engine} on {device_name}"] = {
            "compute_efficiency": [[count, round(share, 3)] for count, share in fitted.compute_efficiency.points],
            **{name: float(f"{getattr(fitted, name):.3g}") for name in list(_START)[len(_COMPUTE_TOKENS) :]},
        }
        for group, members in groupby(mine, key=lambda row: row.group):
            of_group = list(members)
            groups.append(
                {
                    **group._asdict(),
                    "num_rows": len(of_group),
                    "catalogue": _summary(errors(of_group, base)),
                    "fitted": _summary(errors(of_group, fitted)),
                }
            )
    return groups, fits


def _summary(found: FloatArray) -> dict[str, float]:
    sizes = np.abs(found)
    figures = {"bias": np.median(found), "median": np.median(sizes), "p90": np.quantile(sizes, 0.9)}
    return {name: round(float(figure), 3) for name, figure in figures.items()}


def _show(groups: list[dict[str, Any]], console: Console) -> None:
    table = Table(title="Relative errors of predicted step times: median with sign, and size (median, p90)")
    for heading in ("engine", "device", "model", "TP", "phase", "rows", "catalogue", "fitted", ""):
        table.add_column(heading, justify="left" if heading in ("engine", "device", "model", "phase", "") else "right")
    for group in groups:
        shown = [
            f"{group[kind]['bias']:+.0%} ({group[kind]['median']:.0%}, {group[kind]['p90']:.0%})"
            for kind in ("catalogue", "fitted")
        ]
        names = [str(group[key]) for key in ("engine", "device", "model", "tensor_parallel", "phase", "num_rows")]
        table.add_row(*names, *shown, "seen" if group["is_seen"] else "held out")
    console.print(table)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with the two files")
    arguments = parser.parse_args()
    rows = [
        *distserve_rows(arguments.data / "simdistserve_fit_a100_80g.csv"),
        *splitwise_rows(arguments.data / "splitwise_perf_model_median.csv"),
    ]
    groups, fits = check(rows)
    _show(groups, Console(stderr=True))
    publish({"groups": groups, "fits": fits}, arguments.json)


if __name__ == "__main__":
    main()
