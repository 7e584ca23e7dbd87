"""Decides whether to change a running cluster's placement: the gain, its confidence, and the cost of the change.

Compares a plan for the observed traffic with the running placement, both simulated. Proposes a change only if its gain
is statistically clear and above a threshold (hysteresis), so that noise never triggers a rebuild. Changes nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from pdserve.contracts.worker_config import WorkerRole
from pdserve.planner import wording
from pdserve.planner.layout import Layout, PlannedModel, Pool
from pdserve.planner.report.plan_json import Json, attainment_json, layout_json, plan_json
from pdserve.planner.search.goodput import Goodput, Search, Workload, search_goodput, single_run
from pdserve.planner.search.hosts import host_sentence
from pdserve.planner.search.plan import Candidate, Plan
from pdserve.planner.search.process_pool import ProcessPool
from pdserve.planner.simulate.attainment import Attainment

DEFAULT_HYSTERESIS = 0.1
"""Minimum gain in goodput for a proposal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """The running placement, simulated under the observed traffic."""

    layout: Layout
    goodput: Goodput
    at_observed: Attainment
    """Its result at the observed rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Cost of going from one placement to another."""

    num_kept: int
    """Workers in both placements."""
    num_relabelled: int
    """Workers that can take another role, which needs no start."""
    num_stopped: int
    num_started: int
    load_s: float
    """Minimum time until the new workers have their weights, if all devices load from host memory in parallel."""

    @property
    def is_any(self) -> bool:
        return bool(self.num_relabelled or self.num_started or self.num_stopped)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """The comparison and its advice."""

    running: Running
    best: Candidate
    at_observed: Attainment
    """The best candidate's result at the observed rate."""
    gain: float
    """Its goodput relative to the running placement's, minus 1; infinite if the latter never meets the SLO."""
    is_clear: bool
    """The confidence intervals do not overlap."""
    hysteresis: float
    change: Change

    @property
    def is_proposed(self) -> bool:
        return self.is_clear and self.gain >= self.hysteresis and self.change.is_any


def propose(
    plan: Plan,
    layout: Layout,
    workload: Workload,
    *,
    observed_rate: float,
    hysteresis: float = DEFAULT_HYSTERESIS,
    num_processes: int = 1,
) -> Proposal:
    """Simulate the running layout like the plan's best, unless the plan has it, and both at the observed rate; compare.

    Args:
        plan: for the observed traffic, on the running layout's devices.
        layout: the running layout.
        num_processes: parallel simulations.

    Raises:
        ValueError: the running layout cannot be simulated.
    """
    question, best = plan.question, plan.best
    assert best.goodput is not None, "the best was simulated"
    near = best.goodput.at_rate
    assert near is not None, "and meets its target"
    run_s = near.num_requests / near.rate
    # As long as the runs that found the best layout's goodput: shorter ones overstate it.
    num_requests = question.effort.requests_of_run(near.rate, run_s)
    runs, found = (question.trial(each, num_requests, run_s) for each in (layout, best.layout))
    known = next((each.goodput for each in plan.candidates if each.layout == layout), None)
    searches: list[Search[Any]] = [single_run(runs, observed_rate), single_run(found, observed_rate)]
    if known is None:
        searches.append(search_goodput(runs, best.rate, tolerance=question.effort.tolerance))
    with ProcessPool(workload, num_processes) as pool:
        running_at, best_at, *searched = pool.search(searches)
    goodput = known or searched[0]
    running = Running(layout=layout, goodput=goodput, at_observed=running_at)
    return compare(running, best, best_at, model=question.model, hysteresis=hysteresis)


def compare(
    running: Running,
    best: Candidate,
    at_observed: Attainment,
    *,
    model: PlannedModel,
    hysteresis: float = DEFAULT_HYSTERESIS,
) -> Proposal:
    """Compare the best candidate of a plan, which was simulated, with the running placement."""
    assert best.goodput is not None
    old, new = running.goodput, best.goodput
    gain = new.rate / old.rate - 1 if old.rate else float("inf") if new.rate else 0.0
    return Proposal(
        running=running,
        best=best,
        at_observed=at_observed,
        gain=gain,
        is_clear=new.interval.low > old.interval.high,
        hysteresis=hysteresis,
        change=change_between(running.layout, best.layout, model),
    )


