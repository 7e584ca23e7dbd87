from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest
import uvloop

from pdserve.loadgen.load import GeneratorHealth, Progress, PromptWriter, _sleep_until, measure_load
from pdserve.planner.workload.requests import Segment, SimulatedRequest
from tests.loadgen.scripted_server import Script, scripted_server, token_events


def answer_in_full(body: dict[str, Any]) -> Script:
    return Script(events=token_events(body["max_tokens"], token_ids="return_token_ids" in body), pause_s=0.02)


def test_requests_leave_when_they_are_due_whatever_becomes_of_those_before() -> None:
    requests = [SimulatedRequest(0.1 * number, 5, 20) for number in range(8)]
    with scripted_server(answer_in_full) as server:
        measured = measure_load(server.url, requests, vocab_size=100)
    assert measured.num_finished == 8
    assert measured.times.arrived_s == pytest.approx([request.arrived_s for request in requests])
    # One after the other they would take 3.2 s.
    assert 0.3 < max(server.arrived_s) - min(server.arrived_s) < 3
    assert [len(body["prompt"]) for body in server.bodies] == [5] * 8
    assert server.bodies[0]["path"] == "/v1/completions"


def test_no_request_leaves_before_it_is_due() -> None:
    async def lateness_s() -> list[float]:
        late_s = []
        for number in range(40):
            due_s = time.monotonic() + 0.0013 + number * 1e-5
            await _sleep_until(due_s)
            late_s.append(time.monotonic() - due_s)
        return late_s

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert min(runner.run(lateness_s())) >= 0


def test_times_are_those_of_the_first_second_and_last_token() -> None:
    with scripted_server(answer_in_full) as server:
        measured = measure_load(server.url, [SimulatedRequest(0.0, 5, 6)], vocab_size=100)
    times = measured.times
    assert 0.02 <= times.ttft_s[0] < 10
    assert 0 < times.second_token_s[0] - times.first_token_s[0] < 10
    assert 0.002 < times.tpot_s[0] < 10
    assert measured.gap_s.shape == (5,)
    assert measured.gap_s.mean() == pytest.approx(times.tpot_s[0])
    assert times.num_output_tokens.tolist() == [6]
    assert times.num_cached_tokens.tolist() == [3]
    assert measured.ended_s == times.last_token_s[0]


def test_an_answer_of_one_token_has_no_second() -> None:
    with scripted_server(answer_in_full) as server:
        measured = measure_load(server.url, [SimulatedRequest(0.0, 5, 1)], vocab_size=100)
    assert np.isnan(measured.times.second_token_s).all()
    assert measured.times.tpot_s.tolist() == [0.0]
    assert not measured.gap_s.size


def test_events_may_come_in_pieces() -> None:
    whole = b"".join(token_events(4))
    pieces = tuple(whole[start : start + 37] for start in range(0, len(whole), 37))
    with scripted_server(lambda _: Script(events=pieces, pause_s=0.002)) as server:
        measured = measure_load(server.url, [SimulatedRequest(0.0, 5, 4)], vocab_size=100)
    assert measured.num_finished == 1
    assert measured.gap_s.shape == (3,)


def test_a_slowed_workload_gives_times_of_its_own_clock() -> None:
    requests = [SimulatedRequest(0.0, 5, 4), SimulatedRequest(0.05, 5, 4)]
    with scripted_server(lambda _: Script(events=token_events(4), pause_s=0.2)) as server:
        measured = measure_load(server.url, requests, vocab_size=100, time_scale=10)
    assert 0.1 < np.diff(server.arrived_s)[0] < 5
    assert measured.times.arrived_s == pytest.approx([0.0, 0.05])
    assert 0.01 < measured.times.tpot_s.mean() < 0.15
    assert measured.gap_s.mean() == pytest.approx(measured.times.tpot_s.mean())


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (Script(status=500, refusal=b'{"error": "no"}'), '{"error": "no"}'),
        (Script(events=token_events(3, done=False)), "the stream ended early"),
        (Script(events=token_events(3, done=False), breaks_off=True), "the server closed the connection"),
        (Script(events=(b'data: {"error": {"message": "gone"}}\n\n',)), '{"error": {"message": "gone"}}'),
        (Script(events=(b"data: {]\n\n",)), "the answer is broken"),
    ],
    ids=["status", "early end", "broken off", "error event", "no JSON"],
)
def test_what_fails_is_counted_by_its_reason(script: Script, error: str) -> None:
    requests = [SimulatedRequest(0.0, 5, 3), SimulatedRequest(0.1, 5, 2)]
    with scripted_server(lambda body: script if body["max_tokens"] == 3 else answer_in_full(body)) as server:
        measured = measure_load(server.url, requests, vocab_size=100)
    assert measured.num_finished == 1
    assert measured.num_rejected == 0
    ((said, count),) = measured.errors.items()
    assert said.startswith(error)
    assert count == 1
    assert np.isnan(measured.times.last_token_s).tolist() == [True, False]


