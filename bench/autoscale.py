"""An autoscaled cluster against the best fixed one, simulated: attained share, seconds of workers, changes and turns.

    python -m pdserve.bench.autoscale [--data FOLDER] [--only NAME] [--json FILE]
    python -m pdserve.bench.autoscale --live [--leg-s 600] [--time-scale 1] [--json FILE]

``ramp``: from 2 to 10 to 1 requests/s in 10 minutes each, Llama-3-8B on L4. ``azure``, ``mooncake``: the traces in
``--data`` at their own times, on L4 and on H100. The best fixed layout is that of the fewest workers, and of these the
one with the largest share, with at least 95 % of requests within both objectives. A new worker takes
30 s to start. At a turn, numbers of workers that grew shrink, or the other way round.

``--live``: the ramp, with legs of so many seconds, by `pdserve up` with emulated workers as slow as the time scale, and
simulated as slow, with workers that start as fast.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from pdserve.bench.models import LLAMA_3_8B
from pdserve.bench.script import publish, script_parser
from pdserve.bench.simulator_vs_emulation import MODEL, emulated_cluster, observe, slowed_request, slowed_slo
from pdserve.contracts.deployment import SloConfig
from pdserve.contracts.worker_config import WorkerRole
from pdserve.model.cost.hardware import Hardware, hardware, slowed
from pdserve.planner.autoscale import START_S, Autoscaler, Bounds
from pdserve.planner.layout import Layout, PlannedModel, Pool
from pdserve.planner.simulate.simulation import Simulation
from pdserve.planner.simulate.simulator import simulate
from pdserve.planner.workload.conversations import Conversations
from pdserve.planner.workload.lengths import LogNormalLengths
from pdserve.planner.workload.requests import SimulatedRequest
from pdserve.planner.workload.traffic import named_traffic

PREFILL, DECODE = WorkerRole.PREFILL, WorkerRole.DECODE
SHARE, MOST = 0.95, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    model: PlannedModel
    device: Hardware
    slo: SloConfig
    requests: Sequence[SimulatedRequest]
    start_s: float = START_S
    """Of a worker."""

    def layout(self, num_prefill: int, num_decode: int) -> Layout:
        numbers = ((PREFILL, num_prefill), (DECODE, num_decode))
        return Layout.of(Pool(role=role, replicas=number, hardware=self.device) for role, number in numbers)

    def run(self, num_prefill: int, num_decode: int, autoscaler: Autoscaler | None = None) -> Simulation:
        return simulate(
            self.model,
            self.layout(num_prefill, num_decode),
            self.requests,
            slo=self.slo,
            autoscaler=autoscaler,
            start_s=self.start_s,
            max_in_flight=4096,
        )

    def slowed(self, time_scale: float, start_s: float) -> Case:
        """The case as an emulated cluster sees it."""
        slo, requests = slowed_slo(self.slo, time_scale), [slowed_request(each, time_scale) for each in self.requests]
        return replace(self, device=slowed(self.device, time_scale), slo=slo, requests=requests, start_s=start_s)


def ramp(seed: int = 0, leg_s: float = 600.0) -> list[SimulatedRequest]:
    """Poisson arrivals at a rate that goes from 2 to 10 requests/s in ``leg_s``, and to 1 in as long again."""
    random, now_s, arrived_s = np.random.default_rng(seed), 0.0, []
    while (now_s := now_s + random.exponential(1 / 10)) < 2 * leg_s:
        if random.random() < np.interp(now_s, (0, leg_s, 2 * leg_s), (2, 10, 1)) / 10:
            arrived_s.append(now_s)
    lengths = LogNormalLengths(
        mean_prompt_tokens=1000, mean_output_tokens=200, prompt_variation=1.0, output_variation=0.8
    )
    drawn = Conversations(lengths=lengths).draw(len(arrived_s), seed)
    return [
        replace(each.limited(2000), arrived_s=at_s, num_prompt_tokens=min(each.num_prompt_tokens, 4000))
        for each, at_s in zip(drawn, arrived_s, strict=True)
    ]


def trace(file: Path, model: PlannedModel) -> list[SimulatedRequest]:
    traffic = named_traffic(str(file), max_model_len=model.max_model_len, lenient=True, time_unit="auto")
    assert traffic.max_requests is not None
    rate = traffic.recorded_rate(traffic.max_requests, 0)
    assert rate is not None
    return traffic.draw(traffic.max_requests, 0).at_rate(rate)


def cases(data: Path) -> dict[str, Callable[[], Case]]:
    short, long = replace(LLAMA_3_8B, max_model_len=8192), replace(LLAMA_3_8B, max_model_len=131072)
    l4, h100 = hardware("l4"), hardware("h100-sxm")
    slow, fast = SloConfig(ttft_seconds=2.0, tpot_seconds=0.1), SloConfig(ttft_seconds=10.0, tpot_seconds=0.1)
    return {
        "ramp": lambda: Case(name="ramp", model=short, device=l4, slo=slow, requests=ramp()),
        "azure": lambda: Case(
            name="azure",
            model=short,
            device=l4,
            slo=slow,
            requests=trace(data / "AzureLLMInferenceTrace_conv.csv", short),
        ),
        "mooncake": lambda: Case(
            name="mooncake",
            model=long,
            device=h100,
            slo=fast,
            requests=trace(data / "mooncake_conversation_trace.jsonl", long),
        ),
    }


def num_turns(totals: Sequence[int]) -> int:
    """How often a number that grew or fell does the other."""
    steps = [after > before for before, after in pairwise(totals) if after != before]
    return sum(before is not after for before, after in pairwise(steps))


def summary(case: Case, found: Simulation, num_prefill: int, num_decode: int) -> dict[str, Any]:
    times = found.times
    hours = float(times.arrived_s[-1] - times.arrived_s[0]) / 3600
    return {
        "prefill": num_prefill,
        "decode": num_decode,
        "attained": round(float(times.are_within(case.slo).mean()), 4),
        "worker_s": round(found.worker_s),
        "changes_per_hour": round(len(found.scaled) / hours, 1),
        "turns_per_hour": round(num_turns([sum(each.replicas.values()) for each in found.scaled]) / hours, 1),
        "changes": [[round(each.at_s), each.reason, *each.replicas.values()] for each in found.scaled],
    }


def best_fixed(case: Case, scaled: dict[str, Any]) -> dict[str, Any]:
    """Of the fewest workers, near the mean number that ``scaled`` had. Prefill workers are climbed from its
    proportion."""
    numbers = [change[2:] for change in scaled["changes"]]
    total = ceil(scaled["worker_s"] / (case.requests[-1].arrived_s - case.requests[0].arrived_s))
    share = sum(prefill for prefill, _ in numbers) / sum(map(sum, numbers))

    @cache
    def fixed(total: int, num_prefill: int) -> dict[str, Any]:
        found = summary(case, case.run(num_prefill, total - num_prefill), num_prefill, total - num_prefill)
        sys.stderr.write(f"{case.name}: {num_prefill} + {total - num_prefill}: {found['attained']:.1%}\n")
        return found

    @cache
    def best(total: int) -> dict[str, Any]:
        found = fixed(total, min(total - 1, max(1, round(share * total))))
        while True:
            near = [fixed(total, found["prefill"] + step) for step in (-1, 1) if 0 < found["prefill"] + step < total]
            better = max([found, *near], key=lambda each: float(each["attained"]))
            if better is found:
                return found
            found = better

    while best(total)["attained"] < SHARE:
        total += 1
    while total > 2 and best(total - 1)["attained"] >= SHARE:
        total -= 1
    return best(total)


def autoscaled(case: Case) -> dict[str, Any]:
    began_s = time.process_time()
    bounds = {PREFILL: Bounds(1, MOST), DECODE: Bounds(1, MOST)}
    found = case.run(1, 2, Autoscaler(bounds))
    result = summary(case, found, 1, 2)
    sys.stderr.write(f"{case.name}: autoscaled {result} in {time.process_time() - began_s:.0f} s\n")
    return result


_SAID = re.compile(r"^ *([\d.]+)s +change +(.+)$", re.MULTILINE)
_ASKS = re.compile(r"the load asks for prefill=(\d+) decode=(\d+) \((\w+)\)")
_READY = re.compile(r"is ready after ([\d.]+) s")


def followed(log: str, num_workers: int, ended_s: float) -> tuple[dict[str, Any], list[float]]:
    """Changes that `pdserve up` tells of, and worker-seconds, as `summary` has them, and how long each start took.

    Args:
        num_workers: at the beginning.
        ended_s: seconds from readiness to the last answer.
    """
    (ready_s,) = _READY.findall(log)
    changes: list[list[Any]] = []
    began_s: dict[str, float] = {}
    starts_s, worker_s = [], num_workers * ended_s
    for at, said in _SAID.findall(log):
        at_s = float(at) - float(ready_s)
        name, _, what = said.partition(" ")
        if asked := _ASKS.match(said):
            changes.append([round(at_s), asked[3], int(asked[1]), int(asked[2])])
        elif what == "starts":
            began_s[name] = at_s
            worker_s += max(0.0, ended_s - at_s)
        elif what.startswith("is up at "):
            starts_s.append(at_s - began_s[name])
        elif what == "has left":
            worker_s -= max(0.0, ended_s - at_s)
    return {"worker_s": round(worker_s), "changes": changes}, starts_s


def live(case: Case, time_scale: float) -> dict[str, Any]:
    with emulated_cluster(case.model, case.layout(1, 2), case.slo, time_scale, max_replicas=MOST) as cluster:
        vocab_size = case.model.shape.vocab_size
        measured, shares, invalid = observe(cluster, case.requests, vocab_size=vocab_size, time_scale=time_scale)
        seen, starts_s = followed(cluster.log.read_text(), 3, measured.ended_s * time_scale)
    seen = {"attained": round(float(measured.times.are_within(case.slo).mean()), 4), **seen}
    start_s = float(np.mean(starts_s)) if starts_s else START_S
    simulated = autoscaled(case.slowed(time_scale, start_s))
    return {
        "requests": len(case.requests),
        "time_scale": time_scale,
        "start_s": round(start_s, 1),
        "live": seen,
        "simulated": simulated,
        "points": round(100 * (seen["attained"] - simulated["attained"]), 1),
        "shares": shares,
        "invalid": invalid,
    }


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--only", choices=["ramp", "azure", "mooncake"])
    parser.add_argument("--live", action="store_true")
    parser.add_argument("--leg-s", type=float, default=600.0, help="of the ramp, in real seconds")
    parser.add_argument("--time-scale", type=float, default=1.0, help="real seconds of an emulated one")
    arguments = parser.parse_args()
    if arguments.live:
        ramped = cases(arguments.data)["ramp"]()
        requests = ramp(leg_s=arguments.leg_s / arguments.time_scale)
        case = replace(ramped, model=replace(ramped.model, transport=MODEL.transport), requests=requests)
        publish({"cases": {"live ramp": live(case, arguments.time_scale)}}, arguments.json)
        return
    results = {}
    for name, make in cases(arguments.data).items():
        if arguments.only in (None, name):
            case = make()
            scaled = autoscaled(case)
            fixed = best_fixed(case, scaled)
            results[name] = {
                "requests": len(case.requests),
                "autoscaled": scaled,
                "fixed": fixed,
                "worker_s_ratio": round(scaled["worker_s"] / fixed["worker_s"], 3),
            }
    publish({"cases": results}, arguments.json)


if __name__ == "__main__":
    main()
