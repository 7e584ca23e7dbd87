from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from time import process_time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.planner.workload.arrivals import POISSON, RandomGaps, Recorded
from pdserve.planner.workload.conversations import Conversations, SystemPrompts, Turns
from pdserve.planner.workload.lengths import FixedLengths, LogNormalLengths
from pdserve.planner.workload.requests import Clamped
from pdserve.planner.workload.sessions import RedrawnSessions
from pdserve.planner.workload.trace import Trace
from pdserve.planner.workload.trace_lines import read_mooncake, read_plain
from pdserve.planner.workload.workload import Workload, WorkloadSample, trace_workload
from tests.planner.workload.test_conversations import turns_of

CHAT = Workload(
    name="chat",
    contents=Conversations(
        lengths=LogNormalLengths(mean_prompt_tokens=200, mean_output_tokens=50),
        system_prompts=SystemPrompts(3, 500),
        turns=Turns(3, 5.0),
    ),
)
PLAIN = Workload(
    name="plain", contents=Conversations(lengths=LogNormalLengths(mean_prompt_tokens=1000, mean_output_tokens=200))
)


def num_turns(sample: WorkloadSample) -> int:
    return sum(1 for each in sample.conversations for _ in turns_of(each))


@settings(max_examples=40)
@given(
    num_requests=st.integers(1, 200),
    seed=st.integers(0, 2**32),
    rate=st.floats(0.01, 1000),
    arrivals=st.sampled_from([POISSON, RandomGaps(0), RandomGaps(2)]),
)
def test_a_sample_is_put_at_any_rate(num_requests: int, seed: int, rate: float, arrivals: RandomGaps) -> None:
    workload = Workload(name="w", contents=CHAT.contents, arrivals=arrivals)
    sample = workload.draw(num_requests, seed)
    requests, again = sample.at_rate(rate), workload.draw(num_requests, seed).at_rate(rate)
    assert requests == again
    assert sample.num_requests == num_turns(sample) == num_requests
    assert [each.arrived_s for each in requests] == sorted(each.arrived_s for each in requests)
    assert [each.follow_up for each in requests] == [each.follow_up for each in sample.conversations]
    for each in requests:
        assert sum(segment.num_tokens for segment in each.segments) == each.num_prompt_tokens


def test_rates_are_the_same_pattern_and_lengths() -> None:
    sample = CHAT.draw(300, seed=3)
    slow, fast = sample.at_rate(2.0), sample.at_rate(8.0)
    assert [each.arrived_s for each in slow] == [each.arrived_s * 4 for each in fast]
    assert [each.num_prompt_tokens for each in slow] == [each.num_prompt_tokens for each in fast]


def test_the_rate_counts_every_turn() -> None:
    requests = CHAT.draw(30_000, seed=1).at_rate(10.0)
    assert len(requests) < 12_000
    assert requests[-1].arrived_s == pytest.approx(3000, rel=0.05)


def test_another_arrival_process_changes_no_lengths() -> None:
    bursty = Workload(name="bursty", contents=CHAT.contents, arrivals=RandomGaps(4))
    assert bursty.draw(100, 5).conversations == CHAT.draw(100, 5).conversations


def test_ten_thousand_requests_are_drawn_and_timed_in_no_time() -> None:
    began_s = process_time()
    PLAIN.draw(10_000, 0).at_rate(5.0)
    assert process_time() - began_s < 1.0


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_rates_that_are_none_are_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="is not possible"):
        PLAIN.draw(3).at_rate(rate)


def test_draws_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="a workload needs at least one request"):
        PLAIN.draw(0)
    with pytest.raises(ValueError, match="max_model_len 1 leaves no room"):
        PLAIN.draw(5, max_model_len=1)


def test_what_fits_is_not_clamped() -> None:
    sample = PLAIN.draw(200, max_model_len=10**6)
    assert sample.clamped == Clamped()
    assert str(sample.clamped) == ""
    assert sample.conversations == PLAIN.draw(200).conversations


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), max_model_len=st.integers(2, 3000))
def test_nothing_is_longer_than_the_model_allows(seed: int, max_model_len: int) -> None:
    whole, sample = CHAT.draw(60, seed), CHAT.draw(60, seed, max_model_len=max_model_len)
    pairs = [
        (turn, clamped)
        for before, after in zip(whole.conversations, sample.conversations, strict=True)
        for turn, clamped in zip(turns_of(before), turns_of(after), strict=False)
    ]
    for _, clamped in pairs:
        assert clamped.num_prompt_tokens + clamped.num_output_tokens <= max_model_len
        assert clamped.num_output_tokens >= 1
        if clamped.segments:
            assert sum(segment.num_tokens for segment in clamped.segments) == clamped.num_prompt_tokens
            assert all(segment.num_tokens > 0 for segment in clamped.segments)
    assert sample.clamped.num_turns == 60 - sample.num_requests
    assert sample.clamped.num_prompts == sum(a.num_prompt_tokens > b.num_prompt_tokens for a, b in pairs)
    assert sample.clamped.num_answers == sum(a.num_output_tokens > b.num_output_tokens for a, b in pairs)


