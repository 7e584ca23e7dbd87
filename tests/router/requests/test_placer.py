"""Bursts are placed some per turn, answers that clients read first, under a clock that decisions move."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdserve.contracts.deployment import POLICIES, Policy, SloConfig
from pdserve.contracts.events import RequestEvent, RequestEventKind, RequestKey, TokenEvent
from pdserve.contracts.request import FinishReason, GenerationRequest, Outcome, SamplingParams
from pdserve.contracts.worker_config import WorkerRole
from pdserve.router.requests.blame import MAX_LOSSES, TRIAL_WAIT_S
from pdserve.router.requests.dispatch import Dispatcher
from pdserve.router.requests.observer import DispatchObserver
from pdserve.router.requests.placer import TURN_S
from pdserve.router.requests.request import RequestSpec
from pdserve.router.requests.settings import DispatchSettings
from tests.router.requests.test_attempt import suspected
from tests.router.requests.test_dispatch_core import HANDLE, Clock, Core, ReadRequest, RecordingWorker
from tests.router.rig import COST

DECISION_S = 0.4e-3


class SlowPolicy(DispatchObserver):
    """Lets the clock go on with each decision."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def routed(self, seconds: float) -> None:
        self._clock.now_s += DECISION_S


class Loop:
    """A dispatcher whose turns a test takes."""

    def __init__(self, *names: str) -> None:
        self.clock = Clock()
        self.clock.now_s = 1.0
        self.tick_s = 0.0
        """By which the clock moves whenever it is read."""
        self.turns: list[Callable[[], None]] = []
        self.dispatcher = Dispatcher(
            dict.fromkeys(WorkerRole, COST),
            DispatchSettings(policy="least-loaded"),
            self._read_clock,
            SlowPolicy(self.clock),
            call_soon=self.turns.append,
        )
        self.workers = [RecordingWorker(name, WorkerRole(name.split("-")[0])) for name in names]
        for worker in self.workers:
            self.dispatcher.worker_up(worker)
        self.run()

    def _read_clock(self) -> float:
        self.clock.now_s += self.tick_s
        return self.clock.now_s

    def start(self, num_choices: int = 1) -> ReadRequest:
        sampling = SamplingParams(max_tokens=100)
        request = ReadRequest(
            RequestSpec(prompt_tokens=(1, 2, 3), sampling=sampling, arrived_s=self.clock.now_s, num_choices=num_choices)
        )
        self.dispatcher.start(request)
        return request

    def event(self, worker: RecordingWorker, sent: GenerationRequest, kind: RequestEventKind) -> None:
        key = RequestKey(0, sent.request_id, sent.attempt)
        self.dispatcher.event_received(worker, RequestEvent(key, kind, handle=HANDLE))

    def token(self, worker: RecordingWorker, sent: GenerationRequest, index: int) -> None:
        key = RequestKey(0, sent.request_id, sent.attempt)
        self.dispatcher.tokens_received(worker, [TokenEvent(key, 0, index, 7, None, FinishReason.NONE)])

    def turn(self) -> float:
        """Take one turn; return how long it took."""
        began_s = self.clock.now_s
        (drain,) = self.turns
        self.turns.clear()
        drain()
        return self.clock.now_s - began_s

    def run(self, max_turns: int = 1000) -> list[float]:
        turns_s = list[float]()
        while self.turns:
            assert len(turns_s) < max_turns, "turns follow each other without end"
            turns_s.append(self.turn())
        return turns_s


def test_many_choices_are_placed_in_turns_of_a_few_milliseconds() -> None:
    loop = Loop("mixed-0", "mixed-1")
    loop.start(num_choices=128)
    (first,) = loop.workers[0].submitted
    began_s = loop.clock.now_s
    loop.token(loop.workers[0], first, 0)
    assert loop.clock.now_s == began_s, "nothing is placed in the turn of the token"
    turns_s = loop.run()
    assert len(turns_s) >= 127 * DECISION_S / (TURN_S + DECISION_S)
    assert max(turns_s) <= TURN_S + DECISION_S
    assert sorted(sent.choice for worker in loop.workers for sent in worker.submitted) == list(range(128))


