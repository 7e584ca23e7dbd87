"""Inputs of a comparison between simulator and cluster: the rate at saturation, and the overheads.

Used by `pdserve.bench.simulator_vs_emulation`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from pdserve.contracts.deployment import SloConfig
from pdserve.planner.layout import Layout, PlannedModel
from pdserve.planner.simulate.simulation import RequestTimes
from pdserve.planner.simulate.simulator import NO_OVERHEADS, Overheads, simulate
from pdserve.planner.workload.workload import Workload

_NUM_HALVINGS = 5


def saturation(model: PlannedModel, layout: Layout, workload: Workload, slo: SloConfig) -> float:
    """Completed requests per second of a closed loop with more requests than batch slots, after its start."""
    concurrency = 2 * sum(pool.replicas * pool.max_batch_size for pool in layout.pools if pool is not layout.prefill)
    requests = workload.draw(4 * concurrency, max_model_len=model.max_model_len).at_rate(1.0)
    times = simulate(model, layout, requests, slo=slo, overheads=NO_OVERHEADS, concurrency=concurrency).times
    ended_s = np.sort(times.last_token_s)
    first, last = len(ended_s) // 4, 3 * len(ended_s) // 4
    return float((last - first) / (ended_s[last] - ended_s[first]))


def overheads_between(
    measured: RequestTimes, simulated: RequestTimes, is_undisturbed: npt.NDArray[np.bool_] | None = None
) -> Overheads:
    """Overheads that explain the difference of requests that met few others, the second simulated without any.

    The requests should have met few others. The client sees only sums: a sixth each of the excess TTFT is attributed to
    a message to the router and to the answer's way to the client, as in the defaults of `Overheads`.

    Args:
        is_undisturbed: requests whose TTFT is used; ``None`` uses all.
    """
    late_s = measured.ttft_s - simulated.ttft_s
    ttft_s = float(np.median(late_s if is_undisturbed is None else late_s[is_undisturbed]))
    stalls_s = [times.second_token_s - times.first_token_s for times in (measured, simulated)]
    pull_s = float(np.median(stalls_s[0] - stalls_s[1]))
    message_s = max(0.0, ttft_s / 6)
    return Overheads(
        arrival_s=4 * message_s, message_s=message_s, answer_s=message_s, pull_s=max(0.0, pull_s), turn_s=0.0
    )


def pipelined_overheads(measured: RequestTimes, simulated: Callable[[Overheads], RequestTimes]) -> Overheads:
    """Overheads of a cluster whose workers plan a step while the previous one runs, with the turn between two steps.

    There decode steps follow each other without a turn, so TPOT does not reveal it. But a prompt that arrives while the
    only step in flight runs is received when that step ends: it is later than others by a turn.

    Args:
        simulated: simulates the measured requests with given overheads.

    Raises:
        ValueError: none of the prompts waited for a step, or all did.
    """
    bare = simulated(NO_OVERHEADS)
    has_waited = bare.started_s > bare.arrived_s
    if has_waited.all() or not has_waited.any():
        raise ValueError("a turn shows only if some prompts wait for a step and others do not: choose another rate")
    overheads = overheads_between(measured, bare, ~has_waited)

    def late_s(turn_s: float) -> float:
        ttft_s = simulated(replace(overheads, turn_s=turn_s)).ttft_s
        return float(np.median((measured.ttft_s - ttft_s)[has_waited]))

    return replace(overheads, turn_s=found_turn(late_s))


def found_turn(late_s: Callable[[float], float]) -> float:
    """Seconds between two steps for which ``late_s`` is 0.

    A turn delays requests by more than itself, because they stay longer, meet more others and wait for several turns.
    """
    low_s, high_s = 0.0, late_s(0.0)
    if high_s <= 0:
        return 0.0
    for _ in range(_NUM_HALVINGS):
        middle_s = (low_s + high_s) / 2
        low_s, high_s = (middle_s, high_s) if late_s(middle_s) > 0 else (low_s, middle_s)
    return (low_s + high_s) / 2
