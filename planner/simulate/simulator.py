"""Simulation of a placement on a workload without a GPU: the live dispatcher, policy and schedulers in virtual time.

The search, the CLI and the benchmarks call `simulate`. Real: the router's dispatch core with its policy, both phases'
step loops and schedulers, block pools, reservations and prefix caches. Modelled: the time of steps and transfers
(`pdserve.model.cost.cost_model`) and the few delays of `Overheads`. The same arguments give bit-identical results.

Commands of the dispatcher reach a worker at once, because the request's arrival already includes their delay; events of
a worker reach the dispatcher one message later. Tokens between token 1 and the last are counted, not delivered.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial

import numpy as np

from pdserve.contracts.deployment import DEFAULT_POLICY, SloConfig
from pdserve.contracts.events import ClientEvent, RequestEvent, TokenEvent
from pdserve.contracts.request import Outcome, SamplingParams
from pdserve.engine.scheduling.interface import GrantEvent, StartPullEvent, WithdrawEvent
from pdserve.engine.worker.loop import StepReport
from pdserve.model.cost.cost_model import CostModel
from pdserve.planner.autoscale import WINDOW_S, Autoscaler
from pdserve.planner.layout import Layout, PlannedModel, Pool
from pdserve.planner.simulate.event_queue import EventQueue
from pdserve.planner.simulate.simulated_cluster import ClusterBuilder
from pdserve.planner.simulate.simulated_scaling import Scaling
from pdserve.planner.simulate.simulated_transfers import SimulatedTransfers
from pdserve.planner.simulate.simulated_worker import END_TOKEN, SimulatedWorker
from pdserve.planner.simulate.simulation import RequestRecord, RequestTimes, Simulation, request_times
from pdserve.planner.workload.prompts import Prompt, PromptTable
from pdserve.planner.workload.requests import SimulatedRequest
from pdserve.router.requests.dispatch import Dispatcher
from pdserve.router.requests.request import GenerationError, Request, RequestSpec
from pdserve.router.requests.settings import SWEEP_S, DispatchSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """Delays that the cost model does not cover, in seconds.

    The defaults describe clusters on one host of four cores: the middle of what was measured, of which
    `pdserve.bench.simulator_vs_emulation` has part (multiplied by its time scale). The least certain are a turn, from
    0.3 to 1.7 ms, and a pull, from 0.2 to 4.5 ms.
    """

    arrival_s: float = 4.5e-3
    """From a request's arrival to the worker's inbox: parsing, tokenizing, routing."""
    message_s: float = 1.1e-3
    """One way between worker and router."""
    answer_s: float = 1.1e-3
    """From a token's arrival at the router to the client."""
    pull_s: float = 1e-3
    """Fixed part of a pull: opening, verifying, notifying both engines."""
    turn_s: float = 1e-3
    """Turn of a step loop between two steps, unless the second was submitted before the first ended."""


Look = Callable[[RequestTimes, float], bool]
"""Receives the times so far of a simulation, and its clock; returns whether it may end."""
NO_LOOKS: Mapping[int, Look] = {}
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
    policy: str = DEFAULT_POLICY,
    cost_of: Callable[[Pool], CostModel] | None = None,
    looks: Mapping[int, Look] = NO_LOOKS,
    autoscaler: Autoscaler | None = None,
    start_s: float = 0.0,
) -> Simulation:
    """Serve ``requests`` on ``layout``.

    Args:
        requests: in order of arrival.
        slo: objectives of the policy and the prefill queue.
        overheads: ``None`` uses the defaults.
        concurrency: above 0, a closed loop: arrival times are ignored, this many sessions go on at once, in the pace of
            their turns, and the end of each starts the next one.
        max_in_flight: limit on requests in flight at the router; further ones are rejected.
        policy: name of the router's placement policy.
        cost_of: cost model of a pool's workers; `Pool.cost` by default.
        looks: by numbers of ``requests``; as soon as so many arrived, the rest may be left out. The result is that of a
            simulation of the others alone.
        autoscaler: changes the numbers of workers, of which ``layout`` has the first ones.
        start_s: seconds that a worker which it adds takes to start.

    Raises:
        ValueError: the model does not fit, or does not divide by the layout's degrees.
    """
    settings = DispatchSettings(policy=policy, max_in_flight=max_in_flight, slo=slo)
    run = _Simulator(model, layout, requests, settings, overheads or Overheads(), concurrency, cost_of, looks)
    if autoscaler is not None:
        run.scale_by(autoscaler, start_s)
    with _no_garbage_collection():
        return run.simulate()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A simulation makes millions of small objects and no cycles: searching for cycles would take a sixth of it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Request(Request):
    """A simulated request, as the dispatcher sees it."""

    def __init__(self, run: _Simulator, simulated: SimulatedRequest, prompt: Prompt, record: RequestRecord) -> None:
        super().__init__(
            RequestSpec(
                prompt_tokens=prompt.tokens,
                sampling=run.sampling(simulated),
                arrived_s=record.arrived_s,
                uses_cache=run.is_sharing,
                block_hashes=prompt.block_hashes,
                tenant=simulated.tenant,
                tier=simulated.tier,
            )
        )
        self.simulated = simulated
        self.prompt = prompt
        self.record = record
        self._run = run

    def prompt_started(self, num_cached_tokens: int) -> None:
        self.record.started_s = self._run.now_s
        self.record.num_cached_tokens = num_cached_tokens

    def token_received(self, token: TokenEvent) -> None:
        self._run.token_received(self.record, token)

    def ended(self) -> None:
        self._run.ended(self)