def test_clamping_says_what_it_did() -> None:
    two_turns = Workload(name="w", contents=Conversations(lengths=FixedLengths(90, 20), turns=Turns(1e6)))
    sample = two_turns.draw(5, seed=0, max_model_len=215)
    assert [turn.num_prompt_tokens for turn in turns_of(sample.conversations[0])] == [90, 200]
    assert str(sample.clamped) == "1 answer shortened, 3 turns left out"
    sample = two_turns.draw(5, seed=0, max_model_len=200)  # where the second turn would have no room to answer
    assert str(sample.clamped) == "4 turns left out"
    (first,) = (
        Workload(name="w", contents=Conversations(lengths=FixedLengths(90, 20))).draw(1, max_model_len=50).conversations
    )
    assert (first.num_prompt_tokens, first.num_output_tokens) == (49, 1)


def a_trace(folder: Path) -> Trace:
    path = folder / "small.csv"
    rows = [f"{3 * row},{100 + row},{row + 1}" for row in range(20)]
    path.write_text("\n".join(["arrived_s,prompt_tokens,output_tokens", *rows]))
    return read_plain(path)


def test_a_trace_is_replayed_as_it_was_or_at_another_rate(tmp_path: Path) -> None:
    workload = trace_workload(a_trace(tmp_path))
    assert workload.name == "small"
    assert workload.recorded_requests_per_s(20) == pytest.approx(1 / 3)
    sample = workload.draw(20)
    as_recorded = sample.at_rate(1 / 3)
    np.testing.assert_allclose([each.arrived_s for each in as_recorded], 3.0 * np.arange(20), atol=1e-9)
    assert [each.num_prompt_tokens for each in as_recorded] == list(range(100, 120))
    np.testing.assert_allclose([each.arrived_s for each in sample.at_rate(1.0)], np.arange(20.0), atol=1e-9)


def test_times_and_lengths_of_a_stretch_belong_together(tmp_path: Path) -> None:
    trace = a_trace(tmp_path)
    trace = replace(trace, arrived_s=np.cumsum(np.arange(20.0)))
    starts = set()
    for seed in range(8):
        workload = trace_workload(trace)
        assert isinstance(workload.arrivals, Recorded)
        rate = workload.arrivals.stretch_per_s(5, seed)
        first, second, *_ = workload.draw(5, seed).at_rate(rate)
        starts.add(first.num_prompt_tokens)
        assert second.arrived_s == pytest.approx(second.num_prompt_tokens - 100)
    assert len(starts) > 3


def test_a_trace_can_have_other_arrivals(tmp_path: Path) -> None:
    workload = trace_workload(a_trace(tmp_path), arrivals=RandomGaps(0))
    assert workload.recorded_requests_per_s(3) is None
    assert [each.arrived_s for each in workload.draw(3).at_rate(2.0)] == [0.5, 1.0, 1.5]


def test_a_trace_has_no_more_than_it_has(tmp_path: Path) -> None:
    trace = a_trace(tmp_path)
    with pytest.raises(ValueError, match="21 arrivals are asked of a trace of 20"):
        trace_workload(trace).draw(21)
    endless = Workload(name="sessions", contents=RedrawnSessions(trace))
    assert endless.draw(500).num_requests == 500


def test_conversations_of_a_trace_are_drawn_whole(tmp_path: Path) -> None:
    path = tmp_path / "sessions.jsonl"
    lines = [
        {"session_id": row, **time, "input_length": 10 + row, "output_length": 5}
        for row in range(30)
        for time in ({"timestamp": 100 * row}, {"delay": 40}, {"delay": 60})
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    workload = trace_workload(read_mooncake(path))
    starts = set()
    for seed in range(6):
        sample = workload.draw(30, seed)
        assert (len(sample.conversations), sample.num_requests) == (10, 30)
        first, second, *_ = sample.at_rate(workload.recorded_requests_per_s(30, seed) or 0)
        assert second.arrived_s == pytest.approx(0.1)
        starts.add(first.num_prompt_tokens)
        _, later, last = first.turns()
        assert (later.arrived_s, last.arrived_s) == (0.04, 0.06)
        assert last.num_prompt_tokens == 3 * first.num_prompt_tokens + 2 * 5
    assert len(starts) > 2
    assert workload.draw(90).num_requests == 90
