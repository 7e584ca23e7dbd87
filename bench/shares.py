"""Tenants and tiers side by side, in the simulator: what the requests of one lose by those of another.

    python -m pdserve.bench.shares [--json FILE]

4 prefill and 4 decode H100 with Llama-3-8B, 1,000 tokens in and 200 out; hopeless requests are refused. *Tenants*: one
sends 20 requests/s, another ten times what the cluster serves. *Tiers*: requests with half the TTFT objective beside
more than the rest of the cluster serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from pdserve.bench.models import LLAMA_3_8B
from pdserve.bench.policies import MAX_IN_FLIGHT, SETTINGS
from pdserve.bench.script import publish, script_parser
from pdserve.contracts.deployment import DEFAULT_POLICY, DEFAULT_TIER, SloConfig, Tier
from pdserve.planner.simulate.simulator import simulate
from pdserve.planner.workload.requests import SimulatedRequest

(UNIFORM,) = [setting for setting in SETTINGS if setting.workload.name == "uniform"]
SECONDS = 10.0
"""Of arrivals."""
SMALL_RATE, FLOOD_RATE = 20.0, 2000.0
TIER_RATES = (100.0, 200.0)
"""Of the tier with half the objective, and of the other one."""
TTFT_S = 0.5
"""Objective of the other tier."""


def drawn(
    rate: float, seed: int, *, tenant: str = "", tier: str = DEFAULT_TIER, seconds: float = SECONDS
) -> list[SimulatedRequest]:
    """Requests of one sender."""
    requests = UNIFORM.workload.draw(int(rate * seconds), seed, max_model_len=LLAMA_3_8B.max_model_len).at_rate(rate)
    return [replace(request, tenant=tenant, tier=tier) for request in requests]


def served(groups: Sequence[list[SimulatedRequest]], slo: SloConfig) -> list[dict[str, float]]:
    """Attainment, p99 of TTFT (infinite for refused requests) and share of refusals of each group, served together."""
    tagged = sorted(
        ((request, index) for index, group in enumerate(groups) for request in group),
        key=lambda each: each[0].arrived_s,
    )
    requests = [request for request, _ in tagged]
    times = simulate(
        LLAMA_3_8B, UNIFORM.layout, requests, slo=slo, max_in_flight=MAX_IN_FLIGHT, policy=DEFAULT_POLICY
    ).times
    results = []
    for index in range(len(groups)):
        mine = np.array([group == index for _, group in tagged])
        tier = slo.tier(groups[index][0].tier)
        ttft_s = np.where(times.is_rejected, np.inf, times.ttft_s)[mine]
        met = (ttft_s <= tier.ttft_seconds) & (times.tpot_s[mine] <= tier.tpot_seconds)
        results.append(
            {
                "attainment": round(float(met.mean()), 4),
                "ttft_p99_ms": round(float(np.percentile(ttft_s, 99, method="lower")) * 1e3, 1),
                "refused": round(float(times.is_rejected[mine].mean()), 4),
            }
        )
    return results


def main() -> None:
    parser = script_parser(__doc__)
    arguments = parser.parse_args()
    refusing = replace(UNIFORM.slo, when_hopeless="refuse")
    small = drawn(SMALL_RATE, 1, tenant="small")
    half = Tier(ttft_seconds=TTFT_S / 2, tpot_seconds=UNIFORM.tpot_s)
    tiered = replace(refusing, ttft_seconds=TTFT_S, weight=0.1, tiers={"fast": half})
    fast = drawn(TIER_RATES[0], 3, tier="fast")
    cases = {
        "tenant of 20/s": ([small], refusing),
        "the same beside one of 2,000/s": ([small, drawn(FLOOD_RATE, 2, tenant="large")], refusing),
        "the same, one tenant": ([small, drawn(FLOOD_RATE, 2, tenant="small")], refusing),
        "fast tier of 100/s": ([fast], tiered),
        "the same beside 200/s of weight 0.1": ([fast, drawn(TIER_RATES[1], 4)], tiered),
    }
    table = Table("case", "attainment", "TTFT p99 ms", "refused", "attainment of the others", box=None)
    records: list[dict[str, Any]] = []
    for name, (groups, slo) in cases.items():
        results = served(groups, slo)
        first = results[0]
        others = f"{results[1]['attainment']:.1%}" if len(results) > 1 else ""
        table.add_row(
            name, f"{first['attainment']:.1%}", f"{first['ttft_p99_ms']:g}", f"{first['refused']:.1%}", others
        )
        records.append({"case": name, "groups": results})
    Console(stderr=True).print(table)
    publish({"seconds": SECONDS, "cases": records}, arguments.json, unshown=("cases",))


if __name__ == "__main__":
    main()
