"""The step loop under a virtual clock."""

from __future__ import annotations

import weakref

import pytest

from pdserve.contracts.events import RefusalCode, RequestEvent, RequestEventKind, RequestKey, TokenEvent
from pdserve.contracts.request import GenerationRequest, Grammar, GrammarKind, SamplingParams
from pdserve.engine.scheduling.interface import OfferEvent
from pdserve.engine.worker.loop import MAX_FAILED_STEPS_IN_A_ROW, Busy, StepLoop, StepReport, Wait
from pdserve.engine.worker.messages import AddRequest, CancelRequest, GrammarCompiled, SessionEnded, StartDrain
from tests.engine.worker.test_live_loop import CountingScheduler, FakeExecutor


class Rig:
    """A loop that the test drives itself."""

    def __init__(self, pipeline_depth: int = 1) -> None:
        self.scheduler = CountingScheduler()
        self.executor = FakeExecutor(pipeline_depth)
        self.reports: list[StepReport] = []
        self.grammars: dict[Grammar, object | str | None] = {}
        self.loop = StepLoop(scheduler=self.scheduler, executor=self.executor, sink=self, grammars=self)

    def find(self, grammar: Grammar) -> object | str | None:
        return self.grammars.get(grammar)

    def publish(self, report: StepReport) -> None:
        self.reports.append(report)

    def take_reports(self) -> list[StepReport]:
        reports, self.reports = self.reports, []
        return reports

    def add(self, session: int, request_id: int, max_tokens: int = 2) -> RequestKey:
        key = RequestKey(session, request_id, 0)
        request = GenerationRequest(
            request_id=request_id, prompt_tokens=(1,), sampling=SamplingParams(max_tokens=max_tokens)
        )
        self.loop.handle(AddRequest(key, request, 0.0), 0.0)
        return key

    def add_guided(self, request_id: int, grammar: Grammar, session: int = 1) -> RequestKey:
        key = RequestKey(session, request_id, 0)
        sampling = SamplingParams(max_tokens=2, grammar=grammar)
        request = GenerationRequest(request_id=request_id, prompt_tokens=(1,), sampling=sampling)
        self.loop.handle(AddRequest(key, request, 0.0), 0.0)
        return key

    def end_step(self, now_s: float = 0.0) -> None:
        self.loop.step_ended(self.loop.in_flight[0].handle.result(), now_s)

    def refusals(self) -> list[tuple[RefusalCode, str]]:
        self.loop.flush()
        events = [event for report in self.take_reports() for event in report.events]
        return [
            (e.refusal, e.message)
            for e in events
            if isinstance(e, RequestEvent) and e.kind is RequestEventKind.REJECTED
        ]


def test_a_loop_of_depth_2_submits_a_second_step_before_it_waits_for_the_first() -> None:
    rig = Rig(pipeline_depth=2)
    assert rig.loop.turn(0.0) is Wait.MESSAGE
    rig.add(1, 1)
    assert [rig.loop.turn(1.0), rig.loop.turn(1.0), len(rig.loop.in_flight)] == [Wait.NOTHING, Wait.STEP, 2]
    rig.end_step(2.0)
    assert rig.loop.turn(2.0) is Wait.STEP, "nothing is left to plan"
    rig.end_step(3.0)
    assert rig.loop.turn(3.0) is Wait.MESSAGE


def test_reports_leave_before_the_submission_and_with_the_end_of_a_step() -> None:
    rig = Rig()
    key = rig.add(1, 1, max_tokens=1)
    rig.scheduler.events.append(OfferEvent(b"h"))
    assert rig.loop.turn(0.0) is Wait.STEP
    (planned,) = rig.take_reports()
    assert (planned.orders, planned.events, planned.step) == (
        [OfferEvent(b"h")],
        [RequestEvent(key=key, kind=RequestEventKind.STARTED)],
        None,
    )
    rig.end_step()
    (ended,) = rig.take_reports()
    rig.add(1, 2)
    rig.scheduler.events = [OfferEvent(b"i")]
    rig.loop.turn(0.0)
    assert [report.orders for report in rig.take_reports()] == [[OfferEvent(b"i")]], "orders alone do not wait either"
    assert [type(event) for event in ended.events] == [TokenEvent]
    assert ended.step is not None
    assert (ended.step_s, ended.step.num_new_tokens) == (0.25, 1)


def test_what_a_plan_without_a_step_decided_does_not_wait_for_the_step_in_flight() -> None:
    rig = Rig(pipeline_depth=2)
    rig.add(1, 1)
    assert [rig.loop.turn(0.0), rig.loop.turn(0.0)] == [Wait.NOTHING, Wait.STEP]
    rig.end_step(1.0)
    rig.take_reports()
    rig.scheduler.events.append(OfferEvent(b"h"))
    assert rig.loop.turn(1.0) is Wait.STEP
    assert [report.orders for report in rig.take_reports()] == [[OfferEvent(b"h")]]


