"""Simulates a placement on a workload without a GPU: discrete events, virtual time, the live policy and schedulers.

The search, the CLI and the benchmarks call `simulate`. Real: the router's policy and its view of workers, both phases'
schedulers, block pools, reservations and prefix caches. Modelled: the time of steps and transfers
(`pdserve.model.cost.cost_model`) and the few delays of `Overheads`. The same arguments give bit-identical results.

Life of a request: it arrives and the policy picks a prefill worker, which reports STARTED, LAST_CHUNK (the policy picks
a decode worker, whose pull starts once it has reserved blocks) and token 0; the pull ends once the last chunk is
granted and the link has carried everything; the decode worker reports JOINED and, finally, the last token.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import inf, isnan
from typing import NamedTuple

import numpy as np

from pdserve.contracts.deployment import SloConfig
from pdserve.contracts.events import RequestEvent, RequestEventKind, RequestKey, TokenEvent
from pdserve.contracts.placement import WorkerRole
from pdserve.contracts.request import KvSource
from pdserve.engine.scheduling.interface import GrantEvent, StartPullEvent
from pdserve.engine.worker.loop import AddRequest, CancelRequest, PrepareRequest, StepReport
from pdserve.model.cost.cost_model import CostModel
from pdserve.planner.event_queue import EventQueue
from pdserve.planner.layout import Layout, PlannedModel, Pool
from pdserve.planner.prompts import Prompt, PromptTable
from pdserve.planner.requests import SimulatedRequest
from pdserve.planner.sampler import Sampler
from pdserve.planner.simulated_cluster import ClusterBuilder
from pdserve.planner.simulated_flight import SimulatedFlight, request_times
from pdserve.planner.simulated_transfers import SimulatedTransfers
from pdserve.planner.simulated_worker import SimulatedWorker, StepCorrections
from pdserve.planner.simulation import Simulation
from pdserve.router.requests.dispatch import MAX_ATTEMPTS
from pdserve.router.requests.policy import PromptBlocks, choose_decode, choose_prefill
from pdserve.router.requests.request import MIN_DURATION_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """Seconds of what the cost model does not know of.

    The defaults are of clusters on one host of four cores: the middle of what `pdserve.bench.simulator_vs_cpu` found,
    and `pdserve.bench.simulator_vs_emulation`, whose figures are times its time scale. What is least certain is a turn,
    from 0.3 to 1.7 ms, and a pull, from 0.2 to 4.5 ms.
    """

    arrival_s: float = 4.5e-3
    """From a request's arrival to the worker's inbox: reading it, tokenising, routing."""
    message_s: float = 1.1e-3
    """From a worker to the router, or back."""
    answer_s: float = 1.1e-3
    """From a token's arrival at the router to the client."""
    pull_s: float = 1e-3
    """Of a pull, beside the bytes: opening it, verifying, telling both engines."""
    turn_s: float = 1e-3
    """Of a step loop between two steps, unless it submitted the second before the first had ended."""


_KINDS_OF_CONSEQUENCE = (
    RequestEventKind.STARTED,
    RequestEventKind.LAST_CHUNK,
    RequestEventKind.KV_UNAVAILABLE,
    RequestEventKind.REJECTED,
    RequestEventKind.FAILED,
)
"""Events that the router, or the record, takes note of."""

NO_OVERHEADS = Overheads(arrival_s=0.0, message_s=0.0, answer_s=0.0, pull_s=0.0, turn_s=0.0)


