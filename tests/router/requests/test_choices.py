"""Several answers to one prompt: separate requests on workers, one request for the client and the metrics."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.contracts.events import RefusalCode, RequestEventKind
from pdserve.contracts.request import Outcome
from pdserve.proto.v1 import worker_pb2
from pdserve.router.requests.goodput import Goodput
from pdserve.router.requests.request import GenerationError
from pdserve.router.token_stream import TokenStream
from tests.router.rig import (
    Rig,
    attempt_of,
    hand_off,
    is_unbound,
    read_all,
    read_choices,
    read_some,
    running_rig,
    with_workers,
)
from tests.router.scripted_worker import ScriptedWorker, until


def answer(choice: int) -> list[int]:
    """Four tokens per choice: 100 to 103 for choice 0, 200 to 203 for choice 1 and so on."""
    return [100 * (choice + 1) + index for index in range(4)]


def send(worker: ScriptedWorker, request: worker_pb2.Request, first: int = 0, end: int = 4) -> None:
    """Send tokens ``first`` to ``end`` - 1 of the request's choice; the last of four is final."""
    tokens = list(enumerate(answer(request.choice)))[first:end]
    worker.send_tokens(request, tokens, last=end == 4)


async def begin(rig: Rig, m: ScriptedWorker, num_choices: int = 3) -> tuple[TokenStream, list[worker_pb2.Request]]:
    """Start a request on a mixed worker, which receives every choice; token 0 of choice 0 is out."""
    stream = rig.start(num_choices=num_choices)
    requests = [await m.next_submit()]
    send(m, requests[0], 0, 1)
    requests += [await m.next_submit() for _ in range(1, num_choices)]
    assert await read_some(stream, 1) == [100]
    return stream, requests


def check_one_request(rig: Rig, outcome: Outcome) -> None:
    """Check that one request was accepted and has one outcome, however many choices it has."""
    assert rig.dispatcher.num_accepted == 1
    assert rig.dispatcher.outcomes == {other: int(other is outcome) for other in Outcome}
    assert rig.sample("pdserve_requests_accepted_total") == 1