def change_between(old: Layout, new: Layout, model: PlannedModel) -> Change:
    """Workers that differ in device, degree or limits are started anew. Those of two pools that are there before and
    after, and differ in limits alone, may take each other's role: they keep their limits."""
    old_pools, new_pools = ({pool.role: pool for pool in layout.pools} for layout in (old, new))
    surplus: list[Pool] = []
    missing: list[Pool] = []
    num_kept = 0
    for role in WorkerRole:
        before, after = old_pools.get(role), new_pools.get(role)
        num_before, num_after = before.replicas if before else 0, after.replicas if after else 0
        kept = min(num_before, num_after) if before and after and _is_alike(before, after) else 0
        num_kept += kept
        surplus += [before] * (num_before - kept) if before else []
        missing += [after] * (num_after - kept) if after else []
    num_relabelled, load_s = 0, 0.0
    for pool in missing:
        switched = next((each for each in surplus if _may_switch(each, pool, old_pools, new_pools)), None)
        if switched is not None:
            surplus.remove(switched)
            num_relabelled += 1
        else:
            rank_bytes = pool.cost(model).weight_bytes / pool.devices_per_worker
            load_s = max(load_s, rank_bytes / pool.hardware.host_bandwidth)
    return Change(
        num_kept=num_kept,
        num_relabelled=num_relabelled,
        num_stopped=len(surplus),
        num_started=len(missing) - num_relabelled,
        load_s=load_s,
    )


def _may_switch(before: Pool, after: Pool, old: Mapping[WorkerRole, Pool], new: Mapping[WorkerRole, Pool]) -> bool:
    """Whether a worker of one pool can become one of another, both of which are there before and after."""
    both = (before.role, after.role)
    return (
        before.role is not after.role
        and all(role in old and role in new and _is_alike(old[role], new[role]) for role in both)
        and _is_alike(before, dataclasses.replace(after, **{name: getattr(before, name) for name in _KEPT}))
    )


_KEPT = ("role", "max_batch_tokens", "max_batch_size")
"""In these, pools may differ whose workers take each other's role."""


def _is_alike(before: Pool, after: Pool) -> bool:
    """Whether a worker of one pool can stay in the other; the size of its KV pool does not matter."""
    return dataclasses.replace(before, replicas=1, num_kv_blocks=0) == dataclasses.replace(
        after, replicas=1, num_kv_blocks=0
    )


def sentences(proposal: Proposal) -> Iterator[str]:
    """The comparison and the advice as sentences."""
    running, best, change = proposal.running, proposal.best, proposal.change
    observed = wording.rate(running.at_observed.rate)
    yield (
        f"Running: {running.layout}, goodput {_with_interval(running.goodput)}; at the observed {observed}, "
        f"{wording.share(running.at_observed.share)} of requests meet both objectives."
        f"{_where(running.layout, running.at_observed)}"
    )
    yield (
        f"Best found: {best.layout}, goodput {_with_interval(best.goodput)}; at the observed {observed}, "
        f"{wording.share(proposal.at_observed.share)}.{_where(best.layout, proposal.at_observed)}"
    )
    if not change.is_any:
        elsewhere = ", apart from the hosts of its workers" if running.layout.spans_hosts else ""
        yield f"Keep the placement: it is the best one found{elsewhere}."
        return
    loading = f" Loading weights takes at least {wording.seconds(change.load_s)}." if change.num_started else ""
    yield (
        f"The change would move {change.num_relabelled} workers to another role, at once, stop {change.num_stopped}, "
        f"start {change.num_started} and keep {change.num_kept}.{loading}"
    )
    yield _advice(proposal)


def _where(layout: Layout, seen: Attainment) -> str:
    return f" {host_sentence(layout, seen)}" if layout.spans_hosts else ""


def _advice(proposal: Proposal) -> str:
    gain = f"{proposal.gain:+.0%} goodput" if proposal.gain != float("inf") else "a goodput, where there is none now"
    if proposal.is_proposed:
        return f"Change the placement: {gain}, beyond the confidence intervals."
    if not proposal.is_clear:
        return f"Keep the placement: {gain} is within the confidence intervals."
    return f"Keep the placement: {gain} is below the minimum gain of {wording.share(proposal.hysteresis)}."


def _with_interval(goodput: Goodput | None) -> str:
    assert goodput is not None
    low, high = goodput.interval
    return f"{wording.rate(goodput.rate)} ({wording.number(low)} to {wording.number(high)})"


def proposal_json(proposal: Proposal, plan: Plan) -> Json:
    """The proposal as JSON, with its plan."""
    running = proposal.running
    return {
        "is_proposed": proposal.is_proposed,
        "gain": proposal.gain if isfinite(proposal.gain) else None,
        "is_clear": proposal.is_clear,
        "hysteresis": proposal.hysteresis,
        "running": {
            "layout": layout_json(running.layout),
            "rate": running.goodput.rate,
            "interval": list(running.goodput.interval),
            "at_observed": attainment_json(running.at_observed),
        },
        "best_at_observed": attainment_json(proposal.at_observed),
        "change": dataclasses.asdict(proposal.change),
        "plan": plan_json(plan, "observed"),
    }
