"""Several answers to one prompt: together while all is well, each alone after a loss, and one request all the time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest

from pdserve.contracts.request import Outcome
from pdserve.engine.scheduler import RequestEventKind
from pdserve.proto.v1 import worker_pb2
from pdserve.router.flight import Flight
from pdserve.router.generation import GenerationError
from tests.router.rig import Rig, attempt_of, leg_of, read_all, read_choices, read_some, running_rig, with_workers
from tests.router.scripted_worker import ScriptedWorker, until


def send_first_tokens(worker: ScriptedWorker, request: worker_pb2.Request) -> None:
    """Token 0 of every choice: 100 of choice 0, 200 of choice 1 and so on."""
    for choice in range(request.choice, request.choice + request.num_choices):
        worker.send_token(request, 0, 100 * (choice + 1), choice=choice)


def send_rest(
    worker: ScriptedWorker, request: worker_pb2.Request, choices: Iterable[int], first: int = 1, end: int = 4
) -> None:
    """Tokens ``first`` to ``end`` - 1 of every choice, in turn, the last ones of four being final."""
    for index in range(first, end):
        for choice in choices:
            worker.send_token(request, index, 100 * (choice + 1) + index, choice=choice, last=index == 3)


def answer(choice: int) -> list[int]:
    return [100 * (choice + 1) + index for index in range(4)]


async def join(p: ScriptedWorker, d: ScriptedWorker) -> worker_pb2.Request:
    """Prefill on ``p`` and a join on ``d``; token 0 of every choice is out."""
    request = await p.next_submit()
    p.offer(request)
    send_first_tokens(p, request)
    prepared = await d.next_prepare()
    assert (prepared.choice, prepared.num_choices) == (request.choice, request.num_choices)
    d.send_event(prepared, RequestEventKind.JOINED)
    p.send_event(request, RequestEventKind.RELEASED)
    return prepared


async def begin(rig: Rig, m: ScriptedWorker, num_choices: int = 3) -> tuple[Flight, worker_pb2.Request]:
    """A request of several choices on a mixed worker."""
    flight = rig.start(num_choices=num_choices)
    return flight, await m.next_submit()


def check_one_request(rig: Rig, outcome: Outcome) -> None:
    """However many choices and legs: one request was accepted, and it has one outcome."""
    assert rig.dispatcher.num_accepted == 1
    assert rig.dispatcher.outcomes == {other: int(other is outcome) for other in Outcome}
    assert rig.sample("pdserve_requests_accepted_total") == 1


@with_workers("prefill-0", "decode-0")
async def test_one_attempt_carries_all_choices(p: ScriptedWorker, d: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(p, d)
        flight = rig.start(num_choices=3)
        request = await join(p, d)
        assert (request.choice, request.num_choices) == (0, 3)
        assert rig.dispatcher.num_in_flight == 1
        send_rest(d, request, range(3))
        assert await read_choices(flight) == {choice: answer(choice) for choice in range(3)}
        assert p.commands.empty()
        assert d.commands.empty()
        check_one_request(rig, Outcome.FINISHED)


@with_workers("prefill-0", "decode-0")
async def test_a_decode_worker_is_promised_every_choice(p: ScriptedWorker, d: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(p, d)
        flight = rig.start(range(10), num_choices=3)
        p.offer(await p.next_submit())
        await d.next_prepare()
        snapshot = rig.fleet.worker("decode-0").snapshot()
        assert (snapshot.num_decoding, snapshot.num_context_tokens) == (3, 30)
        flight.cancel()
        assert rig.fleet.worker("decode-0").snapshot().num_decoding == 0


@with_workers("prefill-0", "decode-0")
async def test_choices_end_one_by_one(p: ScriptedWorker, d: ScriptedWorker) -> None:
    """One with its token 0, which only the prefill worker says; one for a stop string; one at its limit."""
    async with running_rig() as rig:
        await rig.up(p, d)
        flight = rig.start(num_choices=3)
        request = await p.next_submit()
        p.offer(request)
        p.send_token(request, 0, 100, last=True)
        p.send_token(request, 0, 200, choice=1)
        p.send_token(request, 0, 300, choice=2)
        d.send_event(await d.next_prepare(), RequestEventKind.JOINED)
        d.send_token(request, 1, 201, choice=1)
        d.send_token(request, 1, 301, choice=2)
        assert sorted(await read_some(flight, 5)) == [100, 200, 201, 300, 301]
        flight.finish(1)
        cancel = (await d.next_command("cancel")).cancel
        assert (cancel.request_id, list(cancel.choices)) == (request.request_id, [1])
        d.send_token(request, 2, 666, choice=1)
        d.send_tokens(request, [(2, 302), (3, 303)], last=True, choice=2)
        assert await read_some(flight, 2) == [302, 303]
        assert await read_all(flight) == []
        flight.finish(2)
        assert (await p.next_command("cancel")).cancel.choices == []  # it was never released
        assert d.commands.empty()
        check_one_request(rig, Outcome.FINISHED)


@with_workers("prefill-0", "decode-0")
async def test_a_choice_stops_before_a_decode_worker_is_bound(p: ScriptedWorker, d: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(p, d)
        flight = rig.start(num_choices=2)
        request = await p.next_submit()
        await rig.up(p)
        p.offer(request)
        send_first_tokens(p, request)
        assert sorted(await read_some(flight, 2)) == [100, 200]
        flight.finish(0)
        await rig.up(p, d)
        prepared = await d.next_prepare()
        assert prepared.num_choices == 2
        assert list((await d.next_command("cancel")).cancel.choices) == [0]
        assert p.commands.empty()
        flight.finish(1)
        assert (await d.next_command("cancel")).cancel.choices == []
        check_one_request(rig, Outcome.FINISHED)


@with_workers("prefill-0", "decode-0")
async def test_tokens_wait_for_token_0_of_their_own_choice(p: ScriptedWorker, d: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(p, d)
        flight = rig.start(num_choices=2)
        request = await p.next_submit()
        p.offer(request)
        d.send_event(await d.next_prepare(), RequestEventKind.JOINED)
        send_rest(d, request, range(2))
        await until(lambda: len(attempt_of(flight).overtook) == 6)
        p.send_token(request, 0, 200, choice=1)
        assert await read_some(flight, 4) == answer(1)
        p.send_token(request, 0, 100, choice=0)
        assert await read_choices(flight) == {0: answer(0)}


@with_workers("mixed-0", "mixed-1")
async def test_before_the_first_token_all_are_tried_again_together(m0: ScriptedWorker, m1: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(m0, m1)
        flight, lost = await begin(rig, m0)
        await m0.stop()
        again = await m1.next_submit()
        assert (again.request_id, again.attempt, again.num_choices) == (lost.request_id, 1, 3)
        send_first_tokens(m1, again)
        send_rest(m1, again, range(3))
        assert await read_choices(flight) == {choice: answer(choice) for choice in range(3)}


@with_workers("prefill-0", "decode-0", "decode-1")
async def test_after_the_first_tokens_each_goes_on_alone(
    p: ScriptedWorker, d0: ScriptedWorker, d1: ScriptedWorker
) -> None:
    async with running_rig() as rig:
        await rig.up(p, d0, d1)
        flight = rig.start(num_choices=4)
        lost = await join(p, d0)
        send_rest(d0, lost, [0])  # choice 0 is complete
        send_rest(d0, lost, [1, 3], end=3)
        answers: dict[int, list[int]] = {choice: [] for choice in range(4)}
        for _ in range(11):
            delta = await anext(flight)
            answers[delta.choice].append(delta.token)
        flight.finish(3)
        await d0.stop()
        legs = [await p.next_submit() for _ in range(2)]
        assert [(leg.choice, leg.num_choices, leg.attempt) for leg in legs] == [(1, 1, 1), (2, 1, 1)]
        assert [list(leg.emitted_tokens) for leg in legs] == [[200, 201, 202], [300]]
        assert len({lost.request_id, *(leg.request_id for leg in legs)}) == 3
        assert rig.dispatcher.num_in_flight == 1
        assert rig.sample("pdserve_redispatches_total", reason="worker_lost") == 1
        p.send_token(lost, 3, 666, choice=1)  # fenced: that request is over
        for leg in legs:
            p.offer(leg)
            index = len(leg.emitted_tokens)
            p.send_token(leg, index, 100 * (leg.choice + 1) + index, choice=leg.choice, last=index == 3)
        for leg in legs:
            prepared = await d1.next_prepare()
            assert prepared.choice == leg.choice
        d1.send_event(legs[1], RequestEventKind.JOINED)
        send_rest(d1, legs[1], [2], first=2)
        assert await read_choices(flight, answers) == {
            0: answer(0), 1: answer(1), 2: answer(2), 3: answer(3)[:3]
        }  # fmt: skip
        check_one_request(rig, Outcome.FINISHED)


@with_workers("mixed-0", "mixed-1")
async def test_a_choice_without_a_token_goes_on_alone_too(m0: ScriptedWorker, m1: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(m0, m1)
        flight, request = await begin(rig, m0, 2)
        m0.send_token(request, 0, 200, choice=1)
        assert await read_some(flight, 1) == [200]
        await m0.stop()
        legs = [await m1.next_submit() for _ in range(2)]
        assert [(leg.choice, list(leg.emitted_tokens)) for leg in legs] == [(0, []), (1, [200])]
        m1.send_tokens(legs[0], [(index, 100 + index) for index in range(4)], last=True)
        send_rest(m1, legs[1], [1])
        assert await read_choices(flight, {1: [200]}) == {0: answer(0), 1: answer(1)}


@with_workers("prefill-0", "prefill-1", "decode-0")
async def test_a_prefill_worker_is_needed_until_every_token_0_is_out(
    p0: ScriptedWorker, p1: ScriptedWorker, d: ScriptedWorker
) -> None:
    async with running_rig() as rig:
        await rig.up(p0, p1, d)
        flight = rig.start(num_choices=2)
        request = await p0.next_submit()
        p0.offer(request)
        p0.send_token(request, 0, 100)
        d.send_event(await d.next_prepare(), RequestEventKind.JOINED)
        await until(lambda: attempt_of(flight).has_joined and attempt_of(flight).first_token_s)
        await p0.stop()
        legs = [await p1.next_submit() for _ in range(2)]
        assert [(leg.choice, list(leg.emitted_tokens)) for leg in legs] == [(0, [100]), (1, [])]
        flight.cancel()


@with_workers("mixed-0")
async def test_a_choice_that_stops_in_the_queue_splits_the_rest(m: ScriptedWorker) -> None:
    async with running_rig() as rig:
        flight = rig.start(num_choices=3)
        flight.finish(1)
        await rig.up(m)
        legs = [await m.next_submit() for _ in range(2)]
        assert [(leg.choice, leg.num_choices, leg.attempt) for leg in legs] == [(0, 1, 0), (2, 1, 0)]
        flight.cancel()
        check_one_request(rig, Outcome.CANCELLED)


@with_workers("mixed-0", "mixed-1")
async def test_a_leg_that_fails_for_good_fails_all(m0: ScriptedWorker, m1: ScriptedWorker) -> None:
    """The failure before the split counts: a request that breaks steps must not break one for each choice."""
    async with running_rig() as rig:
        await rig.up(m0)
        flight, request = await begin(rig, m0)
        send_first_tokens(m0, request)
        assert await read_some(flight, 3) == [100, 200, 300]
        m0.send_event(request, RequestEventKind.FAILED, message="boom")
        legs = [await m0.next_submit() for _ in range(3)]
        m0.send_event(legs[1], RequestEventKind.FAILED, message="boom")
        with pytest.raises(GenerationError) as caught:
            await read_all(flight)
        assert caught.value.status == 500
        cancelled = {(await m0.next_command("cancel")).cancel.request_id for _ in range(3)}
        assert cancelled == {leg.request_id for leg in legs}
        check_one_request(rig, Outcome.FAILED)


@with_workers("mixed-0", "mixed-1")
async def test_a_cancel_reaches_every_leg(m0: ScriptedWorker, m1: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(m0)
        flight, request = await begin(rig, m0, 2)
        send_first_tokens(m0, request)
        assert await read_some(flight, 2) == [100, 200]
        await rig.up(m1)
        legs = [await m1.next_submit() for _ in range(2)]
        flight.cancel()
        flight.cancel()
        for leg in legs:
            cancel = (await m1.next_command("cancel")).cancel
            assert (cancel.request_id, cancel.attempt) == (leg.request_id, 1)
        send_rest(m1, legs[0], [0])
        assert await read_all(flight) == []
        check_one_request(rig, Outcome.CANCELLED)


def test_every_choice_takes_a_seat() -> None:
    async def run() -> None:
        async with running_rig(max_in_flight=4) as rig:
            with pytest.raises(GenerationError, match="5 choices") as caught:
                rig.start(num_choices=5)
            assert caught.value.status == 400
            first, second = rig.start(num_choices=3), rig.start()
            with pytest.raises(GenerationError) as caught:
                rig.start()
            assert caught.value.status == 429
            first.cancel()
            third = rig.start(num_choices=3)
            assert rig.dispatcher.num_in_flight == 2
            second.cancel()
            third.cancel()

    asyncio.run(run())


@with_workers("prefill-0", "prefill-1", "decode-0")
async def test_prompt_logprobs_are_whole_when_token_0_is_out(
    p0: ScriptedWorker, p1: ScriptedWorker, d: ScriptedWorker
) -> None:
    """Chunk by chunk; what an attempt repeats of an earlier one is not taken twice."""
    async with running_rig() as rig:
        await rig.up(p0, p1, d)
        flight = rig.start(num_prompt_logprobs=0, max_tokens=2)
        lost = await p0.next_submit()
        assert lost.sampling.num_prompt_logprobs == 0
        p0.send_prompt_logprobs(lost, 1, [-1.0])
        p0.send_prompt_logprobs(lost, 2, [-2.0])
        await until(lambda: len(flight.prompt_logprobs) == 2)
        await p0.stop()
        request = await p1.next_submit()
        p1.send_prompt_logprobs(lost, 3, [-6.0])  # of the attempt before
        p1.send_prompt_logprobs(request, 1, [-1.0])
        p1.send_prompt_logprobs(request, 2, [-2.0, -3.0, -4.0])
        p1.send_token(request, 0, 100)
        assert await read_some(flight, 1) == [100]
        assert [entry.logprob for entry in flight.prompt_logprobs] == [-1.0, -2.0, -3.0, -4.0]
        flight.cancel()


@pytest.mark.parametrize("fault", ["a gap", "too few"])
def test_prompt_logprobs_that_are_lost_cost_the_attempt(fault: str) -> None:
    @with_workers("mixed-0")
    async def run(m: ScriptedWorker) -> None:
        async with running_rig() as rig:
            await rig.up(m)
            flight = rig.start(num_prompt_logprobs=0)
            request = await m.next_submit()
            m.send_prompt_logprobs(request, 1, [-1.0])
            if fault == "a gap":
                m.send_prompt_logprobs(request, 3, [-3.0, -4.0])
            else:
                m.send_token(request, 0, 100)
            again = await m.next_submit()
            assert again.attempt == 1
            m.send_prompt_logprobs(again, 1, [-1.0, -2.0, -3.0, -4.0])
            m.send_token(again, 0, 100)
            assert await read_some(flight, 1) == [100]
            assert len(flight.prompt_logprobs) == 4
            assert leg_of(flight).tries.num_failures == 1
            flight.cancel()

    run()