def test_sessions_know_the_requests_that_have_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.engine.worker.loop.MAX_LIVE_REQUESTS", 2)
    rig = Rig()
    key = rig.add(1, 1, max_tokens=1)
    rig.add(1, 1)
    assert rig.refusals() == [(RefusalCode.INVALID, "the worker already runs this attempt")]
    rig.add(2, 1)
    rig.add(2, 2)
    assert rig.refusals() == [(RefusalCode.OVERLOADED, "the worker holds 2 requests already")]
    rig.loop.turn(0.0)
    rig.end_step()
    rig.add(2, 2)
    assert rig.refusals() == [], "the first has its last token"
    rig.loop.handle(SessionEnded(1), 0.0)
    assert len(rig.scheduler.left) == 2
    rig.loop.handle(CancelRequest(key), 0.0)
    rig.loop.handle(SessionEnded(2), 0.0)
    assert not rig.scheduler.left
    rig.loop.handle(StartDrain(), 0.0)
    assert not rig.loop.is_drained, "the ends are not published yet"
    rig.loop.flush()
    assert rig.loop.is_drained


def test_failed_steps_in_a_row_end_the_loop() -> None:
    rig = Rig()
    for number in range(MAX_FAILED_STEPS_IN_A_ROW - 1):
        rig.add(1, number)
        rig.loop.turn(0.0)
        rig.loop.step_failed(RuntimeError("broken"), 0.0)
    rig.add(1, 1000)
    rig.loop.turn(0.0)
    rig.end_step()
    rig.loop.turn(0.0)
    rig.loop.step_failed(RuntimeError("broken"), 0.0)
    assert rig.scheduler.num_failed == MAX_FAILED_STEPS_IN_A_ROW, "one succeeded in between"


def test_steps_without_a_good_row_end_the_loop() -> None:
    rig = Rig()
    for number in range(MAX_FAILED_STEPS_IN_A_ROW):
        rig.add(1, number)
        rig.loop.turn(0.0)
        output = rig.loop.in_flight[0].handle.result()
        output.failed = dict.fromkeys(range(len(output.sampled)), "nan")
        output.sampled = [None] * len(output.sampled)
        if number == MAX_FAILED_STEPS_IN_A_ROW - 1:
            with pytest.raises(RuntimeError, match="16 steps failed in a row, the last with: nan"):
                rig.loop.step_ended(output, 0.0)
        else:
            rig.loop.step_ended(output, 0.0)


# Grammars

DIGITS, WORDS = Grammar(GrammarKind.REGEX, "[0-9]+"), Grammar(GrammarKind.REGEX, "[a-z]+")


def events_of(rig: Rig) -> list[tuple[RequestKey, RequestEventKind]]:
    rig.loop.flush()
    events = [event for report in rig.take_reports() for event in report.events]
    return [(event.key, event.kind) for event in events if isinstance(event, RequestEvent)]


def test_a_request_waits_for_its_grammar_and_others_run() -> None:
    rig = Rig()
    first, second, other = rig.add_guided(1, DIGITS), rig.add_guided(2, DIGITS), rig.add_guided(3, WORDS)
    plain = rig.add(1, 4)
    assert set(rig.scheduler.left) == {plain}
    rig.grammars[DIGITS] = object()
    rig.loop.handle(GrammarCompiled(DIGITS), 0.0)
    assert set(rig.scheduler.left) == {plain, first, second}
    rig.grammars[WORDS] = object()
    rig.loop.handle(GrammarCompiled(WORDS), 0.0)
    assert set(rig.scheduler.left) == {plain, first, second, other}
    rig.add_guided(5, WORDS)
    assert len(rig.scheduler.left) == 5, "a compiled grammar is not waited for"


def test_a_compiled_grammar_is_kept_until_its_request_ends() -> None:
    class Compiled:
        pass

    rig = Rig()
    rig.grammars[DIGITS] = compiled = Compiled()
    alive = weakref.ref(compiled)
    del compiled
    key = rig.add_guided(1, DIGITS)
    rig.grammars.clear()
    assert alive() is not None
    rig.loop.handle(CancelRequest(key), 0.0)
    rig.loop.flush()
    assert alive() is None


def test_a_grammar_that_cannot_be_compiled_refuses_its_requests_alone() -> None:
    rig = Rig()
    waiting, plain = rig.add_guided(1, DIGITS), rig.add(1, 2)
    rig.grammars[DIGITS] = "too hard"
    rig.loop.handle(GrammarCompiled(DIGITS), 0.0)
    assert rig.refusals() == [(RefusalCode.INVALID, "the grammar of the request cannot be used: too hard")]
    assert set(rig.scheduler.left) == {plain}
    rig.add_guided(1, WORDS)  # the id is free again
    rig.loop.handle(CancelRequest(waiting), 0.0)
    assert events_of(rig) == [(waiting, RequestEventKind.CANCELLED)]


def test_a_busy_compiler_is_no_fault_of_the_request() -> None:
    rig = Rig()
    rig.grammars[DIGITS] = Busy("try again")
    rig.add_guided(1, DIGITS)
    assert rig.refusals() == [(RefusalCode.OVERLOADED, "the grammar of the request cannot be used: try again")]


def test_who_waits_for_a_grammar_can_be_cancelled() -> None:
    rig = Rig()
    first, second = rig.add_guided(1, DIGITS, session=1), rig.add_guided(2, DIGITS, session=2)
    rig.loop.handle(CancelRequest(first), 0.0)
    rig.loop.handle(SessionEnded(2), 0.0)
    assert events_of(rig) == [(first, RequestEventKind.CANCELLED), (second, RequestEventKind.CANCELLED)]
    rig.grammars[DIGITS] = object()
    rig.loop.handle(GrammarCompiled(DIGITS), 0.0)
    assert not rig.scheduler.left
    rig.loop.handle(StartDrain(), 0.0)
    assert rig.loop.is_drained
