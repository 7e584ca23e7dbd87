"""What the router's policy knows of workers, against what their schedulers hold, in the simulator."""

from __future__ import annotations

from functools import partial
from heapq import heappop
from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.contracts.deployment import SloConfig
from pdserve.contracts.worker_config import WorkerRole
from pdserve.planner.simulate.simulator import NO_OVERHEADS, _Simulator
from pdserve.planner.workload.requests import SimulatedRequest
from pdserve.router.requests.goodput import Goodput
from pdserve.router.requests.settings import DispatchSettings
from tests.planner.stand_ins import LLAMA_3_8B, disaggregated

SLO = SloConfig(ttft_seconds=60.0, tpot_seconds=0.05)
"""No request is late, so that the policy knows all answers."""


@settings(max_examples=10)
@given(
    st.lists(st.tuples(st.floats(0, 0.3), st.integers(1, 9000), st.integers(1, 60)), max_size=12),
    st.lists(st.tuples(st.floats(0, 1.0), st.integers(0, 11)), max_size=6),
)
def test_the_policy_knows_what_the_schedulers_hold(
    drawn: list[tuple[float, int, int]], cancelled: list[tuple[float, int]]
) -> None:
    """Whenever no message is on its way: answers where they decode, and prompts that wait where they wait."""
    now_s, requests = 0.0, list[SimulatedRequest]()
    for gap_s, num_prompt_tokens, num_output_tokens in [(0.0, 100, 60), (0.1, 100, 60), *drawn]:
        now_s += gap_s
        requests.append(SimulatedRequest(now_s, num_prompt_tokens, num_output_tokens))
    dispatch = DispatchSettings(policy="goodput", slo=SLO)
    run = _Simulator(LLAMA_3_8B, disaggregated(2, 2), requests, dispatch, NO_OVERHEADS, 0, None)
    dispatcher, entries, num_seen = run._dispatcher, run._events._entries, 0
    policy = dispatcher.placement
    assert isinstance(policy, Goodput)

    def cancel(number: int) -> None:
        in_flight = list(dispatcher._requests)
        if in_flight:
            dispatcher.cancel(in_flight[number % len(in_flight)])

    for instant_s, number in cancelled:
        run._events.at(instant_s, partial(cancel, number))
    while entries:
        instant_s, _, call = heappop(entries)
        run._events.now_s = max(instant_s, run._events.now_s)
        call()
        if entries and entries[0][0] <= run._events.now_s:
            continue
        for worker in run._workers.values():
            if worker.engine._inbox:
                continue
            view, load = policy._view(worker.snapshot()), worker.engine.load()
            assert view.prompts.num_tokens_after(-inf) >= load.num_waiting_tokens
            if worker.role is WorkerRole.DECODE:
                num_answers = len(view.answers)
                num_soon = len(view.prompts) + len(list(worker.engine._scheduler.reservations.pulling()))
                assert num_answers + num_soon == load.num_running + load.num_waiting, (num_answers, num_soon, load)
                num_seen += num_answers
    assert num_seen or cancelled, "the second arrives while the first decodes"
    assert not any(len(view.prompts) or len(view.answers) for view in policy._views.values())
    assert not policy._requests
    assert policy._num_answers == len(policy._joining) == len(policy._late_joining) == 0
