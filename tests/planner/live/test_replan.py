from __future__ import annotations

from dataclasses import replace

import pytest

from pdserve.contracts.worker_config import WorkerRole
from pdserve.planner.layout import Layout
from pdserve.planner.live.replan import Proposal, Running, change_between, compare, propose, sentences
from pdserve.planner.search.goodput import Goodput
from pdserve.planner.search.plan import Candidate, Effort, Plan
from pdserve.planner.simulate.attainment import Interval
from tests.planner.plans import APART, MODEL, TOGETHER, a_plan
from tests.planner.stand_ins import PoissonWorkload, a_pool


def with_goodput(candidate: Candidate, rate: float, low: float, high: float) -> tuple[Candidate, Goodput]:
    assert candidate.goodput is not None
    goodput = replace(candidate.goodput, rate=rate, interval=Interval(low, high))
    return replace(candidate, goodput=goodput), goodput


def weighed(new_rate: float, new_low: float, *, best: Candidate | None = None) -> Proposal:
    """Against a colocated cluster with a goodput of 10, between 9 and 11."""
    _, goodput = with_goodput(a_plan().candidates[1], 10.0, 9.0, 11.0)
    candidate, new = with_goodput(best or a_plan().best, new_rate, new_low, new_rate * 1.1)
    running = Running(layout=TOGETHER, goodput=goodput, at_observed=goodput.points[0])
    return compare(running, candidate, new.points[0], model=MODEL)


def test_a_large_and_certain_gain_is_proposed() -> None:
    proposal = weighed(15.0, 14.0)
    assert proposal.gain == pytest.approx(0.5)
    assert proposal.is_proposed
    *_, cost, advice = sentences(proposal)
    assert "move 0 workers to another role, at once, stop 2, start 2 and keep 0. Loading weights takes at least" in cost
    assert advice == "Change the placement: +50% goodput, beyond the confidence intervals."


def a_short_plan() -> Plan:
    """Whose layouts would be simulated with few requests."""
    return replace(a_plan(), question=replace(a_plan().question, effort=Effort(final_requests=200)))


def test_what_runs_is_simulated_as_long_as_the_best_was() -> None:
    plan = replace(a_short_plan(), candidates=a_plan().candidates[:1])
    assert plan.best.goodput is not None
    assert plan.best.goodput.at_rate is not None
    workload = PoissonWorkload(500, 20)
    proposal = propose(plan, TOGETHER, workload, observed_rate=4.0, num_processes=1)
    for seen in (proposal.running.at_observed, proposal.at_observed, proposal.running.goodput.at_rate):
        assert seen is not None
        assert seen.num_requests == plan.best.goodput.at_rate.num_requests


def test_what_runs_and_was_simulated_for_the_plan_is_not_searched_again() -> None:
    plan = a_short_plan()
    proposal = propose(plan, TOGETHER, PoissonWorkload(500, 20), observed_rate=4.0, num_processes=1)
    assert plan.candidates[1].layout == TOGETHER
    assert proposal.running.goodput is plan.candidates[1].goodput


@pytest.mark.parametrize(
    ("rate", "low", "said"),
    [
        (15.0, 10.9, "Keep the placement: +50% goodput is within the confidence intervals."),
        (11.9, 11.8, "Change the placement"),
        (10.9, 11.8, "Keep the placement: +9% goodput is below the minimum gain of 10 %."),
        (8.0, 7.0, "Keep the placement: -20% goodput is within the confidence intervals."),
    ],
)
def test_less_is_not_proposed(rate: float, low: float, said: str) -> None:
    proposal = weighed(rate, low)
    assert proposal.is_proposed == said.startswith("Change")
    assert list(sentences(proposal))[-1].startswith(said)


def test_what_runs_is_not_proposed_again() -> None:
    proposal = weighed(15.0, 14.0, best=a_plan().candidates[1])
    assert not proposal.is_proposed
    assert list(sentences(proposal))[-1] == "Keep the placement: it is the best one found."


def test_of_clusters_on_several_hosts_it_is_told_how_much_crosses_the_network() -> None:
    _, goodput = with_goodput(a_plan().best, 10.0, 9.0, 11.0)
    layout = replace(APART, hosts=(((0,),), ((1,),)))
    pools = tuple(replace(pool, network_share=0.75) for pool in goodput.points[0].pools)
    running = Running(layout=layout, goodput=goodput, at_observed=replace(goodput.points[0], pools=pools))
    assert a_plan().best.goodput is not None
    proposal = compare(running, a_plan().best, goodput.points[0], model=MODEL)
    first, second, last = sentences(proposal)
    assert first.endswith(
        "On 2 hosts, by devices: 1 with 1 prefill, 1 with 1 decode; 75 % of the pulls cross the network."
    )
    assert "hosts" not in second
    assert last == "Keep the placement: it is the best one found, apart from the hosts of its workers."


def test_a_cluster_that_serves_nothing_in_time_gains_without_bound() -> None:
    _, none = with_goodput(a_plan().candidates[1], 0.0, 0.0, 0.0)
    best = a_plan().best
    running = Running(layout=TOGETHER, goodput=none, at_observed=none.points[0])
    assert best.goodput is not None
    proposal = compare(running, best, best.goodput.points[0], model=MODEL)
    assert proposal.is_proposed
    assert "a goodput, where there is none now" in list(sentences(proposal))[-1]


def test_workers_that_both_placements_have_stay_and_those_alike_change_roles() -> None:
    old = Layout(prefill=a_pool(WorkerRole.PREFILL, 1), decode=a_pool(WorkerRole.DECODE, 3))
    new = Layout(prefill=a_pool(WorkerRole.PREFILL, 2), decode=a_pool(WorkerRole.DECODE, 2))
    change = change_between(old, new, MODEL)
    assert (change.num_kept, change.num_relabelled, change.num_stopped, change.num_started) == (3, 1, 0, 0)
    assert change.is_any
    wide = replace(new, decode=a_pool(WorkerRole.DECODE, 2, 2))
    change = change_between(old, wide, MODEL)
    assert (change.num_kept, change.num_relabelled, change.num_stopped, change.num_started) == (1, 0, 3, 3)


def test_only_new_workers_load_weights_and_all_at_once() -> None:
    assert change_between(APART, APART, MODEL).load_s == 0
    pool = a_pool(WorkerRole.MIXED, 8)
    change = change_between(APART, Layout(mixed=pool), MODEL)
    assert change.load_s == pytest.approx(pool.cost(MODEL).weight_bytes / pool.hardware.host_bandwidth)
    wide = change_between(APART, Layout(mixed=a_pool(WorkerRole.MIXED, 2, 4)), MODEL)
    assert wide.load_s == pytest.approx(change.load_s / 4)


def test_a_pool_of_another_size_does_not_restart_a_worker() -> None:
    sized = Layout(mixed=replace(a_pool(WorkerRole.MIXED, 2), num_kv_blocks=77))
    assert change_between(sized, TOGETHER, MODEL).num_kept == 2
    other = Layout(mixed=replace(a_pool(WorkerRole.MIXED, 2), max_batch_tokens=512))
    assert change_between(other, TOGETHER, MODEL).num_kept == 0
