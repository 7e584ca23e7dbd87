"""Goodput with guesses against that without, simulated: four prefill and four decode workers.

    python -m pdserve.bench.guessed_goodput [--seeds N] [--requests N] [--only NAME ...] [--processes N] [--json FILE]

Decode workers guess by n-grams, which take no time, as many tokens as the scheduler's own `Speculation` chooses. The
share of right guesses is pinned for each kind of traffic: `COPY` is that of answers that repeat themselves on 16 and 64
streams in ``2026-11-27_speculation.json``, 0.1 that of held-out questions on one, and 0 that of no luck at all.

Qwen2-0.5B in bfloat16 on CPUs, a machine of four cores for each worker, with the catalogue's figures, which were fitted
as ``pdserve profile`` does; and Llama-3-8B on devices with the figures of an H100, none of which has made a guess yet.

Both serve the same requests, as many as a plan's usual run, at a rate near the goodput without guesses, at which
90 % of the requests meet both objectives. With guesses the rate is multiplied by the gain to show: if as many requests
meet both objectives as without, the goodput is that much higher at least.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from pdserve.bench.models import LLAMA_3_8B
from pdserve.bench.policies import MAX_IN_FLIGHT, TARGET
from pdserve.bench.script import publish, script_parser
from pdserve.bench.shapes import QWEN2_05B_CONFIG
from pdserve.contracts.deployment import SloConfig
from pdserve.contracts.worker_config import WorkerRole
from pdserve.model.config.shape import ModelShape
from pdserve.model.cost.hardware import Hardware, hardware
from pdserve.planner.layout import Guesses, Layout, PlannedModel, Pool
from pdserve.planner.search.goodput import LEAST_REQUESTS
from pdserve.planner.simulate.attainment import Attainment, measure
from pdserve.planner.simulate.simulator import simulate
from pdserve.planner.workload.conversations import Conversations
from pdserve.planner.workload.lengths import LogNormalLengths
from pdserve.planner.workload.presets import preset
from pdserve.planner.workload.workload import Workload

COPY = 0.8
EDITS = Workload(
    name="edits",
    contents=Conversations(
        lengths=LogNormalLengths(
            mean_prompt_tokens=600, mean_output_tokens=500, prompt_variation=0.5, output_variation=0.5
        )
    ),
    source="Made up: answers that repeat most of their prompts.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    model: PlannedModel
    hardware: Hardware
    """Of a worker."""
    slo: SloConfig


DEVICES = {
    "cpu": Devices(
        model=PlannedModel(shape=ModelShape.from_hf_config(QWEN2_05B_CONFIG), name="Qwen2-0.5B"),
        hardware=hardware("cpu", num_cores=4),
        slo=SloConfig(ttft_seconds=10.0, tpot_seconds=0.1, attainment=TARGET),
    ),
    "h100": Devices(
        model=LLAMA_3_8B,
        hardware=hardware("h100-sxm"),
        slo=SloConfig(ttft_seconds=1.0, tpot_seconds=0.015, attainment=TARGET),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    devices: str
    workload: Workload
    shares: dict[str, float]
    """Of right guesses, by name."""
    rate: float
    """Requests per second, near the goodput without guesses."""
    gain: float = 0.99
    """Of the rate, with guesses."""


_CHAT = {"questions": 0.1, "no luck": 0.0}
CASES = {
    "cpu copy": Case(devices="cpu", workload=EDITS, shares={"copy": COPY}, rate=1.3, gain=1.15),
    "cpu chat": Case(devices="cpu", workload=preset("chat"), shares=_CHAT, rate=0.88),
    "h100 copy": Case(devices="h100", workload=EDITS, shares={"copy": COPY}, rate=68.0, gain=1.15),
    "h100 chat": Case(devices="h100", workload=preset("chat"), shares=_CHAT, rate=127.0),
    "h100 code": Case(devices="h100", workload=preset("code"), shares={"code": 0.1}, rate=132.0),
}


def served(case: Case, num_requests: int, seed: int, rate: float, share_right: float | None) -> Attainment:
    """One run.

    Args:
        share_right: of guesses; ``None`` if there are none.
    """
    devices = DEVICES[case.devices]
    guesses = None if share_right is None else Guesses(share_right=share_right)
    prefill = Pool(role=WorkerRole.PREFILL, replicas=4, hardware=devices.hardware)
    decode = Pool(role=WorkerRole.DECODE, replicas=4, hardware=devices.hardware, guesses=guesses)
    requests = case.workload.draw(num_requests, seed, max_model_len=devices.model.max_model_len).at_rate(rate)
    simulation = simulate(
        devices.model,
        Layout(prefill=prefill, decode=decode),
        requests,
        slo=devices.slo,
        max_in_flight=MAX_IN_FLIGHT,
    )
    return measure(simulation, devices.slo, rate)


def rows(name: str, seed: int, num_requests: int) -> list[dict[str, Any]]:
    """Figures of a case on the requests of ``seed``, by share of right guesses."""
    case = CASES[name]
    plain = served(case, num_requests, seed, case.rate, None)
    result = []
    for kind, share_right in case.shares.items():
        guessed = served(case, num_requests, seed, case.gain * case.rate, share_right)
        result.append(
            {
                "case": f"{case.devices}, {kind}",
                "seed": seed,
                "share_right": share_right,
                "rate": {"none": case.rate, "ngram": round(case.gain * case.rate, 4)},
                "attained": {"none": round(plain.share, 4), "ngram": round(guessed.share, 4)},
                "saturated": [plain.is_saturated, guessed.is_saturated],
                "tokens_per_step": round(guessed.pools[1].tokens_per_step, 2),
                "tpot_p50_ms": [round(1e3 * seen.tpot.percentile(50), 2) for seen in (plain, guessed)],
                "batch_size": [round(seen.pools[1].mean_batch_size, 1) for seen in (plain, guessed)],
                "busy_prefill": [round(seen.pools[0].busy_share, 2) for seen in (plain, guessed)],
                "binding": [seen.binding_slo for seen in (plain, guessed)],
            }
        )
        Console(stderr=True, width=200).print(result[-1])
    return result


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="draws of the requests")
    parser.add_argument("--requests", type=int, default=LEAST_REQUESTS, help="of a run")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    runs = [(name, seed, arguments.requests) for seed in range(arguments.seeds) for name in arguments.only]
    with ProcessPoolExecutor(arguments.processes) as processes:
        found = processes.map(rows, *zip(*runs, strict=True))
    slos = {name: [each.slo.ttft_seconds, each.slo.tpot_seconds] for name, each in DEVICES.items()}
    publish(
        {"slo": slos, "requests": arguments.requests, "rows": [row for each in found for row in each]}, arguments.json
    )


if __name__ == "__main__":
    main()