def test_rejections_are_not_failures() -> None:
    with scripted_server(lambda _: Script(status=429, refusal=b"later")) as server:
        measured = measure_load(server.url, [SimulatedRequest(0.0, 5, 3)], vocab_size=100)
    assert measured.num_rejected == 1
    assert not measured.errors
    assert measured.ended_s == 0


def test_an_answer_that_takes_too_long_fails() -> None:
    slow = Script(events=token_events(3), pause_s=0.6)
    with scripted_server(lambda _: slow) as server:
        measured = measure_load(server.url, [SimulatedRequest(0.0, 5, 3)], vocab_size=100, timeout_s=1.1)
    assert measured.errors == {"not complete after 1.1 s": 1}
    assert not np.isnan(measured.times.first_token_s).any()


def test_connections_are_used_again() -> None:
    with scripted_server(answer_in_full) as server:
        measure_load(server.url, [SimulatedRequest(0.1 * number, 5, 2) for number in range(8)], vocab_size=100)
    assert len(server.connections) < 8


def test_nobody_listens() -> None:
    with pytest.raises(OSError, match="refused"):
        measure_load("http://127.0.0.1:9", [SimulatedRequest(0.0, 5, 3)], vocab_size=100)


def test_the_next_turn_continues_what_was_answered() -> None:
    follow_up = SimulatedRequest(0.1, 12, 2)
    with scripted_server(answer_in_full) as server:
        measured = measure_load(server.url, [SimulatedRequest(0.0, 5, 4, (), follow_up)], vocab_size=100)
    first, second = (body["prompt"] for body in server.bodies)
    assert second[:9] == [*first, 0, 1, 2, 3]
    assert len(second) == 12
    assert measured.num_finished == 2
    assert measured.times.arrived_s[1] == pytest.approx(measured.times.last_token_s[0] + 0.1)
    assert measured.offered_until_s == measured.times.arrived_s[0]


def test_prompts_are_equal_where_their_contents_are() -> None:
    writer = PromptWriter(50000, seed=1)
    system, longer = Segment(7, 20), Segment(7, 30)
    first = writer.tokens(SimulatedRequest(0.0, 25, 1, (system, Segment(8, 5))))
    second = writer.tokens(SimulatedRequest(0.0, 30, 1, (longer,)))
    assert first[:20] == second[:20]
    assert first[20:] != second[20:25]
    private = [writer.tokens(SimulatedRequest(0.0, 16, 1)) for _ in range(2)]
    assert private[0] != private[1]
    assert PromptWriter(50000, seed=2).tokens(SimulatedRequest(0.0, 30, 1, (longer,)))[:20] != first[:20]
    assert all(0 <= token < 50000 for prompt in (first, second, *private) for token in prompt)


def test_a_generator_that_could_not_keep_up_says_so() -> None:
    good = {"cpu_share": 0.3, "send_late_p99_s": 0.002, "send_late_max_s": 0.2, "loop_late_p99_s": 0.002}
    assert GeneratorHealth(**good).problems() == []
    for bad in ({"cpu_share": 0.8}, {"send_late_p99_s": 0.02}, {"loop_late_p99_s": 0.02}):
        assert len(GeneratorHealth(**{**good, **bad}).problems()) == 1
    assert GeneratorHealth(**good).problems(max_late_s=0.001)


def test_lateness_is_noticed() -> None:
    """What keeps the loop busy makes it read late and send late."""

    def busy(_: Progress) -> None:
        time.sleep(0.3)

    requests = [SimulatedRequest(0.9 + 0.02 * number, 5, 2) for number in range(20)]
    with scripted_server(answer_in_full) as server:
        measured = measure_load(server.url, requests, vocab_size=100, progress=busy)
    assert measured.health.send_late_max_s > 0.1
    assert measured.health.problems()
    # Times begin when requests were due.
    assert measured.times.ttft_s.max() > 0.1


def test_progress_counts_prompts_at_token_0_and_tokens_as_they_come() -> None:
    seen: list[Progress] = []
    requests = [SimulatedRequest(0.0, 5, 80), SimulatedRequest(0.0, 7, 2)]
    with scripted_server(answer_in_full) as server:
        measure_load(server.url, requests, vocab_size=100, progress=seen.append)
    assert seen[-1] == (2, 2, 12, 82)
    assert seen[0].num_sent == 2
    assert (seen[0].num_done, seen[0].num_prefilled_tokens) == (1, 12)
    assert 2 < seen[0].num_output_tokens < 82


def test_concurrency_is_bounded() -> None:
    requests = [SimulatedRequest(0.0, 5, 5) for _ in range(6)]
    with scripted_server(answer_in_full) as server:
        measured = measure_load(server.url, requests, vocab_size=100, max_concurrency=2)
    times = measured.times
    assert measured.num_finished == 6
    in_flight = [((times.arrived_s <= at_s) & (times.last_token_s > at_s)).sum() for at_s in times.arrived_s]
    assert max(in_flight) == 2
    # Waiting for a slot is not part of a request's time.
    assert times.arrived_s.max() >= times.last_token_s.min()
