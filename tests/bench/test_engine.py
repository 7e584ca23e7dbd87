"""What the sink of a step loop keeps of steps whose times are known."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from pdserve.bench import engine
from pdserve.bench.engine import TPOT, TTFT, Figure
from pdserve.contracts.events import RequestEvent, RequestEventKind, RequestKey, TokenEvent
from pdserve.contracts.request import FinishReason
from pdserve.engine.worker.loop import Step, StepReport
from pdserve.engine.worker.step_times import Prediction

_KEYS = [RequestKey(0, number, 0) for number in range(2)]


def tokens(index: int, *keys: RequestKey, finish: FinishReason = FinishReason.NONE) -> list[TokenEvent]:
    return [TokenEvent(key, 0, index, 7, None, finish) for key in keys]


def report(predicted_s: float, events: list[TokenEvent], *, has_prefill: bool, num_rows: int) -> StepReport:
    prediction = Prediction(has_prefill, predicted_s, True, num_rows)
    return StepReport(step=Step(0, 1, prediction, Future()), events=[*events])


def test_tokens_come_when_their_step_ends_and_only_steps_of_the_whole_batch_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock_s = [100.0]
    monkeypatch.setattr("pdserve.bench.engine.time.perf_counter", lambda: clock_s[0])
    recorder = engine._Recorder(2)
    steps = [
        (1.0, report(0.5, tokens(0, _KEYS[0]), has_prefill=True, num_rows=1)),
        (4.0, report(2.0, tokens(0, _KEYS[1]) + tokens(1, _KEYS[0]), has_prefill=True, num_rows=2)),
        (4.5, report(0.25, tokens(2, _KEYS[0]) + tokens(1, _KEYS[1]), has_prefill=False, num_rows=2)),
        (4.75, report(0.2, tokens(3, _KEYS[0], finish=FinishReason.LENGTH), has_prefill=False, num_rows=1)),
        (5.0, report(0.2, tokens(2, _KEYS[1], finish=FinishReason.LENGTH), has_prefill=False, num_rows=1)),
    ]
    for at_s, each in steps:
        assert recorder.num_left
        clock_s[0] = 100 + at_s
        recorder.publish(each)
    assert recorder.num_left == 0
    run = recorder.run()
    assert run.first_tokens_s == [(1.0, 0.5), (4.0, 2.5)]
    assert run.decodes_s == [(0.5, 0.25)]
    assert run.total_s == pytest.approx((5.0, 3.15))
    assert run.num_tokens == 7
    one = engine._Case(2, 8, 1)
    assert list(engine._figures(one, [run], is_full=True)) == [Figure(TTFT, 2, 8, 2.5, 1.5)]
    more = engine._Case(2, 8, 4)
    tpot, throughput = engine._figures(more, [run], is_full=True)
    assert tpot == Figure(TPOT, 2, 8, 0.5, 0.25)
    assert throughput.measured == pytest.approx(7 / 5)
    assert len(list(engine._figures(more, [run], is_full=False))) == 1


def test_a_request_that_is_not_answered_ends_the_measurement() -> None:
    refused = RequestEvent(_KEYS[0], RequestEventKind.REJECTED, "too long")
    with pytest.raises(ValueError, match="not answered: too long"):
        engine._Recorder(1).publish(StepReport(events=[refused]))
