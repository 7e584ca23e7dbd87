"""What wrong knowledge costs the policy `goodput`, in the simulator: shares of requests that meet both objectives.

    python -m pdserve.bench.wrong_knowledge [--only NAME] [--cases A,B] [--requests N] [--seeds N] [--json FILE]

The settings of `pdserve.bench.policies`, each at the highest of its rates. Before the requests that are judged, 1,000
arrive at a third of the rate, or less where their answers are longer, from which the policy learns.

- ``old``: reported loads are 200 ms old.
- ``slow``, ``fast``: workers report corrections 1.5 times too high, or too low.
- ``half``: two routers share the workers, each knowing its own half of the requests.
- ``short``, ``long``: the answers of the first 1,000 requests are a fifth, or three times, as long as later ones.

``worst`` is the least ratio of the mean attainment to that with right knowledge, and to that of ``least-time`` with the
same wrong knowledge.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from pdserve.bench.models import LLAMA_3_8B
from pdserve.bench.policies import MAX_IN_FLIGHT, SETTINGS, Setting
from pdserve.bench.script import publish, script_parser
from pdserve.planner.simulate.simulated_cluster import Knowledge
from pdserve.planner.simulate.simulator import simulate
from pdserve.planner.workload.requests import SimulatedRequest

NUM_FIRST = 1000
"""Requests from which the policy learns."""


class Case(NamedTuple):
    knowledge: Knowledge = Knowledge()
    length_factor: float = 1.0
    """Factor on the lengths of the first answers."""


RIGHT = "right"
CASES = {
    RIGHT: Case(),
    "old": Case(Knowledge(age_s=0.2)),
    "slow": Case(Knowledge(correction=1.5)),
    "fast": Case(Knowledge(correction=1 / 1.5)),
    "half": Case(Knowledge(num_routers=2)),
    "short": Case(length_factor=0.2),
    "long": Case(length_factor=3.0),
}


def attainment(
    setting: Setting, policy: str, case: Case, num_requests: int, seed: int, num_first: int = NUM_FIRST
) -> float:
    """Share of the judged requests that met both objectives."""
    rate, max_model_len = _rate(setting), LLAMA_3_8B.max_model_len
    first = setting.workload.draw(num_first, seed + 10_000, max_model_len=max_model_len).at_rate(
        rate / 3 / max(1.0, case.length_factor)
    )
    judged = setting.workload.draw(num_requests, seed, max_model_len=max_model_len).at_rate(rate)
    first = [_with_length(request, case.length_factor) for request in first]
    longest = max(request.num_output_tokens for request in first)
    begins_s = first[-1].arrived_s + longest * setting.tpot_s  # the last of them have ended
    requests = [
        *first,
        *(replace(request, arrived_s=request.arrived_s + begins_s) for request in judged),
    ]
    times = simulate(
        LLAMA_3_8B,
        setting.layout,
        requests,
        slo=setting.slo,
        max_in_flight=MAX_IN_FLIGHT,
        policy=policy,
        knowledge=case.knowledge,
    ).times
    return float(np.mean(setting.are_met(times)[num_first:]))


def _rate(setting: Setting) -> float:
    """The one past saturation, if the setting has one."""
    return max((setting.rate, *setting.rates))


def _with_length(request: SimulatedRequest, factor: float) -> SimulatedRequest:
    return replace(request, num_output_tokens=max(1, round(request.num_output_tokens * factor)))


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--only", default="", help="settings whose name contains this")
    parser.add_argument("--cases", default=",".join(CASES), help="cases, separated by commas")
    parser.add_argument("--requests", type=int, default=2000, help="judged requests per run")
    parser.add_argument("--seeds", type=int, default=2, help="runs for each setting and case")
    arguments = parser.parse_args()
    cases = arguments.cases.split(",")
    unknown = [case for case in cases if case not in CASES]
    if unknown:
        parser.error(f"--cases names {', '.join(unknown)}: use some of {', '.join(CASES)}")
    table = Table("setting", "requests/s", *cases, "worst", "against least-time", box=None)
    records: list[dict[str, Any]] = []
    for setting in SETTINGS:
        if arguments.only not in setting.workload.name:
            continue
        means: dict[str, dict[str, float]] = {}
        for policy in ("goodput", "least-time"):
            means[policy] = {}
            for case in [RIGHT, *(case for case in cases if case != RIGHT)]:
                seeds = range(arguments.seeds)
                shares = [attainment(setting, policy, CASES[case], arguments.requests, seed) for seed in seeds]
                means[policy][case] = float(np.mean(shares))
                record = {"setting": setting.workload.name, "rate": _rate(setting), "policy": policy, "case": case}
                records.append({**record, "attainment": [round(share, 4) for share in shares]})
        goodput, least_time = means["goodput"], means["least-time"]
        worst = min(goodput[case] / goodput[RIGHT] for case in cases)
        against = min(goodput[case] / max(least_time[case], 1e-3) for case in cases)
        for policy, shares_by_case in means.items():
            shown = [f"{shares_by_case[case]:.1%}" for case in cases]
            ratios = [f"{worst:.2f}", f"{against:.2f}"] if policy == "goodput" else []
            table.add_row(f"{setting.workload.name}, {policy}", f"{_rate(setting):g}", *shown, *ratios)
    Console(stderr=True, width=160).print(table)
    publish({"requests_per_run": arguments.requests, "runs": records}, arguments.json, unshown=("runs",))


if __name__ == "__main__":
    main()
