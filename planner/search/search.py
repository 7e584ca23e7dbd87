"""Placement search: from a question and a workload to a ranked plan.

The CLI and the live planner call `find_plan`. It runs three rounds, each with fewer layouts and more requests (as in
successive halving; Karnin, Koren and Somekh, ICML 2013), all on the same requests:

1. Closed-form estimates of every layout. Each phase's worker is evaluated once, and the demand of each phase
   sets the ratio of prefill to decode workers, as in DistServe's algorithm 1 (OSDI 2024, section 4.1), but with queues,
   the link, and the prompts that decode workers compute.
2. Screening: the scout (`pdserve.planner.simulate.scout`) finds the goodput of the best estimates of both kinds of
   layout in short runs; the first ones correct the remaining estimates.
3. Finalists: the scout finds their goodput in long runs with several seeds. The judge
   (`pdserve.planner.simulate.simulator`) then serves the best of either kind at its goodput; where it misses the
   target, the goodput is the judge's; where it differs from the scout by more than 2 points, the plan says so. Last,
   the sensitivity: the losers at the winner's rate, the saturation rate, and the effect of faster or slower steps.

The answer does not depend on the number of processes. Layouts that were not simulated keep their estimates.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from functools import partial
from statistics import geometric_mean
from typing import NamedTuple, TypeVar

from pdserve.planner.layout import Layout
from pdserve.planner.search.candidates import assemble, verdict_of
from pdserve.planner.search.demand import Demand
from pdserve.planner.search.estimates import Estimator, fits
from pdserve.planner.search.goodput import (
    Confirmed,
    Goodput,
    Runner,
    Trial,
    Workload,
    confirmed,
    find_best,
    find_goodput,
)
from pdserve.planner.search.infeasible import nothing_met, slo_infeasible, too_slow
from pdserve.planner.search.layouts import Enumeration, dollars_per_hour, enumerate_layouts
from pdserve.planner.search.plan import Candidate, InfeasibleError, Objective, Plan, Question, Screening
from pdserve.planner.search.process_pool import Job, ProcessPool
from pdserve.planner.search.ranking import Entry, Ranking, best_of_kinds, of_both_kinds
from pdserve.planner.search.sensitivity import SensitivityAnalysis
from pdserve.planner.simulate.attainment import Attainment
from pdserve.planner.wording import rate as rate_words
from pdserve.planner.wording import share

Progress = Callable[[float, str], None]
"""Receives the progress of the search: a fraction from 0 to 1, and the current activity."""

_NUM_SAMPLED = 1000
"""Requests drawn to measure the demand."""
_SCREEN_TOLERANCE = 0.1
_OPTIMISM = 1.2
"""Factor by which an estimate may be too low."""
_SCREEN_OPTIMISM = 1.15
"""Factor by which a short run's goodput may be too low relative to another's."""
_MOST_CHUNK_TOKENS = 16384
_MOST_POINTS = 0.02
"""Difference in attainment between scout and judge that counts as agreement."""

Result = TypeVar("Result")


def find_plan(
    question: Question, workload: Workload, *, num_processes: int = 0, progress: Progress | None = None
) -> Plan:
    """Rank the layouts that the question allows.

    Args:
        num_processes: parallel simulations; 0 uses one per core available to this process, 1 stays in this process.

    Raises:
        FitsNowhereError: no layout holds the model.
        InfeasibleSloError: no layout meets the objectives at any rate.
        InfeasibleRateError: no layout serves the required rate.
        ValueError: every request exceeds the model's length, or the least cost is asked for without a price.
    """
    started_s = time.perf_counter()
    report = progress or (lambda fraction, text: None)
    report(0.0, "listing layouts")
    _check_prices(question)
    model, effort = question.model, question.effort
    with ProcessPool(workload, num_processes or len(os.sched_getaffinity(0))) as pool:
        report(0.01, "loading the scout (the first time compiles it, in a minute)")
        _load_scout()
        enumeration = enumerate_layouts(question)
        drawn = workload.draw(_NUM_SAMPLED, effort.seeds[0], max_model_len=model.max_model_len)
        demand = Demand.of(drawn.at_rate(1.0), block_size=model.block_size, max_model_len=model.max_model_len)
        estimator = Estimator(model, demand, question.slo)
        search = _Search(question, estimator, pool, report)
        shortened = f"Shortened to {model.max_model_len} tokens: {drawn.clamped}, of {_NUM_SAMPLED} requests."
        notes = (shortened,) if str(drawn.clamped) else ()
        try:
            search.weigh(enumeration)
            search.screen()
            search.finish()
        except InfeasibleError as error:
            raise type(error)(". ".join((str(error), *notes))) from None
        candidates = search.candidates()
    return Plan(
        question=question,
        candidates=candidates,
        verdict=verdict_of(question, candidates),
        screening=search.screening(enumeration.num_without_memory),
        mean_prompt_tokens=demand.mean_prompt_tokens,
        mean_output_tokens=demand.mean_output_tokens,
        elapsed_s=time.perf_counter() - started_s,
        notes=notes + search.notes() + _notes(question, candidates),
    )


def _load_scout() -> None:
    """Before the processes of the pool do, so that they find it compiled."""
    try:
        from pdserve.planner.simulate.scout import load_scout
    except ModuleNotFoundError as error:
        raise ValueError(f"the search needs {error.name}: pip install 'pdserve[plan]'") from error
    load_scout()


def _check_prices(question: Question) -> None:
    for supply in question.fleet:
        if question.objective is Objective.LEAST_COST and supply.price is None:
            raise ValueError(
                f"{supply.hardware.name} has no known price: give its dollars per hour, or ask for the fewest devices"
            )


def _notes(question: Question, candidates: Sequence[Candidate]) -> tuple[str, ...]:
    notes = []
    if len(question.fleet) > 1:
        notes.append("A colocated layout uses one kind of device; the other kinds stay idle.")
    if any(candidate.layout.spans_hosts for candidate in candidates):
        notes.append(
            "A layout that does not fit one host is assumed to spread both phases over as few hosts as possible; KV "
            "crosses the network between workers on different hosts."
        )
    if candidates[0].dollars_per_hour is None:
        notes.append("No cost is shown, because some devices have no known price.")
    return tuple(notes)


class _Description(NamedTuple):
    """Simulations of a winner and its losers."""

    analysis: SensitivityAnalysis
    analysed: list[Future[Goodput]]
    """Of the analysis' jobs."""
    losers: list[Future[Attainment]]
    """The losers at the winner's rate, or at the required one."""


