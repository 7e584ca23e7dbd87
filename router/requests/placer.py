"""Places queued attempts and binds parked ones, some in each turn of the driver's loop.

What is due is decided by the dispatcher's events, where it goes by a `Placement`, when it may go by `Blame` and
`Retries`; `AttemptTable.move` carries it out. Placing ends no attempt, so nothing here is entered twice.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf

from pdserve.contracts.request import GenerationRequest, PrefixSource
from pdserve.contracts.worker_config import WorkerRole, whole_worker_id
from pdserve.router.cluster.worker import Worker
from pdserve.router.requests.admission import Admission
from pdserve.router.requests.attempt import Attempt, Decision, Held, Loss, Parked, Prefilling, Pull, Queued
from pdserve.router.requests.attempt_table import AttemptTable
from pdserve.router.requests.blame import Blame
from pdserve.router.requests.observer import DispatchObserver
from pdserve.router.requests.placement import (
    Arrival,
    Placement,
    PrefixPull,
    PromptBlocks,
    prefill_candidates,
    shortfall,
)
from pdserve.router.requests.retries import Retries
from pdserve.router.requests.settings import DispatchSettings

log = logging.getLogger(__name__)

TURN_S = 2e-3
"""Seconds of placing after which the loop turns."""
HELD_REST = 19
"""Time until an attempt that is held back is considered again, as a multiple of what that takes."""
MIN_DURATION_S = 1e-3
"""Duration sent for an instant that has passed: 0 would mean none."""


class Placer:
    """Places queued attempts and binds parked ones."""

    def __init__(
        self,
        workers: Mapping[str, Worker],
        table: AttemptTable,
        placement: Placement,
        settings: DispatchSettings,
        admission: Admission,
        blame: Blame,
        retries: Retries,
        observer: DispatchObserver,
        now_s: Callable[[], float],
        *,
        wake: Callable[[], object],
    ) -> None:
        """
        Args:
            workers: those that are up, by id, kept by the dispatcher.
            blame, retries: told of losses, errors and tokens by `pdserve.router.requests.failover`.
            wake: has `turn` called soon.
        """
        self._workers, self._table, self._placement, self._settings = workers, table, placement, settings
        self._admission, self._blame, self._retries = admission, blame, retries
        self._observer, self._now_s, self._wake_up = observer, now_s, wake
        tiers = [settings.slo, *settings.slo.tiers.values()]
        self._least_ttft_s = min(tier.ttft_seconds for tier in tiers)
        self._heaviest = max(tier.weight for tier in tiers) or 1.0
        self._due: tuple[deque[Attempt], deque[Attempt]] = deque(), deque()
        """To be placed or bound for the first time in their state: those whose client has tokens, and others."""
        self._unseen: deque[Attempt] = deque()
        """Of the queue as it was when it was last due: what no turn has looked at since."""
        self._is_woken = self._is_queue_due = self._is_held_due = False
        self._held_until_s = 0.0
        """Until then the policy is not asked again for what is held back."""

    # Turns

    def put(self, attempt: Attempt) -> None:
        """Have the attempt, which is queued or not bound, placed or bound in a next turn."""
        self._due[not attempt.emitted].append(attempt)
        self._wake()

    def put_others(self, first: Attempt) -> None:
        """Have the choices bound that waited for the pull of choice 0, if ``first`` is that."""
        if first.choice == 0 and self._table.unbound:
            for attempt in first.request.attempts.values():
                if attempt is not first and attempt.request_id in self._table.unbound:
                    self.put(attempt)

    def look(self, *, at_queue: bool = True) -> None:
        """Have the attempts that are held back considered in a next turn, and with ``at_queue`` all that are queued."""
        self._is_held_due = True
        self._is_queue_due |= at_queue
        self._wake()

    def _wake(self) -> None:
        if not self._is_woken:
            self._is_woken = True
            self._wake_up()

    def turn(self) -> list[Attempt]:
        """Place for `TURN_S`, or one attempt, and have another turn if more is to do; return attempts for which no
        worker came in time."""
        overdue: list[Attempt] = []
        if self._is_woken:
            self._is_woken = False
            end_s = self._now_s() + TURN_S
            if not (self._place_due(end_s) and self._place_queued(end_s, overdue) and self._release_held(end_s)):
                self._wake()
        return overdue

    def _place_due(self, end_s: float) -> bool:
        for due in self._due:
            while due:
                if self._now_s() >= end_s:
                    return False
                attempt = due.popleft()
                match attempt.state:
                    case Queued() as state:
                        self._report(attempt, state)
                        if not self._has_to_wait(attempt):
                            self.place(attempt, self.decide(attempt))
                    case Parked(pull=None) as state:
                        self._bind(attempt, state)
        return True

    def _report(self, attempt: Attempt, state: Queued) -> None:
        """Log and count the loss of the attempt before: here, because a thousand at once would take too long."""
        if state.loss is not None:
            log.info("request %s, attempt %d: %s (%s)", attempt.name, attempt.number, *state.loss[:2])
            self._observer.retried(state.loss.reason, state.loss.num_tokens)
            self._table.move(attempt, replace(state, loss=None))

    def _place_queued(self, end_s: float, overdue: list[Attempt]) -> bool:
        """Place queued attempts while a worker has less to prefill than two steps compute: the first one that comes up
        would get all, and the next none. As new requests pass them meanwhile, none waits for that longer than for a
        worker, nor after an error or on trial."""
        if self._is_queue_due and not self._unseen:
            self._is_queue_due = False
            self._unseen.extend(self._table.queued.values())
        if not self._unseen:
            return True
        can_start = bool(prefill_candidates([worker.snapshot() for worker in self.taking_work()]))
        are_full = False
        while self._unseen:
            now_s = self._now_s()
            if now_s >= end_s:
                return False
            attempt = self._unseen.popleft()
            state = attempt.state
            if not isinstance(state, Queued):
                continue
            if self._has_to_wait(attempt):
                self._table.move(attempt, replace(state, since_s=now_s))
                continue
            waited_s = now_s - state.since_s
            is_patient = not attempt.num_errors and attempt.request_id not in self._blame.on_trial
            if can_start and is_patient and waited_s < self._settings.new_wait_s:
                are_full = are_full or self._are_full(attempt)
                if are_full:
                    continue
            is_placed = can_start and self.place(attempt, self.decide(attempt), is_first=False)
            wait_s = self._settings.new_wait_s if attempt.is_new else self._settings.worker_wait_s
            if not is_placed and waited_s >= wait_s:
                overdue.append(attempt)
        return not self._is_queue_due

    def _release_held(self, end_s: float) -> bool:
        """Send attempts that were held back, until one has to wait; queue them if no worker is up."""
        if not self._is_held_due or self._now_s() < self._held_until_s:
            return True
        while (attempt := self._table.held.first()) is not None:
            began_s = self._now_s()
            if began_s >= end_s:
                return False
            decision = self.decide(attempt)
            now_s = self._now_s()
            if decision is None:
                self._table.move(attempt, Queued(now_s))  # it waits for a worker from now on
                self._observer.fell_back("no_worker")
            elif decision.choice.is_held:
                self._table.held.end_turn()
                self._held_until_s = now_s + HELD_REST * (now_s - began_s)
                break
            else:
                self._send(attempt, decision)
        self._is_held_due = False
        return True

    # Decisions

    def taking_work(self) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.takes_work]

    def _are_full(self, attempt: Attempt) -> bool:
        """Whether each worker that may compute the prompt has two steps of others before it."""
        candidates = prefill_candidates([worker.snapshot() for worker in self._offered(attempt)])
        return all(worker.num_waiting_tokens >= 2 * worker.max_batch_tokens for worker in candidates)

    def _has_to_wait(self, attempt: Attempt) -> bool:
        """Whether the attempt may not start now: it waits for a trial, or follows an error."""
        now_s, num_retrying = self._now_s(), len(self._table.retrying)
        return self._blame.has_to_wait(attempt.request_id, now_s) or self._retries.has_to_wait(
            attempt, num_retrying, self._admission.num_in_flight, now_s
        )

    def _offered(self, attempt: Attempt) -> list[Worker]:
        """Workers that accept work, without those to avoid, as far as others have their role."""
        workers = self.taking_work()
        avoided = self._retries.avoided(attempt, workers, self._now_s())
        roles = {worker.role for worker in workers if worker not in avoided} if avoided else ()
        return [worker for worker in workers if worker not in avoided or worker.role not in roles]

    def decide(self, attempt: Attempt) -> Decision | None:
        """Choice of the policy; ``None`` if no worker can start."""
        start_s = self._now_s()
        workers = self._offered(attempt)
        if not workers:
            return None
        arrival = self._arrival(attempt, attempt.blocks(workers[0].block_size), start_s)
        choice = self._placement.prefill(arrival, [worker.snapshot() for worker in workers])
        self._observer.routed(self._now_s() - start_s)
        return None if choice is None else Decision(arrival, choice)

    def _arrival(self, attempt: Attempt, blocks: PromptBlocks, now_s: float) -> Arrival:
        spec, state = attempt.request.spec, attempt.state
        tier = self._settings.slo.tier(spec.tier)
        is_resumed = bool(attempt.emitted) or attempt.request_id in self._blame.on_trial  # others wait for the trial
        has_objective = tier.ttft_seconds > 0 and not is_resumed
        is_accepted = attempt.request_id in self._table.all
        return Arrival(
            request_id=attempt.request_id,
            blocks=blocks,
            now_s=now_s,
            wanted_s=spec.arrived_s + tier.ttft_seconds if has_objective else inf,
            is_probe=spec.is_probe,
            tpot_slo_s=tier.tpot_seconds,
            weight=tier.weight / self._heaviest,
            may_refuse=tier.when_hopeless == "refuse" and not is_accepted and not spec.is_probe,
            queued_s=state.since_s if isinstance(state, Queued | Held) else 0.0,
            is_resumed=is_resumed,
            decodes=len(attempt.emitted) + 1 < spec.sampling.max_tokens,
            is_sibling=attempt.choice > 0,
            share=f"{spec.tenant}/{spec.tier}",
        )

    # Placing and binding

    def place(self, attempt: Attempt, decision: Decision | None, *, is_first: bool = True) -> bool:
        """Send a queued attempt, unless no worker can start, which counts the first time. A new one is held back if
        the policy lets it wait, or those of its share before it."""
        if decision is None:
            if is_first:
                self._observer.fell_back("no_worker")
            return False
        arrival, choice = decision
        is_behind = choice.is_held or (choice.is_late and self._table.held.is_any_of(arrival.share))
        if is_behind and attempt.is_new:
            self._table.move(attempt, Held(arrival.queued_s, arrival.share))
        else:
            self._send(attempt, decision)
        return True

    def _send(self, attempt: Attempt, decision: Decision) -> None:
        arrival, choice = decision
        now_s, spec = self._now_s(), attempt.request.spec
        if attempt.is_new:
            attempt.journey.spent("queue", now_s - arrival.queued_s, now_s)
            if choice.ttft_s:
                attempt.journey.predicted_ttft_s = now_s - spec.arrived_s + choice.ttft_s
        left_s = attempt.heard_s + self._settings.max_silence_s - now_s
        patience_s = 0.0
        if choice.is_late:
            patience_s = max(0.0, left_s)
        elif arrival.wanted_s < inf:  # until it is as urgent as a new prompt of the most urgent tier
            patience_s = max(0.0, arrival.wanted_s - now_s - self._least_ttft_s)
        sampling = spec.sampling
        if sampling.num_prompt_logprobs >= 0 and not attempt.asks_prompt_logprobs:
            sampling = replace(sampling, num_prompt_logprobs=-1)
        due_s = -inf if arrival.is_resumed else choice.due_s
        worker = self._workers[choice.worker_id]
        self._retries.was_given(worker, now_s)
        self._observer.placed(self._settings.policy, worker.role, is_late=choice.is_late)
        if worker.role is WorkerRole.DECODE and all(w.role is not WorkerRole.PREFILL for w in self.taking_work()):
            self._observer.fell_back("no_prefill")
        attempt.number += 1
        attempt.num_resumed = len(attempt.emitted)
        sent = GenerationRequest(
            request_id=attempt.request_id,
            attempt=attempt.number,
            prompt_tokens=spec.prompt_tokens,
            emitted_tokens=tuple(attempt.emitted),
            choice=attempt.choice,
            sampling=sampling,
            cache_salt=spec.cache_salt,
            deadline_s=max(left_s, MIN_DURATION_S),
            ttft_slo_s=max(due_s - now_s, MIN_DURATION_S) if due_s < inf else 0.0,
            patience_s=patience_s,
            max_gap_s=self._settings.slo.tier(spec.tier).max_gap_seconds,
            block_hashes=spec.block_hashes,
            handoff=choice.handoff,
            prefix_source=self._prefix_source(choice.prefix),
        )
        self._table.move(attempt, Prefilling(worker, sent, decision))

    def _prefix_source(self, pull: PrefixPull | None) -> PrefixSource | None:
        if pull is None:
            return None
        source = self._workers[pull.worker_id]
        return PrefixSource(
            address=source.kv_address,
            worker_epoch=source.epoch,
            num_tokens=pull.num_tokens,
            min_tokens=pull.min_tokens,
            max_s=pull.prefill_s,
        )

    def park(self, attempt: Attempt, state: Parked) -> None:
        """Have the prompt, which is parked without a decode worker, bound in a next turn."""
        self._table.move(attempt, state)
        if all(worker.role is not WorkerRole.DECODE for worker in self.taking_work()):
            self._observer.fell_back("no_decode")
        self.put(attempt)

    def _bind(self, attempt: Attempt, state: Parked) -> None:
        """Bind the decode worker chosen by the policy. The prompt stays parked while choice 0 pulls it, or until a
        decode worker is up."""
        first = attempt.request.attempts.get(0, attempt).state
        if isinstance(first, Parked) and first.is_pulling:
            # Choice 0 brings the prompt into that decode worker's prefix cache, so it is pulled once for all choices.
            return
        start_s = self._now_s()
        blocks = attempt.blocks(state.prefill.block_size)
        decoders = [worker for worker in self.taking_work() if worker.role is WorkerRole.DECODE]
        if state.prefill.role is WorkerRole.DECODE:  # it took that role while it had the prompt
            owner = whole_worker_id(state.prefill.worker_id)
            others = [worker for worker in decoders if whole_worker_id(worker.worker_id) != owner]
            if decoders and not others:  # it pulls nothing from itself, and has the prompt in its prefix cache
                attempt.num_excused += 1
                message, num_tokens = "its worker is the only decode worker now", state.sent.num_known_tokens
                self.queue_again(attempt, Loss("relabelled", message, num_tokens))
                return
            decoders = others
        cut_off = {worker.worker_id for worker in self._retries.avoided(attempt, decoders, start_s)}
        snapshots = [worker.snapshot() for worker in decoders]
        arrival = self._arrival(attempt, blocks, start_s)._replace(token_s=state.first_token_s)
        binding = self._placement.decode(arrival, snapshots, cut_off, state.prefill.host)
        now_s = self._now_s()
        self._observer.routed(now_s - start_s)
        if binding is None:
            return
        worker = self._workers[binding.worker_id]
        self._retries.was_given(worker, now_s)
        if worker.worker_id in cut_off:
            self._observer.fell_back("cut_off")
        elif shortfall(blocks, worker.snapshot(), num_cached_tokens=blocks.num_cached_tokens(worker.cached_blocks)):
            self._observer.fell_back("no_room")
        deadline_s = max(self._settings.max_silence_s, MIN_DURATION_S)  # token 0 may come meanwhile
        sent = replace(state.sent, deadline_s=deadline_s, stall_slo_s=binding.stall_slo_s)
        self._table.move(attempt, replace(state, pull=Pull(worker, sent), num_pulls=state.num_pulls + 1))

    def queue_again(self, attempt: Attempt, loss: Loss, retry_at_s: float = 0.0) -> None:
        """Queue an attempt that was given up, for a next one that begins at ``retry_at_s`` at the earliest."""
        attempt.journey.num_retries += 1
        attempt.lost_s = self._now_s()
        self._table.move(attempt, Queued(attempt.lost_s, retry_at_s, loss))
        self.put_others(attempt)
        self.put(attempt)
