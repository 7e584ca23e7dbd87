"""The work that requests bring, as the dispatcher tells it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.contracts.events import SchedulerLoad
from pdserve.contracts.request import SamplingParams
from pdserve.contracts.worker_config import WorkerRole
from pdserve.router.requests.attempt import Queued
from pdserve.router.requests.demand import KV_SHARE, TPOT_SHARE, Demand, DemandMeter
from pdserve.router.requests.request import Request, RequestSpec
from tests.router.requests.test_least_time import COST, COSTS

TPOT_S, BUDGET = 0.05, 4096


def a_worker(role: WorkerRole, num_blocks: int = 10_000, correction: float = 1.0, **more: Any) -> Any:
    load = SchedulerLoad(num_blocks_free=num_blocks, prefill_correction=correction, decode_correction=correction)
    fixed: dict[str, Any] = {
        "role": role,
        "max_batch_tokens": BUDGET,
        "max_batch_size": 10_000,
        "block_size": 16,
        "load": load,
    }
    return SimpleNamespace(**{**fixed, **more})


WORKERS = [a_worker(WorkerRole.PREFILL), a_worker(WorkerRole.DECODE)]


def spec(num_tokens: int, num_choices: int = 1) -> RequestSpec:
    sampling = SamplingParams(max_tokens=100)
    return RequestSpec(prompt_tokens=(1,) * num_tokens, sampling=sampling, arrived_s=0.0, num_choices=num_choices)


def a_meter(num_prompt_tokens: int = 1000, num_tokens: int = 100) -> DemandMeter:
    """That has seen such answers."""
    meter = DemandMeter(COSTS, TPOT_S)
    for _ in range(10):
        meter.answer_ended(num_prompt_tokens, num_tokens)
    meter.now(WORKERS, [])
    return meter


def test_prompts_bring_their_predicted_seconds_less_what_is_cached() -> None:
    meter = a_meter()
    request = Request(spec(5000, num_choices=3))
    meter.accepted(request)
    whole_s = COST.prompt_s(5000, 0, BUDGET)
    assert meter.now(WORKERS, []).prefill_s == pytest.approx(whole_s)
    assert meter.now(WORKERS, []).num_answers == 3
    slow = [a_worker(WorkerRole.PREFILL, correction=2.0), WORKERS[1]]
    meter.now(slow, [])  # nothing is taken back at another price
    request.num_cached_tokens = 4000
    meter.prompt_started(request)
    assert meter.now(WORKERS, []).prefill_s == pytest.approx(COST.prompt_s(1000, 4000, BUDGET))
    before_s = meter.now(slow, []).prefill_s
    meter.accepted(Request(spec(5000)))
    assert meter.now(slow, []).prefill_s == pytest.approx(before_s + 2 * whole_s)


def test_answers_bring_their_share_of_full_batches() -> None:
    answer_s = a_meter().now(WORKERS, []).answer_s
    context = 1000 + 100 / 2
    batch = next(
        batch for batch in range(1, 10_000) if COST.decode_s(batch + 1, int((batch + 1) * context)) > 0.85 * TPOT_S
    )
    most = int(KV_SHARE * 10_000 * 16 / context)
    batch = min(batch, most)
    assert TPOT_SHARE == 0.85
    assert answer_s == pytest.approx(100 * COST.decode_s(batch, int(batch * context)) / batch, rel=0.02)


def test_small_pools_and_slow_steps_make_answers_dearer() -> None:
    meter = a_meter()
    usual = meter.now(WORKERS, []).answer_s
    for changed in ({"num_blocks": 1000}, {"max_batch_size": 4}, {"correction": 1.5}):
        assert meter.now([WORKERS[0], a_worker(WorkerRole.DECODE, **changed)], []).answer_s > 1.2 * usual


def test_what_waits_and_what_runs_is_told_apart() -> None:
    meter = a_meter()
    waiting: Any = SimpleNamespace(state=Queued(0.0), request=Request(spec(500)))
    demand = meter.now(WORKERS, [waiting, waiting])
    assert demand.waiting_s == pytest.approx(2 * COST.prompt_s(500, 0, BUDGET))
    assert (demand.num_waiting, demand.num_full) == (2, 0.0)


def test_it_is_unknown_before_an_answer_ended_or_a_decode_worker_reported() -> None:
    assert not DemandMeter(COSTS, TPOT_S).now(WORKERS, []).answer_s
    assert not a_meter().now([WORKERS[0], a_worker(WorkerRole.DECODE, num_blocks=0)], []).answer_s
    assert not a_meter().now([WORKERS[0]], []).answer_s
    assert a_meter().now([*WORKERS, a_worker(WorkerRole.DECODE, num_blocks=0)], []).answer_s > 0


def test_routers_add_up() -> None:
    one, two = Demand(1.0, 2, 3.0, 4.0, 5, 6.0), Demand(10.0, 20, 2.0, 40.0, 50, 60.0)
    assert one.beside(two) == Demand(11.0, 22, 3.0, 44.0, 55, 66.0)
