"""Finds the best numbers of workers of a running cluster: ``pdserve plan --live --apply``, beside its load.

The question is which numbers are better, not how high a rate they serve: a few layouts are simulated, the running one
and the best by estimate, in runs half as long as those of `pdserve.planner.search.search`, and nothing is compiled.
Short runs overstate rates, those of all layouts alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil

from pdserve.planner.layout import Layout
from pdserve.planner.search.candidates import assemble, verdict_of
from pdserve.planner.search.demand import Demand
from pdserve.planner.search.estimates import Estimator
from pdserve.planner.search.goodput import Run, Workload, search_goodput, single_run
from pdserve.planner.search.infeasible import nothing_met, slo_infeasible
from pdserve.planner.search.layouts import dollars_per_hour, enumerate_layouts
from pdserve.planner.search.plan import Plan, Question, Screening
from pdserve.planner.search.process_pool import ProcessPool
from pdserve.planner.search.ranking import Entry, Ranking
from pdserve.planner.search.search import NUM_SAMPLED, usual_run_s
from pdserve.planner.simulate.attainment import Attainment
from pdserve.planner.wording import rate as rate_words
from pdserve.planner.workload.requests import SimulatedRequest

NUM_OTHERS = 2
"""Layouts that are simulated beside the running one."""
_LEAST_REQUESTS = 2000
"""Of a run."""
_USUAL_RUNS = 5
"""Of a search; for the progress."""


def best_numbers(
    question: Question,
    workload: Workload,
    running: Layout,
    *,
    num_processes: int,
    progress: Callable[[float, str], None],
) -> Plan:
    """Plan whose candidates have the pools of ``running``, which is one of them, in other numbers.

    Args:
        num_processes: parallel simulations.
        progress: receives a fraction from 0 to 1, and the current activity.

    Raises:
        InfeasibleSloError: none of them meets the objectives at any rate.
        ValueError: every request exceeds the model's length.
    """
    started_s = time.perf_counter()
    model, effort = question.model, question.effort
    progress(0.0, "listing numbers of workers")
    with ProcessPool(workload, num_processes) as pool:
        sample = workload.draw(NUM_SAMPLED, effort.seed, max_model_len=model.max_model_len).at_rate(1.0)
        demand = Demand.of(sample, block_size=model.block_size, max_model_len=model.max_model_len)
        estimator, ranking = Estimator(model, demand, question.slo), Ranking(question)
        entries = _entries(question, estimator, running)
        ranked = ranking.ranked([entry for entry in entries if entry.estimate.is_feasible])
        if not ranked:
            raise slo_infeasible(question, estimator, [entry.layout for entry in entries])
        finalists = [entries[0], *[entry for entry in ranked if entry is not entries[0]][:NUM_OTHERS]]
        num_requests = _simulate(question, pool, sample, finalists, ranked[0], progress)
    if not any(entry.rate for entry in finalists):
        raise nothing_met(question, finalists)
    winner, *losers = ranking.ranked(finalists)
    others = ranking.ranked([entry for entry in entries if entry.goodput is None])
    first = assemble(question, estimator, winner, None)
    candidates = (first, *(assemble(question, estimator, entry, first) for entry in (*losers, *others)))
    return Plan(
        question=question,
        candidates=candidates,
        verdict=verdict_of(question, candidates),
        screening=Screening(
            num_layouts=len(entries),
            num_without_memory=0,
            num_infeasible=len(entries) - len(ranked),
            num_estimated=len(others),
            num_screened=0,
            num_simulated=len(finalists),
            num_requests=num_requests,
        ),
        mean_prompt_tokens=demand.mean_prompt_tokens,
        mean_output_tokens=demand.mean_output_tokens,
        elapsed_s=time.perf_counter() - started_s,
    )


def _simulate(
    question: Question,
    pool: ProcessPool,
    sample: Sequence[SimulatedRequest],
    finalists: Sequence[Entry],
    best: Entry,
    progress: Callable[[float, str], None],
) -> int:
    """Find goodputs of ``finalists``, by runs of the length that the ``best`` by estimate needs. Returns the number of
    simulated requests."""
    effort = question.effort
    trial = question.trial(best.layout, effort.limited(min(NUM_SAMPLED, effort.final_requests or NUM_SAMPLED)))
    (probed,) = pool.search([single_run(trial, best.rate)])
    run_s = usual_run_s(sample, probed.mean_residence_s, question.slo) / 2
    num_requests = effort.final_requests or max(_LEAST_REQUESTS, ceil(2 * best.rate * run_s))
    trial = replace(trial, num_requests=effort.limited(num_requests), run_s=run_s)
    seen = [probed]

    def done(run: Run, attained: Attainment) -> None:
        seen.append(attained)
        share = min(1.0, len(seen) / (_USUAL_RUNS * len(finalists)))
        progress(share, f"{len(seen)} runs, {run.trial.layout} at {rate_words(run.rate)}")

    searches = [
        search_goodput(replace(trial, layout=entry.layout), entry.rate or best.rate, tolerance=effort.tolerance)
        for entry in finalists
    ]
    for entry, goodput in zip(finalists, pool.search(searches, done), strict=True):
        entry.goodput = goodput
    return sum(each.num_requests for each in seen)


def _entries(question: Question, estimator: Estimator, running: Layout) -> list[Entry]:
    """``running``, and its pools in all other numbers for which there are devices."""
    numbers = [pool.replicas for pool in running.pools]
    layouts = [running]
    for layout in enumerate_layouts(question).layouts:
        if [pool.replicas for pool in layout.pools] != numbers:
            pools = zip(running.pools, layout.pools, strict=True)
            layouts.append(Layout.of((replace(old, replicas=new.replicas) for old, new in pools), layout.hosts))
    estimates = [estimator.estimate(layout) for layout in layouts]
    return [
        Entry(layout, estimate, dollars_per_hour(layout, question.fleet), estimate.rate)
        for layout, estimate in zip(layouts, estimates, strict=True)
    ]
