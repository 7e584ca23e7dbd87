"""Dispatch core: takes a request from its acceptance to its one outcome, by events of workers and readers.

A pure `Placement` decides where to go, `Admission` what is accepted, and `FailOver` what becomes of attempts that were
lost; `AttemptTable` carries out what they mean. At all times, accepted requests equal the sum of outcomes and requests
in the table.

Everything the core needs is injected, so a virtual clock drives it as well as a live router.

- Time: ``now_s`` returns the current instant; the driver calls `Dispatcher.sweep` periodically.
- Turns: what follows from an event is placed later, so that a lost worker with a thousand answers stops no stream.
  ``call_soon`` has `Dispatcher.place_some` called in a turn of its own; a driver without it calls it after each event.
- Commands: a subclass implements `Worker.submit`, `Worker.prepare` and `Worker.cancel`. They return at once.
- Events: `Dispatcher.worker_up`, `worker_lost`, `tokens_received`, `event_received`, `prompt_logprobs_received`, in the
  vocabulary of `pdserve.contracts.events`. Events of one worker arrive in order: starts, prompt log probabilities,
  tokens, ends. The driver keeps the attributes of `Worker` current.
- Readers: a `Request` whose hooks a subclass overrides.
- Metrics: a `DispatchObserver`; the base class ignores everything.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from heapq import nsmallest
from math import inf

from pdserve.contracts.deployment import DEFAULT_TIER
from pdserve.contracts.events import PromptLogprobsEvent, RequestEvent, RequestKey, TokenEvent
from pdserve.contracts.events import RequestEventKind as Kind
from pdserve.contracts.request import KvSource, Outcome, SamplingParams
from pdserve.contracts.worker_config import WorkerRole
from pdserve.router.cluster.worker import Worker
from pdserve.router.replicas import Replicas
from pdserve.router.requests.admission import MIN_RETRY_AFTER_S, Admission
from pdserve.router.requests.attempt import (
    Attempt,
    Decision,
    Decoding,
    Ended,
    Parked,
    Prefilling,
    Pull,
    PullStage,
    Queued,
)
from pdserve.router.requests.attempt_table import AttemptTable
from pdserve.router.requests.blame import Blame
from pdserve.router.requests.demand import Demand, DemandMeter
from pdserve.router.requests.failover import FailOver
from pdserve.router.requests.observer import DispatchObserver
from pdserve.router.requests.placement import Costs, tie_order
from pdserve.router.requests.placer import Placer
from pdserve.router.requests.policies import new_placement
from pdserve.router.requests.request import GenerationError, Request, RequestSpec
from pdserve.router.requests.retries import Retries
from pdserve.router.requests.settings import DispatchSettings

log = logging.getLogger(__name__)

MAX_ANNOUNCED_WORKERS = 4
"""Decode workers that compile a grammar ahead. All of them, in a large cluster with new grammars, would do little else;
one that gets an answer whose grammar it lacks compiles that first."""
_LEAST = SamplingParams(max_tokens=1)


class Dispatcher:
    """Dispatch core. Not thread-safe: one event loop drives it."""

    def __init__(
        self,
        costs: Costs,
        settings: DispatchSettings,
        now_s: Callable[[], float],
        observer: DispatchObserver | None = None,
        replicas: Replicas | None = None,
        call_soon: Callable[[Callable[[], None]], object] = lambda _: None,
    ) -> None:
        """
        Args:
            now_s: returns the current monotonic instant, of any origin.
            replicas: routers that share ``settings.max_in_flight``.
            call_soon: has a function called in a turn of its own of the driver's loop.
        """
        self.workers: dict[str, Worker] = {}
        """Workers that are up, by id."""
        self.outcomes: Counter[Outcome] = Counter(dict.fromkeys(Outcome, 0))
        self.num_accepted = 0
        self.costs = costs
        tiers = [settings.slo, *settings.slo.tiers.values()]
        self.placement = new_placement(settings.policy, costs, tpot_slo_s=min(tier.tpot_seconds for tier in tiers))
        self._settings = settings
        self.replicas = replicas or Replicas()
        self._now_s = now_s
        self._observer = observer or DispatchObserver()
        self.admission = Admission(settings, self.replicas, self._observer)
        self._requests: dict[Request, None] = {}
        """Requests in flight, in order of arrival."""
        self.attempts = AttemptTable(self.placement)
        blame, retries = Blame(), Retries(settings.cut_off_s)
        self._placer = Placer(
            self.workers,
            self.attempts,
            self.placement,
            settings,
            self.admission,
            blame,
            retries,
            self._observer,
            now_s,
            wake=lambda: call_soon(self.place_some),
        )
        self._failover = FailOver(
            self.attempts, self._placer, blame, retries, self._observer, now_s, max_silence_s=settings.max_silence_s
        )
        self._demand = DemandMeter(costs, self.placement.tpot_slo_s)
        self._request_ids = itertools.count(1)
        self._silent_at_s = inf
        """No choice has been silent for too long before then."""

    @property
    def num_in_flight(self) -> int:
        return len(self._requests)

    @property
    def num_queued(self) -> int:
        """Attempts that no worker has taken."""
        return len(self.attempts.queued) + len(self.attempts.held)

    @property
    def tiers(self) -> tuple[str, ...]:
        """Names of the tiers, the default one first."""
        return DEFAULT_TIER, *self._settings.slo.tiers

    def demand(self) -> Demand:
        """The work that requests bring, in seconds of one worker."""
        return self._demand.now(self.workers.values(), self.attempts.all.values())

    # Requests

    def check_room(self, num_choices: int, *, tenant: str, tier: str, arrived_s: float) -> None:
        """Check, before its prompt is read, that a request would be accepted now if its prompt is short.

        Raises:
            GenerationError: it would not (overload, drain).
        """
        self.admission.check(num_choices, tenant=tenant, tier=tier)
        if self._settings.slo.tier(tier).when_hopeless == "refuse" and self._placer.taking_work():
            least = RequestSpec(
                prompt_tokens=(0,), sampling=_LEAST, arrived_s=arrived_s, uses_cache=False, tenant=tenant, tier=tier
            )
            self._check_chance(tier, self._placer.decide(Attempt(Request(least), 0, 0, Queued(self._now_s()))))

    def _check_chance(self, tier: str, decision: Decision | None) -> None:
        if decision is not None and decision.choice.retry_after_s:
            self._observer.refused(tier)
            message = f"no worker would meet the objectives of tier {tier} for this request now"
            raise GenerationError(429, message, retry_after_s=max(decision.choice.retry_after_s, MIN_RETRY_AFTER_S))

    def start(self, request: Request, *, is_further: bool = False) -> None:
        """Accept a request and place its first choice.

        Args:
            is_further: it comes with one that was started, for both of which `Admission.check` had room; it is placed
                in a next turn, unless its tier may refuse it.

        Raises:
            GenerationError: refused at once (overload, drain).
        """
        spec = request.spec
        attempt, decision = Attempt(request, 0, next(self._request_ids), Queued(self._now_s())), None
        if not is_further:
            self.admission.check(spec.num_choices, tenant=spec.tenant, tier=spec.tier)
        may_wait = is_further and self._settings.slo.tier(spec.tier).when_hopeless != "refuse"
        if not may_wait:
            decision = self._placer.decide(attempt)
            self._check_chance(spec.tier, decision)
        self._requests[request] = None
        self.admission.accepted(spec)
        self.num_accepted += 1
        self._observer.accepted(spec)
        self._demand.accepted(request)
        now_s = self._now_s()
        attempt.journey.spent("tokenise", now_s - spec.arrived_s, now_s)
        self._launch(attempt)
        if may_wait:
            self._placer.put(attempt)
        else:
            self._placer.place(attempt, decision)

    def finish(self, request: Request, choice: int) -> None:
        """Finish ``choice`` early because a stop string was found. After its last choice the request is FINISHED.
        Idempotent; a no-op after the end."""
        attempt = request.attempts.get(choice)
        if attempt is not None:
            self._end_choice(attempt)
        elif choice in request.waiting_choices:
            request.waiting_choices.remove(choice)

    def cancel(self, request: Request) -> None:
        """Stop the request on every worker because the client left; a no-op after the end."""
        if request.outcome is None:
            self._end(request, Outcome.CANCELLED)

    def fail(self, request: Request, error: GenerationError) -> None:
        """End a request with an error and free it on every worker."""
        if request.outcome is None:
            request.error = error
            self._end(request, Outcome.REJECTED if error.status == 400 else Outcome.FAILED)

    def _fail_if(self, attempt: Attempt, error: GenerationError | None) -> None:
        """Fail the request of an attempt that cannot go on."""
        if error is not None:
            self.fail(attempt.request, error)

    def fail_all(self, message: str) -> None:
        """End every request with an error because the process is about to exit."""
        for request in list(self._requests):
            self.fail(request, GenerationError(503, message, retry_after_s=MIN_RETRY_AFTER_S))

    def sweep(self) -> None:
        """Fail requests that have been silent for too long; have those placed that may go, and those failed for which
        no worker came in time."""
        if self._now_s() >= self._silent_at_s:
            for attempt in list(self.attempts.all.values()):
                self._fail_if(attempt, self._failover.silence(attempt))
            self._silent_at_s = min(map(self._failover.deadline_s, self.attempts.all.values()), default=inf)
        self._placer.look()

    # Workers

    def worker_up(self, worker: Worker) -> None:
        """Give queued work to ``worker``, which accepts commands and has its limits set: it has come up, its drain has
        ended, or it has another role."""
        worker.is_up = True
        worker.cost = self.costs.get(worker.role)
        self.workers[worker.worker_id] = worker
        for attempt in self.attempts.unbound.values():
            self._placer.put(attempt)
        self._placer.look()

    def worker_lost(self, worker: Worker) -> None:
        """Remove ``worker``; everything sent to it is void."""
        worker.is_up = False
        if self.workers.get(worker.worker_id) is worker:
            del self.workers[worker.worker_id]
        lost = []
        for attempt in [attempt for attempt in self.attempts.all.values() if worker in attempt.state.workers]:
            if isinstance(attempt.state, Decoding) and worker is attempt.state.prefill:
                self.attempts.move(attempt, replace(attempt.state, is_released=True))
            else:
                lost.append(attempt)
        culprit = self._failover.worker_lost(worker, lost)
        if culprit is not None:
            self._fail_if(*culprit)
        message = f"worker {worker.worker_id} was lost"
        for attempt in lost:
            if not isinstance(attempt.state, Ended):  # its request has just failed
                error = self._failover.go_on_without(attempt, worker, "worker_lost", message, is_error=False)
                self._fail_if(attempt, error)

    # Events

    def tokens_received(self, worker: Worker, tokens: Iterable[TokenEvent]) -> None:
        """Deliver each token that is the next of its choice in the current attempt; drop stale and repeated tokens."""
        attempts = self.attempts.all
        for token in tokens:
            attempt = attempts.get(token.key.request_id)
            if attempt is not None and attempt.hears(worker, token.key.attempt):
                self._take(attempt, worker, token)

    def tokens_skipped(self, key: RequestKey, num_tokens: int) -> None:
        """Count ``num_tokens`` more tokens of a choice as delivered. For the simulator, whose workers emit no token
        events during steady decode steps."""
        attempt = self.attempts.all.get(key.request_id)
        if attempt is not None and attempt.number == key.attempt:
            attempt.emitted.extend(itertools.repeat(0, num_tokens))
            attempt.heard_s = self._now_s()

    def prompt_logprobs_received(self, worker: Worker, event: PromptLogprobsEvent) -> None:
        """Take log probabilities of some prompt tokens, computed by the current attempt."""
        attempt = self.attempts.all.get(event.key.request_id)
        if attempt is None or not attempt.hears(worker, event.key.attempt):
            return
        if not attempt.request.take_prompt_logprobs(event.first_position, event.entries):
            log.error("request %s: no prompt logprobs before position %d", attempt.name, event.first_position)
            self._failed(attempt, worker, "prompt logprobs were lost between worker and router")

    def event_received(self, worker: Worker, event: RequestEvent) -> None:
        """Handle an event of the current attempt."""
        attempt = self.attempts.all.get(event.key.request_id)
        if attempt is None or not attempt.hears(worker, event.key.attempt):
            return
        match attempt.state, event.kind:
            case Decoding(prefill=prefill) as state, kind if worker is prefill:
                # Whatever ends it, the prefill worker is done: it may not know that the pull is complete.
                if kind.is_terminal:
                    self.attempts.move(attempt, replace(state, is_released=True))
            case Prefilling() as state, Kind.STARTED:
                self._prompt_started(attempt, state, event)
            case Prefilling() as state, Kind.LAST_CHUNK if state.sent.handoff:
                source = KvSource(address=worker.kv_address, worker_epoch=worker.epoch, handle=event.handle)
                self._placer.park(attempt, Parked(worker, state.sent, source, state.started_s))
            case Parked(pull=None), Kind.RELEASED:
                self._fail_if(attempt, self._failover.given_up(attempt, worker, event))
            case Parked() as state, Kind.RELEASED if worker is state.prefill:
                self.attempts.move(attempt, replace(state, is_released=True))
            case Parked() as state, Kind.STARTED if worker is not state.prefill:
                self.attempts.move(attempt, state.pulled(PullStage.RESERVED))
                attempt.journey.spent("decode_queue", event.waited_s, self._now_s())
                self._observer.pull_started(event.num_cached_tokens)
            case Parked() as state, Kind.JOINED if worker is not state.prefill:
                self._joined(attempt, state)
            case Decoding() as state, Kind.PREEMPTED:
                self.attempts.move(attempt, replace(state, preempted_s=self._now_s()))
            case Decoding() as state, Kind.RESUMED if state.preempted_s is not None:
                attempt.journey.preempted_s += self._now_s() - state.preempted_s
                self.attempts.move(attempt, replace(state, preempted_s=None))
            case _, Kind.REJECTED | Kind.FAILED | Kind.KV_UNAVAILABLE | Kind.CANCELLED:
                self._fail_if(attempt, self._failover.given_up(attempt, worker, event))
            case _:
                # RELEASED by a decode worker: token 0 was the last, and comes from the prefill worker. Others say what
                # the state implies, or, before token 0, something of tokens that have overtaken it.
                pass

    def prefix_failed(self, source: Worker) -> None:
        """A worker could not pull a prefix from ``source``."""
        self.placement.prefix_failed(source.worker_id, self._now_s() + self._settings.cut_off_s)

    # Launch and end

    def _announce(self, attempt: Attempt, state: Prefilling) -> None:
        """Have the emptiest decode workers compile the grammar of an answer while its prompt is prefilled. A prompt is
        started once its grammar is compiled there, so those that take too long reach no decode worker."""
        grammar = attempt.request.spec.sampling.grammar
        if grammar is None or not state.sent.handoff:
            return
        blocks = state.decision.arrival.blocks
        decoders = [worker for worker in self._placer.taking_work() if worker.role is WorkerRole.DECODE]
        loads = {w: (w.snapshot().num_decoding, tie_order(blocks, w.snapshot())) for w in decoders}
        for worker in nsmallest(MAX_ANNOUNCED_WORKERS, decoders, key=loads.__getitem__):
            worker.announce(grammar)

    def _launch(self, attempt: Attempt) -> None:
        attempt.request.attempts[attempt.choice] = attempt
        self.attempts.move(attempt, attempt.state)
        self._silent_at_s = min(self._silent_at_s, self._failover.deadline_s(attempt))

    def _launch_waiting(self, request: Request) -> None:
        """Launch the remaining choices: choice 0 has computed the prompt or is over."""
        waiting, request.waiting_choices = request.waiting_choices, []
        for choice in waiting:
            attempt = Attempt(request, choice, next(self._request_ids), Queued(self._now_s()))
            self._launch(attempt)
            self._placer.put(attempt)

    def _end_choice(self, attempt: Attempt, finisher: Worker | None = None) -> None:
        """End a complete choice; ``finisher`` sent its last token."""
        request = attempt.request
        self._demand.answer_ended(len(request.spec.prompt_tokens), len(attempt.emitted))
        self._drop(attempt, Ended(len(attempt.emitted), finisher))
        del request.attempts[attempt.choice]
        self._placer.put_others(attempt)
        self._launch_waiting(request)
        if not request.attempts:
            self._end(request, Outcome.FINISHED)
        if self.attempts.held:
            self._placer.look(at_queue=False)

    def _end(self, request: Request, outcome: Outcome) -> None:
        """Record the outcome, exactly once."""
        assert request.outcome is None
        request.outcome = outcome
        for attempt in request.attempts.values():
            self._drop(attempt, Ended())
        request.attempts.clear()
        request.waiting_choices.clear()
        del self._requests[request]
        is_answered = outcome is Outcome.FINISHED
        self.admission.ended(request.spec, self._now_s() - request.spec.arrived_s if is_answered else 0.0)
        self.outcomes[outcome] += 1
        self._observer.ended(request)
        request.ended()

    def _drop(self, attempt: Attempt, ended: Ended) -> None:
        self.attempts.move(attempt, ended)
        self._failover.ended(attempt)

    def place_some(self) -> None:
        """Place and bind what can be, for a few milliseconds; what is left follows in another turn."""
        for attempt in self._placer.turn():
            missing = "decode worker" if self._placer.taking_work() else "worker"
            retry_after_s = max(self._settings.new_wait_s, MIN_RETRY_AFTER_S)
            self.fail(attempt.request, GenerationError(503, f"no {missing} is up", retry_after_s=retry_after_s))

    # Progress of an attempt

    def _take(self, attempt: Attempt, worker: Worker, token: TokenEvent) -> None:
        """Deliver a token of the current attempt if it is the next of its choice."""
        state, num_emitted = attempt.state, len(attempt.emitted)
        is_first = num_emitted == attempt.num_resumed
        if token.index != num_emitted:
            if token.index > num_emitted:
                self._came_early(attempt, worker, token)
            return
        if is_first and attempt.asks_prompt_logprobs:
            self._failed(attempt, worker, "prompt logprobs are missing at token 0")
            return
        if is_first:
            self._first_token(attempt)
        elif token.index == 1 and not (isinstance(state, Decoding) and state.prefill is None):
            attempt.journey.stall_s = self._now_s() - attempt.journey.token_s
        attempt.emitted.append(token.token)
        attempt.heard_s = self._now_s()
        self._failover.token_received(attempt, worker)
        token.choice = attempt.choice
        attempt.request.token_received(token)
        if isinstance(attempt.state, Ended):
            return  # its reader had enough
        if token.finish:
            now_s = self._now_s()
            began_s = attempt.state.since_s if isinstance(attempt.state, Decoding) else now_s
            attempt.journey.spent("decode", now_s - began_s, now_s)
            self._end_choice(attempt, worker)
        elif is_first:
            self._launch_waiting(attempt.request)
            if isinstance(state, Parked) and state.pull is not None:
                self.tokens_received(state.pull.worker, state.pull.overtook)

    def _came_early(self, attempt: Attempt, worker: Worker, token: TokenEvent) -> None:
        """Keep a token that overtook the prefill worker's; any other shows that one is lost."""
        match attempt.state:
            case Parked(first_token_s=None, pull=Pull() as pull) if worker is pull.worker:
                pull.overtook.append(token)
            case _:
                num_emitted = len(attempt.emitted)
                log.error("request %s: token %d came where %d was next", attempt.name, token.index, num_emitted)
                self._failed(attempt, worker, "a token was lost between worker and router")

    def _first_token(self, attempt: Attempt) -> None:
        now_s, state = self._now_s(), attempt.state
        attempt.num_errors = 0
        if not attempt.emitted:
            attempt.journey.token_s = now_s
        elif attempt.lost_s:
            attempt.journey.lost_s += now_s - attempt.lost_s
        attempt.lost_s = 0.0
        if isinstance(state, Prefilling | Parked) and state.started_s is not None:
            attempt.journey.spent("prefill", now_s - state.started_s, now_s)
        match state:
            case Prefilling() if not state.sent.handoff:
                self.attempts.move(attempt, Decoding(state.worker, now_s))
            case Parked():
                self.attempts.move(attempt, replace(state, first_token_s=now_s).settled(now_s))

    def _prompt_started(self, attempt: Attempt, state: Prefilling, event: RequestEvent) -> None:
        self.attempts.move(attempt, replace(state, started_s=self._now_s()))
        self._announce(attempt, state)
        attempt.journey.spent("prefill_queue", event.waited_s, self._now_s())
        request = attempt.request
        if not request.is_started:
            request.is_started = True
            request.num_cached_tokens = min(event.num_cached_tokens, len(request.spec.prompt_tokens))
            self._observer.prompt_started(request.num_cached_tokens)
            self._demand.prompt_started(request)
            request.prompt_started(request.num_cached_tokens)

    def _joined(self, attempt: Attempt, state: Parked) -> None:
        now_s = self._now_s()
        self.attempts.move(attempt, state.pulled(PullStage.JOINED).settled(now_s))
        if state.first_token_s is not None:
            attempt.journey.spent("handoff", now_s - state.first_token_s, now_s)
        self._placer.put_others(attempt)

    def _failed(self, attempt: Attempt, worker: Worker, message: str) -> None:
        self._fail_if(attempt, self._failover.failed(attempt, worker, message))
