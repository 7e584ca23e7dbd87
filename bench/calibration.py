"""What is asked of the simulator and of a cluster before the two are compared: the rate at saturation, the overheads.

Used by the benchmarks that hold `pdserve.planner.simulator` against real and emulated clusters.
"""

from __future__ import annotations

import numpy as np

from pdserve.contracts.deployment import SloConfig
from pdserve.planner.layout import Layout, PlannedModel
from pdserve.planner.simulation import RequestTimes
from pdserve.planner.simulator import NO_OVERHEADS, Overheads, simulate
from pdserve.planner.workload import Workload


def saturation(
    model: PlannedModel,
    layout: Layout,
    workload: Workload,
    slo: SloConfig,
    overheads: Overheads = NO_OVERHEADS,
) -> float:
    """Requests per second that a closed loop with more requests than places completes, once it is under way."""
    concurrency = 2 * sum(pool.replicas * pool.max_batch_size for pool in layout.pools if pool is not layout.prefill)
    requests = workload.draw(4 * concurrency, max_model_len=model.max_model_len).at_rate(1.0)
    times = simulate(model, layout, requests, slo=slo, overheads=overheads, concurrency=concurrency).times
    ended_s = np.sort(times.last_token_s)
    first, last = len(ended_s) // 4, 3 * len(ended_s) // 4
    return float((last - first) / (ended_s[last] - ended_s[first]))


def overheads_between(measured: RequestTimes, simulated: RequestTimes) -> Overheads:
    """What explains the difference of requests that met few others, the second simulated without overheads.

    The client sees sums only. Of what TTFT has too much, a sixth each is taken for a message to the router and for the
    answer's way to the client, as in the defaults of `Overheads`.
    """
    ttft_s = float(np.median(measured.ttft_s - simulated.ttft_s))
    stalls_s = [times.second_token_s - times.first_token_s for times in (measured, simulated)]
    pull_s = float(np.median(stalls_s[0] - stalls_s[1]))
    message_s = max(0.0, ttft_s / 6)
    return Overheads(
        arrival_s=4 * message_s, message_s=message_s, answer_s=message_s, pull_s=max(0.0, pull_s), turn_s=0.0
    )