@with_workers("prefill-0", "decode-0")
async def test_further_choices_follow_token_0_of_the_first(p: ScriptedWorker, d: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(p, d)
        stream = rig.start(num_choices=3)
        first = await hand_off(p, d)
        requests = [first]
        assert len(stream.attempts) in (1, 3)
        requests += [await hand_off(p, d, 100 * (choice + 1)) for choice in (1, 2)]
        assert [request.choice for request in requests] == [0, 1, 2]
        assert len({request.request_id for request in requests}) == 3
        assert rig.dispatcher.num_in_flight == 1
        for request in requests:
            send(d, request, 1)
        assert await read_choices(stream) == {choice: answer(choice) for choice in range(3)}
        assert stream.num_cached_tokens == 1
        assert rig.sample("pdserve_cached_prompt_tokens_total") == 1
        check_one_request(rig, Outcome.FINISHED)


@with_workers("mixed-0")
async def test_before_token_0_one_choice_is_on_its_way(m: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(m)
        stream = rig.start(num_choices=2)
        request = await m.next_submit()
        m.send_event(request, RequestEventKind.STARTED, num_cached_tokens=3)
        await until(lambda: stream.is_started)
        assert m.commands.empty()
        stream.cancel()


@with_workers("prefill-0", "decode-0")
async def test_every_choice_counts_as_load(p: ScriptedWorker, d: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(p, d)
        stream = rig.start(range(10), num_choices=3)
        for choice in range(3):
            request = await p.next_submit()
            p.offer(request)
            await d.next_prepare()
            if choice == 0:
                p.send_token(request, 0, 100)
                d.send_event(request, RequestEventKind.JOINED)
        snapshot = rig.cluster.workers["decode-0"].snapshot()
        # The worker's own report includes the one that has joined.
        assert (snapshot.num_decoding, snapshot.num_context_tokens) == (2, 20)
        placement = rig.dispatcher.placement
        assert isinstance(placement, Goodput)
        assert placement._pulls.num_tokens("prefill-0", 1, 0) == 2 * 4, "a block each"
        stream.cancel()
        assert rig.cluster.workers["decode-0"].snapshot().num_decoding == 0


@pytest.mark.parametrize("ending", ["joined", "stopped", "failed"])
def test_the_prompt_is_pulled_once(ending: str) -> None:
    """Other choices wait for the pull of choice 0, however it ends: the decode worker then caches the prompt."""

    @with_workers("prefill-0", "decode-0", "decode-1")
    async def run(p: ScriptedWorker, d0: ScriptedWorker, d1: ScriptedWorker) -> None:
        async with running_rig() as rig:
            await rig.up(p, d0, d1)
            stream = rig.start(num_choices=2)
            first = await p.next_submit()
            p.offer(first)
            await d0.next_prepare()
            send(p, first, 0, 1)
            second = await p.next_submit()
            p.offer(second)
            await until(lambda: is_unbound(stream.attempts[1]))
            assert d0.commands.empty()
            assert d1.commands.empty()
            match ending:
                case "joined":
                    d0.send_event(first, RequestEventKind.JOINED)
                case "stopped":
                    rig.dispatcher.finish(stream, 0)
                case "failed":
                    d0.send_event(first, RequestEventKind.KV_UNAVAILABLE, refusal=RefusalCode.SOURCE)
            assert (await asyncio.wait_for(next_of(d0, d1), 5)).request_id == second.request_id
            stream.cancel()

    run()


async def next_of(*workers: ScriptedWorker) -> worker_pb2.Request:
    """Next request that any of the workers is to decode."""
    tasks = [asyncio.create_task(worker.next_prepare()) for worker in workers]
    done, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in others:
        task.cancel()
    return done.pop().result()


@with_workers("mixed-0")
async def test_choices_end_one_by_one(m: ScriptedWorker) -> None:
    """One choice ends at token 0, one at a stop string, one at its limit."""
    async with running_rig() as rig:
        await rig.up(m)
        stream = rig.start(num_choices=3)
        m.send_token(await m.next_submit(), 0, 100, last=True)
        second, third = await m.next_submit(), await m.next_submit()
        send(m, second, 0, 2)
        send(m, third, 0, 2)
        assert sorted(await read_some(stream, 5)) == [100, 200, 201, 300, 301]
        rig.dispatcher.finish(stream, 1)
        assert (await m.next_command("cancel")).cancel.request_id == second.request_id
        m.send_token(second, 2, 666)
        send(m, third, 2)
        assert await read_some(stream, 2) == [302, 303]
        assert await read_all(stream) == []
        rig.dispatcher.finish(stream, 2)
        assert m.commands.empty()
        check_one_request(rig, Outcome.FINISHED)


@with_workers("mixed-0")
async def test_a_choice_that_stops_early_never_leaves(m: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(m)
        stream = rig.start(num_choices=3)
        rig.dispatcher.finish(stream, 1)
        send(m, await m.next_submit())
        last = await m.next_submit()
        assert last.choice == 2
        send(m, last)
        assert await read_choices(stream) == {0: answer(0), 2: answer(2)}
        check_one_request(rig, Outcome.FINISHED)


@with_workers("mixed-0")
async def test_the_others_do_not_wait_for_a_first_choice_that_stops(m: ScriptedWorker) -> None:
    async with running_rig() as rig:
        stream = rig.start(num_choices=2)
        rig.dispatcher.finish(stream, 0)
        await rig.up(m)
        request = await m.next_submit()
        assert request.choice == 1
        send(m, request)
        assert await read_choices(stream) == {1: answer(1)}
        assert m.commands.empty()


@with_workers("mixed-0", "mixed-1")
async def test_a_first_choice_lost_before_its_token_is_tried_alone(m0: ScriptedWorker, m1: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(m0, m1)
        stream = rig.start(num_choices=2)
        lost = await m0.next_submit()
        await m0.stop()
        again = await m1.next_submit()
        assert (again.request_id, again.attempt, again.choice) == (lost.request_id, 1, 0)
        assert m1.commands.empty()
        send(m1, again)
        send(m1, await m1.next_submit())
        assert await read_choices(stream) == {0: answer(0), 1: answer(1)}


@with_workers("mixed-0", "mixed-1")
async def test_after_a_loss_each_goes_on_from_its_tokens(m0: ScriptedWorker, m1: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(m0)
        stream, requests = await begin(rig, m0, 4)
        await rig.up(m0, m1)
        answers: dict[int, list[int]] = {0: [100], 1: [], 2: [], 3: []}
        send(m0, requests[0], 1)  # choice 0 is complete
        send(m0, requests[1], 0, 3)
        send(m0, requests[3], 0, 3)
        for _ in range(9):
            token = await anext(stream)
            answers[token.choice].append(token.token)
        rig.dispatcher.finish(stream, 3)
        await m0.stop()
        again = [await m1.next_submit() for _ in range(2)]
        assert [(request.choice, request.attempt) for request in again] == [(1, 1), (2, 1)]
        assert [list(request.emitted_tokens) for request in again] == [[200, 201, 202], []]
        assert rig.dispatcher.num_in_flight == 1
        assert rig.sample("pdserve_redispatches_total", reason="worker_lost") == 2
        m1.send_token(requests[3], 3, 666)  # that choice is over
        send(m1, again[0], 3)
        send(m1, again[1])
        assert await read_choices(stream, answers) == {0: answer(0), 1: answer(1), 2: answer(2), 3: answer(3)[:3]}
        check_one_request(rig, Outcome.FINISHED)


@with_workers("mixed-0")
async def test_a_choice_that_fails_for_good_fails_all(m: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(m)
        stream, requests = await begin(rig, m)
        m.send_event(requests[1], RequestEventKind.FAILED, message="boom")
        again = await m.next_submit()
        assert (again.request_id, again.attempt) == (requests[1].request_id, 1)
        m.send_event(again, RequestEventKind.FAILED, message="boom")
        with pytest.raises(GenerationError) as caught:
            await read_all(stream)
        assert caught.value.status == 500
        cancelled = {(await m.next_command("cancel")).cancel.request_id for _ in range(3)}
        assert cancelled == {request.request_id for request in requests}
        check_one_request(rig, Outcome.FAILED)


@with_workers("mixed-0")
async def test_a_first_choice_that_can_never_run_fails_all(m: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(m)
        stream = rig.start(num_choices=3)
        request = await m.next_submit()
        m.send_event(request, RequestEventKind.REJECTED, message="too long", refusal=RefusalCode.INVALID)
        with pytest.raises(GenerationError, match="too long") as caught:
            await read_all(stream)
        assert caught.value.status == 400
        assert (await m.next_command("cancel")).cancel.request_id == request.request_id
        assert m.commands.empty()
        check_one_request(rig, Outcome.REJECTED)


@with_workers("mixed-0")
async def test_a_cancel_reaches_every_choice(m: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(m)
        stream, requests = await begin(rig, m)
        stream.cancel()
        stream.cancel()
        for request in requests:
            cancel = (await m.next_command("cancel")).cancel
            assert (cancel.request_id, cancel.attempt) == (request.request_id, 0)
        send(m, requests[0], 1)
        assert await read_all(stream) == []
        check_one_request(rig, Outcome.CANCELLED)


@with_workers("mixed-0")
async def test_prompt_logprobs_are_asked_of_the_first_choice(m: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(m)
        stream = rig.start(num_choices=2, num_prompt_logprobs=1)
        first = await m.next_submit()
        m.send_prompt_logprobs(first, 1, [-1.0, -2.0, -3.0, -4.0])
        send(m, first)
        second = await m.next_submit()
        assert (first.sampling.num_prompt_logprobs, second.sampling.num_prompt_logprobs) == (1, -1)
        send(m, second)
        assert await read_choices(stream) == {0: answer(0), 1: answer(1)}
        assert len(stream.prompt_logprobs) == 4


def test_every_choice_counts_in_admission() -> None:
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
    """Log probabilities arrive chunk by chunk; those repeated by a later attempt are not added twice."""
    async with running_rig() as rig:
        await rig.up(p0, p1, d)
        stream = rig.start(num_prompt_logprobs=0, max_tokens=2)
        lost = await p0.next_submit()
        assert lost.sampling.num_prompt_logprobs == 0
        p0.send_prompt_logprobs(lost, 1, [-1.0])
        p0.send_prompt_logprobs(lost, 2, [-2.0])
        await until(lambda: len(stream.prompt_logprobs) == 2)
        await p0.stop()
        request = await p1.next_submit()
        p1.send_prompt_logprobs(lost, 3, [-6.0])  # from the previous attempt
        p1.send_prompt_logprobs(request, 1, [-1.0])
        p1.send_prompt_logprobs(request, 2, [-2.0, -3.0, -4.0])
        p1.send_token(request, 0, 100)
        assert await read_some(stream, 1) == [100]
        assert [entry.logprob for entry in stream.prompt_logprobs] == [-1.0, -2.0, -3.0, -4.0]
        stream.cancel()


@pytest.mark.parametrize("fault", ["a gap", "too few"])
def test_prompt_logprobs_that_are_lost_cost_the_attempt(fault: str) -> None:
    @with_workers("mixed-0")
    async def run(m: ScriptedWorker) -> None:
        async with running_rig() as rig:
            await rig.up(m)
            stream = rig.start(num_prompt_logprobs=0)
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
            assert await read_some(stream, 1) == [100]
            assert len(stream.prompt_logprobs) == 4
            assert attempt_of(stream).num_failures == 1
            stream.cancel()

    run()
