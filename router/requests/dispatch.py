"""Dispatch core: places requests on workers, binds decode workers, retries, delivers tokens.

Owns the tables of requests and attempts and the queue of attempts that no worker has taken. A pure `Placement` decides
where to go, `Admission` what is accepted, `Blame` and `Retries` when it may be tried again. At all times, accepted
requests equal the sum of outcomes and requests in the table.

Everything the core needs is injected, so a virtual clock drives it as well as a live router.

- Time: ``now_s`` returns the current instant; the driver calls `Dispatcher.sweep` periodically.
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
from collections.abc import Callable, Iterable, Sequence
from heapq import nsmallest
from math import inf
from typing import NamedTuple

from pdserve.contracts.deployment import DEFAULT_TIER
from pdserve.contracts.events import (
    PromptLogprobsEvent,
    RefusalCode,
    RequestEvent,
    RequestEventKind,
    RequestKey,
    TokenEvent,
)
from pdserve.contracts.placement import WorkerRole, whole_worker_id
from pdserve.contracts.request import KvSource, Outcome, RequestState, SamplingParams
from pdserve.router.cluster.worker import Worker
from pdserve.router.replicas import Replicas
from pdserve.router.requests.admission import MIN_RETRY_AFTER_S, Admission
from pdserve.router.requests.blame import Blame, computed_by
from pdserve.router.requests.held_back import HeldBack
from pdserve.router.requests.interface import DispatchObserver, DispatchSettings
from pdserve.router.requests.placement import Arrival
from pdserve.router.requests.policies import placement
from pdserve.router.requests.policy import Costs, PrefillChoice, PromptBlocks, prefill_candidates, shortfall, tie_order
from pdserve.router.requests.request import MIN_DURATION_S, Attempt, GenerationError, Request, RequestSpec
from pdserve.router.requests.retries import MAX_FAILURES, Retries

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 8
"""Maximum dispatches of one choice, whatever the cause."""
MAX_ANNOUNCED_WORKERS = 4
"""Decode workers that compile a grammar ahead. All of them, in a large cluster with new grammars, would do little else;
one that gets an answer whose grammar it lacks compiles that first."""
HELD_REST = 19
"""Time until an attempt that is held back is considered again, as a multiple of what that takes."""
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
    ) -> None:
        """
        Args:
            now_s: returns the current monotonic instant, of any origin.
            replicas: routers that share ``settings.max_in_flight``.
        """
        self.workers: dict[str, Worker] = {}
        """Workers that are up, by id."""
        self.outcomes: Counter[Outcome] = Counter(dict.fromkeys(Outcome, 0))
        self.num_accepted = 0
        self.costs = costs
        tiers = [settings.slo, *settings.slo.tiers.values()]
        self._placement = placement(settings.policy, costs, tpot_slo_s=min(tier.tpot_seconds for tier in tiers))
        self._least_ttft_s = min(tier.ttft_seconds for tier in tiers)
        self._heaviest = max(tier.weight for tier in tiers) or 1.0
        self._settings = settings
        self.replicas = replicas or Replicas()
        self._now_s = now_s
        self._observer = observer or DispatchObserver()
        self.admission = Admission(settings, self.replicas, self._observer)
        self._requests: dict[Request, None] = {}
        """Requests in flight, in order of arrival."""
        self._attempts: dict[int, Attempt] = {}
        """Attempts by request id, as in the next two tables."""
        self._queued: dict[int, Attempt] = {}
        self._unbound: dict[int, Attempt] = {}
        self._held, self._held_until_s = HeldBack(), 0.0
        """Attempts that the policy lets wait, and the instant until which it is not asked again."""
        self._request_ids = itertools.count(1)
        self._blame = Blame()
        self._retries = Retries(settings.cut_off_s)

    @property
    def num_in_flight(self) -> int:
        return len(self._requests)

    @property
    def num_queued(self) -> int:
        """Attempts that no worker has taken."""
        return len(self._queued) + len(self._held)

    @property
    def tiers(self) -> tuple[str, ...]:
        """Names of the tiers, the default one first."""
        return DEFAULT_TIER, *self._settings.slo.tiers

    def handoff_ages_s(self) -> list[float]:
        """Seconds since token 0 of each answer that waits for a decode worker to hold its prompt."""
        first_s = [each.first_token_s for each in self._attempts.values() if each.handoff and not each.has_joined]
        return [self._now_s() - token_s for token_s in first_s if token_s]

    # Requests

    def check(self, num_choices: int, *, tenant: str, tier: str, arrived_s: float) -> None:
        """Check that a request, whose prompt may be as short as can be, would be accepted now.

        Raises:
            GenerationError: it would not (overload, drain).
        """
        self.admission.check(num_choices, tenant=tenant, tier=tier)
        workers = [worker for worker in self.workers.values() if worker.takes_work]
        if self._settings.slo.tier(tier).when_hopeless == "refuse" and workers:
            least = RequestSpec(
                prompt_tokens=(0,), sampling=_LEAST, arrived_s=arrived_s, uses_cache=False, tenant=tenant, tier=tier
            )
            self._check_chance(tier, self._decide(Attempt(Request(least), 0, 0, self._now_s())))

    def _check_chance(self, tier: str, decision: _Decision | None) -> None:
        if decision is not None and decision.choice.retry_after_s:
            self._observer.refused(tier)
            message = f"no worker would meet the objectives of tier {tier} for this request now"
            raise GenerationError(429, message, retry_after_s=max(decision.choice.retry_after_s, MIN_RETRY_AFTER_S))

    def start(self, request: Request, *, has_room: bool = False) -> None:
        """Accept a request and place its first choice.

        Args:
            has_room: `Admission.check` has said so, for this request and others.

        Raises:
            GenerationError: refused at once (overload, drain).
        """
        spec = request.spec
        if not has_room:
            self.admission.check(spec.num_choices, tenant=spec.tenant, tier=spec.tier)
        attempt = Attempt(request, 0, next(self._request_ids), self._now_s())
        decision = self._decide(attempt)
        self._check_chance(spec.tier, decision)
        self._requests[request] = None
        self.admission.accepted(spec)
        self.num_accepted += 1
        self._observer.accepted(spec)
        now_s = self._now_s()
        self._observer.phase_ended("tokenise", now_s - spec.arrived_s)
        request.journey.spent("tokenise", now_s - spec.arrived_s, now_s)
        self._launch(attempt, decision)

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

    def fail_all(self, message: str) -> None:
        """End every request with an error because the process is about to exit."""
        for request in list(self._requests):
            self.fail(request, GenerationError(503, message, retry_after_s=MIN_RETRY_AFTER_S))

    def sweep(self) -> None:
        """Fail requests that have been silent or waited for a worker for too long; place those that may go."""
        now_s = self._now_s()
        for attempt in list(self._attempts.values()):
            if now_s >= self._deadline_s(attempt):
                self.fail(attempt.request, self._silence_error())
        self._place_queued()
        self._release_held()
        for attempt in list(self._queued.values()):
            if self._has_to_wait(attempt):
                attempt.queued_s = now_s
                continue
            wait_s = self._settings.new_wait_s if attempt.number < 0 else self._settings.worker_wait_s
            if now_s - attempt.queued_s >= wait_s and attempt.request_id in self._queued:
                retry_after_s = max(self._settings.new_wait_s, MIN_RETRY_AFTER_S)
                missing = "decode worker" if any(worker.takes_work for worker in self.workers.values()) else "worker"
                self.fail(attempt.request, GenerationError(503, f"no {missing} is up", retry_after_s=retry_after_s))

    def links(self) -> Counter[tuple[str, str]]:
        """Answers that were handed over, or are about to be: their number by ids of prefill and decode worker."""
        return Counter(
            (attempt.prefill.worker_id, attempt.decode.worker_id)
            for attempt in self._attempts.values()
            if attempt.prefill is not None and attempt.decode is not None
        )

    # Workers

    def worker_up(self, worker: Worker) -> None:
        """Give queued work to ``worker``, which accepts commands and has its limits set: it has come up, or its drain
        has ended."""
        worker.is_up = True
        self.workers[worker.worker_id] = worker
        self._place_queued()
        for attempt in list(self._unbound.values()):
            self._bind(attempt)

    def worker_lost(self, worker: Worker) -> None:
        """Remove ``worker``; everything sent to it is void."""
        worker.is_up = False
        worker.in_flight.clear()
        self._retries.clear(worker)
        if self.workers.get(worker.worker_id) is worker:
            del self.workers[worker.worker_id]
        held = [attempt for attempt in self._attempts.values() if worker in attempt.workers]
        if not worker.is_draining:  # or its end was asked for
            self._blame_for(worker, computed_by(worker, held))
        for attempt in held:
            if worker not in attempt.workers:
                continue  # its request has just failed
            if worker is attempt.prefill and not attempt.needs_prefill:
                attempt.is_prefill_over = True
            else:
                message = f"worker {worker.worker_id} was lost"
                self._go_on_without(attempt, worker, "worker_lost", message, is_error=False)

    # Events

    def tokens_received(self, worker: Worker, tokens: Iterable[TokenEvent]) -> None:
        """Deliver each token that is the next of its choice in the current attempt; drop stale and repeated tokens."""
        attempts = self._attempts
        for token in tokens:
            attempt = attempts.get(token.key.request_id)
            if attempt is not None:
                self._take(attempt, worker, token)

    def tokens_skipped(self, key: RequestKey, num_tokens: int) -> None:
        """Count ``num_tokens`` more tokens of a choice as delivered. For the simulator, whose workers emit no token
        events during steady decode steps."""
        attempt = self._attempts.get(key.request_id)
        if attempt is not None and attempt.number == key.attempt:
            attempt.emitted.extend(itertools.repeat(0, num_tokens))
            attempt.heard_s = self._now_s()

    def prompt_logprobs_received(self, worker: Worker, event: PromptLogprobsEvent) -> None:
        """Take log probabilities of some prompt tokens, computed by the current attempt."""
        attempt = self._attempts.get(event.key.request_id)
        if attempt is None or event.key.attempt != attempt.number or worker is not attempt.prefill:
            return
        if not attempt.request.take_prompt_logprobs(event.first_position, event.entries):
            log.error("request %s: no prompt logprobs before position %d", attempt.name, event.first_position)
            self._failed(attempt, worker, "prompt logprobs were lost between worker and router")

    def event_received(self, worker: Worker, event: RequestEvent) -> None:
        """Handle an event of the current attempt."""
        attempt = self._attempts.get(event.key.request_id)
        if attempt is None or not attempt.accepts(worker, event.key.attempt):
            return
        kind = event.kind
        if worker is attempt.prefill and kind.is_terminal and not attempt.needs_prefill:
            # Whatever the event, the prefill worker is done: it may not know that the pull is complete.
            attempt.is_prefill_over = True
            return
        match kind:
            case RequestEventKind.STARTED:
                self._started(attempt, worker, event)
            case RequestEventKind.LAST_CHUNK:
                self._last_chunk(attempt, worker, event)
            case RequestEventKind.JOINED:
                self._joined(attempt)
            case RequestEventKind.PREEMPTED:
                attempt.state = RequestState.PREEMPTED
                attempt.paused_s = self._now_s()
            case RequestEventKind.RESUMED:
                attempt.state = RequestState.DECODING
                if attempt.paused_s:
                    attempt.journey.preempted_s += self._now_s() - attempt.paused_s
                attempt.paused_s = 0.0
            case RequestEventKind.RELEASED:
                # A decode worker sends RELEASED when token 0 was the last; the prefill worker reports that too.
                attempt.is_prefill_over |= worker is attempt.prefill
            case RequestEventKind.REJECTED:
                self._rejected(attempt, worker, event)
            case RequestEventKind.FAILED:
                self._failed(attempt, worker, event.message)
            case RequestEventKind.KV_UNAVAILABLE:
                self._kv_unavailable(attempt, worker, event)
            case RequestEventKind.CANCELLED:
                self._retry(attempt, "cancelled", event.message)

    # Admission, launch and end

    def _announce(self, attempt: Attempt, block_size: int) -> None:
        """Have the emptiest decode workers compile the grammar of an answer while its prompt is prefilled. A prompt is
        started once its grammar is compiled there, so those that take too long reach no decode worker."""
        grammar = attempt.request.spec.sampling.grammar
        if grammar is None or not attempt.handoff:
            return
        blocks = attempt.blocks(block_size)
        decoders = {w: w.snapshot() for w in self.workers.values() if w.role is WorkerRole.DECODE and w.takes_work}
        load = {worker: (each.num_decoding, tie_order(blocks, each)) for worker, each in decoders.items()}
        for worker in nsmallest(MAX_ANNOUNCED_WORKERS, decoders, key=load.__getitem__):
            worker.announce(grammar)

    def _launch(self, attempt: Attempt, decision: _Decision | None) -> None:
        attempt.request.attempts[attempt.choice] = attempt
        self._attempts[attempt.request_id] = attempt
        self._send_or_hold(attempt, decision)

    def _launch_waiting(self, request: Request) -> None:
        """Launch the remaining choices: choice 0 has computed the prompt or is over."""
        waiting, request.waiting_choices = request.waiting_choices, []
        for choice in waiting:
            attempt = Attempt(request, choice, next(self._request_ids), self._now_s())
            self._launch(attempt, self._decide(attempt))

    def _end_choice(self, attempt: Attempt, finisher: Worker | None = None) -> None:
        """End a complete choice; ``finisher`` sent its last token."""
        request = attempt.request
        self._placement.left(attempt.request_id, len(attempt.emitted))
        self._forget(attempt, finisher)
        del request.attempts[attempt.choice]
        self._bind_others(attempt)
        if request.waiting_choices:
            self._launch_waiting(request)
        if not request.attempts:
            self._end(request, Outcome.FINISHED)
        self._release_held()

    def _end(self, request: Request, outcome: Outcome) -> None:
        """Record the outcome, exactly once."""
        assert request.outcome is None
        request.outcome = outcome
        for attempt in request.attempts.values():
            self._forget(attempt)
        request.attempts.clear()
        request.waiting_choices.clear()
        del self._requests[request]
        is_answered = outcome is Outcome.FINISHED
        self.admission.ended(request.spec, self._now_s() - request.spec.arrived_s if is_answered else 0.0)
        self.outcomes[outcome] += 1
        self._observer.ended(request)
        request.ended()

    def _forget(self, attempt: Attempt, finisher: Worker | None = None) -> None:
        """Free what workers hold of an attempt that is over."""
        self._placement.left(attempt.request_id, 0)
        attempt.abandon(finisher)
        del self._attempts[attempt.request_id]
        self._queued.pop(attempt.request_id, None)
        self._unbound.pop(attempt.request_id, None)
        self._held.discard(attempt)
        self._retries.over(attempt.request_id)
        if self._blame.forget(attempt.request_id):
            self._try_suspect()

    def _deadline_s(self, attempt: Attempt) -> float:
        """Instant at which a choice is given up, unless its next token comes before."""
        return attempt.heard_s + self._settings.max_silence_s

    # Placing and binding

    def _place(self, attempt: Attempt) -> None:
        """Send the attempt to the worker chosen by the policy, or queue it until one comes up or its turn comes."""
        self._unbound.pop(attempt.request_id, None)
        if self._has_to_wait(attempt):
            self._queued[attempt.request_id] = attempt
            return
        self._send_or_hold(attempt, self._decide(attempt))

    def _place_queued(self) -> None:
        """Place queued attempts while a worker has less to prefill than two steps compute: the first one that comes up
        would get all, and the next none. New requests pass them meanwhile, so they wait for that as long as for a
        worker, and not after an error."""
        up = [worker.snapshot() for worker in self.workers.values() if worker.takes_work] if self._queued else []
        if not prefill_candidates(up):
            return
        latest_s = self._now_s() - self._settings.new_wait_s
        are_full = False
        for attempt in list(self._queued.values()):
            if attempt.request_id not in self._queued or self._has_to_wait(attempt):
                continue
            may_wait = attempt.queued_s > latest_s and not attempt.num_errors
            are_full = are_full or (may_wait and self._are_full(self._offered(attempt)))
            if not (may_wait and are_full):
                self._place(attempt)

    def _are_full(self, workers: Sequence[Worker]) -> bool:
        """Whether each of ``workers`` that may compute a prompt has two steps of others before it."""
        candidates = prefill_candidates(worker.snapshot() for worker in workers)
        return all(worker.num_waiting_tokens >= 2 * worker.max_batch_tokens for worker, _ in candidates)

    def _has_to_wait(self, attempt: Attempt) -> bool:
        """Whether the attempt may not start now: it waits for a trial, or follows an error."""
        now_s = self._now_s()
        if self._blame.has_to_wait(attempt.request_id, now_s):
            return True
        return self._retries.has_to_wait(attempt, self.admission.num_in_flight, now_s)

    def _offered(self, attempt: Attempt) -> list[Worker]:
        """Workers that accept work, without those to avoid, as far as others have their role."""
        now_s = self._now_s()
        workers = [worker for worker in self.workers.values() if worker.takes_work]
        if not self._retries.avoids_any(attempt):
            return workers
        good = {worker for worker in workers if not self._retries.avoids(attempt, worker, now_s)}
        roles = {worker.role for worker in good}
        return [worker for worker in workers if worker in good or worker.role not in roles]

    def _decide(self, attempt: Attempt) -> _Decision | None:
        """Choice of the policy; ``None`` if no worker can start."""
        start_s = self._now_s()
        workers = self._offered(attempt)
        if not workers:
            return None
        blocks = attempt.blocks(workers[0].block_size)
        arrival = self._arrival(attempt, blocks, start_s)
        choice = self._placement.prefill(arrival, [worker.snapshot() for worker in workers])
        self._observer.routed(self._now_s() - start_s)
        return None if choice is None else _Decision(arrival, choice)

    def _send_or_hold(self, attempt: Attempt, decision: _Decision | None) -> None:
        """Send the attempt. A first one is held back if the policy lets it wait, or those of its share before it."""
        if decision is not None and attempt.choice == 0 and attempt.number < 0:
            arrival, choice = decision
            if choice.waits or (choice.is_late and self._held.is_any_of(arrival.share)):
                self._queued.pop(attempt.request_id, None)
                self._held.add(arrival.share, attempt)
                return
        self._send(attempt, decision)

    def _send(self, attempt: Attempt, decision: _Decision | None) -> None:
        """Send the attempt to the worker chosen, or queue it."""
        if decision is None:
            if attempt.request_id not in self._queued:
                self._observer.fell_back("no_worker")
            self._queued[attempt.request_id] = attempt
            return
        self._queued.pop(attempt.request_id, None)
        arrival, choice = decision
        now_s = self._now_s()
        if attempt.number < 0 and attempt.choice == 0:
            self._phase_ended(attempt, "queue", now_s - attempt.queued_s)
            if choice.ttft_s:
                attempt.journey.predicted_ttft_s = now_s - attempt.request.spec.arrived_s + choice.ttft_s
        ttft_slo_s = max(choice.due_s - now_s, MIN_DURATION_S) if choice.due_s < inf else 0.0
        deadline_s = self._deadline_s(attempt) - now_s
        patience_s = 0.0
        if choice.is_late:
            patience_s = max(0.0, deadline_s)
        elif arrival.wanted_s < inf:  # until it is as urgent as a new prompt of the most urgent tier
            patience_s = max(0.0, arrival.wanted_s - now_s - self._least_ttft_s)
        self._placement.placed(arrival, choice)
        worker = self.workers[choice.worker_id]
        self._retries.began(attempt, worker, now_s)
        self._observer.placed(self._settings.policy, worker.role, is_late=choice.is_late)
        roles = [each.role for each in self.workers.values() if each.takes_work]
        if worker.role is WorkerRole.DECODE and WorkerRole.PREFILL not in roles:
            self._observer.fell_back("no_prefill")
        attempt.submit(
            worker,
            handoff=choice.handoff,
            num_cached_tokens=choice.num_cached_tokens,
            num_blocks=arrival.blocks.num_blocks(),
            deadline_s=deadline_s,
            ttft_slo_s=ttft_slo_s,
            patience_s=patience_s,
            max_gap_s=self._settings.slo.tier(attempt.request.spec.tier).max_gap_seconds,
        )

    def _release_held(self) -> None:
        """Send attempts that were held back, until one has to wait; queue them if no worker is up."""
        if self._now_s() < self._held_until_s:
            return
        while (attempt := self._held.first()) is not None:
            began_s = self._now_s()
            decision = self._decide(attempt)
            now_s = self._now_s()
            if decision is None:
                attempt.queued_s = now_s  # it waits for a worker from now on
            elif decision.choice.waits:
                self._held.end_turn()
                self._held_until_s = now_s + HELD_REST * (now_s - began_s)
                return
            self._held.discard(attempt)
            self._send(attempt, decision)

    def _arrival(self, attempt: Attempt, blocks: PromptBlocks, now_s: float) -> Arrival:
        spec = attempt.request.spec
        tier = self._settings.slo.tier(spec.tier)
        has_objective = tier.ttft_seconds > 0 and not attempt.emitted
        return Arrival(
            request_id=attempt.request_id,
            blocks=blocks,
            now_s=now_s,
            wanted_s=spec.arrived_s + tier.ttft_seconds if has_objective else inf,
            is_probe=spec.is_probe,
            tpot_slo_s=tier.tpot_seconds,
            weight=tier.weight / self._heaviest,
            # What was accepted is served.
            may_refuse=tier.when_hopeless == "refuse" and attempt.request not in self._requests and not spec.is_probe,
            queued_s=attempt.queued_s,
            is_resumed=bool(attempt.emitted),
            share=f"{spec.tenant}/{spec.tier}",
        )

    def _bind(self, attempt: Attempt) -> None:
        """Bind the attempt to the decode worker chosen by the policy. It stays parked while choice 0 pulls the prompt,
        or until a decode worker has room."""
        prefill = attempt.prefill
        assert prefill is not None
        first = attempt.request.attempts.get(0)
        if first is not None and first is not attempt and first.is_pulling:
            # Choice 0 brings the prompt into that decode worker's prefix cache, so it is pulled once for all choices.
            self._unbound[attempt.request_id] = attempt
            return
        start_s = self._now_s()
        blocks = attempt.blocks(prefill.block_size)
        decoders = [w for w in self.workers.values() if w.role is WorkerRole.DECODE and w.takes_work]
        cut_off: set[str] = set()
        if self._retries.avoids_any(attempt):
            cut_off = {w.worker_id for w in decoders if self._retries.avoids(attempt, w, start_s)}
        binding = self._placement.decode(
            self._arrival(attempt, blocks, start_s), [w.snapshot() for w in decoders], cut_off, prefill.host
        )
        now_s = self._now_s()
        self._observer.routed(now_s - start_s)
        if binding is None:
            if attempt.request_id not in self._unbound:
                self._observer.fell_back("no_decode")
            self._unbound[attempt.request_id] = attempt
            return
        worker = self.workers[binding.worker_id]
        self._retries.began(attempt, worker, now_s)
        if worker.worker_id in cut_off:
            self._observer.fell_back("cut_off")
        elif shortfall(blocks, worker.snapshot(), num_cached_tokens=blocks.num_cached_tokens(worker.cached_blocks)):
            self._observer.fell_back("no_room")
        self._unbound.pop(attempt.request_id, None)
        deadline_s = self._settings.max_silence_s  # token 0 may come meanwhile
        attempt.bind(worker, num_blocks=blocks.num_blocks(), deadline_s=deadline_s, stall_slo_s=binding.stall_slo_s)

    def _bind_others(self, first: Attempt) -> None:
        """Bind the choices that waited for the pull of choice 0."""
        if first.choice == 0 and self._unbound:
            for attempt in list(first.request.attempts.values()):
                if attempt is not first and attempt.request_id in self._unbound:
                    self._bind(attempt)

    # An attempt's events

    def _take(self, attempt: Attempt, worker: Worker, token: TokenEvent) -> None:
        """Deliver a token if it is the next of its choice."""
        if not attempt.accepts(worker, token.key.attempt) or token.index < len(attempt.emitted):
            return
        if token.index > len(attempt.emitted):
            if worker is attempt.decode and attempt.awaits_first:
                attempt.overtook.append(token)
                return
            expected = len(attempt.emitted)
            log.error("request %s: token %d came where %d was next", attempt.name, token.index, expected)
            self._failed(attempt, worker, "a token was lost between worker and router")
            return
        is_first = attempt.awaits_first
        if is_first:
            if attempt.asks_prompt_logprobs:
                self._failed(attempt, worker, "prompt logprobs are missing at token 0")
                return
            self._first_token(attempt)
        elif token.index == 1 and attempt.handoff:
            attempt.journey.stall_s = self._now_s() - attempt.began_s
            self._observer.handoff_stalled(attempt.journey.stall_s)
        self._retries.clear(worker)
        attempt.emitted.append(token.token)
        attempt.heard_s = self._now_s()
        if self._blame.suspects and self._blame.passes(attempt.request_id, attempt.num_new_tokens):
            self._try_suspect()
        token.choice = attempt.choice
        attempt.request.token_received(token)
        if token.finish:
            self._phase_ended(attempt, "decode", self._now_s() - max(attempt.joined_s, attempt.first_token_s))
            self._end_choice(attempt, worker)
        elif is_first:
            if attempt.request.waiting_choices:
                self._launch_waiting(attempt.request)
            if attempt.overtook:
                overtook, attempt.overtook = attempt.overtook, []
                assert attempt.decode is not None
                self.tokens_received(attempt.decode, overtook)

    def _phase_ended(self, attempt: Attempt, phase: str, seconds: float) -> None:
        self._observer.phase_ended(phase, seconds)
        attempt.journey.spent(phase, seconds, self._now_s())

    def _first_token(self, attempt: Attempt) -> None:
        now_s = self._now_s()
        attempt.awaits_first = False
        attempt.num_errors = 0
        self._retries.over(attempt.request_id)
        if not attempt.emitted:
            attempt.began_s = attempt.journey.token_s = now_s
        elif attempt.paused_s:
            attempt.journey.lost_s += now_s - attempt.paused_s
        attempt.paused_s = 0.0
        attempt.first_token_s = now_s
        if attempt.started_s:
            self._phase_ended(attempt, "prefill", now_s - attempt.started_s)
        is_parked = attempt.handoff and not attempt.has_joined
        attempt.state = RequestState.HANDOFF if is_parked else RequestState.DECODING
        assert attempt.prefill is not None
        self._placement.prefilled(attempt.request_id, attempt.prefill.worker_id)
        if not is_parked:
            self._decoding(attempt)

    def _decoding(self, attempt: Attempt) -> None:
        worker = attempt.decode or attempt.prefill
        assert worker is not None
        num_tokens = max(1, len(attempt.emitted))
        snapshot = worker.snapshot()
        self._placement.decoding(attempt.request_id, attempt.began_s, num_tokens, snapshot)
        if not attempt.journey.predicted_tpot_s:
            step_s = self.costs[worker.role].decode_s(max(1, snapshot.num_decoding), snapshot.num_context_tokens)
            attempt.journey.predicted_tpot_s = step_s * worker.decode_correction

    def _started(self, attempt: Attempt, worker: Worker, event: RequestEvent) -> None:
        worker.in_flight.remove(attempt.request_id)
        if worker is attempt.decode:
            attempt.has_reserved = True
            self._phase_ended(attempt, "decode_queue", event.waited_s)
            self._observer.pull_started(event.num_cached_tokens)
            return
        attempt.started_s = self._now_s()
        self._announce(attempt, worker.block_size)
        self._phase_ended(attempt, "prefill_queue", event.waited_s)
        request = attempt.request
        if not request.is_started:
            request.is_started = True
            request.num_cached_tokens = min(event.num_cached_tokens, len(request.spec.prompt_tokens))
            self._observer.prompt_started(request.num_cached_tokens)
            request.prompt_started(request.num_cached_tokens)

    def _last_chunk(self, attempt: Attempt, worker: Worker, event: RequestEvent) -> None:
        if attempt.handoff and attempt.source is None:
            attempt.source = KvSource(address=worker.kv_address, worker_epoch=worker.epoch, handle=event.handle)
            if attempt.awaits_first:
                attempt.state = RequestState.HANDOFF
            self._placement.prefilled(attempt.request_id, worker.worker_id)
            self._bind(attempt)

    def _joined(self, attempt: Attempt) -> None:
        attempt.has_joined = True
        attempt.joined_s = self._now_s()
        if not attempt.awaits_first:
            attempt.state = RequestState.DECODING
            self._decoding(attempt)
            self._phase_ended(attempt, "handoff", attempt.joined_s - attempt.first_token_s)
        self._bind_others(attempt)

    def _rejected(self, attempt: Attempt, worker: Worker, event: RequestEvent) -> None:
        if event.refusal not in (RefusalCode.DRAINING, RefusalCode.OVERLOADED):
            self.fail(attempt.request, GenerationError(400, event.message))
            return
        worker.is_draining |= event.refusal is RefusalCode.DRAINING
        is_error = event.refusal is RefusalCode.OVERLOADED
        self._go_on_without(attempt, worker, "refused", event.message, is_error=is_error)

    def _kv_unavailable(self, attempt: Attempt, worker: Worker, event: RequestEvent) -> None:
        if worker is attempt.decode and event.refusal is not RefusalCode.SOURCE:
            assert attempt.prefill is not None
            self._retries.pull_failed(attempt.prefill, worker, self._now_s())
            self._go_on_without(attempt, worker, "kv_unavailable", event.message)
        else:
            is_expired = worker is attempt.prefill  # for want of room to decode, which is no error
            self._retry(attempt, "expired" if is_expired else "kv_unavailable", event.message, is_error=not is_expired)

    # Fail-over

    def _blame_for(self, worker: Worker, computed: Sequence[Attempt]) -> None:
        """Count the loss of ``worker``, and fail the request whose fault it is, if any."""
        process = whole_worker_id(worker.worker_id), worker.epoch
        culprit = self._blame.worker_lost(process, [attempt.request_id for attempt in computed], self._now_s())
        for attempt in computed:
            if attempt.request_id in self._blame.suspects:
                log.warning("request %s may be what ended worker %s", attempt.name, worker.worker_id)
        if culprit is not None:
            message = f"{self._blame.num_losses(culprit)} workers ended while they computed this request"
            self.fail(self._attempts[culprit].request, GenerationError(500, message))

    def _try_suspect(self) -> None:
        """Begin the next trial, if its time has come."""
        if self._blame.on_trial in self._queued:
            self._place(self._queued[self._blame.on_trial])

    def _failed(self, attempt: Attempt, worker: Worker, message: str) -> None:
        attempt.num_failures += 1
        if self._now_s() < self._deadline_s(attempt):  # workers enforce deadlines, too
            self._retries.step_failed(attempt, worker, self._now_s())
        self._retry(attempt, "failed", message)

    def _go_on_without(
        self, attempt: Attempt, worker: Worker, reason: str, message: str, *, is_error: bool = True
    ) -> None:
        """Continue without ``worker``: bind the parked prompt to another decode worker if possible, else retry."""
        is_late = self._now_s() >= self._deadline_s(attempt)
        is_held = self._blame.is_held(attempt.request_id)
        if worker is not attempt.decode or not attempt.may_rebind or is_late or is_held:
            self._retry(attempt, reason, message, is_error=is_error)
            return
        log.info("request %s, attempt %d is bound anew: %s (%s)", attempt.name, attempt.number, reason, message)
        attempt.unbind()
        self._observer.retried("rebound", 0)
        self._bind(attempt)

    def _retry(self, attempt: Attempt, reason: str, message: str, *, is_error: bool = True) -> None:
        """Give up the attempt and place the next one: at once, or after an error when its turn comes."""
        log.info("request %s, attempt %d: %s (%s)", attempt.name, attempt.number, reason, message)
        error = self._verdict(attempt)
        if error is not None:
            self.fail(attempt.request, error)
            return
        self._placement.left(attempt.request_id, 0)
        is_started = attempt.started_s > 0
        attempt.abandon()
        num_tokens = len(attempt.request.spec.prompt_tokens) + len(attempt.emitted)
        self._observer.retried(reason, num_tokens if is_started else 0)
        attempt.journey.num_retries += 1
        attempt.queued_s = attempt.paused_s = self._now_s()
        self._retries.over(attempt.request_id)
        if is_error:
            self._retries.failed(attempt, self._now_s())
        self._bind_others(attempt)
        self._place(attempt)

    def _verdict(self, attempt: Attempt) -> GenerationError | None:
        """Error that forbids another attempt, or ``None``."""
        if self._now_s() >= self._deadline_s(attempt):  # workers enforce deadlines, too
            return self._silence_error()
        if attempt.num_failures >= MAX_FAILURES:
            return GenerationError(500, "the model could not compute this request")
        if attempt.number + 1 >= MAX_ATTEMPTS:
            return GenerationError(503, f"gave up after {MAX_ATTEMPTS} attempts", retry_after_s=MIN_RETRY_AFTER_S)
        return None

    def _silence_error(self) -> GenerationError:
        remedy = "raise router.max_silence_seconds, or add workers"
        return GenerationError(504, f"no token came for {self._settings.max_silence_s:g} s: {remedy}")


class _Decision(NamedTuple):
    arrival: Arrival
    choice: PrefillChoice
