"""Places requests on workers and brings back their tokens: the `Generator` behind the HTTP edge.

Owns the table of flights, the queue of those that no worker can take yet, and admission: a bound on requests in flight,
and the drain. Asks the pure policy where to go and tells each `Flight` what workers say of it. Accepted requests equal
the sum of outcomes and flights in the table, always.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdserve.contracts.request import Outcome, SamplingParams
from pdserve.engine.frames import ReceivedToken
from pdserve.model.cost import CostModel
from pdserve.proto.v1 import worker_pb2
from pdserve.router.fleet import Fleet, Worker
from pdserve.router.flight import Flight
from pdserve.router.generation import GenerationError, ServedModel
from pdserve.router.metrics import RouterMetrics
from pdserve.router.policy import choose_decode, choose_prefill

SWEEP_S = 0.1
"""Period at which deadlines are looked at."""
MIN_RETRY_AFTER_S, MAX_RETRY_AFTER_S = 1.0, 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchSettings:
    """Bounds of the dispatcher."""

    max_in_flight: int = 1024
    """Requests accepted and not ended, at most."""
    ttft_slo_s: float = 0.0
    """Seconds from arrival by which token 0 is wanted; 0 for no objective."""
    deadline_s: float = 600.0
    """Seconds from arrival after which a request is given up."""
    worker_wait_s: float = 60.0
    """Seconds that a request waits at most while no worker can take it."""
    cut_off_s: float = 10.0
    """Seconds after a failed pull for which its decode worker is avoided for prompts of its prefill worker."""


class Dispatcher:
    """Implements `Generator` for the edge, `FleetListener` for the fleet and `FlightOwner` for flights."""

    def __init__(
        self,
        fleet: Fleet,
        cost: CostModel,
        metrics: RouterMetrics,
        settings: DispatchSettings,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._cost = cost
        self._metrics = metrics
        self._settings = settings
        self._now_s = now_s
        self._flights: dict[int, Flight] = {}
        self._queued: dict[int, Flight] = {}
        self._unbound: dict[int, Flight] = {}
        self._cut_off_until_s: dict[tuple[Worker, Worker], float] = {}
        """By (prefill worker, decode worker); the incarnations, so that a replaced one starts with a clean slate."""
        self._request_ids = itertools.count(1)
        self._num_accepted = 0
        self._outcomes: Counter[Outcome] = Counter()
        self._mean_request_s = MIN_RETRY_AFTER_S
        self._is_draining = False
        self._is_proven = False
        self._idle = asyncio.Event()
        self._idle.set()
        metrics.track(lambda: self.num_in_flight, lambda: self.num_queued)
        fleet.attach(self)

    # Generator

    @property
    def is_ready(self) -> bool:
        """Whether a round trip has succeeded since both phases were last up, and nothing is draining."""
        return self._is_proven and not self._is_draining and self._fleet.serves_both_phases()

    @property
    def model(self) -> ServedModel | None:
        return self._fleet.model

    def start(
        self,
        prompt_tokens: Sequence[int],
        sampling: SamplingParams,
        *,
        arrived_s: float,
        cache_salt: bytes = b"",
        num_choices: int = 1,
    ) -> Flight:
        assert prompt_tokens
        assert num_choices == 1
        if self._is_draining:
            raise GenerationError(503, "the router is draining", retry_after_s=MIN_RETRY_AFTER_S)
        if self.num_in_flight >= self._settings.max_in_flight:
            wait_s = min(max(self._mean_request_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)
            raise GenerationError(429, f"{self.num_in_flight} requests are in flight already", retry_after_s=wait_s)
        flight = Flight(
            self,
            self._metrics,
            self._now_s,
            request_id=next(self._request_ids),
            prompt_tokens=prompt_tokens,
            sampling=sampling,
            cache_salt=cache_salt,
            arrived_s=arrived_s,
            deadline_s=arrived_s + self._settings.deadline_s,
            ttft_slo_s=self._settings.ttft_slo_s,
        )
        self._flights[flight.request_id] = flight
        self._idle.clear()
        self._num_accepted += 1
        self._metrics.accepted.inc()
        self._metrics.prompt_tokens.inc(len(prompt_tokens))
        self.want_prefill(flight)
        return flight

    # What the process around it asks

    @property
    def num_in_flight(self) -> int:
        return len(self._flights)

    @property
    def num_queued(self) -> int:
        """Requests that no worker has taken."""
        return len(self._queued)

    @property
    def num_accepted(self) -> int:
        return self._num_accepted

    @property
    def outcomes(self) -> dict[Outcome, int]:
        """Requests ended so far; their sum and `num_in_flight` make `num_accepted`."""
        return {outcome: self._outcomes[outcome] for outcome in Outcome}

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    def begin_drain(self) -> None:
        """Refuse new requests from now on; those in flight go on."""
        self._is_draining = True

    async def wait_idle(self) -> None:
        """Until nothing is in flight."""
        await self._idle.wait()

    def prove(self) -> None:
        """A round trip through both phases has succeeded."""
        self._is_proven = True

    async def sweep_forever(self) -> None:
        """Give up requests that are past their deadline or have waited too long for a worker."""
        while True:
            await asyncio.sleep(SWEEP_S)
            for flight in list(self._flights.values()):
                if flight.is_late:
                    flight.fail_late()
            for flight in list(self._queued.values()):
                if self._now_s() - flight.queued_s >= self._settings.worker_wait_s:
                    flight.fail(GenerationError(503, "no worker is up", retry_after_s=MIN_RETRY_AFTER_S))

    def fail_all(self, message: str) -> None:
        """End every request with an error: the process is about to exit."""
        for flight in list(self._flights.values()):
            flight.fail(GenerationError(503, message, retry_after_s=MIN_RETRY_AFTER_S))

    # FleetListener

    def worker_up(self, worker: Worker) -> None:
        for flight in list(self._queued.values()):
            self.want_prefill(flight)
        for flight in list(self._unbound.values()):
            self.want_decode(flight)

    def worker_lost(self, worker: Worker, reason: str) -> None:
        if not self._fleet.serves_both_phases():
            self._is_proven = False
        for flight in list(self._flights.values()):
            flight.worker_lost(worker)

    def token_received(self, worker: Worker, token: ReceivedToken) -> None:
        flight = self._flights.get(token.request_id)
        if flight is not None:
            flight.token_received(worker, token)

    def event_received(self, worker: Worker, event: worker_pb2.RequestEvent) -> None:
        flight = self._flights.get(event.request_id)
        if flight is not None:
            flight.event_received(worker, event)

    # FlightOwner

    def want_prefill(self, flight: Flight) -> None:
        """Send ``flight`` to the worker that the policy names, or queue it until one comes up."""
        self._unbound.pop(flight.request_id, None)
        start_s = time.perf_counter()
        snapshots = self._fleet.snapshots()
        choice = None
        if snapshots:
            choice = choose_prefill(flight.blocks(self._fleet.block_size), snapshots, self._cost)
        self._metrics.route_seconds.observe(time.perf_counter() - start_s)
        if choice is None:
            self._queued[flight.request_id] = flight
        else:
            self._queued.pop(flight.request_id, None)
            flight.submit(self._fleet.worker(choice.worker_id), handoff=choice.handoff)

    def want_decode(self, flight: Flight) -> None:
        """Bind ``flight`` to the decode worker that the policy names, or let it wait parked until one comes up."""
        assert flight.attempt is not None
        start_s = time.perf_counter()
        blocks = flight.blocks(self._fleet.block_size)
        cut_off = self._cut_off_from(flight.attempt.prefill)
        choice = choose_decode(blocks, self._fleet.snapshots(), self._cost, cut_off)
        self._metrics.route_seconds.observe(time.perf_counter() - start_s)
        if choice is None:
            self._unbound[flight.request_id] = flight
        else:
            self._unbound.pop(flight.request_id, None)
            flight.prepare(self._fleet.worker(choice.worker_id), blocks.num_blocks)

    def link_failed(self, prefill: Worker, decode: Worker) -> None:
        self._forget_cut_off()
        self._cut_off_until_s[prefill, decode] = self._now_s() + self._settings.cut_off_s

    def _cut_off_from(self, prefill: Worker) -> set[str]:
        """Ids of decode workers that could not pull from ``prefill`` lately."""
        self._forget_cut_off()
        return {decode.worker_id for source, decode in self._cut_off_until_s if source is prefill}

    def _forget_cut_off(self) -> None:
        now_s = self._now_s()
        for pair in [pair for pair, until_s in self._cut_off_until_s.items() if until_s <= now_s]:
            del self._cut_off_until_s[pair]

    def landed(self, flight: Flight) -> None:
        assert flight.outcome is not None
        del self._flights[flight.request_id]
        self._queued.pop(flight.request_id, None)
        self._unbound.pop(flight.request_id, None)
        self._outcomes[flight.outcome] += 1
        self._metrics.outcomes.labels(flight.outcome.value).inc()
        if flight.outcome is Outcome.FINISHED:
            self._mean_request_s += 0.1 * (self._now_s() - flight.arrived_s - self._mean_request_s)
        if not self._flights:
            self._idle.set()
