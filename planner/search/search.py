"""Placement search: from a question and a workload to a ranked plan.

The CLI and the live planner call `find_plan`. It runs three rounds, each with fewer layouts and more exact (as in
successive halving; Karnin, Koren and Somekh, ICML 2013), all on the same requests:

1. Closed-form estimates of every layout. Each phase's worker is evaluated once, and the demand of each phase
   sets the ratio of prefill to decode workers, as in DistServe's algorithm 1 (OSDI 2024, section 4.1), but with queues,
   the link, and the prompts that decode workers compute.
2. Screening: the scout (`pdserve.planner.simulate.scout`) ranks the best estimates of both kinds of layout; the first
   ones correct the remaining estimates.
3. Finalists: the simulator that drives the live schedulers and the router's own policy
   (`pdserve.planner.simulate.simulator`) finds the goodput of the best of either kind, and of those that may be better:
   they serve the goodput of the best of their kind. Last, the sensitivity: the losers at the winner's rate, the
   saturation rate, and the effect of faster or slower steps.

The scout models one policy, ``least-time``, so it states nothing: all figures of a plan are of the third round, under
the policy of the question. The answer does not depend on the number of processes. Layouts that were not simulated keep
their estimates, corrected by what was found of others.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from statistics import geometric_mean, mean
from typing import Any

from pdserve.contracts.deployment import DEFAULT_POLICY, SloConfig
from pdserve.kv_transfer.host_limits import usable_cores
from pdserve.planner.layout import Layout
from pdserve.planner.search.candidates import assemble, verdict_of
from pdserve.planner.search.demand import Demand
from pdserve.planner.search.estimates import Estimator, fits
from pdserve.planner.search.goodput import (
    Goodput,
    Result,
    Run,
    Search,
    Trial,
    Workload,
    find_best,
    search_better,
    search_goodput,
    single_run,
)
from pdserve.planner.search.infeasible import nothing_met, slo_infeasible, too_few_requests, too_slow
from pdserve.planner.search.layouts import Enumeration, dollars_per_hour, enumerate_layouts
from pdserve.planner.search.plan import Candidate, InfeasibleError, Objective, Plan, Question, Screening
from pdserve.planner.search.process_pool import ProcessPool
from pdserve.planner.search.ranking import Entry, Ranking, of_both_kinds
from pdserve.planner.search.sensitivity import TIME_FACTORS, search_saturation, search_sensitivity
from pdserve.planner.simulate.attainment import Attainment
from pdserve.planner.wording import rate as rate_words
from pdserve.planner.workload.requests import SimulatedRequest

Progress = Callable[[float, str], None]
"""Receives the progress of the search: a fraction from 0 to 1, and the current activity."""

NUM_SAMPLED = 1000
"""Requests drawn to measure the demand."""
_SCREEN_TOLERANCE = 0.1
_OPTIMISM = 1.2
"""Factor by which an estimate may be too low."""
_SCREEN_OPTIMISM = 1.1
"""Factor by which what the scout found may be too low, once corrected by what was simulated."""
_MOST_CHUNK_TOKENS = 16384
_RUN_RESIDENCES = 20
"""Usual length of a run in mean residence times, as screened, in mean times of a conversation, and in TTFT objectives:
a queue that gets a twentieth more than it can take passes the objective within the run. Closed loops drift as slowly:
beyond their highest rate answers get slower for many conversations, all in time, until turns wait for each other."""
_USUAL_RUNS = 6
"""Of a search; for the progress."""


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
        InfeasibleError: the requests are too few to find the highest rate.
        ValueError: every request exceeds the model's length, or the least cost is asked for without a price.
    """
    started_s = time.perf_counter()
    report = progress or (lambda fraction, text: None)
    _check_prices(question)
    enumeration = enumerate_layouts(question)
    report(0.0, "loading the screener (compiled once on this machine, in about a minute)")
    model, effort = question.model, question.effort
    with ProcessPool(workload, num_processes or len(usable_cores())) as pool:
        _load_scout()
        report(0.01, "drawing requests")
        drawn = workload.draw(NUM_SAMPLED, effort.seed, max_model_len=model.max_model_len)
        sample = drawn.at_rate(1.0)
        demand = Demand.of(sample, block_size=model.block_size, max_model_len=model.max_model_len)
        estimator = Estimator(model, demand, question.slo)
        search = _Search(question, estimator, pool, report, sample)
        shortened = f"Shortened to {model.max_model_len} tokens: {drawn.clamped}, of {NUM_SAMPLED} requests."
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
    if question.policy != DEFAULT_POLICY:
        notes.append(f"Planned for the router's policy {question.policy}.")
    if question.guesses_note:
        notes.append(question.guesses_note)
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