def test_what_a_lost_worker_held_is_placed_in_turns_answers_with_tokens_first() -> None:
    loop = Loop("mixed-0", "mixed-1")
    requests = [loop.start() for _ in range(200)]
    lost, other = loop.workers
    read = lost.submitted[::3]
    for sent in read:
        loop.token(lost, sent, 0)
    num_held = len(other.submitted)
    began_s = loop.clock.now_s
    loop.dispatcher.worker_lost(lost)
    assert loop.clock.now_s == began_s
    assert not lost.in_flight.num_prefill_tokens
    turns_s = loop.run()
    assert max(turns_s) <= TURN_S + DECISION_S
    again = other.submitted[num_held:]
    assert len(again) == len(requests) - num_held
    assert [sent.request_id for sent in again[: len(read)]] == [sent.request_id for sent in read]


def test_parked_prompts_are_bound_in_turns_and_again_after_a_loss() -> None:
    loop = Loop("prefill-0", "decode-0", "decode-1")
    prefill, first, second = loop.workers
    requests = [loop.start() for _ in range(40)]
    for sent in prefill.submitted:
        loop.event(prefill, sent, RequestEventKind.STARTED)
        loop.event(prefill, sent, RequestEventKind.LAST_CHUNK)
    assert not first.prepared
    turns_s = loop.run()
    num_bound = len(first.prepared)
    assert num_bound + len(second.prepared) == len(requests)
    loop.dispatcher.worker_lost(first)
    turns_s += loop.run()
    assert len(second.prepared) == len(requests)
    assert len(prefill.submitted) == len(requests), "nothing was prefilled again"
    assert max(turns_s) <= TURN_S + DECISION_S


def test_a_queue_is_placed_in_turns_when_a_worker_comes_up_and_none_of_it_fails_meanwhile() -> None:
    loop = Loop()
    requests = [loop.start() for _ in range(60)]
    loop.clock.now_s += DispatchSettings().new_wait_s
    worker = RecordingWorker("mixed-0", WorkerRole.MIXED)
    loop.dispatcher.worker_up(worker)
    loop.turn()
    assert 0 < len(worker.submitted) < len(requests)
    loop.dispatcher.sweep()
    turns_s = loop.run()
    assert max(turns_s) <= TURN_S + DECISION_S
    assert len(worker.submitted) == len(requests)
    assert not any(request.outcome for request in requests)


def test_what_was_cancelled_before_its_turn_goes_nowhere() -> None:
    loop = Loop("mixed-0", "mixed-1")
    request = loop.start()
    lost, other = loop.workers
    loop.dispatcher.worker_lost(lost)
    loop.dispatcher.cancel(request)
    loop.run()
    assert not other.submitted
    assert loop.dispatcher.num_queued == 0


def test_a_queue_that_no_turn_can_look_through_is_looked_through_in_several() -> None:
    loop = Loop()
    requests = [loop.start() for _ in range(1000)]
    loop.tick_s = TURN_S / 100
    loop.dispatcher.sweep()
    turns_s = loop.run(max_turns=100)
    assert len(turns_s) > 1
    assert max(turns_s) <= TURN_S + 10 * loop.tick_s
    assert not loop.turns, "it is looked through once"
    loop.clock.now_s += DispatchSettings().new_wait_s
    loop.dispatcher.sweep()
    loop.run(max_turns=100)
    assert {request.outcome for request in requests} == {Outcome.FAILED}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_on_trial_is_due_at_once(policy: Policy) -> None:
    """All suspects and bystanders wait until it has passed."""
    core = Core(SloConfig(ttft_seconds=100.0, tpot_seconds=100.0), settings=DispatchSettings(policy=policy))
    suspected(core)
    core.wait(TRIAL_WAIT_S)
    sent = [each for worker in (core.prefill, *core.decodes) for each in worker.submitted]
    assert [each.ttft_slo_s > 1.0 for each in sent] == [True] * MAX_LOSSES + [False]
    assert sent[-1].ttft_slo_s > 0.0
    assert sent[-1].patience_s == 0.0