class _Search:
    """One search in progress."""

    def __init__(self, question: Question, estimator: Estimator, pool: ProcessPool, progress: Progress) -> None:
        self._question = question
        self._estimator = estimator
        self._ranking = Ranking(question)
        self._pool = pool
        self._progress = progress
        self._fraction = 0.0
        self._entries: list[Entry] = []
        """Feasible layouts in order of enumeration."""
        self._num_infeasible = 0
        self._num_requests = 0
        self._judging: dict[Layout, Future[Confirmed]] = {}
        self._judged: list[Entry] = []
        self._descriptions: dict[tuple[object, ...], _Description] = {}
        """By the finalists, their order and rates."""
        self._notes: list[str] = []

    # The three rounds

    def weigh(self, enumeration: Enumeration) -> None:
        """Estimate all layouts."""
        self._report(0.02, f"weighing {len(enumeration.layouts)} layouts")
        fleet = self._question.fleet
        for layout in enumeration.layouts:
            estimate = self._estimator.estimate(layout)
            if estimate.is_feasible:
                self._entries.append(Entry(layout, estimate, dollars_per_hour(layout, fleet)))
        self._num_infeasible = len(enumeration.layouts) - len(self._entries)
        if not self._entries:
            raise slo_infeasible(self._question, self._estimator, enumeration.layouts)

    def screen(self) -> None:
        """Simulate the best estimates briefly, until no other layout may win.

        Half of them go first and calibrate the estimates of either kind of layout; then the best of the remaining ones
        that may still win.
        """
        num_first = max(2, self._question.effort.num_screened // 2)
        num_more = self._question.effort.num_screened - num_first
        self._screen(of_both_kinds(self._ranking.ranked(self._entries, _OPTIMISM), num_first), 0.1, 0.25)
        while rest := self._worth_simulating():
            self._screen(of_both_kinds(rest, num_more), 0.25, 0.35)
            if self._is_served(self._simulated()):
                break
        if not any(entry.rate for entry in self._simulated()):
            raise nothing_met(self._question, self._simulated())

    def _screen(self, entries: Sequence[Entry], low: float, high: float) -> None:
        """Simulate layouts briefly, colocated ones with the chunk budget of the highest goodput."""
        variants = [self._variants(entry.layout) for entry in entries]
        jobs = [
            partial(
                find_best,
                trials=[self._trial(layout) for layout in layouts],
                first=layouts.index(entry.layout),
                start_rate=entry.rate,
                tolerance=_SCREEN_TOLERANCE if len(layouts) == 1 else self._question.effort.tolerance,
            )
            for entry, layouts in zip(entries, variants, strict=True)
        ]
        known = {entry.layout for entry in self._simulated()}
        for entry, layouts, (best, goodput) in zip(
            entries, variants, self._run(jobs, low, high, "screening"), strict=True
        ):
            if layouts[best] != entry.layout:
                estimate = self._estimator.estimate(layouts[best])
                corrected = entry.estimate.rate / self._estimator.estimate(entry.layout).rate
                entry.layout, entry.estimate = layouts[best], replace(estimate, rate=corrected * estimate.rate)
            entry.screened = goodput
            self._num_requests += goodput.num_requests
            if entry.layout in known:
                self._entries.remove(entry)
            known.add(entry.layout)
        self._correct_estimates(entries)

    def _variants(self, layout: Layout) -> list[Layout]:
        """A colocated layout with chunk budgets of powers of two that hold a decode batch and whose steps leave room
        for KV; any other one alone."""
        pool, model = layout.mixed, self._question.model
        if pool is None or self._question.space.mixed_batch_tokens:
            return [layout]
        powers = range(pool.max_batch_size.bit_length(), _MOST_CHUNK_TOKENS.bit_length())
        tuned = [replace(pool, max_batch_tokens=2**power) for power in powers]
        return [replace(layout, mixed=each) for each in tuned if fits(each, model, each.cost(model))]

    def _correct_estimates(self, screened: Sequence[Entry]) -> None:
        """Scale the estimates of either kind by its simulated ratios. Pipelines have ratios of their own once one was
        simulated: their bubbles make estimates too high."""
        ratios: defaultdict[tuple[bool, bool], list[float]] = defaultdict(list)
        for entry in screened:
            if entry.rate:
                ratios[_family(entry)].append(entry.rate / entry.estimate.rate)
        for entry in self._entries:
            if entry.goodput is None:
                family = _family(entry)
                seen = ratios.get(family) or ratios.get((entry.layout.is_colocated, False)) or [1.0]
                entry.estimate = replace(entry.estimate, rate=entry.estimate.rate * geometric_mean(seen))

    def _worth_simulating(self) -> list[Entry]:
        """Unsimulated layouts that may beat all simulated ones of their kind, best first: the verdict needs the best of
        both kinds."""
        key = self._ranking.key
        best = best_of_kinds(self._ranking.ranked(self._simulated()))
        rest = [entry for entry in self._entries if entry.goodput is None]
        return [
            entry
            for entry in self._ranking.ranked(rest, _OPTIMISM)
            if (rival := best.get(entry.layout.is_colocated)) is None
            or not rival.rate
            or key(entry, entry.rate * _OPTIMISM) < key(rival, rival.rate)
        ]

    def finish(self) -> None:
        """Simulate the best screened layouts at length, until one answers the question."""
        rest = [entry for entry in self._simulated() if entry.rate]
        while rest and not self._is_served(self._finalists()):
            reach = self._ranking.within_reach(self._ranking.ranked(rest), _SCREEN_OPTIMISM)
            chosen = of_both_kinds(reach, self._question.effort.num_finalists)
            self._simulate_finalists(chosen)
            rest = [entry for entry in rest if entry not in chosen and self._ranking.serves(entry.rate)]
            if not rest and not self._is_served(self._finalists()):
                rest = self._screened_further()
        finalists = self._finalists()
        if not any(entry.rate for entry in finalists):
            raise nothing_met(self._question, finalists)
        if not self._is_served(finalists):
            raise too_slow(self._question, finalists)

    def _simulate_finalists(self, chosen: Sequence[Entry]) -> None:
        """Find the goodput of the finalists by the scout, and let the judge serve the best of either kind, until it
        agrees with both or has replaced them. It begins as soon as no other finalist is likely to be better."""
        sought = {self._pool.submit(self._goodput_job(entry)): entry for entry in chosen}
        pending = set(sought)
        while pending:
            over, pending = wait(pending, return_when=FIRST_COMPLETED)
            for future in over:
                sought[future].final = goodput = future.result()
                self._num_requests += goodput.num_requests
            num_over = len(sought) - len(pending)
            self._report(0.35 + 0.3 * num_over / len(sought), f"finalists: {num_over} of {len(sought)}")
            self._start_judging([sought[future] for future in pending])
        self._report(0.65, "judging")
        if self._is_served(self._finalists()):
            self._start_describing()  # the judge agrees as a rule, and leaves processes idle
        while unheard := [entry for entry in self._best_finalists() if entry not in self._judged]:
            self._start_judging()
            for entry in unheard:
                self._judged.append(entry)
                found = self._judging[entry.layout].result()
                self._note_difference(entry.layout, found)
                entry.final = found.goodput

    def _best_finalists(self) -> list[Entry]:
        """The best disaggregated finalist and the best colocated one."""
        best = best_of_kinds(self._ranking.ranked(self._finalists()))
        return [best[kind] for kind in (False, True) if kind in best and best[kind].rate]

    def _start_judging(self, sought: Sequence[Entry] = ()) -> None:
        """Let the judge serve the best finalist of either kind, unless it does or another one, whose goodput is still
        ``sought``, is better by its short run."""
        for best in self._best_finalists():
            rivals = [entry for entry in sought if entry.layout.is_colocated is best.layout.is_colocated]
            is_likely = all(self._ranking.key(best, best.rate) <= self._ranking.key(each, each.rate) for each in rivals)
            if is_likely and best.layout not in self._judging:
                assert best.final is not None
                job = partial(confirmed, trial=self._judge_trial(best.layout), scouted=best.final)
                self._judging[best.layout] = self._pool.submit(job)

    def _note_difference(self, layout: Layout, found: Confirmed) -> None:
        judge, scout = found.judge, found.scout
        if abs(judge.share - scout.share) > _MOST_POINTS:
            self._notes.append(
                f"Scout and judge differ on {layout}: at {rate_words(scout.rate)} the scout finds {share(scout.share)} "
                f"of requests within the SLO, the judge {share(judge.share)}. The judge's figures count."
            )

    def _judge_trial(self, layout: Layout) -> Trial:
        effort = self._question.effort
        return replace(
            self._trial(layout),
            num_requests=self._limited(effort.judge_requests),
            seeds=(effort.seeds[-1] + 1,),
            is_scouted=False,
        )

    def _screened_further(self) -> list[Entry]:
        """Screen more layouts that may answer the question, if no screened one did."""
        unseen = [entry for entry in self._entries if entry.goodput is None]
        hopeful = [entry for entry in unseen if self._ranking.serves(entry.rate * _OPTIMISM)]
        further = of_both_kinds(self._ranking.ranked(hopeful), self._question.effort.num_screened // 2)
        if further:
            self._screen(further, 0.45, 0.5)
        return [entry for entry in further if entry.rate]

    def candidates(self) -> tuple[Candidate, ...]:
        """All layouts in order of rank, with their reasons."""
        finalists, description = self._start_describing()
        screened = self._ranking.ranked([entry for entry in self._simulated() if not entry.final])
        estimated = self._ranking.ranked([entry for entry in self._entries if entry.goodput is None])
        self._report(0.9, "saturation and sensitivity")
        analysed = [future.result() for future in description.analysed]
        seen = [future.result() for future in description.losers]
        self._num_requests += sum(each.num_requests for each in seen) + sum(each.num_requests for each in analysed)
        saturation_rate, sensitivity = description.analysis.results(analysed)
        put_together = partial(assemble, self._question, self._estimator)
        best = put_together(finalists[0], None, saturation_rate=saturation_rate, sensitivity=sensitivity)
        losing = [
            put_together(entry, best, at_winners_rate=at_rate)
            for entry, at_rate in zip(finalists[1:], seen, strict=True)
        ]
        others = [put_together(entry, best) for entry in (*screened, *estimated)]
        self._report(1.0, "done")
        return best, *losing, *others

    def _start_describing(self) -> tuple[list[Entry], _Description]:
        """The finalists in order of rank, and the simulations that describe them, which it starts once."""
        finalists = self._ranking.ranked(self._finalists())
        winner = finalists[0]
        rate = self._question.rate if self._question.objective.has_rate else winner.rate
        key = (rate, winner.rate, *(entry.layout for entry in finalists))
        if key not in self._descriptions:
            analysis = SensitivityAnalysis(self._trial(winner.layout, is_final=True), winner.rate)
            trials = [self._trial(entry.layout, is_final=True) for entry in finalists[1:]]
            losers = [self._pool.submit(partial(Runner.attainment, trial=trial, rate=rate)) for trial in trials]
            analysed = [self._pool.submit(job) for job in analysis.jobs]
            self._descriptions[key] = _Description(analysis, analysed, losers)
        return finalists, self._descriptions[key]

    def notes(self) -> tuple[str, ...]:
        """Limits of the simulations' accuracy."""
        winner = self._ranking.ranked(self._finalists())[0]
        if winner.final is None or not winner.final.is_unbounded:
            return tuple(self._notes)
        return (
            *self._notes,
            f"No rate was found that {winner.layout} does not serve: the requests are too few to overload it. Its "
            "figures say nothing about longer runs; plan with more requests.",
        )

    def screening(self, num_without_memory: int) -> Screening:
        """Number of layouts by outcome."""
        simulated = self._simulated()
        return Screening(
            num_layouts=len(self._entries) + self._num_infeasible + num_without_memory,
            num_without_memory=num_without_memory,
            num_infeasible=self._num_infeasible,
            num_estimated=len(self._entries) - len(simulated),
            num_simulated=len(simulated),
            num_requests=self._num_requests,
        )

    # Helpers

    def _report(self, fraction: float, text: str) -> None:
        """Report progress; a repeated round continues from the last fraction."""
        self._fraction = max(self._fraction, fraction)
        self._progress(self._fraction, text)

    def _trial(self, layout: Layout, *, is_final: bool = False) -> Trial:
        """A trial of the scout."""
        effort = self._question.effort
        num_requests, seeds = effort.screen_requests, effort.seeds[:1]
        if is_final:
            num_requests, seeds = effort.final_requests, effort.seeds
        return Trial(
            model=self._question.model,
            layout=layout,
            slo=self._question.slo,
            num_requests=self._limited(num_requests),
            seeds=seeds,
            is_scouted=True,
        )

    def _limited(self, num_requests: int) -> int:
        """At most as many as the workload has."""
        most = self._question.effort.most_requests
        return num_requests if most is None else min(num_requests, most)

    def _goodput_job(self, entry: Entry) -> Job[Goodput]:
        """Goodput of a finalist, by the scout."""
        return partial(
            find_goodput,
            trial=self._trial(entry.layout, is_final=True),
            start_rate=entry.rate,
            tolerance=self._question.effort.tolerance,
        )

    def _run(self, jobs: Sequence[Job[Result]], low: float, high: float, what: str) -> list[Result]:
        self._report(low, f"{what}: 0 of {len(jobs)}")

        def done(num_done: int) -> None:
            self._report(low + (high - low) * num_done / len(jobs), f"{what}: {num_done} of {len(jobs)}")

        return self._pool.run(jobs, done)

    def _simulated(self) -> list[Entry]:
        return [entry for entry in self._entries if entry.goodput is not None]

    def _finalists(self) -> list[Entry]:
        return [entry for entry in self._entries if entry.final]

    def _is_served(self, entries: Sequence[Entry]) -> bool:
        """Whether one of them answers the question."""
        return any(entry.rate and self._ranking.serves(entry.rate) for entry in entries)


def _family(entry: Entry) -> tuple[bool, bool]:
    """Whether the layout is colocated, and whether it decodes in a pipeline."""
    return entry.layout.is_colocated, entry.layout.decode_pool.pipeline_parallel > 1
