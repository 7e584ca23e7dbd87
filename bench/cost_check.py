"""Compares the cost model with published step times: its error on GPUs that are not here.

    python -m pdserve.bench.cost_check --data FOLDER [--json FILE]

FOLDER has three files, each with its sources in comments at the beginning:

- ``simdistserve_fit_a100_80g.csv``: coefficients that DistServe's authors fitted to OPT-13B and OPT-66B on A100 GPUs,
  under their engine and under vLLM of 2023.
- ``splitwise_perf_model_median.csv``: medians of Llama-2-70B and BLOOM-176B on A100 and H100 GPUs under the Splitwise
  paper's engine.
- ``vllm_h100_open_loop.csv``: see `pdserve.bench.vllm_runs`.

Prints two errors for each engine, model and number of ranks of the first two. *Catalogue* uses the catalogue's device,
whose host costs assume CUDA graphs, which these engines lacked. *Fitted* gives it NCCL's all-reduces instead of vLLM's,
the host costs of the engine, and shares of the catalogue's rates for its older kernels: the six figures of `STARTS`,
fitted to OPT-13B, or to Llama-2-70B on 2 and 4 ranks. All other rows are held out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pdserve.bench.models import BLOOM_176B, LLAMA_2_70B, OPT_13B, OPT_66B
from pdserve.bench.script import csv_records, publish, script_parser, show_table
from pdserve.bench.vllm_runs import check_runs
from pdserve.contracts.precision import Precision
from pdserve.model.cost.cost_model import CostModel
from pdserve.model.cost.curve import Curve
from pdserve.model.cost.hardware import Hardware, hardware
from pdserve.planner.arrays import FloatArray
from pdserve.planner.cost_fit import best_fit

SHAPES = {
    "opt-13b": OPT_13B.shape,
    "opt-66b": OPT_66B.shape,
    "llama2-70b": LLAMA_2_70B.shape,
    "bloom-176b": BLOOM_176B.shape,
}
PROMPT_TOKENS = (64, 128, 256, 512, 1024, 2000)
"""Prompt lengths within the range of the fitted coefficients, up to 2048."""
BATCH_SIZES = (1, 4, 16, 64, 128, 192)
CONTEXT_TOKENS = (64, 512, 1500)
MAX_CONTEXT_TOKENS = 60_000
"""Largest batch that fitted into the measured pools."""
MAX_BATCH_OF_TWO, MAX_SEEN_RANKS = 16, 4
"""Splitwise's largest batch on 2 ranks, and the ranks that its fit sees."""


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


