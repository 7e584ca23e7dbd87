"""Whatever happens to requests and workers in whatever order, tables and loads in flight are what the states say."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdserve.contracts.deployment import SloConfig
from pdserve.contracts.events import RefusalCode, RequestEvent, RequestEventKind, RequestKey, TokenEvent
from pdserve.contracts.request import FinishReason
from pdserve.contracts.worker_config import WorkerRole
from pdserve.router.requests.attempt import Attempt, Held, Parked, Prefilling, Queued
from pdserve.router.requests.goodput import Goodput
from tests.router.requests.test_dispatch_core import HANDLE, Core, RecordingWorker

KINDS = list(RequestEventKind)
ACTIONS = ["start", "event", "token", "last", "lose", "up", "drain", "cancel", "finish", "wait"]


def check(core: Core, workers: list[RecordingWorker]) -> None:
    table = core.dispatcher.attempts
    attempts = [attempt for request in core.dispatcher._requests for attempt in request.attempts.values()]
    assert set(table.all.values()) == set(attempts)

    def ids(which: list[Attempt]) -> set[int]:
        return {attempt.request_id for attempt in which}

    assert table.queued.keys() == ids([each for each in attempts if isinstance(each.state, Queued)])
    unbound = [each for each in attempts if isinstance(each.state, Parked) and each.state.pull is None]
    assert table.unbound.keys() == ids(unbound)
    assert len(table.held) == sum(isinstance(each.state, Held) for each in attempts)
    for worker in workers:
        flight = worker.in_flight
        unreported = [attempt for attempt in attempts if attempt.state.unreported is worker]
        assert flight._prefills.keys() | flight.decodes.keys() == ids(unreported)
        assert flight.num_prefill_tokens == sum(flight._prefills.values())
        assert worker.is_up or not any(worker in attempt.state.workers for attempt in attempts)
    policy = core.dispatcher.placement
    assert isinstance(policy, Goodput)
    assert policy._requests.keys() == ids([each for each in attempts if each.state.workers])
    waiting = {request_id for view in policy._views.values() for request_id in view.prompts._prompts}
    assert waiting == ids([each for each in attempts if isinstance(each.state, Prefilling)])


HANDED_OFF = [("start", 0, 5, RequestEventKind.STARTED, False), ("lose", 0, 3, RequestEventKind.STARTED, True)]
HANDED_OFF += [("start", 0, 5, RequestEventKind.STARTED, False)]
HANDED_OFF += [("event", 0, 0, kind, False) for kind in (RequestEventKind.STARTED, RequestEventKind.LAST_CHUNK)]
HANDED_OFF += [("event", 0, 1, kind, False) for kind in (RequestEventKind.STARTED, RequestEventKind.JOINED)]
HANDED_OFF += [("token", 0, 0, RequestEventKind.FAILED, False), ("token", 0, 1, RequestEventKind.FAILED, False)]


@settings(max_examples=60, deadline=None)
@example(HANDED_OFF)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(ACTIONS), st.integers(0, 5), st.integers(0, 5), st.sampled_from(KINDS), st.booleans()
        ),
        max_size=60,
    )
)
def test_tables_and_loads_are_what_the_states_say(actions: list[tuple[str, int, int, RequestEventKind, bool]]) -> None:
    core = Core(SloConfig(ttft_seconds=0.5, tpot_seconds=1.0), max_in_flight=1000)
    core.clock.now_s = 1.0
    mixed = RecordingWorker("mixed-0", WorkerRole.MIXED)
    workers = [core.prefill, *core.decodes, mixed]
    for worker in workers:
        core.dispatcher.worker_up(worker)
    for action, which, whose, kind, flag in actions:
        attempts = list(core.dispatcher.attempts.all.values())
        attempt = attempts[which % len(attempts)] if attempts else None
        worker = workers[whose % len(workers)]
        if attempt is not None and attempt.state.workers and whose < 5:
            worker = attempt.state.workers[whose % len(attempt.state.workers)]  # type: ignore[assignment]
        match action:
            case "start":
                core.start(num_choices=1 + which)
            case "event" if attempt is not None:
                refusal = RefusalCode.OVERLOADED if flag else RefusalCode.SOURCE
                key = RequestKey(0, attempt.request_id, attempt.number)
                core.dispatcher.event_received(worker, RequestEvent(key, kind, handle=HANDLE, refusal=refusal))
            case "token" | "last" if attempt is not None:
                finish = FinishReason.LENGTH if action == "last" else FinishReason.NONE
                key = RequestKey(0, attempt.request_id, attempt.number)
                token = TokenEvent(key, 0, len(attempt.emitted) + (flag and kind == 1), 7, None, finish)
                core.dispatcher.tokens_received(worker, [token])
            case "lose" if worker.is_up:
                worker.is_draining = flag
                core.dispatcher.worker_lost(worker)
            case "up" if not worker.is_up:
                worker.is_draining = False
                core.dispatcher.worker_up(worker)
            case "cancel" if attempt is not None:
                core.dispatcher.cancel(attempt.request)
            case "finish" if attempt is not None:
                core.dispatcher.finish(attempt.request, attempt.choice)
            case "wait":
                core.wait(0.5 * which)
        check(core, workers)
    core.dispatcher.fail_all("over")
    check(core, workers)
    assert not core.dispatcher.attempts.retrying
