"""Goodput under several times the load that workers can serve, in the simulator."""

from __future__ import annotations

from dataclasses import replace

from pdserve.bench.models import LLAMA_3_8B
from pdserve.bench.policies import MAX_IN_FLIGHT, layout
from pdserve.contracts.deployment import DEFAULT_POLICY, SloConfig
from pdserve.planner.simulate.simulator import simulate
from pdserve.planner.workload.conversations import Conversations
from pdserve.planner.workload.lengths import QuantileLengths
from pdserve.planner.workload.workload import Workload

SHORT_ANSWERS = Workload(
    name="short-answers",
    contents=Conversations(
        lengths=QuantileLengths(shares=(0, 1), num_prompt_tokens=(200, 600), num_output_tokens=(30, 90))
    ),
)
SLO = SloConfig(ttft_seconds=0.5, tpot_seconds=0.01, when_hopeless="refuse")
CAPACITY = 190.0
"""Requests per second."""


def test_what_is_accepted_meets_its_objectives_however_much_is_refused() -> None:
    """Two things decide how far TPOT may be filled: the stall of a handoff, which is several steps and so some percent
    of a short answer's TPOT, and requests that are accepted while the prompts of others are still computed."""
    warm_s, overload_s = 1.5, 1.0
    usual, tenfold = (
        SHORT_ANSWERS.draw(int(rate * duration_s), seed, max_model_len=LLAMA_3_8B.max_model_len).at_rate(rate)
        for seed, (rate, duration_s) in enumerate(((0.7 * CAPACITY, warm_s), (10 * CAPACITY, overload_s)))
    )
    requests = [*usual, *(replace(each, arrived_s=each.arrived_s + usual[-1].arrived_s) for each in tenfold)]
    times = simulate(
        LLAMA_3_8B, layout(4, 1), requests, slo=SLO, max_in_flight=MAX_IN_FLIGHT, policy=DEFAULT_POLICY
    ).times
    is_served = (~times.is_rejected)[len(usual) :]
    is_met = ((times.ttft_s <= SLO.ttft_seconds) & (times.tpot_s <= SLO.tpot_seconds))[len(usual) :] & is_served
    assert is_met.sum() >= 0.95 * is_served.sum()
    assert is_met.sum() >= 0.95 * CAPACITY * overload_s