def simulate(
    model: PlannedModel,
    layout: Layout,
    requests: Sequence[SimulatedRequest],
    *,
    slo: SloConfig,
    overheads: Overheads | None = None,
    concurrency: int = 0,
    max_in_flight: int = 1024,
    max_missed: int | None = None,
    sample_every_s: float = 0.0,
    cost_of: Callable[[Pool], CostModel] | None = None,
    corrections: Mapping[WorkerRole, Sequence[StepCorrections]] | None = None,
) -> Simulation:
    """Serve ``requests`` on ``layout``.

    Args:
        requests: in order of arrival.
        slo: objectives; the policy and the prefill queue go by them.
        overheads: ``None`` takes the defaults.
        concurrency: not 0: a closed loop. Arrival times are ignored; so many requests are under way at any time, and
            each that ends is followed at once by the next one.
        max_in_flight: requests that the router takes at once; more are rejected.
        max_missed: stop as soon as so many requests have missed an objective, for a search that needs no more; the
            times of those under way are NaN then. ``None`` runs to the end.
        sample_every_s: not 0: fill `Simulation.timelines` at such distances.
        cost_of: predicts a pool's workers; by default `Pool.cost`.
        corrections: of workers whose steps take longer or less long than that, which the policy knows; of each role
            that is named at least one, in order of their times.

    Raises:
        ValueError: the model does not fit, or does not divide as the layout says.
    """
    bounds = _Bounds(concurrency, max_in_flight, max_missed)
    run = _Run(model, layout, requests, slo, overheads or Overheads(), bounds, cost_of, corrections or {})
    with _no_garbage_collection():
        return run.simulate(sample_every_s)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A simulation makes millions of small objects and no cycles among them: looking for some takes a sixth of it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Bounds(NamedTuple):
    concurrency: int
    max_in_flight: int
    max_missed: int | None


