"""Places requests on workers and brings back their tokens: the `Generator` behind the HTTP edge.

Owns the table of flights and that of their legs, the queue of those that no worker can take yet, and admission: a bound
on what is in flight, and the drain. Asks the pure policy where to go and tells each `Leg` what workers say of it.
Accepted requests equal the sum of outcomes and flights in the table, always; legs are counted nowhere.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pdserve.contracts.request import Outcome, SamplingParams
from pdserve.engine.frames import ReceivedToken
from pdserve.proto.v1 import worker_pb2
from pdserve.router.fleet import Fleet, Worker
from pdserve.router.flight import Flight
from pdserve.router.generation import GenerationError, ServedModel
from pdserve.router.job import Job
from pdserve.router.leg import Leg
from pdserve.router.metrics import RouterMetrics
from pdserve.router.policy import Costs, choose_decode, choose_prefill

SWEEP_S = 0.1
"""Period at which deadlines are looked at."""
MIN_RETRY_AFTER_S, MAX_RETRY_AFTER_S = 1.0, 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchSettings:
    """Bounds of the dispatcher."""

    max_in_flight: int = 1024
    """Choices of requests accepted and not ended, at most: a request for n answers costs what n requests cost."""
    ttft_slo_s: float = 0.0
    """Seconds from arrival by which token 0 is wanted; 0 for no objective."""
    tpot_slo_s: float = 0.0
    """Seconds per token that prefill on a decode worker must leave to those that decode there; 0 keeps it away."""
    deadline_s: float = 600.0
    """Seconds from arrival after which a request is given up."""
    worker_wait_s: float = 60.0
    """Seconds that a request which had a worker waits for the next one at most: its client may have tokens already."""
    new_wait_s: float = 5.0
    """The same of a new one. A worker that restarts quickly goes unnoticed; who would wait longer had better ask again,
    perhaps elsewhere."""
    cut_off_s: float = 10.0
    """Seconds after a failed pull for which its decode worker is avoided for prompts of its prefill worker."""


class Dispatcher:
    """Implements `Generator` for the edge, `FleetListener` for the fleet and `FlightOwner` for flights."""

    def __init__(
        self,
        fleet: Fleet,
        costs: Costs,
        metrics: RouterMetrics,
        settings: DispatchSettings,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._costs = costs
        self._metrics = metrics
        self._settings = settings
        self._now_s = now_s
        self._flights: dict[Flight, None] = {}
        """In order of arrival."""
        self._legs: dict[int, Leg] = {}
        """By request id, as the next two."""
        self._queued: dict[int, Leg] = {}
        self._unbound: dict[int, Leg] = {}
        self._cut_off_until_s: dict[tuple[Worker, Worker], float] = {}
        """By (prefill worker, decode worker); the incarnations, so that a replaced one starts with a clean slate."""
        self._request_ids = itertools.count(1)
        self._num_accepted = 0
        self._num_choices = 0
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
        is_probe: bool = False,
    ) -> Flight:
        """As `Generator.start` says; ``is_probe`` as `Job.is_probe`."""
        assert prompt_tokens
        assert num_choices >= 1
        self._admit(num_choices)
        job = Job(
            prompt_tokens=tuple(prompt_tokens),
            sampling=sampling,
            cache_salt=cache_salt,
            arrived_s=arrived_s,
            deadline_s=arrived_s + self._settings.deadline_s,
            ttft_slo_s=self._settings.ttft_slo_s,
            is_probe=is_probe,
        )
        flight = Flight(self, self._metrics, self._now_s, job, num_choices)
        self._flights[flight] = None
        self._num_choices += num_choices
        self._idle.clear()
        self._num_accepted += 1
        self._metrics.accepted.inc()
        self._metrics.prompt_tokens.inc(len(prompt_tokens))
        if not is_probe:
            self._metrics.request_prompt_tokens.observe(len(prompt_tokens))
        flight.begin()
        return flight

    def _admit(self, num_choices: int) -> None:
        """Raises GenerationError where a request must be refused at once."""
        if self._is_draining:
            raise GenerationError(503, "the router is draining", retry_after_s=MIN_RETRY_AFTER_S)
        max_in_flight = self._settings.max_in_flight
        if num_choices > max_in_flight:
            raise GenerationError(
                400, f"{num_choices} choices are more than this router takes at once: {max_in_flight}"
            )
        if self._num_choices + num_choices > max_in_flight:
            wait_s = min(max(self._mean_request_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)
            raise GenerationError(429, f"{self._num_choices} answers are in flight already", retry_after_s=wait_s)

    # What the process around it asks

    @property
    def num_in_flight(self) -> int:
        return len(self._flights)

    @property
    def num_queued(self) -> int:
        """Legs of requests that no worker has taken."""
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
            for flight in list(self._flights):
                if flight.is_late:
                    flight.fail_late()
            for leg in list(self._queued.values()):
                is_new = leg.tries.num_attempts == 0
                wait_s = self._settings.new_wait_s if is_new else self._settings.worker_wait_s
                if self._now_s() - leg.queued_s >= wait_s:
                    leg.fail(self._nobody_is_up())

    def _nobody_is_up(self) -> GenerationError:
        retry_after_s = max(self._settings.new_wait_s, MIN_RETRY_AFTER_S)
        missing = "decode worker" if self._fleet.snapshots() else "worker"
        return GenerationError(503, f"no {missing} is up", retry_after_s=retry_after_s)

    def fail_all(self, message: str) -> None:
        """End every request with an error: the process is about to exit."""
        for flight in list(self._flights):
            flight.fail(GenerationError(503, message, retry_after_s=MIN_RETRY_AFTER_S))

    # FleetListener

    def worker_up(self, worker: Worker) -> None:
        for leg in list(self._queued.values()):
            self.want_prefill(leg)
        for leg in list(self._unbound.values()):
            self.want_decode(leg)

    def worker_lost(self, worker: Worker, reason: str) -> None:
        if not self._fleet.serves_both_phases():
            self._is_proven = False
        for leg in list(self._legs.values()):
            leg.worker_lost(worker)

    def tokens_received(self, worker: Worker, tokens: Iterable[ReceivedToken]) -> None:
        for token in tokens:
            leg = self._legs.get(token.request_id)
            if leg is not None:
                leg.token_received(worker, token)

    def prompt_logprobs_received(self, worker: Worker, message: worker_pb2.PromptLogprobs) -> None:
        leg = self._legs.get(message.request_id)
        if leg is not None:
            leg.prompt_logprobs_received(worker, message)

    def event_received(self, worker: Worker, event: worker_pb2.RequestEvent) -> None:
        leg = self._legs.get(event.request_id)
        if leg is not None:
            leg.event_received(worker, event)

    # FlightOwner and LegPlacer

    def next_request_id(self) -> int:
        return next(self._request_ids)

    def entered(self, leg: Leg) -> None:
        self._legs[leg.request_id] = leg
        self.want_prefill(leg)

    def want_prefill(self, leg: Leg) -> None:
        """Send ``leg`` to the worker that the policy names, or queue it until one comes up."""
        self._unbound.pop(leg.request_id, None)
        start_s = time.perf_counter()
        snapshots = self._fleet.snapshots()
        if not snapshots:
            self._queued[leg.request_id] = leg
            return
        blocks = leg.blocks(self._fleet.block_size)
        choice = choose_prefill(
            blocks,
            snapshots,
            self._costs,
            num_choices=leg.num_choices,
            tpot_slo_s=0.0 if leg.job.is_probe else self._settings.tpot_slo_s,
        )
        self._metrics.route_seconds.observe(time.perf_counter() - start_s)
        if choice is None:
            self._queued[leg.request_id] = leg
        else:
            self._queued.pop(leg.request_id, None)
            leg.submit(
                self._fleet.worker(choice.worker_id),
                handoff=choice.handoff,
                num_cached_tokens=choice.num_cached_tokens,
                num_blocks=blocks.num_blocks(leg.num_choices),
            )

    def want_decode(self, leg: Leg) -> None:
        """Bind ``leg`` to the decode worker that the policy names, or let it wait parked until one comes up."""
        assert leg.attempt is not None
        start_s = time.perf_counter()
        blocks = leg.blocks(self._fleet.block_size)
        prefill = leg.attempt.prefill
        choice = choose_decode(
            blocks,
            self._fleet.snapshots(),
            self._costs,
            self._cut_off_from(prefill),
            num_choices=leg.num_choices,
            source_host=prefill.host,
        )
        self._metrics.route_seconds.observe(time.perf_counter() - start_s)
        if choice is None:
            self._unbound[leg.request_id] = leg
        else:
            self._unbound.pop(leg.request_id, None)
            leg.prepare(self._fleet.worker(choice.worker_id), blocks.num_blocks(leg.num_choices))

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

    def left(self, leg: Leg) -> None:
        del self._legs[leg.request_id]
        self._queued.pop(leg.request_id, None)
        self._unbound.pop(leg.request_id, None)

    def landed(self, flight: Flight) -> None:
        assert flight.outcome is not None
        del self._flights[flight]
        self._num_choices -= flight.num_choices
        self._outcomes[flight.outcome] += 1
        self._metrics.outcomes.labels(flight.outcome.value).inc()
        if flight.outcome is Outcome.FINISHED:
            self._mean_request_s += 0.1 * (self._now_s() - flight.job.arrived_s - self._mean_request_s)
        if not self._flights:
            self._idle.set()
