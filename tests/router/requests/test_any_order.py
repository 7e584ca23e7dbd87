"""Whatever workers say, in whatever order, and whatever becomes of them: every request ends once, its tokens come in
order, and nothing of it is left."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from pdserve.contracts.events import RefusalCode, RequestEvent, RequestEventKind, RequestKey, TokenEvent
from pdserve.contracts.request import FinishReason, GenerationRequest, KvSource, SamplingParams
from pdserve.contracts.worker_config import WorkerRole
from pdserve.router.requests.attempt import Held, Parked, Prefilling, Queued
from pdserve.router.requests.dispatch import Dispatcher
from pdserve.router.requests.goodput import Goodput
from pdserve.router.requests.request import GenerationError, RequestSpec
from pdserve.router.requests.settings import DispatchSettings
from tests.router.requests.test_dispatch_core import HANDLE, SLO, ReadRequest, RecordingWorker
from tests.router.rig import COST

LAYOUTS = (
    ("prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"),
    ("prefill-0", "mixed-0", "decode-0"),
    ("mixed-0", "mixed-1"),
)
NUM_TOKENS = 6
SETTINGS = DispatchSettings(slo=SLO, max_in_flight=60)


class AnyWorker(RecordingWorker):
    """Keeps what it is sent."""

    def __init__(self, name: str, sent: list[tuple[AnyWorker, GenerationRequest]]) -> None:
        super().__init__(name, WorkerRole(name.split("-")[0]))
        self._sent = sent

    def submit(self, request: GenerationRequest) -> None:
        assert self.is_up
        self._sent.append((self, request))

    def prepare(self, request: GenerationRequest, source: KvSource) -> None:
        assert self.is_up
        self._sent.append((self, request))

    def cancel(self, request_id: int, attempt: int) -> None:
        assert self.is_up


class World:
    """A dispatcher, its workers, and everything that was ever sent to one of them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_s = 1.0
        self.turns: list[Callable[[], None]] = []
        self.sent: list[tuple[AnyWorker, GenerationRequest]] = []
        self.workers = [AnyWorker(name, self.sent) for name in self.random.choice(LAYOUTS)]
        self.requests: list[ReadRequest] = []
        self.dispatcher = Dispatcher(
            dict.fromkeys(WorkerRole, COST), SETTINGS, lambda: self.now_s, call_soon=self.turns.append
        )
        for worker in self.workers:
            self.dispatcher.worker_up(worker)
        self.actions = (
            [self.start] * 4 + [self.event] * 30 + [self.token] * 15 + [self.turn] * 30 + [self.rise] * 4
            + [self.lose, self.drain, self.cancel, self.finish, self.wait]
        )  # fmt: skip

    def start(self) -> None:
        tokens = tuple(self.random.randrange(9) for _ in range(self.random.choice([1, 5, 400])))
        sampling = SamplingParams(max_tokens=NUM_TOKENS)
        request = ReadRequest(RequestSpec(prompt_tokens=tokens, sampling=sampling, arrived_s=self.now_s,
                                          num_choices=self.random.choice([1, 1, 4])))  # fmt: skip
        try:
            self.dispatcher.start(request)
        except GenerationError:
            return
        self.requests.append(request)

    def _pick(self) -> tuple[AnyWorker, GenerationRequest, RequestKey] | None:
        if not self.sent:
            return None
        worker, request = self.random.choice(self.sent[-20:])
        return (worker, request, RequestKey(0, request.request_id, request.attempt)) if worker.is_up else None

    def event(self) -> None:
        if picked := self._pick():
            worker, request, key = picked
            is_prefill = worker.role is not WorkerRole.DECODE
            usual = RequestEventKind.LAST_CHUNK if is_prefill and request.handoff else RequestEventKind.JOINED
            kind = self.random.choice([RequestEventKind.STARTED, usual] * 20 + list(RequestEventKind))
            refusal = self.random.choice([RefusalCode.DRAINING, RefusalCode.OVERLOADED, RefusalCode.SOURCE])
            self.dispatcher.event_received(worker, RequestEvent(key, kind, handle=HANDLE, refusal=refusal))

    def token(self) -> None:
        if picked := self._pick():
            worker, request, key = picked
            attempt = self.dispatcher.attempts.all.get(request.request_id)
            known = len(attempt.emitted) if attempt else 0
            first = max(0, known + self.random.choice([-1, 0, 0, 0, 0, 0, 0, 0, 1]))
            indices = range(first, min(first + self.random.choice([1, 1, 2]), NUM_TOKENS))
            ends = {NUM_TOKENS - 1: FinishReason.LENGTH}
            tokens = [TokenEvent(key, 0, index, 7, None, ends.get(index, FinishReason.NONE)) for index in indices]
            self.dispatcher.tokens_received(worker, tokens)

    def turn(self) -> None:
        for turn in [self.turns.pop() for _ in range(len(self.turns))]:
            turn()

    def lose(self) -> None:
        worker = self.random.choice(self.workers)
        if worker.is_up:
            self.dispatcher.worker_lost(worker)

    def rise(self) -> None:
        worker = self.random.choice(self.workers)
        worker.is_draining = False
        self.dispatcher.worker_up(worker)

    def drain(self) -> None:
        self.random.choice(self.workers).is_draining = True

    def cancel(self) -> None:
        if self.requests:
            self.dispatcher.cancel(self.random.choice(self.requests))

    def finish(self) -> None:
        if self.requests:
            self.dispatcher.finish(self.random.choice(self.requests), self.random.randrange(4))

    def wait(self) -> None:
        self.now_s += self.random.choice([0.01, 1.0, 6.0])
        self.dispatcher.sweep()

    def check(self) -> None:
        table, unreported = self.dispatcher.attempts, defaultdict[RecordingWorker, set[int]](set)
        pulled = set[int]()
        for request_id, attempt in table.all.items():
            assert attempt.request.attempts[attempt.choice] is attempt
            state = attempt.state
            assert (request_id in table.queued) == isinstance(state, Queued)
            assert (request_id in table.unbound) == (isinstance(state, Parked) and state.pull is None)
            assert all(worker.is_up for worker in state.workers)
            if isinstance(state, Parked) or (isinstance(state, Prefilling) and state.sent.handoff):
                pulled.add(request_id)
            if isinstance(state.unreported, RecordingWorker):
                unreported[state.unreported].add(request_id)
        for worker in self.workers:
            in_flight = worker.in_flight
            assert {*in_flight._prefills, *in_flight.decodes} == unreported[worker]
        placement = self.dispatcher.placement
        assert isinstance(placement, Goodput)
        assert placement._pulls._pulls.keys() == pulled
        assert bool(placement._pulls._from) == bool(pulled)
        assert len(table.held) == sum(isinstance(each.state, Held) for each in table.all.values())
        assert sum(self.dispatcher.outcomes.values()) + self.dispatcher.num_in_flight == self.dispatcher.num_accepted
        for request in self.requests:
            for choice in range(request.spec.num_choices):
                indices = [index for each, index in request.tokens if each == choice]
                assert indices == list(range(len(indices)))

    def check_empty(self) -> None:
        dispatcher = self.dispatcher
        assert dispatcher.num_in_flight == 0
        assert all(request.outcome for request in self.requests)
        assert not dispatcher.attempts.all
        assert not dispatcher.attempts.retrying
        assert not dispatcher._failover._blame._losses
        assert dispatcher._failover._blame._groups == [{}]
        assert not dispatcher._failover._blame._bystanders
        assert not dispatcher._failover._blame._first
        assert not dispatcher._failover._blame._siblings
        assert not dispatcher.admission.num_in_flight
        placement = dispatcher.placement
        assert isinstance(placement, Goodput)
        assert not placement._requests
        for worker in self.workers:
            load = worker.in_flight
            assert (load.num_prefill_tokens, load.num_context_tokens, load.num_blocks) == (0, 0, 0)


@given(st.integers(0, 2**32), st.integers(0, 200))
def test_nothing_is_left_of_any_request(seed: int, num_actions: int) -> None:
    world = World(seed)
    for _ in range(num_actions):
        world.random.choice(world.actions)()
        world.check()
    world.now_s += SETTINGS.max_silence_s
    world.dispatcher.sweep()
    for _ in range(3):
        world.turn()
    world.check()
    world.check_empty()
