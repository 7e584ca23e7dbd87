"""For every state, the seconds after which it is left though nothing else moves, under a virtual clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from pdserve.contracts.deployment import SloConfig, Tier
from pdserve.contracts.events import RequestEventKind
from pdserve.router.requests.attempt import Attempt, Decoding, Ended, Held, Parked, Prefilling, Queued, State
from pdserve.router.requests.blame import MAX_LOSSES, TRIAL_WAIT_S
from pdserve.router.requests.goodput_rules import LATE_S
from pdserve.router.requests.retries import MAX_BACKOFF_S
from pdserve.router.requests.settings import SWEEP_S, DispatchSettings
from tests.router.requests.test_dispatch_core import Core, ReadRequest, behind_a_pull
from tests.router.rig import COST

SETTINGS = DispatchSettings(max_silence_s=100.0)
LATE = Tier(ttft_seconds=1e-4, tpot_seconds=4 * COST.decode_s(1, 5))
FREE = Tier(ttft_seconds=LATE.ttft_seconds, tpot_seconds=LATE.tpot_seconds, weight=0.0)
SLO = SloConfig(ttft_seconds=0.5, tpot_seconds=LATE.tpot_seconds, tiers={"late": LATE, "free": FREE})


def all_up(core: Core) -> ReadRequest:
    core.all_up()
    return core.start()


def none_up(core: Core) -> ReadRequest:
    return core.start()


def all_full(core: Core) -> ReadRequest:
    request = core.start()
    core.prefill.load = core.prefill.load._replace(num_waiting_tokens=10**6)
    core.all_up()
    return request


def none_left(core: Core) -> ReadRequest:
    request = all_up(core)
    for worker in (*core.decodes, core.prefill):
        core.dispatcher.worker_lost(worker)
    return request


def failed(core: Core) -> ReadRequest:
    request = all_up(core)
    core.event(core.prefill, RequestEventKind.FAILED)
    return request


def suspected(core: Core) -> ReadRequest:
    request = all_up(core)
    for number in range(MAX_LOSSES):
        state = request.attempts[0].state
        assert isinstance(state, Prefilling)
        core.event(state.worker, RequestEventKind.STARTED, attempt=number)
        core.dispatcher.worker_lost(state.worker)
    return request


def started(core: Core) -> ReadRequest:
    request = all_up(core)
    core.event(core.prefill, RequestEventKind.STARTED)
    return request


def parked(core: Core) -> ReadRequest:
    request = started(core)
    core.event(core.prefill, RequestEventKind.LAST_CHUNK)
    return request


def unbound(core: Core) -> ReadRequest:
    request = started(core)
    for worker in core.decodes:
        core.dispatcher.worker_lost(worker)
    core.event(core.prefill, RequestEventKind.LAST_CHUNK)
    return request


def joined(core: Core) -> ReadRequest:
    request = parked(core)
    core.event(core.decodes[0], RequestEventKind.STARTED)
    core.event(core.decodes[0], RequestEventKind.JOINED)
    return request


def with_token_0(core: Core) -> ReadRequest:
    request = parked(core)
    core.token(core.prefill, 0)
    return request


def sibling(core: Core) -> ReadRequest:
    """Of a choice that has its first token, while no decode worker is up."""
    core.all_up()
    request = core.start(num_choices=2)
    core.event(core.prefill, RequestEventKind.STARTED)
    for worker in core.decodes:
        core.dispatcher.worker_lost(worker)
    core.event(core.prefill, RequestEventKind.LAST_CHUNK)
    core.token(core.prefill, 0)
    return request


def decoding(core: Core) -> ReadRequest:
    request = joined(core)
    core.token(core.prefill, 0)
    return request


def preempted(core: Core) -> ReadRequest:
    request = decoding(core)
    core.event(core.decodes[0], RequestEventKind.PREEMPTED)
    return request


def held(core: Core, tier: str = "late") -> ReadRequest:
    decoding(core)
    for worker in core.decodes:
        worker.load = worker.load._replace(num_running=64, num_context_tokens=10**6)
    return core.start(tier=tier)


def held_without_weight(core: Core) -> ReadRequest:
    return held(core, "free")


class Bound(NamedTuple):
    enter: Callable[[Core], ReadRequest]
    state: type[State]
    seconds: float
    then: type[State] = Ended


BOUNDS = [
    Bound(none_up, Queued, SETTINGS.new_wait_s),
    Bound(all_full, Queued, SETTINGS.new_wait_s, Prefilling),
    Bound(none_left, Queued, SETTINGS.worker_wait_s),
    Bound(sibling, Queued, SETTINGS.worker_wait_s),
    Bound(failed, Queued, 1.25 * MAX_BACKOFF_S, Prefilling),
    Bound(suspected, Queued, TRIAL_WAIT_S, Prefilling),
    Bound(held, Held, LATE_S, Prefilling),
    Bound(held_without_weight, Held, SETTINGS.max_silence_s),
    Bound(all_up, Prefilling, SETTINGS.max_silence_s),
    Bound(started, Prefilling, SETTINGS.max_silence_s),
    Bound(parked, Parked, SETTINGS.max_silence_s),
    Bound(unbound, Parked, SETTINGS.max_silence_s),
    Bound(joined, Parked, SETTINGS.max_silence_s),
    Bound(with_token_0, Parked, SETTINGS.max_silence_s),
    Bound(behind_a_pull, Parked, SETTINGS.max_silence_s),
    Bound(decoding, Decoding, SETTINGS.max_silence_s),
    Bound(preempted, Decoding, SETTINGS.max_silence_s),
]


@pytest.mark.parametrize("bound", BOUNDS, ids=lambda bound: bound.enter.__name__)
def test_every_state_is_left_though_nothing_else_moves(bound: Bound) -> None:
    core = Core(SLO, settings=SETTINGS)
    core.clock.now_s = 1000.0
    attempt = [*bound.enter(core).attempts.values()][-1]
    assert isinstance(attempt.state, bound.state)
    waited_s = wait_while(core, attempt, bound.state, bound.seconds + 2 * SWEEP_S)
    assert isinstance(attempt.state, bound.then)
    assert waited_s <= bound.seconds + SWEEP_S + 1e-6
    if bound.then is Ended or bound.state is Held:
        assert waited_s >= bound.seconds - 1e-6, "no bound is longer than it has to be"


def wait_while(core: Core, attempt: Attempt, state: type[State], limit_s: float) -> float:
    waited_s = 0.0
    while isinstance(attempt.state, state) and waited_s < limit_s:
        core.wait(SWEEP_S)
        waited_s += SWEEP_S
    return waited_s


def test_no_state_is_without_a_bound() -> None:
    names = {state.__name__ for state in State.__subclasses__()}
    assert {bound.state.__name__ for bound in BOUNDS} == names - {"Ended"}


def test_only_workers_that_may_hold_something_are_heard() -> None:
    core = Core(SLO)
    decode = core.decodes[0]
    for prefill, is_released in ((None, False), (core.prefill, False), (core.prefill, True)):
        state = Decoding(decode, 0.0, prefill, is_released)
        assert [worker for worker in (core.prefill, *core.decodes) if state.hears(worker)] == [*state.workers]
