"""Fair shares of tenants and tiers under a flood, in the simulator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pdserve.bench.models import LLAMA_3_8B
from pdserve.bench.policies import MAX_IN_FLIGHT, SETTINGS
from pdserve.contracts.deployment import DEFAULT_POLICY, Tier
from pdserve.planner.simulate.simulator import simulate
from pdserve.planner.workload.requests import SimulatedRequest

(UNIFORM,) = [setting for setting in SETTINGS if setting.workload.name == "uniform"]


def drawn(rate: float, seed: int, tenant: str) -> list[SimulatedRequest]:
    """Requests of one tenant for two seconds."""
    requests = UNIFORM.workload.draw(int(2 * rate), seed, max_model_len=LLAMA_3_8B.max_model_len).at_rate(rate)
    return [replace(request, tenant=tenant) for request in requests]


@pytest.mark.parametrize(("flooding", "low", "high"), [("large", 0.97, 1.0), ("small", 0.0, 0.8)])
def test_a_flood_of_one_tenant_takes_nothing_from_another(flooding: str, low: float, high: float) -> None:
    small, flood = drawn(20.0, 1, "small"), drawn(1000.0, 2, flooding)
    requests = sorted([*small, *flood], key=lambda request: request.arrived_s)
    slo = replace(UNIFORM.slo, when_hopeless="refuse")
    times = simulate(
        LLAMA_3_8B, UNIFORM.layout, requests, slo=slo, max_in_flight=MAX_IN_FLIGHT, policy=DEFAULT_POLICY
    ).times
    met = (times.ttft_s <= slo.ttft_seconds) & (times.tpot_s <= slo.tpot_seconds) & ~times.is_rejected
    is_small = np.isin([id(request) for request in requests], [id(request) for request in small])
    assert low <= met[is_small].mean() <= high


@pytest.mark.parametrize(
    ("name", "rate", "weight"), [("uniform", 80.0, 0.0), ("uniform", 80.0, 0.1), ("decode-bound", 40.0, 0.0)]
)
def test_a_tier_with_half_the_ttft_meets_it_while_best_effort_takes_the_rest(
    name: str, rate: float, weight: float
) -> None:
    [setting] = [setting for setting in SETTINGS if setting.workload.name == name]
    tier = Tier(ttft_seconds=setting.ttft_s / 2, tpot_seconds=setting.tpot_s)
    rest_tier = Tier(ttft_seconds=10.0, tpot_seconds=0.5, weight=weight)
    slo = replace(setting.slo, tiers={"fast": tier, "rest": rest_tier})
    requests = [
        replace(request, tier=tier_name)
        for seed, (tier_name, load) in enumerate((("fast", rate), ("rest", 3 * rate)))
        for request in setting.workload.draw(int(4 * load), seed, max_model_len=LLAMA_3_8B.max_model_len).at_rate(load)
    ]
    requests.sort(key=lambda request: request.arrived_s)
    times = simulate(
        LLAMA_3_8B, setting.layout, requests, slo=slo, max_in_flight=MAX_IN_FLIGHT, policy=DEFAULT_POLICY
    ).times
    met = (times.ttft_s <= tier.ttft_seconds) & (times.tpot_s <= tier.tpot_seconds)
    assert met[[request.tier == "fast" for request in requests]].mean() >= 0.9
    assert np.isfinite(times.last_token_s).all()