class _Run:
    """One simulation: the router's part, and the transfers."""

    def __init__(
        self,
        model: PlannedModel,
        layout: Layout,
        requests: Sequence[SimulatedRequest],
        slo: SloConfig,
        overheads: Overheads,
        bounds: _Bounds,
        cost_of: Callable[[Pool], CostModel] | None,
        corrections: Mapping[WorkerRole, Sequence[StepCorrections]],
    ) -> None:
        self._model = model
        self._slo = slo
        self._overheads = overheads
        self._bounds = bounds
        self._events = EventQueue()
        self._sampler = Sampler()
        self._prompts = PromptTable(requests, model.block_size)
        self._ids = count(1)
        self._flights: list[SimulatedFlight] = []
        self._live: dict[int, SimulatedFlight] = {}
        self._num_missed = 0
        self._ended_s = 0.0
        predict = cost_of or (lambda pool: pool.cost(model))
        self._costs = {pool.role: predict(pool) for pool in layout.pools}
        self._seats = ClusterBuilder(
            model=model,
            layout=layout,
            costs=self._costs,
            is_sharing=self._prompts.is_sharing,
            turn_s=overheads.turn_s,
            corrections=corrections,
            queue=self._events,
            sink=self,
        ).seats()
        self._transfers = SimulatedTransfers(self._events, block_size=model.block_size, pull_s=overheads.pull_s)
        self._queue: Iterator[SimulatedRequest] = iter(requests)
        self._is_closed_loop = bounds.concurrency > 0
        self._num_expected = 0
        """Arrivals, of follow-ups too, that the event queue holds."""
        for _ in range(bounds.concurrency or 1):
            self._expect_next()

    def simulate(self, sample_every_s: float) -> Simulation:
        if sample_every_s:
            self._events.at(0.0, partial(self._sample, sample_every_s))
        self._events.run()
        return self._result()

    # Arrivals

    def _expect_next(self) -> None:
        request = next(self._queue, None)
        if request is not None:
            self._expect(request, self._events.now_s if self._is_closed_loop else request.arrived_s)

    def _expect(self, request: SimulatedRequest, arrives_s: float, before: Prompt | None = None) -> None:
        self._num_expected += 1
        self._events.at(arrives_s, partial(self._arrive, request, before))

    def _arrive(self, request: SimulatedRequest, before: Prompt | None) -> None:
        now_s = self._events.now_s
        is_follow_up = before is not None
        self._num_expected -= 1
        if not self._is_closed_loop and not is_follow_up:
            self._expect_next()
        prompt = self._prompts.write(request, before)
        blocks = PromptBlocks(
            prompt.tokens,
            self._model.block_size,
            may_use_cache=self._prompts.is_sharing,
            known_hashes=prompt.block_hashes,
        )
        flight = SimulatedFlight(next(self._ids), request, prompt, blocks, now_s)
        self._flights.append(flight)
        if len(self._live) >= self._bounds.max_in_flight:
            self._reject(flight)
            return
        self._live[flight.request_id] = flight
        self._events.at(now_s + self._overheads.arrival_s, partial(self._place, flight))

    def _reject(self, flight: SimulatedFlight) -> None:
        flight.is_rejected = True
        self._live.pop(flight.request_id, None)
        self._miss(flight)
        self._after(flight)

    def _miss(self, flight: SimulatedFlight) -> None:
        if not flight.has_missed:
            flight.has_missed = True
            self._num_missed += 1
            if self._num_missed == self._bounds.max_missed:
                self._events.stop()

    def _after(self, flight: SimulatedFlight) -> None:
        """The request is over, with all of its follow-ups if it was rejected."""
        self._ended_s = self._events.now_s
        follow_up = flight.request.follow_up
        if follow_up is not None and not flight.is_rejected:
            before = self._prompts.answered(flight.prompt, flight.request.num_output_tokens)
            think_s = 0.0 if self._is_closed_loop else follow_up.arrived_s
            self._expect(follow_up, self._events.now_s + think_s, before)
        elif self._is_closed_loop:
            self._expect_next()
        flight.forget_prompt()

    # The router

    def _place(self, flight: SimulatedFlight) -> None:
        """Name a worker for the prompt, as `pdserve.router.requests.dispatch` does."""
        flight.attempt += 1
        if flight.attempt == MAX_ATTEMPTS:
            self._reject(flight)
            return
        now_s, slo = self._events.now_s, self._slo
        workers = [seat.snapshot() for seat in self._seats.values()]
        choice = choose_prefill(flight.blocks, workers, self._costs, tpot_slo_s=slo.tpot_seconds)
        assert choice is not None, "workers of a simulation are always up"
        seat = self._seats[choice.worker_id]
        flight.prefill, flight.decode = seat, None
        ttft_slo_s = 0.0 if flight.emitted else max(flight.arrived_s + slo.ttft_seconds - now_s, MIN_DURATION_S)
        request = flight.attempt_request(ttft_slo_s=ttft_slo_s, handoff=choice.handoff)
        seat.promise_prefill(flight.request_id, request.num_known_tokens - choice.num_cached_tokens)
        if not choice.handoff:
            seat.promise_decode(flight.request_id, request.num_known_tokens, flight.blocks.num_blocks())
        seat.worker.tell(AddRequest(flight.key, request, now_s))

    def _bind(self, flight: SimulatedFlight) -> None:
        """Name a decode worker for the parked prompt."""
        assert flight.prefill is not None
        now_s = self._events.now_s
        decoding = [seat.snapshot() for seat in self._seats.values() if seat.worker.role is WorkerRole.DECODE]
        choice = choose_decode(flight.blocks, decoding, self._costs, source_host=flight.prefill.host)
        assert choice is not None
        seat = flight.decode = self._seats[choice.worker_id]
        request = flight.attempt_request(ttft_slo_s=0.0, handoff=False)
        source = KvSource(address=flight.prefill.worker.worker_id, worker_epoch=0, handle=flight.handle)
        seat.promise_decode(flight.request_id, request.num_known_tokens, flight.blocks.num_blocks())
        seat.worker.tell(PrepareRequest(flight.key, request, source, now_s))

    # What workers say

    def received(self, worker: SimulatedWorker, report: StepReport, sent_s: float) -> None:
        at = self._events.at
        arrives_s = sent_s + self._overheads.message_s
        for event in report.events:
            if isinstance(event, TokenEvent):
                if event.index < 2 or event.finish:
                    self._token_event(event, arrives_s)
            elif isinstance(event, RequestEvent) and event.kind in _KINDS_OF_CONSEQUENCE:
                at(arrives_s, partial(self._request_event, worker, event))
        for order in report.orders:
            if isinstance(order, StartPullEvent):
                self._transfers.start_pull(self._seats[order.source.address], self._seats[worker.worker_id], order)
            elif isinstance(order, GrantEvent) and order.final:
                self._transfers.granted_whole(self._seats[worker.worker_id], order)

    def _flight(self, key: RequestKey) -> SimulatedFlight:
        return self._flights[key.request_id - 1]

    def _token_event(self, event: TokenEvent, arrives_s: float) -> None:
        flight = self._flight(event.key)
        if event.key.attempt != flight.attempt:
            return
        seen_s = arrives_s + self._overheads.answer_s
        if event.index == 0:
            flight.first_token_s = seen_s
            flight.emitted = (0,)
            if seen_s - flight.arrived_s > self._slo.ttft_seconds:
                self._miss(flight)
        elif event.index == 1 and isnan(flight.second_token_s):
            flight.second_token_s = seen_s
        if event.finish:
            flight.last_token_s = seen_s
            self._events.at(arrives_s, partial(self._finish, flight))

    def _finish(self, flight: SimulatedFlight) -> None:
        self._live.pop(flight.request_id, None)
        num_gaps = flight.request.num_output_tokens - 1
        if num_gaps and (flight.last_token_s - flight.first_token_s) / num_gaps > self._slo.tpot_seconds:
            self._miss(flight)
        self._after(flight)

    def _request_event(self, worker: SimulatedWorker, event: RequestEvent) -> None:
        flight = self._flight(event.key)
        if event.key.attempt != flight.attempt or flight.request_id not in self._live:
            return
        match event.kind:
            case RequestEventKind.STARTED:
                self._seats[worker.worker_id].settle(flight.request_id)
                if flight.prefill is not None and flight.prefill.worker is worker and not flight.emitted:
                    flight.started_s = self._events.now_s
                    flight.num_cached_tokens = event.num_cached_tokens
            case RequestEventKind.LAST_CHUNK:
                flight.handle = event.handle
                self._bind(flight)
            case RequestEventKind.KV_UNAVAILABLE:
                self._abandon(flight)
                self._place(flight)
            case RequestEventKind.REJECTED | RequestEventKind.FAILED:
                self._abandon(flight)
                self._reject(flight)
            case kind:
                raise AssertionError(f"{kind!r} is of no consequence to anybody else")

    def _abandon(self, flight: SimulatedFlight) -> None:
        """Free what workers hold of the attempt."""
        for seat in (flight.prefill, flight.decode):
            if seat is not None:
                seat.settle(flight.request_id)
                seat.worker.tell(CancelRequest(flight.key))

    # The result

    def _sample(self, every_s: float) -> None:
        now_s = self._events.now_s
        self._sampler.sample(now_s, ((seat.worker.role, seat.worker.load()) for seat in self._seats.values()))
        if self._live or self._num_expected:
            self._events.at(now_s + every_s, partial(self._sample, every_s))

    def _result(self) -> Simulation:
        gaps_us: Counter[int] = Counter()
        for seat in self._seats.values():
            gaps_us.update(seat.worker.gaps_us)
        lengths_us = sorted(gaps_us)
        return Simulation(
            times=request_times(self._flights),
            workers=[seat.use() for seat in self._seats.values()],
            timelines=self._sampler.timelines(),
            gap_s=np.array(lengths_us, np.float64) / 1e6,
            gap_weights=np.array([gaps_us[length_us] for length_us in lengths_us], np.float64),
            ended_s=self._ended_s,
            was_stopped=self._num_missed >= (self._bounds.max_missed or inf),
        )
