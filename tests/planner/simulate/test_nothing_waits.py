"""Nothing waits that could run: for every policy, with the real dispatcher and schedulers under the virtual clock."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdserve.contracts.deployment import POLICIES, SloConfig, Tier
from pdserve.contracts.worker_config import WorkerRole
from pdserve.planner.layout import Layout
from pdserve.planner.simulate.simulator import NO_OVERHEADS, simulate
from pdserve.planner.workload.requests import SimulatedRequest
from pdserve.router.requests.goodput_rules import LATE_S
from pdserve.router.requests.settings import SWEEP_S
from tests.planner.stand_ins import LLAMA_3_8B, a_pool

LAYOUTS = ((1, 1, 0), (0, 0, 1), (2, 2, 0), (1, 1, 1))
"""Prefill, decode and mixed workers."""
COST = a_pool(WorkerRole.DECODE).cost(LLAMA_3_8B)
LONE_STEP_S = COST.decode_s(1, 64)
NUM_BLOCKS = 400


def a_layout(counts: tuple[int, int, int], *, num_kv_blocks: int = NUM_BLOCKS, max_batch_tokens: int = 2048) -> Layout:
    pools = [
        replace(a_pool(role, count or 1), num_kv_blocks=num_kv_blocks, max_batch_tokens=max_batch_tokens)
        if count
        else None
        for role, count in zip((WorkerRole.PREFILL, WorkerRole.DECODE, WorkerRole.MIXED), counts, strict=True)
    ]
    return Layout(prefill=pools[0], decode=pools[1], mixed=pools[2])


def objectives(ttft: float, tpot: float, weight: float) -> SloConfig:
    """``ttft`` in prefills of 64 tokens or so, ``tpot`` in steps of a lone answer."""
    bulk = Tier(ttft_seconds=ttft * LONE_STEP_S, tpot_seconds=tpot * LONE_STEP_S, weight=weight)
    default = SloConfig(ttft_seconds=ttft * LONE_STEP_S, tpot_seconds=tpot * LONE_STEP_S)
    return replace(default, tiers={"bulk": bulk})


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=25, deadline=None)
@given(
    counts=st.sampled_from(LAYOUTS),
    ttft=st.sampled_from([1e-3, 0.5, 1.0, 3.0, 100.0]),
    tpot=st.sampled_from([1e-3, 0.5, 0.9, 1.0, 1.05, 1.2, 1.5, 3.0, 100.0]),
    weight=st.sampled_from([0.0, 0.1, 1.0]),
    budget=st.sampled_from([64, 2048]),
    sizes=st.lists(st.tuples(st.sampled_from([1, 64, 700, 6000]), st.sampled_from([1, 2, 40])), min_size=1, max_size=5),
)
@example(counts=(0, 0, 1), ttft=0.5, tpot=1.05, weight=1.0, budget=2048, sizes=[(64, 8), (64, 8)])
def test_a_client_alone_starts_within_a_sweep_and_ends(
    policy: str,
    counts: tuple[int, int, int],
    ttft: float,
    tpot: float,
    weight: float,
    budget: int,
    sizes: list[tuple[int, int]],
) -> None:
    tiers = ("default", "bulk")
    requests = [
        SimulatedRequest(0.0, num_prompt, num_output, tier=tiers[index % 2])
        for index, (num_prompt, num_output) in enumerate(sizes)
    ]
    simulation = simulate(
        LLAMA_3_8B,
        a_layout(counts, max_batch_tokens=budget),
        requests,
        slo=objectives(ttft, tpot, weight),
        overheads=NO_OVERHEADS,
        concurrency=1,
        policy=policy,
    )
    times = simulation.times
    assert len(times.arrived_s) == len(requests)
    assert not times.is_rejected.any()
    assert (times.started_s - times.arrived_s <= SWEEP_S).all()


@settings(max_examples=15, deadline=None)
@given(counts=st.sampled_from(LAYOUTS), tpot=st.sampled_from([1.18, 1.25, 1.5]), num_requests=st.integers(2, 6))
@example(counts=(0, 0, 1), tpot=1.18, num_requests=4)
@example(counts=(1, 1, 0), tpot=1.18, num_requests=4)
def test_what_is_held_back_goes_though_no_answer_of_others_ends(
    counts: tuple[int, int, int], tpot: float, num_requests: int
) -> None:
    """The first answer may meet its objectives, all others are late. Each lasts for longer than all that come after it
    may be held back, one in every `LATE_S`."""
    lone_s = COST.decode_s(1, 6000)
    num_output = round((num_requests + 2) * LATE_S / lone_s)
    model = replace(LLAMA_3_8B, max_model_len=2 * num_output)
    tiers = ["default"] + ["bulk"] * (num_requests - 1)
    requests = [SimulatedRequest(0.2 * index, 6000, num_output, tier=tier) for index, tier in enumerate(tiers)]
    bulk = Tier(ttft_seconds=1e-3, tpot_seconds=tpot * lone_s)
    slo = SloConfig(ttft_seconds=1.0, tpot_seconds=tpot * lone_s, tiers={"bulk": bulk})
    layout = a_layout(counts, num_kv_blocks=40_000)
    times = simulate(model, layout, requests, slo=slo, overheads=NO_OVERHEADS, policy="goodput").times
    assert not times.is_rejected.any()
    waited_s = np.sort(times.started_s - times.arrived_s)
    assert (waited_s <= np.arange(num_requests) * (LATE_S + SWEEP_S) + 1.0).all()
    assert times.started_s.max() < times.last_token_s.min()
    if counts == (1, 1, 0) and tpot < 1.2:
        assert waited_s[1] >= LATE_S, "it would be no test of this otherwise"


@pytest.mark.parametrize("counts", [(1, 1, 0), (0, 0, 1)])
def test_an_answer_of_twenty_minutes_ends_whole(counts: tuple[int, int, int]) -> None:
    num_output = round(1600 / COST.decode_s(1, 120_000))
    model = replace(LLAMA_3_8B, max_model_len=2 * num_output)
    request = SimulatedRequest(0.0, 64, num_output)
    times = simulate(
        model, a_layout(counts, num_kv_blocks=40_000), [request], slo=SloConfig(ttft_seconds=1.0, tpot_seconds=1.0)
    ).times
    assert not times.is_rejected.any()
    assert times.last_token_s[0] > 1000.0, "600 s without a token would end it"
