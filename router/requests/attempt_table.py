"""Attempts by state, and `AttemptTable.move`, which alone takes them from one state to the next. Never decides.

All that a state means to others follows from the move: the tables here, commands to workers, their load in flight, and
what the policy is told.
"""

from __future__ import annotations

from collections import Counter

from pdserve.router.cluster.worker import Worker
from pdserve.router.requests.attempt import Attempt, Decoding, Ended, Held, Parked, Prefilling, Pull, Queued, State
from pdserve.router.requests.placement import Placement


class AttemptTable:
    """Attempts in the dispatcher's care."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self.all: dict[int, Attempt] = {}
        """By request id, in order of arrival, as in the next two."""
        self.queued: dict[int, Attempt] = {}
        self.unbound: dict[int, Attempt] = {}
        """Those parked without a decode worker."""
        self.held = HeldBack()
        self.retrying: set[int] = set()
        """Ids of those on workers that follow an error and have no token yet."""

    def move(self, attempt: Attempt, state: State) -> None:
        """Have the attempt leave its state and enter ``state``; a new one enters that which it has."""
        old, attempt.state = attempt.state, state
        request_id = attempt.request_id
        self._file(attempt, old, state)
        if old.unreported is not None and old.unreported is not state.unreported:
            old.unreported.in_flight.remove(request_id)
        if isinstance(old, Prefilling) and isinstance(state, Parked | Decoding):
            self._placement.prefilled(request_id)
        match state:
            case Prefilling() if not isinstance(old, Prefilling):
                self._submit(attempt, state)
            case Parked() if state.pull is not None and not (isinstance(old, Parked) and old.pull is not None):
                self._prepare(attempt, state)
            case Decoding() if not isinstance(old, Decoding):
                self._decode(attempt, state)
            case Queued() | Ended() if not isinstance(old, Queued) or isinstance(state, Ended):
                self._leave_workers(attempt, old, state)

    def handoff_ages_s(self, now_s: float) -> list[float]:
        """Seconds since token 0 of each answer that waits for a decode worker to hold its prompt."""
        states = [attempt.state for attempt in self.all.values() if isinstance(attempt.state, Parked)]
        return [now_s - state.first_token_s for state in states if state.first_token_s is not None]

    def links(self) -> Counter[tuple[str, str]]:
        """Answers that were handed over, or are about to be: their number by ids of prefill and decode worker."""
        links: Counter[tuple[str, str]] = Counter()
        for attempt in self.all.values():
            match attempt.state:
                case (
                    Parked(prefill=source, pull=Pull(worker=puller))
                    | Decoding(prefill=Worker() as source, worker=puller)
                ):
                    links[source.worker_id, puller.worker_id] += 1
        return links

    def _file(self, attempt: Attempt, old: State, state: State) -> None:
        belongs = (
            (self.all, not isinstance(state, Ended)),
            (self.queued, isinstance(state, Queued)),
            (self.unbound, isinstance(state, Parked) and state.pull is None),
        )
        for table, is_in in belongs:
            if is_in:
                table[attempt.request_id] = attempt
            else:
                table.pop(attempt.request_id, None)
        if isinstance(old, Held):
            self.held.discard(attempt, old.share)
        if isinstance(state, Held):
            self.held.add(attempt, state.share)
        if attempt.num_errors and isinstance(state, Prefilling | Parked):
            self.retrying.add(attempt.request_id)
        else:
            self.retrying.discard(attempt.request_id)

    def _submit(self, attempt: Attempt, state: Prefilling) -> None:
        worker, sent, (arrival, choice) = state.worker, state.sent, state.decision
        attempt.request.workers.append(worker.worker_id)
        self._placement.placed(arrival, choice)
        worker.in_flight.add_prefill(attempt.request_id, sent.num_known_tokens - choice.num_cached_tokens)
        if not sent.handoff:
            worker.in_flight.add_decode(attempt.request_id, sent.num_known_tokens, arrival.blocks.num_blocks())
        worker.submit(sent)

    def _prepare(self, attempt: Attempt, state: Parked) -> None:
        """Token 0 may be out already: the parked blocks do not contain its KV."""
        assert state.pull is not None
        worker, sent = state.pull.worker, state.pull.sent
        attempt.request.workers.append(worker.worker_id)
        num_blocks = attempt.blocks(state.prefill.block_size).num_blocks()
        worker.in_flight.add_decode(attempt.request_id, sent.num_known_tokens, num_blocks)
        worker.prepare(sent, state.source)

    def _decode(self, attempt: Attempt, state: Decoding) -> None:
        worker, snapshot = state.worker, state.worker.snapshot()
        self._placement.decoding(attempt.request_id, attempt.journey.token_s, max(1, len(attempt.emitted)), snapshot)
        if not attempt.journey.predicted_tpot_s:
            cost = self._placement.costs[worker.role]
            step_s = cost.decode_s(max(1, snapshot.num_decoding), snapshot.num_context_tokens)
            attempt.journey.predicted_tpot_s = step_s * worker.load.decode_correction

    def _leave_workers(self, attempt: Attempt, old: State, state: Queued | Ended) -> None:
        """Free what workers hold."""
        num_tokens, finisher = (state.num_tokens, state.finisher) if isinstance(state, Ended) else (0, None)
        self._placement.left(attempt.request_id, num_tokens)
        for worker in old.workers:
            has_parked = isinstance(old, Parked) and worker is old.prefill
            if worker.is_up and (worker is not finisher or has_parked):
                worker.cancel(attempt.request_id, attempt.number)
        if not isinstance(old, Queued | Held):
            attempt.known_blocks = None


class HeldBack:
    """Attempts that are `Held`. Shares take turns; in each, the first that was added goes first."""

    def __init__(self) -> None:
        self._shares: dict[str, dict[int, Attempt]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._shares.values()))

    def is_any_of(self, share: str) -> bool:
        return share in self._shares

    def add(self, attempt: Attempt, share: str) -> None:
        self._shares.setdefault(share, {})[attempt.request_id] = attempt

    def discard(self, attempt: Attempt, share: str) -> None:
        del self._shares[share][attempt.request_id]
        if not self._shares[share]:
            del self._shares[share]

    def first(self) -> Attempt | None:
        """First attempt of the share whose turn it is."""
        return next((attempt for attempts in self._shares.values() for attempt in attempts.values()), None)

    def end_turn(self) -> None:
        share = next(iter(self._shares))
        self._shares[share] = self._shares.pop(share)