@cache
def _exact_sampling(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens)


class _Simulator:
    """One simulation: arrivals, the dispatcher's driver, and the transfers."""

    def __init__(
        self,
        model: PlannedModel,
        layout: Layout,
        requests: Sequence[SimulatedRequest],
        settings: DispatchSettings,
        overheads: Overheads,
        concurrency: int,
        cost_of: Callable[[Pool], CostModel] | None,
        looks: Mapping[int, Look] = NO_LOOKS,
    ) -> None:
        self._overheads = overheads
        self._events = EventQueue()
        self._max_model_len = model.max_model_len
        self._prompts = PromptTable(requests, model.block_size)
        self._records: list[RequestRecord] = []
        self._ended_s = 0.0
        self._offered_until_s = 0.0
        self._delivered_s = 0.0
        """Arrival of the events that the dispatcher is handling."""
        predict = cost_of or (lambda pool: pool.cost(model))
        costs = {pool.role: predict(pool) for pool in layout.pools}
        self._builder = ClusterBuilder(
            model=model,
            layout=layout,
            costs=costs,
            is_sharing=self.is_sharing,
            turn_s=overheads.turn_s,
            queue=self._events,
            sink=self,
        )
        self._workers = self._builder.workers()
        self._scaling: Scaling | None = None
        self._dispatcher = Dispatcher(costs, settings, now_s=lambda: self._events.now_s)
        for worker in self._workers.values():
            self._dispatcher.worker_up(worker)
        self._transfers = SimulatedTransfers(
            self._events,
            block_size=model.block_size,
            pull_s=overheads.pull_s,
            prefix_failed=self._dispatcher.prefix_failed,
        )
        self._is_sweep_due = False
        self._is_any_expected = True
        self._queue: Iterator[SimulatedRequest] = iter(requests)
        self._is_closed_loop = concurrency > 0
        self._looks = looks
        self._num_arrived = 0
        """Of ``requests``; the records have the later turns of conversations, too."""
        for _ in range(concurrency or 1):
            self._expect_next()

    @property
    def now_s(self) -> float:
        return self._events.now_s

    @property
    def is_sharing(self) -> bool:
        """Whether some prompts may share a prefix."""
        return self._prompts.is_sharing

    def sampling(self, request: SimulatedRequest) -> SamplingParams:
        """Sampling that ends at the exact length: known to schedulers if that is the client's limit."""
        num_tokens = request.num_output_tokens
        limit = min(request.max_tokens, self._max_model_len - request.num_prompt_tokens)
        if limit <= num_tokens:
            return _exact_sampling(num_tokens)
        return SamplingParams(max_tokens=limit, min_tokens=num_tokens - 1, stop_token_ids=(END_TOKEN,))

    def simulate(self) -> Simulation:
        self._events.run()
        return self._result()

    def scale_by(self, autoscaler: Autoscaler, start_s: float) -> None:
        """Have the numbers of workers follow the load."""
        self._scaling = Scaling(autoscaler, start_s, self._builder, self._workers, self._dispatcher, self._events)
        self._scale_later()

    def _scale_later(self) -> None:
        self._events.at(self.now_s + WINDOW_S, self._scale)

    def _scale(self) -> None:
        assert self._scaling is not None
        self._scaling.turn()
        if self._dispatcher.num_in_flight or self._is_any_expected:
            self._scale_later()

    # Arrivals

    def _expect_next(self) -> None:
        request = next(self._queue, None)
        self._is_any_expected = request is not None
        if request is not None:
            self._expect(request, self.now_s if self._is_closed_loop else request.arrived_s)

    def _expect(self, request: SimulatedRequest, arrives_s: float, before: Prompt | None = None) -> None:
        self._events.at(arrives_s, partial(self._arrive, request, before))

    def _arrive(self, simulated: SimulatedRequest, before: Prompt | None) -> None:
        if before is None:
            self._offered_until_s = self.now_s
            self._num_arrived += 1
            look = self._looks.get(self._num_arrived)
            if look is not None and look(request_times(self._records), self.now_s):
                self._queue = iter(())
            if not self._is_closed_loop:
                self._expect_next()
        record = RequestRecord(self.now_s, simulated.num_prompt_tokens, simulated.num_output_tokens)
        self._records.append(record)
        request = _Request(self, simulated, self._prompts.write(simulated, before), record)
        self._events.at(self.now_s + self._overheads.arrival_s, partial(self._dispatch, request))

    def _dispatch(self, request: _Request) -> None:
        try:
            self._dispatcher.start(request)
        except GenerationError:
            self.ended(request)
        self._sweep_soon()

    def _sweep_soon(self) -> None:
        """Sweep as the live router does while a request waits in it; nothing else there depends on the clock."""
        if self._dispatcher.num_queued and not self._is_sweep_due:
            self._is_sweep_due = True
            self._events.at(self.now_s + SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        self._is_sweep_due = False
        self._dispatcher.sweep()
        self._dispatcher.place_some()
        self._sweep_soon()

    # Events of workers

    def received(self, engine: SimulatedWorker, report: StepReport, sent_s: float) -> None:
        worker = self._workers[engine.worker_id]
        # Tokens between token 1 and the last are only counted.
        events = [each for each in report.events if not isinstance(each, TokenEvent) or each.index < 2 or each.finish]
        if events:
            arrives_s = sent_s + self._overheads.message_s
            self._events.at(arrives_s, partial(self._deliver, engine.worker_id, events, arrives_s))
        for order in report.orders:
            if isinstance(order, StartPullEvent):
                self._transfers.start_pull(self._workers[order.source.address], worker, order)
            elif isinstance(order, GrantEvent) and order.final:
                self._transfers.granted_whole(worker, order)
            elif isinstance(order, WithdrawEvent):
                self._transfers.give_up(order.handle)

    def _deliver(self, worker_id: str, events: list[ClientEvent], arrives_s: float) -> None:
        self._delivered_s = arrives_s
        dispatcher, worker = self._dispatcher, self._workers[worker_id]
        for event in events:
            if isinstance(event, TokenEvent):
                if event.index > 2:
                    dispatcher.tokens_skipped(event.key, event.index - 2)
                dispatcher.tokens_received(worker, (event,))
            elif isinstance(event, RequestEvent):
                dispatcher.event_received(worker, event)
            dispatcher.place_some()
        self._sweep_soon()

    # Progress of requests

    def token_received(self, record: RequestRecord, token: TokenEvent) -> None:
        """Record when tokens 0, 1 and the last reach the client."""
        seen_s = self._delivered_s + self._overheads.answer_s
        if token.index == 0:
            record.first_token_s = seen_s
        elif token.index == 1:
            record.second_token_s = seen_s
        if token.finish:
            record.last_token_s = seen_s

    def ended(self, request: _Request) -> None:
        """The request finished, failed or was rejected; only a finished request has a follow-up."""
        record, simulated = request.record, request.simulated
        record.is_rejected = request.outcome is not Outcome.FINISHED
        self._ended_s = self.now_s
        follow_up = simulated.follow_up
        if follow_up is not None and not record.is_rejected:
            before = self._prompts.answered(request.prompt, simulated.num_output_tokens)
            self._expect(follow_up, self.now_s + self._overheads.answer_s + follow_up.arrived_s, before)
        elif self._is_closed_loop:
            self._expect_next()

    def _result(self) -> Simulation:
        gaps_us: Counter[int] = Counter()
        for worker in self._workers.values():
            gaps_us.update(worker.engine.gaps_us)
        lengths_us = sorted(gaps_us)
        return Simulation(
            times=request_times(self._records),
            workers=[worker.use() for worker in self._workers.values()],
            scaled=self._scaling.history if self._scaling else (),
            worker_s=self._scaling.worker_s(self._ended_s) if self._scaling else len(self._workers) * self._ended_s,
            gap_s=np.array(lengths_us, np.float64) / 1e6,
            gap_weights=np.array([gaps_us[length_us] for length_us in lengths_us], np.float64),
            ended_s=self._ended_s,
            offered_until_s=self._offered_until_s,
        )