def usual_run_s(sample: Sequence[SimulatedRequest], residence_s: float, slo: SloConfig) -> float:
    """Usual length of a run of requests like ``sample``, whose mean residence time is ``residence_s``."""
    turns = [list(each.turns()) for each in sample]
    think_s = mean(sum(turn.arrived_s for turn in each[1:]) for each in turns)
    conversation_s = think_s + mean(map(len, turns)) * residence_s
    return _RUN_RESIDENCES * max(slo.ttft_seconds, conversation_s)


class _Search:
    """One search in progress."""

    def __init__(
        self,
        question: Question,
        estimator: Estimator,
        pool: ProcessPool,
        progress: Progress,
        sample: Sequence[SimulatedRequest],
    ) -> None:
        self._question = question
        self._estimator = estimator
        self._ranking = Ranking(question)
        self._pool = pool
        self._progress = progress
        self._fraction = 0.0
        self._entries: list[Entry] = []
        """Feasible layouts in order of enumeration."""
        self._tuned: dict[tuple[Layout, ...], Entry] = {}
        """The best screened layout by its variants."""
        self._num_infeasible = 0
        self._num_requests = 0
        self._sample = sample

    # The three rounds

    def weigh(self, enumeration: Enumeration) -> None:
        """Estimate all layouts."""
        self._report(0.02, f"weighing {len(enumeration.layouts)} layouts")
        fleet = self._question.fleet
        for layout in enumeration.layouts:
            estimate = self._estimator.estimate(layout)
            if estimate.is_feasible:
                self._entries.append(Entry(layout, estimate, dollars_per_hour(layout, fleet), estimate.rate))
        self._num_infeasible = len(enumeration.layouts) - len(self._entries)
        if not self._entries:
            raise slo_infeasible(self._question, self._estimator, enumeration.layouts)

    def screen(self) -> None:
        """Rank the best estimates by the scout, until no other layout may win.

        Half of them go first and calibrate the estimates of either kind of layout; then the best of the remaining ones
        that may still win.
        """
        num_first = max(2, self._question.effort.num_screened // 2)
        num_more = self._question.effort.num_screened - num_first
        self._screen(of_both_kinds(self._ranking.ranked(self._entries, _OPTIMISM), num_first), 0.03, 0.08)
        while rest := self._ranking.may_beat(self._unscreened(), self._screened(), _OPTIMISM):
            self._screen(of_both_kinds(rest, num_more), 0.08, 0.12)
            if self._is_served(self._screened()):
                break

    def _screen(self, entries: Sequence[Entry], low: float, high: float) -> None:
        """Let the scout find the rates of layouts, of colocated ones with the chunk budget of the highest."""
        effort = self._question.effort
        num_requests = effort.limited(effort.screen_requests)
        variants = [self._variants(entry.layout) for entry in entries]
        jobs = [
            partial(
                find_best,
                trials=[self._question.trial(layout, num_requests) for layout in layouts],
                first=layouts.index(entry.layout),
                start_rate=entry.rate,
                tolerance=_SCREEN_TOLERANCE if len(layouts) == 1 else effort.tolerance,
            )
            for entry, layouts in zip(entries, variants, strict=True)
        ]

        def done(num_done: int) -> None:
            self._report(low + (high - low) * num_done / len(jobs), f"screening: {num_done} of {len(jobs)}")

        done(0)
        for entry, layouts, (best, found) in zip(entries, variants, self._pool.run(jobs, done), strict=True):
            if layouts[best] != entry.layout:
                entry.layout, entry.estimate = layouts[best], self._estimator.estimate(layouts[best])
            entry.screened = found
            self._keep_best(tuple(layouts), entry)
        self._correct()

    def _keep_best(self, variants: tuple[Layout, ...], entry: Entry) -> None:
        """Of the layouts that were tuned to one of the same ``variants``, only the best goes on."""
        rival = self._tuned.setdefault(variants, entry)
        if rival is not entry:
            assert rival.screened is not None
            assert entry.screened is not None
            is_worse = rival.goodput is None and rival.screened.rate < entry.screened.rate
            self._entries.remove(rival if is_worse else entry)
            self._tuned[variants] = entry if is_worse else rival

    def _variants(self, layout: Layout) -> list[Layout]:
        """A colocated layout with chunk budgets of powers of two that hold a decode batch and whose steps leave room
        for KV; any other one alone."""
        pool, model = layout.mixed, self._question.model
        space = self._question.space
        if pool is None or space.mixed_batch_tokens or space.keeps_pools:
            return [layout]
        powers = range(pool.max_batch_size.bit_length(), _MOST_CHUNK_TOKENS.bit_length())
        tuned = [replace(pool, max_batch_tokens=2**power) for power in powers]
        return [replace(layout, mixed=each) for each in tuned if fits(each, model)]

    def _correct(self) -> None:
        """Correct what is expected of layouts by what was found of others: estimates of either kind by the scout, and
        what it found by goodputs of that kind. Pipelines have ratios of their own once one was screened: their bubbles
        make estimates too high."""
        screened: defaultdict[tuple[bool, bool], list[float]] = defaultdict(list)
        simulated: defaultdict[bool, list[float]] = defaultdict(list)
        for entry in self._screened():
            assert entry.screened is not None
            if entry.screened.rate:
                screened[_family(entry)].append(entry.screened.rate / entry.estimate.rate)
                if entry.goodput is not None and entry.rate:
                    simulated[entry.layout.is_colocated].append(entry.rate / entry.screened.rate)
        all_simulated = [ratio for ratios in simulated.values() for ratio in ratios]
        for entry in self._entries:
            is_colocated = entry.layout.is_colocated
            ratios = screened.get(_family(entry)) or screened.get((is_colocated, False)) or [1.0]
            rate = entry.screened.rate if entry.screened else entry.estimate.rate * geometric_mean(ratios)
            rate *= geometric_mean(simulated.get(is_colocated) or all_simulated or [1.0])
            entry.expected_rate = min(rate, entry.beaten.rate) if entry.beaten else rate

    def finish(self) -> None:
        """Simulate the best screened layouts, until one answers the question and no other is likely to be better."""
        while chosen := self._challengers():
            self._simulate(chosen)
        finalists = self._finalists()
        if not any(entry.rate for entry in finalists):
            raise nothing_met(self._question, finalists)
        if not self._is_served(finalists):
            raise too_slow(self._question, finalists)

    def _challengers(self) -> list[Entry]:
        """Layouts to simulate next: the best of either kind, then those that may beat them, for a required rate all of
        these; as long as none answers the question, any that may."""
        finalists, effort = self._finalists(), self._question.effort
        has_rate = self._question.objective.has_rate
        if not finalists:
            return of_both_kinds(self._ranking.ranked(self._screened()), 2)
        rest = [entry for entry in self._screened() if not (entry.goodput or entry.beaten) and entry.expected_rate]
        if self._is_served(finalists):
            num_more = 2 if has_rate else max(0, effort.num_finalists - len(finalists + self._beaten()))
            return of_both_kinds(self._ranking.may_beat(rest, finalists, _SCREEN_OPTIMISM), num_more)[:num_more]
        if not has_rate and len(finalists) >= effort.num_screened:
            return []
        rest = [entry for entry in rest if self._ranking.serves(entry.rate * _SCREEN_OPTIMISM)]
        if not rest:
            rest = [entry for entry in self._unscreened() if self._ranking.serves(entry.rate * _OPTIMISM)]
            further = of_both_kinds(self._ranking.ranked(rest), effort.num_screened // 2)
            if further:
                self._screen(further, 0.4, 0.45)
            rest = [entry for entry in further if entry.expected_rate]
        return of_both_kinds(self._ranking.ranked(rest, _SCREEN_OPTIMISM), 2)

    def _simulate(self, chosen: Sequence[Entry]) -> None:
        """Find the goodput of finalists, as far as it is that of the best of their kind so far."""
        searches = [self._finalist(entry) for entry in chosen]
        for entry, goodput in zip(chosen, self._searched(searches, 0.12, 0.7, "finalists"), strict=True):
            if isinstance(goodput, Attainment):
                entry.beaten = goodput
                continue
            entry.goodput = goodput
            trial, required = self._trial(entry), self._question
            stated = required.rate if required.objective.has_rate else goodput.rate
            if goodput.rate > trial.most_rate and stated > trial.most_rate:
                raise too_few_requests(entry, trial, may_draw=trial.num_requests != required.effort.most_requests)
        self._correct()

    def _finalist(self, entry: Entry) -> Search[Goodput | Attainment]:
        trial, tolerance = self._trial(entry), self._question.effort.tolerance
        rival = self._ranking.rival(entry, self._finalists())
        if rival is not None:
            goodput, rate = rival
            return search_better(trial, rate, goodput.is_met, tolerance=tolerance)
        return search_goodput(trial, entry.expected_rate or entry.estimate.rate, tolerance=tolerance)

    def candidates(self) -> tuple[Candidate, ...]:
        """All layouts in order of rank, with their reasons."""
        winner, *losers = self._ranking.ranked(self._finalists())
        others = self._ranking.ranked([entry for entry in self._entries if entry.goodput is None])
        goodput, trial = winner.goodput, self._trial(winner)
        assert goodput is not None
        rate = self._question.rate if self._question.objective.has_rate else goodput.rate
        at_rate = {each: each.result_at(rate) for each in (*losers, *others)}
        unknown = [each for each in losers if at_rate[each] is None]
        describing: list[Search[Any]] = [
            search_saturation(trial, goodput),
            *(search_sensitivity(trial, goodput, factor) for factor in TIME_FACTORS),
            *(single_run(self._trial(each), rate) for each in unknown),
        ]
        saturation_rate, faster, slower, *seen = self._searched(describing, 0.7, 1.0, "saturation and sensitivity")
        put_together = partial(assemble, self._question, self._estimator)
        best = put_together(winner, None, saturation_rate=saturation_rate, sensitivity=(faster, slower))
        at_rate.update(zip(unknown, seen, strict=True))
        self._report(1.0, "done")
        return best, *(put_together(entry, best, at_winners_rate=found) for entry, found in at_rate.items())

    def notes(self) -> tuple[str, ...]:
        """Limits of the simulations' accuracy."""
        winner = self._ranking.ranked(self._finalists())[0]
        trial = self._trial(winner)
        if winner.rate <= trial.most_rate:
            return ()
        return (
            f"{trial.num_requests:,} requests are too few to find the highest rate of {winner.layout}: above "
            f"{rate_words(trial.most_rate)} they arrive before a steady state is reached, and its figures say nothing "
            "about longer runs.",
        )

    def screening(self, num_without_memory: int) -> Screening:
        """Number of layouts by outcome."""
        num_screened, num_simulated = len(self._screened()), len(self._finalists()) + len(self._beaten())
        return Screening(
            num_layouts=len(self._entries) + self._num_infeasible + num_without_memory,
            num_without_memory=num_without_memory,
            num_infeasible=self._num_infeasible,
            num_estimated=len(self._entries) - num_screened,
            num_screened=num_screened - num_simulated,
            num_simulated=num_simulated,
            num_requests=self._num_requests,
        )

    # Helpers

    def _report(self, fraction: float, text: str) -> None:
        """Report progress; a repeated round continues from the last fraction."""
        self._fraction = max(self._fraction, fraction)
        self._progress(self._fraction, text)

    def _trial(self, entry: Entry) -> Trial:
        """Trial of a finalist, long enough for a steady state."""
        question, screened = self._question, entry.screened
        assert screened is not None
        run_s = usual_run_s(self._sample, screened.mean_residence_s, question.slo)
        return question.trial(entry.layout, question.effort.requests_of_run(entry.estimate.rate, run_s), run_s)

    def _searched(self, searches: Sequence[Search[Result]], low: float, high: float, what: str) -> list[Result]:
        """Results of ``searches``; reports each of their runs."""
        low, num_runs = max(low, self._fraction), 0
        self._report(low, what)

        def done(run: Run, seen: Attainment) -> None:
            nonlocal num_runs
            num_runs += 1
            self._num_requests += seen.num_requests
            share = min(1.0, num_runs / (_USUAL_RUNS * len(searches)))
            self._report(
                low + max(0.0, high - low) * share,
                f"{what}: {num_runs} runs, {run.trial.layout} at {rate_words(run.rate)}",
            )

        return self._pool.search(searches, done)

    def _screened(self) -> list[Entry]:
        return [entry for entry in self._entries if entry.screened is not None]

    def _unscreened(self) -> list[Entry]:
        return [entry for entry in self._entries if entry.screened is None]

    def _finalists(self) -> list[Entry]:
        return [entry for entry in self._entries if entry.goodput is not None]

    def _beaten(self) -> list[Entry]:
        return [entry for entry in self._entries if entry.beaten is not None]

    def _is_served(self, entries: Iterable[Entry]) -> bool:
        """Whether one of them answers the question."""
        return any(entry.rate and self._ranking.serves(entry.rate) for entry in entries)


def _family(entry: Entry) -> tuple[bool, bool]:
    """Whether the layout is colocated, and whether it decodes in a pipeline."""
    return entry.layout.is_colocated, entry.layout.decode_pool.pipeline_parallel > 1