def distserve_rows(path: Path) -> Iterator[Row]:
    """Steps within the range that the coefficients were fitted to, as long as the coefficients say."""
    for record in csv_records(path):
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
    """Medians of all models; the largest batches did not fit on 2 ranks."""
    devices = {"a100-80gb": "a100-80gb-sxm", "h100-80gb": "h100-sxm"}
    for record in csv_records(path):
        ranks, device, model = int(record["tensor_parallel"]), devices.get(record["hardware"]), record["model"]
        prompt, size, answer = (int(record[key]) for key in ("prompt_size", "batch_size", "token_size"))
        if device is None or (ranks == 2 and size > MAX_BATCH_OF_TWO):
            continue
        is_seen = model == "llama2-70b" and ranks <= MAX_SEEN_RANKS
        for phase, tokens in (("prefill", (prompt, 0)), ("decode", (1, prompt + answer // 2))):
            key = "prompt_time_ms" if phase == "prefill" else "token_time_ms"
            group = Group("Splitwise", device, model, ranks, phase, is_seen)
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


NCCL: dict[str, dict[str, Any]] = {
    "a100-80gb-sxm": {"link_latency_s": 16e-6, "all_reduce_efficiency": 0.25},
    "h100-sxm": {"link_latency_s": 9.5e-6, "all_reduce_efficiency": 0.28},
}
"""Fitted to NCCL 2.27's all-reduces of 8 KB to 64 MB on 2 and 4 GPUs, published in aiconfigurator-core 0.12.0."""
STARTS = {
    "step_overhead_s": (1e-4, 3e-3),
    "ranks_overhead_s": (2e-4, 4e-3),
    "layer_launch_s": (1e-4, 3e-4, 6e-4),
    "row_overhead_s": (30e-6,),
    "products": (0.9,),
    "prefill_attention": (0.8,),
}
"""Fitted figures and the values that a fit starts from: a cost that hides behind another has no slope. The last two are
shares of ``compute_efficiency`` and ``prefill_attention_efficiency``."""


def device_of(base: Hardware, figures: dict[str, float]) -> Hardware:
    """``base`` with the figures of `STARTS`."""
    costs: dict[str, Any] = {name: value for name, value in figures.items() if name.endswith("_s")}
    return replace(
        base,
        **costs,
        compute_efficiency=_scaled(base.compute_efficiency, figures["products"]),
        prefill_attention_efficiency=_scaled(base.prefill_attention_efficiency, figures["prefill_attention"]),
    )


def _scaled(curve: Curve, factor: float) -> Curve:
    return Curve(tuple((count, min(1.0, factor * share)) for count, share in curve.points))


def fit(rows: list[Row], base: Hardware) -> dict[str, float]:
    """Figures of `STARTS` that predict ``rows`` best: least squares of log(predicted / measured).

    The start pulls weakly, as in `pdserve.planner.cost_fit`.
    """

    def figures(logs: FloatArray) -> dict[str, float]:
        return dict(zip(STARTS, np.exp(logs).tolist(), strict=True))

    def residuals(logs: FloatArray) -> FloatArray:
        found: FloatArray = np.log1p(errors(rows, device_of(base, figures(logs))))
        return found

    return figures(best_fit(residuals, [np.log(start) for start in product(*STARTS.values())]))


def check(rows: list[Row]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Errors by group, and the figures of the fits, by engine and device."""
    groups, fits = [], {}
    rows = sorted(rows, key=lambda row: row.group)
    for (engine, device_name), of_engine in groupby(rows, key=lambda row: row.group[:2]):
        mine, base = list(of_engine), hardware(device_name)
        with_nccl = replace(base, **NCCL[device_name])
        figures = fit([row for row in mine if row.group.is_seen], with_nccl)
        fits[f"{engine} on {device_name}"] = {name: float(f"{value:.3g}") for name, value in figures.items()}
        fitted = device_of(with_nccl, figures)
        for group, members in groupby(mine, key=lambda row: row.group):
            of_group = list(members)
            found = {"catalogue": _summary(errors(of_group, base)), "fitted": _summary(errors(of_group, fitted))}
            groups.append({**group._asdict(), "num_rows": len(of_group), **found})
    return groups, fits


def _summary(found: FloatArray) -> dict[str, float]:
    return {"bias": round(float(np.mean(found)), 3), "mean": round(float(np.mean(np.abs(found))), 3)}


def held_out(groups: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Mean absolute errors of all held-out rows, by engine and phase."""
    sums: dict[str, dict[str, list[float]]] = {}
    for group in groups:
        if not group["is_seen"]:
            of_engine = sums.setdefault(f"{group['engine']} on {group['device']}", {})
            of_engine.setdefault(group["phase"], []).extend([group["fitted"]["mean"]] * group["num_rows"])
    return {
        engine: {phase: round(float(np.mean(means)), 3) for phase, means in phases.items()}
        for engine, phases in sums.items()
    }


def _show(groups: list[dict[str, Any]], runs: list[dict[str, Any]]) -> None:
    table: list[tuple[str, ...]] = []
    for group in groups:
        shown = [f"{group[kind]['bias']:+.0%} ({group[kind]['mean']:.0%})" for kind in ("catalogue", "fitted")]
        names = [str(group[key]) for key in ("engine", "device", "model", "tensor_parallel", "phase", "num_rows")]
        table.append((*names, *shown, "seen" if group["is_seen"] else "held out"))
    for run in runs:
        model = f"{run['model'].partition('/')[2]}, {run['requests_per_s']:g}/s"
        for name in ("ttft", "itl"):
            shown = [f"{run[kind][name]:+.0%}" for kind in ("catalogue", "held_out")]
            names = ["vLLM 0.15.1", "h100-sxm", model, str(run["tensor_parallel"]), name, "1"]
            table.append((*names, *shown, "held out"))
    header = ("engine", "device", "model", "TP", "what", "rows", "catalogue", "fitted", "")
    show_table("Relative errors of predictions: mean with sign, and mean size", header, table)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with the three files")
    arguments = parser.parse_args()
    rows = [
        *distserve_rows(arguments.data / "simdistserve_fit_a100_80g.csv"),
        *splitwise_rows(arguments.data / "splitwise_perf_model_median.csv"),
    ]
    groups, fits = check(rows)
    runs, fits["vLLM 0.15.1 on h100-sxm"] = check_runs(arguments.data / "vllm_h100_open_loop.csv")
    _show(groups, runs)
    means = held_out(groups)
    means["vLLM 0.15.1 on h100-sxm"] = {
        name: round(float(np.mean([abs(run["held_out"][name]) for run in runs])), 3) for name in ("ttft", "itl")
    }
    publish({"held_out": means, "groups": groups, "fits": fits}, arguments.json)


if __name__ == "__main__":
    main()
