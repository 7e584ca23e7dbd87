"""Placement search: from a question and a workload to a ranked plan.

The CLI and the live planner call `find_plan`. It runs three rounds, each with fewer layouts and more requests (as in
successive halving; Karnin, Koren and Somekh, ICML 2013), all on the same requests:

1. Closed-form bounds and estimates of every layout. Each phase's worker is evaluated once, and the demand of each phase
   sets the ratio of prefill to decode workers, as in DistServe's algorithm 1 (OSDI 2024, section 4.1), but with queues,
   the link, and the prompts that decode workers compute.
2. Screening: short simulations of the best estimates of both kinds of layout; the first ones correct the remaining
   estimates. One simulation each suffices to choose finalists; if the question asks for a rate, layouts close to the
   best get as many as their goodput needs.
3. Finalists: one long simulation each, at the same rates where possible; then, for the best of either kind, as many as
   their goodput needs, with several seeds. Last, the sensitivity: the losers at the winner's rate, the saturation
   rate, and the effect of faster or slower steps.

The answer does not depend on the number of processes. Layouts that were not simulated keep their estimates.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from statistics import geometric_mean

from pdserve.planner.bounds import BoundTable
from pdserve.planner.candidates import assemble, verdict_of
from pdserve.planner.demand import Demand
from pdserve.planner.final_round import FinalRound, start_rate
from pdserve.planner.goodput import Goodput, RateSearch, Trial, Workload
from pdserve.planner.goodput_search import GoodputSearch
from pdserve.planner.hosts import ONE_HOST_TODAY
from pdserve.planner.infeasible import nothing_met, slo_infeasible, too_slow
from pdserve.planner.layout import Layout
from pdserve.planner.layouts import Enumeration, dollars_per_hour, enumerate_layouts
from pdserve.planner.plan import Candidate, Objective, Plan, Question, Screening
from pdserve.planner.process_pool import ProcessPool
from pdserve.planner.ranking import Entry, Ranking, best_of_kinds, of_both_kinds
from pdserve.planner.sensitivity import SensitivityAnalysis

Progress = Callable[[float, str], None]
"""Receives the progress of the search: a fraction from 0 to 1, and the current activity."""

_NUM_SAMPLED = 1000
"""Requests drawn to measure the demand."""
_SCREEN_TOLERANCE = 0.15
_LONG_RUN = 0.85
"""First guess of a long run's goodput relative to a short run's: queues have more time to grow."""
_SCREEN_RESIDENCES, _FINAL_RESIDENCES = 2.5, 4.0
"""Minimum length of a run, in mean residence times of a request: a shorter run would be mostly warm-up ..."""
_MOST_LONGER = 3
"""... up to this multiple of the configured number of requests."""
_OPTIMISM = 1.2
"""Factor by which an estimate may be too low."""
_SCREEN_OPTIMISM = 1.25
"""Factor by which one short run's goodput may be too low relative to another's."""


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
        enumeration = enumerate_layouts(question)
        drawn = workload.draw(_NUM_SAMPLED, effort.seeds[0], max_model_len=model.max_model_len)
        demand = Demand.of(drawn.at_rate(1.0), block_size=model.block_size, max_model_len=model.max_model_len)
        bound_table = BoundTable(model, demand, question.slo)
        search = _Search(question, bound_table, pool, report)
        search.weigh(enumeration)
        search.screen()
        search.finish()
        candidates = search.candidates()
    notes = (f"Shortened to {model.max_model_len} tokens: {drawn.clamped}.",) if str(drawn.clamped) else ()
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


def _check_prices(question: Question) -> None:
    for supply in question.fleet:
        if question.objective is Objective.LEAST_COST and supply.price is None:
            raise ValueError(
                f"{supply.hardware.name} has no known price: give its dollars per hour, or ask for the fewest devices"
            )


def _notes(question: Question, candidates: Sequence[Candidate]) -> tuple[str, ...]:
    notes = []
    if len(question.fleet) > 1 and question.space.may_colocate:
        notes.append("A colocated layout uses one kind of device; the other kinds stay idle.")
    if any(candidate.layout.spans_hosts for candidate in candidates):
        notes.append(
            "A layout that does not fit one host is assumed to spread both phases over as few hosts as possible; KV "
            f"crosses the network between workers on different hosts. {ONE_HOST_TODAY}"
        )
    if candidates[0].dollars_per_hour is None:
        notes.append("No cost is shown, because some devices have no known price.")
    return tuple(notes)


class _Search:
    """One search in progress."""

    def __init__(self, question: Question, bound_table: BoundTable, pool: ProcessPool, progress: Progress) -> None:
        self._question = question
        self._bound_table = bound_table
        self._ranking = Ranking(question)
        self._pool = pool
        self._progress = progress
        self._fraction = 0.0
        self._entries: list[Entry] = []
        """Feasible layouts in order of enumeration."""
        self._num_infeasible = 0
        self._num_requests = 0
        self._num_in_flight = 0.0
        """In-flight requests of the best estimate, by Little's law."""

    # The three rounds

    def weigh(self, enumeration: Enumeration) -> None:
        """Compute bounds and estimates of all layouts."""
        self._report(0.02, f"weighing {len(enumeration.layouts)} layouts")
        fleet = self._question.fleet
        for layout in enumeration.layouts:
            bounds = self._bound_table.bounds(layout)
            if bounds.is_feasible:
                self._entries.append(Entry(layout, bounds, dollars_per_hour(layout, fleet)))
        self._num_infeasible = len(enumeration.layouts) - len(self._entries)
        if not self._entries:
            raise slo_infeasible(self._question, self._bound_table, enumeration.layouts)
        best = self._ranking.ranked(self._entries)[0]
        self._num_in_flight = best.rate * self._bound_table.residence_s

    def screen(self) -> None:
        """Simulate the best estimates briefly, until one answers the question.

        Half of them go first and calibrate the estimates of either kind of layout; then the best of the remaining ones
        that may still win.
        """
        num_first = max(2, self._question.effort.num_screened // 2)
        num_more = self._question.effort.num_screened - num_first
        self._screen(of_both_kinds(self._ranking.ranked(self._entries, _OPTIMISM), num_first), 0.1, 0.25)
        while rest := self._worth_simulating():
            self._screen(of_both_kinds(rest, num_more), 0.25, 0.35)
            if self._is_served(self._simulated()):
                self._settle_screened()
            if self._is_served(self._simulated()):
                break
        self._settle_screened()
        if not any(entry.rate for entry in self._simulated()):
            raise nothing_met(self._question, self._simulated())

    def _screen(self, entries: Sequence[Entry], low: float, high: float) -> None:
        """Roughly: a layout far behind the best needs no precise goodput."""
        for entry in entries:
            entry.search = GoodputSearch(
                self._trial(entry.layout), entry.bounds.estimate, _SCREEN_TOLERANCE, entry.bounds.rate, is_rough=True
            )
        for entry, goodput in zip(entries, self._goodputs(entries, low, high, "screening"), strict=True):
            entry.screened = goodput
        self._correct_estimates(entries)

    def _settle_screened(self) -> None:
        """If the question asks for a rate, settle the layouts that may be as good as the best of their kind."""
        if not self._question.objective.has_rate:
            return
        while unsettled := [entry for entry in self._within_reach_of_screened() if not entry.is_settled]:
            for entry in unsettled:
                assert entry.search is not None
                entry.search.settle()
            for entry, goodput in zip(unsettled, self._goodputs(unsettled, 0.35, 0.45, "screening"), strict=True):
                entry.screened = goodput

    def _within_reach_of_screened(self) -> list[Entry]:
        screened = [entry for entry in self._simulated() if not entry.final]
        return self._ranking.within_reach(self._ranking.ranked(screened), _SCREEN_OPTIMISM)

    def _correct_estimates(self, screened: Sequence[Entry]) -> None:
        """Scale the estimates of either kind by its simulated ratios. Pipelines have ratios of their own once one was
        simulated: their bubbles make estimates too high."""
        ratios: defaultdict[tuple[bool, bool], list[float]] = defaultdict(list)
        for entry in screened:
            if entry.rate:
                ratios[_family(entry)].append(entry.rate / entry.bounds.estimate)
        for entry in self._entries:
            if entry.goodput is None:
                family = _family(entry)
                seen = ratios.get(family) or ratios.get((entry.layout.is_colocated, False)) or [1.0]
                estimate = entry.bounds.estimate * geometric_mean(seen)
                entry.bounds = replace(entry.bounds, estimate=min(entry.bounds.rate, estimate))

    def _worth_simulating(self) -> list[Entry]:
        """Unsimulated layouts that may beat all simulated ones of their kind, best first: the verdict needs the best of
        both kinds."""
        key = self._ranking.key
        best = best_of_kinds(self._ranking.ranked(self._simulated()))
        rest = [entry for entry in self._entries if entry.goodput is None and self._ranking.serves(entry.bounds.rate)]
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
            self._simulate_at_length(chosen)
            rest = [entry for entry in rest if entry not in chosen and self._ranking.serves(entry.rate)]
            if not rest and not self._is_served(self._finalists()):
                rest = self._screened_further()
        finalists = self._finalists()
        if not any(entry.rate for entry in finalists):
            raise nothing_met(self._question, finalists)
        if not self._is_served(finalists):
            raise too_slow(self._question, finalists)

    def _screened_further(self) -> list[Entry]:
        """Screen more layouts that may answer the question, if no screened one did."""
        unseen = [entry for entry in self._entries if entry.goodput is None]
        hopeful = [entry for entry in unseen if self._ranking.serves(min(entry.rate * _OPTIMISM, entry.bounds.rate))]
        further = of_both_kinds(self._ranking.ranked(hopeful), self._question.effort.num_screened // 2)
        if further:
            self._screen(further, 0.45, 0.5)
            self._settle_screened()
        return [entry for entry in further if entry.rate]

    def _simulate_at_length(self, entries: Sequence[Entry]) -> None:
        """With the first seed; then the best of either kind with all seeds."""
        rates = [_LONG_RUN * entry.rate for entry in best_of_kinds(entries).values()]
        if self._question.objective.has_rate:
            rates = [self._question.rate]
        for entry in entries:
            entry.search = GoodputSearch(
                self._trial(entry.layout, is_final=True),
                start_rate(_LONG_RUN * entry.rate, rates, _SCREEN_TOLERANCE),
                self._question.effort.tolerance,
                entry.bounds.rate,
                is_rough=True,
            )
        num_done = count(1)

        def done() -> None:
            self._report(0.45 + 0.4 * (1 - len(entries) / (len(entries) + next(num_done))), "finalists")

        finalists = [entry for entry in self._entries if entry.final or entry in entries]
        kinds = [[entry for entry in finalists if entry.layout.is_colocated is kind] for kind in (False, True)]
        tolerance = self._question.effort.tolerance
        self._run_searches([FinalRound(self._ranking, kind, tolerance, done) for kind in kinds if kind])

    def candidates(self) -> tuple[Candidate, ...]:
        """All layouts in order of rank, with their reasons."""
        finalists = self._ranking.ranked(self._finalists())
        screened = self._ranking.ranked([entry for entry in self._simulated() if not entry.final])
        estimated = self._ranking.ranked([entry for entry in self._entries if entry.goodput is None])
        winner = finalists[0]
        asked_rate = self._question.rate if self._question.objective.has_rate else winner.rate
        look = SensitivityAnalysis(
            winner,
            finalists[1:],
            asked_rate,
            tolerance=self._question.effort.tolerance,
            short=self._trial(winner.layout),
            long=replace(self._trial(winner.layout, is_final=True), seeds=self._first_seed),
        )
        self._run_searches(
            look.searches, self._done(0.85, 1.0, len(look.searches), "losers, saturation and sensitivity")
        )
        seen, saturation_rate, sensitivity = look.losers_at_rate(), look.saturation_rate(), look.sensitivity()
        assembled: list[Candidate] = []
        for entry in (*finalists, *screened, *estimated):
            index = finalists.index(entry) if entry.final else -1
            assembled.append(
                assemble(
                    self._question,
                    self._bound_table,
                    entry.layout,
                    entry.bounds,
                    entry.goodput,
                    entry.dollars_per_hour,
                    is_final=entry.final is not None,
                    at_winners_rate=seen[index - 1] if index > 0 else None,
                    saturation_rate=saturation_rate if entry is winner else None,
                    sensitivity=sensitivity if entry is winner else (),
                    winner=assembled[0] if assembled else None,
                )
            )
        self._report(1.0, "done")
        return tuple(assembled)

    def notes(self) -> tuple[str, ...]:
        """Limits of the simulations' accuracy."""
        num_residences = self._most_requests(self._question.effort.final_requests) / self._num_in_flight
        if self._question.effort.is_finite or num_residences >= _FINAL_RESIDENCES:
            return ()
        return (
            f"Simulations last only about {num_residences:.1f} times as long as a request, so goodput may be slightly "
            "overestimated. Simulate more requests.",
        )

    def screening(self, num_without_memory: int) -> Screening:
        """Number of layouts by outcome."""
        simulated = self._simulated()
        best = self._ranking.ranked(simulated)[0]
        others = [entry for entry in self._entries if entry.goodput is None]
        num_bounded = sum(
            self._ranking.key(entry, entry.bounds.rate) > self._ranking.key(best, best.rate) for entry in others
        )
        return Screening(
            num_layouts=len(self._entries) + self._num_infeasible + num_without_memory,
            num_without_memory=num_without_memory,
            num_infeasible=self._num_infeasible,
            num_bounded=num_bounded,
            num_estimated=len(others) - num_bounded,
            num_simulated=len(simulated),
            num_requests=self._num_requests,
        )

    # Helpers

    def _report(self, fraction: float, text: str) -> None:
        """Report progress; a repeated round continues from the last fraction."""
        self._fraction = max(self._fraction, fraction)
        self._progress(self._fraction, text)

    def _trial(self, layout: Layout, *, is_final: bool = False) -> Trial:
        effort, num_requests = self._question.effort, self._question.effort.screen_requests
        num_residences = _SCREEN_RESIDENCES
        if is_final:
            num_requests, num_residences = effort.final_requests, _FINAL_RESIDENCES
        if not effort.is_finite:
            num_long = min(round(num_residences * self._num_in_flight), self._most_requests(num_requests))
            num_requests = max(num_requests, num_long)
        return Trial(
            model=self._question.model,
            layout=layout,
            slo=self._question.slo,
            num_requests=num_requests,
            seeds=effort.seeds if is_final else self._first_seed,
            is_finite=effort.is_finite,
        )

    def _most_requests(self, num_requests: int) -> int:
        """Maximum length of a simulation whose minimum is ``num_requests``."""
        most = self._question.effort.most_requests
        return _MOST_LONGER * num_requests if most is None else min(most, _MOST_LONGER * num_requests)

    @property
    def _first_seed(self) -> tuple[int, ...]:
        return self._question.effort.seeds[:1]

    def _goodputs(self, entries: Sequence[Entry], low: float, high: float, what: str) -> list[Goodput]:
        """Run each entry's search until it asks for no more."""
        searches = [entry.search for entry in entries if entry.search is not None]
        self._run_searches(searches, self._done(low, high, len(searches), what))
        return [search.goodput() for search in searches]

    def _run_searches(
        self, searches: Sequence[RateSearch], done: Callable[[int], None] = lambda num_done: None
    ) -> None:
        num_before = sum(search.num_requests for search in searches)
        self._pool.run(searches, done)
        self._num_requests += sum(search.num_requests for search in searches) - num_before

    def _done(self, low: float, high: float, num_jobs: int, what: str) -> Callable[[int], None]:
        self._report(low, f"{what}: 0 of {num_jobs}")
        return lambda num_done: self._report(
            low + (high - low) * num_done / num_jobs, f"{what}: {num_done} of {num_jobs}"
        )

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
