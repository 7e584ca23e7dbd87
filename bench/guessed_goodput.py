"""Goodput with guesses over that without, simulated: four prefill and four decode workers.

    python -m pdserve.bench.guessed_goodput [--requests N] [--json FILE]

Llama-3-8B on devices with the figures of an H100, of which each step is planned when the last one has ended, as on the
CPUs that may guess: on GPUs nothing guesses yet. Decode workers guess by n-grams, which take no time, as many tokens as
the scheduler's own `Speculation` chooses. The share of right guesses is pinned for each workload: `COPY` is that of
answers that repeat themselves on 16 and 64 streams in ``2026-11-27_speculation.json``, 0.1 that of held-out questions
on one, and 0 that of no luck at all. Goodput is the rate at which 90 % of the requests meet both objectives.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rich.console import Console

from pdserve.bench.models import LLAMA_3_8B
from pdserve.bench.policies import MAX_IN_FLIGHT, goodput
from pdserve.bench.script import publish, script_parser
from pdserve.contracts.deployment import SloConfig
from pdserve.contracts.worker_config import WorkerRole
from pdserve.model.cost.hardware import hardware
from pdserve.planner.layout import Guesses, Layout, Pool
from pdserve.planner.simulate.attainment import Attainment, measure
from pdserve.planner.simulate.simulator import simulate
from pdserve.planner.workload.presets import preset
from pdserve.planner.workload.workload import WorkloadSample

COPY = 0.8
WORKLOADS = {"copy": ("chat", COPY), "questions": ("chat", 0.1), "no luck": ("chat", 0.0), "code": ("code", 0.1)}
"""Preset, and share of right guesses."""
SLO = SloConfig(ttft_seconds=1.0, tpot_seconds=0.015)
DEVICE = replace(hardware("h100-sxm"), pipeline_depth=1)
_START_RATE = 40.0


def served(sample: WorkloadSample, rate: float, guesses: Guesses | None) -> Attainment:
    prefill = Pool(role=WorkerRole.PREFILL, replicas=4, hardware=DEVICE)
    decode = Pool(role=WorkerRole.DECODE, replicas=4, hardware=DEVICE, guesses=guesses)
    simulation = simulate(
        LLAMA_3_8B,
        Layout(prefill=prefill, decode=decode),
        sample.at_rate(rate),
        slo=SLO,
        max_in_flight=MAX_IN_FLIGHT,
    )
    return measure([simulation], SLO, rate)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    arguments = parser.parse_args()
    rows: dict[str, Any] = {}
    for name in arguments.only:
        traffic, share_right = WORKLOADS[name]
        sample = preset(traffic).draw(arguments.requests, max_model_len=LLAMA_3_8B.max_model_len)
        rates, at = {}, {}
        for kind, guesses in (("none", None), ("ngram", Guesses(share_right=share_right))):
            rates[kind] = goodput(lambda rate: served(sample, rate, guesses).share, _START_RATE)  # noqa: B023
            at[kind] = served(sample, rates["none"], guesses)
        rows[name] = {
            "share_right": share_right,
            "goodput": {kind: round(rate, 1) for kind, rate in rates.items()},
            "ratio": round(rates["ngram"] / rates["none"], 3),
            "tokens_per_step": round(at["ngram"].pools[1].tokens_per_step, 2),
            "tpot_p50_ms": {kind: round(1e3 * each.tpot.percentile(50), 2) for kind, each in at.items()},
        }
        Console(stderr=True).print(name, rows[name])
    publish({"slo": [SLO.ttft_seconds, SLO.tpot_seconds], "requests": arguments.requests, "rows": rows}, arguments.json)


if __name__ == "__main__":
    main()
