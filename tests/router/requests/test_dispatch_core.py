"""Dispatch core under a virtual clock: no event loop, no wire, no process."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.contracts.deployment import SloConfig, Tier
from pdserve.contracts.events import RefusalCode, RequestEvent, RequestEventKind, RequestKey, SchedulerLoad, TokenEvent
from pdserve.contracts.request import (
    FinishReason,
    GenerationRequest,
    Grammar,
    GrammarKind,
    KvSource,
    Outcome,
    SamplingParams,
)
from pdserve.contracts.worker_config import WorkerRole
from pdserve.router.cluster.worker import Worker
from pdserve.router.requests.attempt import Attempt, Parked, Prefilling, Queued
from pdserve.router.requests.attempt_table import HeldBack
from pdserve.router.requests.dispatch import Dispatcher
from pdserve.router.requests.goodput import Goodput
from pdserve.router.requests.goodput_rules import LATE_S
from pdserve.router.requests.observer import DispatchObserver
from pdserve.router.requests.placer import MIN_DURATION_S
from pdserve.router.requests.request import GenerationError, Request, RequestSpec
from pdserve.router.requests.settings import DispatchSettings
from tests.router.rig import COST

HANDLE = bytes(16)


class RecordingWorker(Worker):
    def __init__(self, worker_id: str, role: WorkerRole) -> None:
        super().__init__(worker_id, role)
        self.kv_address = worker_id
        self.block_size, self.max_batch_tokens, self.max_batch_size = 4, 256, 8
        self.load = SchedulerLoad(num_blocks_free=256)
        self.submitted: list[GenerationRequest] = []
        self.prepared: list[tuple[GenerationRequest, KvSource]] = []
        self.cancelled: list[tuple[int, int]] = []
        self.announced: list[Grammar] = []

    def announce(self, grammar: Grammar) -> None:
        self.announced.append(grammar)

    def submit(self, request: GenerationRequest) -> None:
        self.submitted.append(request)

    def prepare(self, request: GenerationRequest, source: KvSource) -> None:
        self.prepared.append((request, source))

    def cancel(self, request_id: int, attempt: int) -> None:
        self.cancelled.append((request_id, attempt))


class ReadRequest(Request):
    def __init__(self, spec: RequestSpec) -> None:
        super().__init__(spec)
        self.tokens: list[tuple[int, int]] = []
        """(choice, index)"""

    def token_received(self, token: TokenEvent) -> None:
        self.tokens.append((token.choice, token.index))


class Clock:
    now_s = 0.0


class DrainedDispatcher(Dispatcher):
    """Drains after every call of its driver, as in a loop that has nothing else to do."""

    def worker_up(self, worker: Worker) -> None:
        super().worker_up(worker)
        self.place_some()

    def worker_lost(self, worker: Worker) -> None:
        super().worker_lost(worker)
        self.place_some()

    def tokens_received(self, worker: Worker, tokens: Iterable[TokenEvent]) -> None:
        super().tokens_received(worker, tokens)
        self.place_some()

    def event_received(self, worker: Worker, event: RequestEvent) -> None:
        super().event_received(worker, event)
        self.place_some()

    def finish(self, request: Request, choice: int) -> None:
        super().finish(request, choice)
        self.place_some()

    def sweep(self) -> None:
        super().sweep()
        self.place_some()


class Observer(DispatchObserver):
    def __init__(self) -> None:
        self.num_refused = 0
        self.refused_tiers: list[str] = []
        self.placements: list[tuple[str, WorkerRole, bool]] = []
        self.fallbacks: list[str] = []
        self.accepted_shares, self.ended_shares = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        """Requests by tenant and tier."""

    def accepted(self, spec: RequestSpec) -> None:
        self.accepted_shares[spec.tenant, spec.tier] += 1

    def ended(self, request: Request) -> None:
        self.ended_shares[request.spec.tenant, request.spec.tier] += 1

    def fell_back(self, reason: str) -> None:
        self.fallbacks.append(reason)

    def refused(self, tier: str) -> None:
        self.num_refused += 1
        self.refused_tiers.append(tier)

    def placed(self, policy: str, role: WorkerRole, *, is_late: bool) -> None:
        self.placements.append((policy, role, is_late))


SPEC = RequestSpec(prompt_tokens=(1,), sampling=SamplingParams(max_tokens=1), arrived_s=0.0)
SLO = SloConfig(ttft_seconds=0.5, tpot_seconds=0.0)


class Core:
    """Dispatcher of one prefill and two decode workers."""

    def __init__(
        self, slo: SloConfig = SLO, *, max_in_flight: int = 4, settings: DispatchSettings | None = None
    ) -> None:
        self.clock = Clock()
        settings = settings or DispatchSettings(max_in_flight=max_in_flight, max_silence_s=10.0, new_wait_s=1.0)
        dispatch = replace(settings, slo=slo)
        self.observer = Observer()
        self.dispatcher = DrainedDispatcher(
            dict.fromkeys(WorkerRole, COST), dispatch, lambda: self.clock.now_s, observer=self.observer
        )
        self.prefill = RecordingWorker("prefill-0", WorkerRole.PREFILL)
        self.decodes = [RecordingWorker(f"decode-{n}", WorkerRole.DECODE) for n in range(2)]

    def all_up(self) -> None:
        for worker in (self.prefill, *self.decodes):
            self.dispatcher.worker_up(worker)

    def start(
        self,
        num_choices: int = 1,
        *,
        tenant: str = "",
        tier: str = "default",
        waited_s: float = 0.0,
        max_tokens: int = 100,
    ) -> ReadRequest:
        spec = RequestSpec(
            prompt_tokens=(1, 2, 3, 4, 5),
            sampling=SamplingParams(max_tokens=max_tokens),
            arrived_s=self.clock.now_s - waited_s,
            num_choices=num_choices,
            tenant=tenant,
            tier=tier,
        )
        request = ReadRequest(spec)
        self.dispatcher.start(request)
        return request

    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.dispatcher.sweep()

    def event(self, worker: Worker, kind: RequestEventKind, request_id: int = 1, attempt: int = 0) -> None:
        key = RequestKey(0, request_id, attempt)
        self.dispatcher.event_received(worker, RequestEvent(key, kind, handle=HANDLE))

    def token(self, worker: Worker, index: int, *, request_id: int = 1, attempt: int = 0, last: bool = False) -> None:
        finish = FinishReason.LENGTH if last else FinishReason.NONE
        event = TokenEvent(RequestKey(0, request_id, attempt), 0, index, 7, None, finish)
        self.dispatcher.tokens_received(worker, [event])


def behind_a_pull(core: Core) -> ReadRequest:
    """Of two choices, the last of which waits parked until the first has pulled the prompt."""
    core.all_up()
    request = core.start(num_choices=2)
    for request_id in (1, 2):
        core.event(core.prefill, RequestEventKind.STARTED, request_id)
        core.event(core.prefill, RequestEventKind.LAST_CHUNK, request_id)
        core.token(core.prefill, 0, request_id=request_id)
    state = request.attempts[1].state
    assert isinstance(state, Parked)
    assert state.pull is None
    return request


def test_choices_that_wait_for_a_pull_go_on_where_the_last_decode_worker_is_their_own() -> None:
    core = Core()
    request = behind_a_pull(core)
    core.prefill.take_role(WorkerRole.DECODE)
    core.dispatcher.worker_up(core.prefill)
    for worker in core.decodes[::-1]:
        core.dispatcher.worker_lost(worker)
    states = [attempt.state for attempt in request.attempts.values()]
    assert [isinstance(state, Prefilling) and state.worker is core.prefill for state in states] == [True, True]


def test_placements_are_observed() -> None:
    core = Core()
    core.all_up()
    core.start()
    assert core.observer.placements == [("goodput", WorkerRole.PREFILL, False)]


def test_a_prompt_that_stays_parked_falls_back_once() -> None:
    core = Core()
    core.all_up()
    core.start()
    for worker in core.decodes:
        core.dispatcher.worker_lost(worker)
    core.event(core.prefill, RequestEventKind.LAST_CHUNK)
    core.dispatcher.worker_up(RecordingWorker("prefill-1", WorkerRole.PREFILL))
    assert core.observer.fallbacks == ["no_decode"]


def test_a_request_runs_on_a_virtual_clock() -> None:
    core = Core()
    request = core.start()
    assert core.dispatcher.num_queued == 1
    core.clock.now_s = 0.25
    core.all_up()
    (submitted,) = core.prefill.submitted
    assert (submitted.deadline_s, submitted.ttft_slo_s, submitted.handoff) == (9.75, 0.25, True)
    core.event(core.prefill, RequestEventKind.STARTED)
    core.event(core.prefill, RequestEventKind.LAST_CHUNK)
    ((prepared, source),) = core.decodes[0].prepared
    assert (prepared.request_id, source) == (1, KvSource(address="prefill-0", worker_epoch=0, handle=HANDLE))
    core.token(core.prefill, 0)
    core.event(core.decodes[0], RequestEventKind.JOINED)
    core.event(core.prefill, RequestEventKind.RELEASED)
    core.token(core.decodes[0], 1)
    core.dispatcher.tokens_skipped(RequestKey(0, 1, 0), 97)
    core.token(core.decodes[0], 99, last=True)
    assert request.tokens == [(0, 0), (0, 1), (0, 99)]
    assert request.outcome is Outcome.FINISHED
    assert core.dispatcher.num_in_flight == 0
    assert not core.prefill.cancelled + core.decodes[0].cancelled


def test_a_grammar_is_announced_where_its_answer_may_be_decoded() -> None:
    core = Core()
    core.all_up()
    core.start()
    assert not any(worker.announced for worker in core.decodes)
    grammar = Grammar(GrammarKind.REGEX, "a+")
    sampling = SamplingParams(max_tokens=100, grammar=grammar)
    core.dispatcher.start(ReadRequest(RequestSpec(prompt_tokens=(1, 2), sampling=sampling, arrived_s=0.0)))
    assert not any(worker.announced for worker in core.decodes), "it may be too hard to compile"
    core.event(core.prefill, RequestEventKind.STARTED, request_id=2)
    assert [worker.announced for worker in (core.prefill, *core.decodes)] == [[], [grammar], [grammar]]


def test_a_grammar_is_announced_to_few_of_many_workers() -> None:
    core = Core()
    core.all_up()
    for index in range(2, 100):
        worker = RecordingWorker(f"decode-{index}", WorkerRole.DECODE)
        worker.load = SchedulerLoad(num_blocks_free=256, num_running=abs(index - 50))
        core.decodes.append(worker)
        core.dispatcher.worker_up(worker)
    for worker in core.decodes[:2]:
        worker.load = SchedulerLoad(num_blocks_free=256, num_running=9)
    core.decodes[50].is_draining = True
    grammar = Grammar(GrammarKind.REGEX, "a+")
    sampling = SamplingParams(max_tokens=100, grammar=grammar)
    core.dispatcher.start(ReadRequest(RequestSpec(prompt_tokens=(1, 2), sampling=sampling, arrived_s=0.0)))
    core.event(core.prefill, RequestEventKind.STARTED)
    told = {worker.worker_id for worker in core.decodes if worker.announced}
    assert told == {"decode-48", "decode-49", "decode-51", "decode-52"}


def test_the_next_attempt_counts_what_the_client_has() -> None:
    core = Core()
    core.all_up()
    request = core.start()
    core.event(core.prefill, RequestEventKind.LAST_CHUNK)
    for index, worker in enumerate((core.prefill, core.decodes[0], core.decodes[0])):
        core.token(worker, index)
    core.event(core.decodes[0], RequestEventKind.FAILED)
    core.wait(0.1)
    again = core.prefill.submitted[-1]
    assert (again.attempt, again.emitted_tokens, again.ttft_slo_s) == (1, (7, 7, 7), MIN_DURATION_S), "due at once"
    assert again.patience_s == 0.0
    assert request.attempts[0].blocks(4).num_tokens == 8
    assert core.prefill.snapshot().num_waiting_tokens == 8


def test_skipped_tokens_of_an_older_attempt_do_not_count() -> None:
    core = Core()
    core.all_up()
    request = core.start()
    core.dispatcher.tokens_skipped(RequestKey(0, 1, 5), 3)
    core.dispatcher.tokens_skipped(RequestKey(0, 9, 0), 3)
    core.token(core.prefill, 0)
    assert request.tokens == [(0, 0)]


def test_deadlines_and_waits_go_by_the_clock() -> None:
    core = Core()
    waiting = core.start()
    core.clock.now_s = 0.5
    core.dispatcher.sweep()
    assert waiting.outcome is None
    core.clock.now_s = 1.0
    core.dispatcher.sweep()
    assert waiting.error is not None
    assert waiting.error.status == 503
    core.all_up()
    late = core.start(num_choices=3)
    core.clock.now_s = 11.0
    core.dispatcher.sweep()
    assert late.error is not None
    assert late.error.status == 504
    assert core.prefill.cancelled == [(2, 0)]


def test_silence_ends_an_answer_however_long_it_has_been_and_nothing_else_does() -> None:
    core = Core()
    core.all_up()
    request = core.start()
    core.event(core.prefill, RequestEventKind.LAST_CHUNK)
    core.token(core.prefill, 0)
    for index in range(1, 6):
        core.wait(9.0)
        core.token(core.decodes[0], index)
    assert len(request.tokens) == 6, "45 s, where the bound is 10"
    core.wait(9.9)
    assert request.outcome is None
    core.wait(0.1)
    assert request.error is not None
    assert request.error.status == 504


def test_choices_that_wait_for_token_0_have_the_time_from_then_on() -> None:
    core = Core()
    core.all_up()
    request = core.start(num_choices=2)
    core.wait(9.0)
    core.token(core.prefill, 0)
    core.wait(9.0)
    core.token(core.prefill, 0, request_id=2)
    assert request.outcome is None


def test_what_is_held_back_notices_that_the_cluster_is_gone() -> None:
    tpot_s = 4 * COST.decode_s(1, 5)
    late = Tier(ttft_seconds=1e-4, tpot_seconds=tpot_s)
    core = Core(SloConfig(ttft_seconds=0.5, tpot_seconds=tpot_s, tiers={"late": late}))
    core.all_up()
    core.start()
    core.event(core.prefill, RequestEventKind.LAST_CHUNK)
    core.token(core.prefill, 0)
    core.event(core.decodes[0], RequestEventKind.JOINED)
    for worker in core.decodes:
        worker.load = worker.load._replace(num_running=64, num_context_tokens=10**6)
    held = core.start(tier="late")
    assert core.dispatcher.num_queued == 1
    core.wait(4.0)
    assert held.outcome is None
    for lost in (core.prefill, *core.decodes):
        core.dispatcher.worker_lost(lost)
    core.wait(0.0)
    core.wait(0.9)
    assert held.outcome is None
    core.wait(0.1)
    assert held.error is not None
    assert held.error.status == 503


def test_further_prompts_of_a_client_are_placed_in_a_next_turn() -> None:
    core = Core()
    core.all_up()
    spec = core.start().spec
    for _ in range(2):
        core.dispatcher.start(ReadRequest(spec), is_further=True)
    assert (len(core.prefill.submitted), core.dispatcher.num_queued) == (1, 2)
    core.dispatcher.place_some()
    assert (len(core.prefill.submitted), core.dispatcher.num_queued) == (3, 0)


def test_a_further_prompt_may_be_refused() -> None:
    core = Core(SloConfig(ttft_seconds=0.25, tpot_seconds=0.05, when_hopeless="refuse"))
    core.all_up()
    spec = core.start().spec
    long = replace(spec, prompt_tokens=(1,) * 100_000)
    with pytest.raises(GenerationError, match="no worker would meet"):
        core.dispatcher.start(ReadRequest(long), is_further=True)


def test_what_is_in_flight_is_bounded() -> None:
    core = Core()
    first = core.start(num_choices=3)
    with pytest.raises(GenerationError) as caught:
        core.start(num_choices=2)
    assert caught.value.status == 429
    with pytest.raises(GenerationError, match="more than this router takes at once"):
        core.start(num_choices=5)
    assert core.observer.num_refused == 1, "a request that fits no router is the client's error"
    core.dispatcher.cancel(first)
    core.start(num_choices=4)


def test_what_would_meet_its_objectives_nowhere_is_refused_if_its_tier_says_so() -> None:
    fast, slow = (Tier(ttft_seconds=0.5, tpot_seconds=1.0, when_hopeless=when) for when in ("refuse", "last"))
    core = Core(SloConfig(tiers={"fast": fast, "slow": slow}))
    core.clock.now_s = 1.0
    waiting = core.start(tier="fast", waited_s=0.9)
    core.all_up()
    assert waiting.outcome is None, "what was accepted is served"
    with pytest.raises(GenerationError) as caught:
        core.start(tier="fast", waited_s=0.9)
    assert caught.value.status == 429
    assert caught.value.retry_after_s == 1.0
    assert core.observer.refused_tiers == ["fast"]
    core.start(tier="slow", waited_s=0.9)
    assert [request.ttft_slo_s for request in core.prefill.submitted] == [LATE_S, LATE_S]
    assert [request.patience_s for request in core.prefill.submitted] == pytest.approx([9.1, 9.1]), "all their lives"
    assert core.dispatcher.num_accepted == core.dispatcher.num_in_flight == 2


def test_what_would_only_harm_others_is_held_back() -> None:
    tier = Tier(ttft_seconds=10.0, tpot_seconds=1.0, weight=0.0)
    core = Core(SloConfig(tpot_seconds=1.3 * COST.decode_s(1, 5), tiers={"rest": tier}), max_in_flight=8)
    core.all_up()
    core.start()
    idle = core.decodes[0].load
    for worker in core.decodes:
        worker.load = idle._replace(num_running=4, num_context_tokens=10**6)
    rest = [core.start(tier="rest") for _ in range(4)]
    core.token(core.prefill, 0, last=True)
    core.wait(2.0)
    assert len(core.prefill.submitted) == 1, "an answer has ended, but those that are left have no room"
    assert core.dispatcher.num_queued == 4
    core.dispatcher.cancel(rest[0])
    full = core.decodes[0].load
    for worker in core.decodes:
        worker.load = idle
    core.wait(0.1)
    assert [request.request_id for request in core.prefill.submitted] == [1, 3, 4, 5]
    for worker in core.decodes:
        worker.load = full
    core.event(core.prefill, RequestEventKind.FAILED, 3)
    core.wait(2.0)
    assert [(request.request_id, request.attempt) for request in core.prefill.submitted][4:] == [(3, 1)], "it goes on"
    assert core.dispatcher.num_queued == 0


def test_a_prompt_of_one_token_is_sent_beside_answers_without_room() -> None:
    core = Core(SloConfig(tpot_seconds=1.3 * COST.decode_s(1, 5)), max_in_flight=8)
    core.all_up()
    core.start()
    for worker in core.decodes:
        worker.load = worker.load._replace(num_running=4, num_context_tokens=10**6)
    core.start()
    assert len(core.prefill.submitted) == 1, "the answers have no room for another"
    core.start(max_tokens=1)
    assert [request.request_id for request in core.prefill.submitted] == [1, 3]


def test_what_waited_for_a_worker_may_be_held_back() -> None:
    tier = Tier(ttft_seconds=10.0, tpot_seconds=1.0, weight=0.0)
    core = Core(SloConfig(tpot_seconds=1.3 * COST.decode_s(1, 5), tiers={"rest": tier}))
    for worker in core.decodes:
        worker.load = worker.load._replace(num_running=4, num_context_tokens=10**6)
    request = core.start(tier="rest")
    core.all_up()
    core.wait(2.0)
    assert request.outcome is None
    assert not core.prefill.submitted
    assert core.dispatcher.num_queued == 1
    for worker in (core.prefill, *core.decodes):
        core.dispatcher.worker_lost(worker)
    core.wait(2.0)
    assert request.outcome is None, "it waits for a worker as long as for others to end"
    core.all_up()
    for worker in core.decodes:
        worker.load = worker.load._replace(num_running=0, num_context_tokens=0)
    core.wait(0.1)
    assert len(core.prefill.submitted) == 1


def test_held_back_requests_of_several_shares_take_turns() -> None:
    held, attempts = HeldBack(), {number: Attempt(ReadRequest(SPEC), 0, number, Queued(0.0)) for number in range(4)}
    shares = "aaba"
    for number, share in enumerate(shares):
        held.add(attempts[number], share)
    order = []
    while (attempt := held.first()) is not None:
        order.append(attempt.request_id)
        held.end_turn()
        held.discard(attempt, shares[attempt.request_id])
    assert order == [0, 2, 1, 3]
    assert not held.is_any_of("a")


def test_a_prompt_has_patience_until_it_is_as_urgent_as_those_of_the_tightest_objective() -> None:
    fast, slow = (Tier(ttft_seconds=seconds, tpot_seconds=1.0) for seconds in (0.2, 5.0))
    core = Core(SloConfig(ttft_seconds=0.5, tiers={"fast": fast, "slow": slow}))
    core.clock.now_s = 1.0
    core.all_up()
    for tier in ("default", "fast", "slow"):
        core.start(tier=tier, waited_s=0.1)
    submitted = [request for worker in (core.prefill, *core.decodes) for request in worker.submitted]
    assert sorted(request.patience_s for request in submitted) == pytest.approx([0.0, 0.2, 4.7])


def test_a_request_whose_shortest_prompt_would_be_hopeless_is_refused_before_its_prompt_is_read() -> None:
    """To ask changes nothing: requests that would be accepted are not counted, nor is what they would do to others."""
    fast, slow = (Tier(ttft_seconds=0.5, tpot_seconds=1.0, when_hopeless=when) for when in ("refuse", "last"))
    core = Core(SloConfig(tiers={"fast": fast, "slow": slow}))
    core.clock.now_s = 1.0
    core.dispatcher.check_room(1, tenant="", tier="fast", arrived_s=0.1)
    core.all_up()
    core.dispatcher.check_room(1, tenant="", tier="fast", arrived_s=1.0)
    core.dispatcher.check_room(1, tenant="", tier="slow", arrived_s=0.1)
    with pytest.raises(GenerationError) as caught:
        core.dispatcher.check_room(1, tenant="", tier="fast", arrived_s=0.1)
    assert caught.value.status == 429
    assert core.observer.refused_tiers == ["fast"]
    assert not core.prefill.submitted
    assert core.dispatcher.num_accepted == core.dispatcher.num_in_flight == 0
    placement = core.dispatcher.placement
    assert isinstance(placement, Goodput)
    assert placement._prefill_cost.misses_per_s(1.0) == 0.0
    assert not len(placement._joining)


def test_a_tenant_may_hold_as_many_choices_as_are_free() -> None:
    """Eight requests of n = 128 would take all of 1,024."""
    core = Core(max_in_flight=1024)
    held = [core.start(128, tenant="a") for _ in range(4)]
    with pytest.raises(GenerationError, match="512 answers of this tenant and tier are in flight"):
        core.start(128, tenant="a")
    core.start(256, tenant="b")
    core.start(256)
    core.dispatcher.cancel(held[0])
    with pytest.raises(GenerationError, match="384 answers of this tenant"):
        core.start(tenant="a")


def test_places_are_shared_by_routers() -> None:
    core = Core(max_in_flight=4)
    core.dispatcher.replicas.put([9000, 9001])
    core.start()
    held = core.start()
    with pytest.raises(GenerationError, match="2 answers are in flight already"):
        core.start()
    core.dispatcher.cancel(held)
    core.dispatcher.replicas.put(range(9000, 9009))
    with pytest.raises(GenerationError, match="1 answers are in flight already"):
        core.start()
    core.dispatcher.replicas.put([9000])
    core.start(3)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b", ""]),
            st.sampled_from(["default", "fast"]),
            st.integers(1, 9),
            st.sampled_from(["", "cancel", "fail", "finish", "lose", "late"]),
        ),
        max_size=30,
    )
)
def test_accepted_requests_are_in_flight_or_over_by_tenant_and_tier(arrivals: list[tuple[str, str, int, str]]) -> None:
    tiers = {"fast": Tier(ttft_seconds=0.1, tpot_seconds=0.0)}
    core = Core(SloConfig(ttft_seconds=0.5, tpot_seconds=0.0, tiers=tiers), max_in_flight=20)
    core.all_up()
    accepted: list[ReadRequest] = []
    for tenant, tier, num_choices, event in arrivals:
        with suppress(GenerationError):
            accepted.append(core.start(num_choices, tenant=tenant, tier=tier))
        in_flight = [request for request in accepted if request.outcome is None]
        match event:
            case "cancel" if in_flight:
                core.dispatcher.cancel(in_flight[0])
            case "fail" if in_flight:
                core.dispatcher.fail(in_flight[0], GenerationError(500, "failed"))
            case "finish" if in_flight:
                for choice in range(in_flight[0].spec.num_choices):
                    core.dispatcher.finish(in_flight[0], choice)
            case "lose":
                core.dispatcher.worker_lost(core.prefill)
                core.dispatcher.worker_up(core.prefill)
            case "late":
                core.wait(10.0)
        held = Counter[tuple[str, str]]()
        for request in accepted:
            if request.outcome is None:
                held[request.spec.tenant, request.spec.tier] += request.spec.num_choices
        assert core.dispatcher.admission._num_choices == held
        assert held.total() <= 20
        for share in {(request.spec.tenant, request.spec.tier) for request in accepted}:
            of_share = [each for each in accepted if (each.spec.tenant, each.spec.tier) == share]
            counts = core.observer.accepted_shares[share], core.observer.ended_shares[share]
            assert counts == (len(of_share), sum(each.outcome is not None for each in of_share))
        assert core.dispatcher.num_accepted == len(accepted)
        for outcome, num_ended in core.dispatcher.outcomes.items():
            assert num_ended == sum(each.outcome is outcome for each in accepted)


@pytest.mark.parametrize(
    ("code", "status"), [(code, 400) for code in (RefusalCode.NONE, RefusalCode.INVALID, RefusalCode.SOURCE)]
)
def test_a_refusal_for_good_is_the_clients_error_whatever_its_words(code: RefusalCode, status: int) -> None:
    core = Core()
    core.all_up()
    request = core.start()
    event = RequestEvent(RequestKey(0, 1, 0), RequestEventKind.REJECTED, "draining: overloaded", refusal=code)
    core.dispatcher.event_received(core.prefill, event)
    assert request.error is not None
    assert request.error.status == status


@pytest.mark.parametrize("code", [RefusalCode.DRAINING, RefusalCode.OVERLOADED])
def test_a_passing_refusal_is_retried_whatever_its_words(code: RefusalCode) -> None:
    core = Core()
    core.all_up()
    request = core.start()
    event = RequestEvent(RequestKey(0, 1, 0), RequestEventKind.REJECTED, "can never run", refusal=code)
    core.dispatcher.event_received(core.prefill, event)
    assert request.outcome is None
    assert request.attempts[0].number == (code is RefusalCode.DRAINING)
    core.wait(0.1)
    assert request.attempts[0].number == 1
    assert core.prefill.is_draining is (code is RefusalCode.DRAINING)


@pytest.mark.parametrize("is_refused", [False, True])
def test_only_the_code_decides_whether_another_worker_pulls(is_refused: bool) -> None:
    core = Core()
    core.all_up()
    core.start()
    core.event(core.prefill, RequestEventKind.LAST_CHUNK)
    code = RefusalCode.SOURCE if is_refused else RefusalCode.NONE
    message = "connect: no route" if is_refused else "refused: NOT_FOUND"
    event = RequestEvent(RequestKey(0, 1, 0), RequestEventKind.KV_UNAVAILABLE, message, refusal=code)
    core.dispatcher.event_received(core.decodes[0], event)
    core.wait(0.1)
    assert len(core.decodes[1].prepared) == (not is_refused)
    assert len(core.prefill.submitted) == 1 + is_refused


def test_a_prompt_that_expired_for_want_of_room_to_decode_is_prefilled_again_at_once() -> None:
    core = Core()
    core.all_up()
    request = core.start()
    core.event(core.prefill, RequestEventKind.LAST_CHUNK)
    core.event(core.prefill, RequestEventKind.KV_UNAVAILABLE)
    assert [sent.attempt for sent in core.prefill.submitted] == [0, 1]
    assert request.attempts[0].num_errors == 0


def test_no_other_worker_pulls_for_a_request_that_has_been_silent_for_too_long() -> None:
    core = Core()
    core.all_up()
    request = core.start()
    core.event(core.prefill, RequestEventKind.LAST_CHUNK)
    core.clock.now_s += 10.0  # no sweep has seen it yet
    core.event(core.decodes[0], RequestEventKind.KV_UNAVAILABLE)
    assert request.error is not None
    assert request.error.status == 504
    assert not core.decodes[1].prepared


def test_the_core_knows_no_event_loop_and_no_wire() -> None:
    script = (
        "import sys, pdserve.router.requests.dispatch;"
        "sys.exit(bool({'asyncio', 'grpc', 'google.protobuf', 'prometheus_client'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
