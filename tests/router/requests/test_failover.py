"""Fail-over of requests: each token reaches the client once, and every request gets its outcome."""

from __future__ import annotations

import asyncio
import time
from functools import partial

import pytest

from pdserve.contracts.events import RequestEvent, RequestEventKind, RequestKey
from pdserve.contracts.request import Outcome
from pdserve.proto.v1 import worker_pb2
from pdserve.router.requests.attempt import Decoding, Queued
from pdserve.router.requests.failover import MAX_ATTEMPTS
from pdserve.router.requests.request import GenerationError
from tests.router.rig import attempt_of, hand_off, is_released, read_all, read_some, running_rig, with_workers
from tests.router.scripted_worker import ScriptedWorker, until


@with_workers("prefill-0", "decode-0", "decode-1")
async def test_decode_worker_dies_in_the_middle(p: ScriptedWorker, d0: ScriptedWorker, d1: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(p, d0, d1)
        stream = rig.start(max_tokens=5)
        request = await hand_off(p, d0)
        d0.send_tokens(request, [(1, 101), (2, 102)], last=False)
        assert await read_some(stream, 3) == [100, 101, 102]
        await d0.stop()
        again = await hand_off(p, d1, token=103)
        assert again.attempt == 1
        assert list(again.emitted_tokens) == [100, 101, 102]
        d1.send_token(again, 4, 104, last=True)
        assert await read_all(stream, 3) == [103, 104]
        assert rig.sample("pdserve_redispatches_total", reason="worker_lost") == 1


@with_workers("prefill-0", "prefill-1", "decode-0")
async def test_prefill_worker_dies_before_token_0(p0: ScriptedWorker, p1: ScriptedWorker, d: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(p0, p1, d)
        stream = rig.start(max_tokens=2)
        answer = asyncio.create_task(read_all(stream))
        p0.offer(await p0.next_submit())
        await d.next_prepare()
        await p0.stop()
        assert (await d.next_command("cancel")).cancel.attempt == 0
        again = await hand_off(p1, d)
        d.send_token(again, 1, 101, last=True)
        assert await answer == [100, 101]


@with_workers("prefill-0", "prefill-1", "decode-0")
async def test_prefill_worker_dies_before_the_pull(p0: ScriptedWorker, p1: ScriptedWorker, d: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(p0, p1, d)
        stream = rig.start(max_tokens=3)
        answer = asyncio.create_task(read_all(stream))
        request = await p0.next_submit()
        p0.offer(request)
        p0.send_token(request, 0, 100)
        await d.next_prepare()
        await until(lambda: attempt_of(stream).emitted)
        await p0.stop()
        await d.next_command("cancel")
        again = await hand_off(p1, d, token=101)
        assert list(again.emitted_tokens) == [100]
        d.send_token(again, 2, 102, last=True)
        assert await answer == [100, 101, 102]


@pytest.mark.parametrize("released", [True, False])
def test_a_prefill_worker_that_has_given_everything_may_die(released: bool) -> None:
    with_workers("prefill-0", "decode-0")(partial(play_last_words, released=released))()


async def play_last_words(p: ScriptedWorker, d: ScriptedWorker, *, released: bool) -> None:
    async with running_rig() as rig:
        await rig.up(p, d)
        stream = rig.start(max_tokens=2)
        request = await hand_off(p, d, released=released)
        await until(lambda: isinstance(attempt_of(stream).state, Decoding))
        await p.stop()
        await until(lambda: not rig.cluster.workers["prefill-0"].is_up)
        d.send_token(request, 1, 101, last=True)
        assert await read_all(stream) == [100, 101]
        assert rig.dispatcher.outcomes[Outcome.FINISHED] == 1


@with_workers("prefill-0", "decode-0")
async def test_the_only_prefill_worker_dies_and_decode_takes_over(p: ScriptedWorker, d: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(p, d)
        stream = rig.start(max_tokens=2)
        await p.next_submit()
        await p.stop()
        request = await d.next_submit()
        assert not request.handoff
        d.send_tokens(request, [(0, 100), (1, 101)], last=True)
        assert await read_all(stream) == [100, 101]


@with_workers("prefill-0", "decode-0")
async def test_the_only_decode_worker_comes_back(p: ScriptedWorker, d: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(p, d)
        stream = rig.start(max_tokens=4)
        request = await hand_off(p, d)
        d.send_token(request, 1, 101)
        assert await read_some(stream, 2) == [100, 101]
        await d.stop()
        await until(lambda: isinstance(attempt_of(stream).state, Queued))
        d.epoch += 1000
        await d.start()
        await rig.cluster.set_targets([p.endpoint, d.endpoint])
        again = await hand_off(p, d, token=102)
        assert list(again.emitted_tokens) == [100, 101]
        d.send_token(again, 3, 103, last=True)
        assert await read_all(stream, 2) == [102, 103]


@with_workers("prefill-0", "decode-0", "decode-1")
async def test_a_target_that_is_taken_away_gives_up_its_requests(
    p: ScriptedWorker, d0: ScriptedWorker, d1: ScriptedWorker
) -> None:
    async with running_rig() as rig:
        await rig.up(p, d0, d1)
        stream = rig.start(max_tokens=3)
        await hand_off(p, d0)
        assert await read_some(stream, 1) == [100]
        await until(lambda: isinstance(attempt_of(stream).state, Decoding))
        await rig.up(p, d1)
        request = await hand_off(p, d1, token=101)
        d1.send_token(request, 2, 102, last=True)
        assert await read_all(stream, 1) == [101, 102]


@with_workers("prefill-0", "decode-0", "decode-1")
async def test_a_silent_decode_worker_is_fenced(p: ScriptedWorker, d0: ScriptedWorker, d1: ScriptedWorker) -> None:
    async with running_rig(stall_timeout_s=0.6) as rig:
        await rig.up(p, d0, d1)
        stream = rig.start(max_tokens=3)
        stale = await hand_off(p, d0)
        await until(lambda: isinstance(attempt_of(stream).state, Decoding))
        d0.is_silent = True
        request = await hand_off(p, d1, token=101)
        d0.is_silent = False
        await until(lambda: rig.cluster.workers["decode-0"].is_up)
        d0.send_tokens(stale, [(1, 666), (2, 666)], last=True)
        d1.send_token(request, 2, 102, last=True)
        assert await read_all(stream) == [100, 101, 102]


@with_workers("prefill-0", "decode-0")
async def test_stale_and_repeated_tokens_are_dropped(p: ScriptedWorker, d: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(p, d)
        stream = rig.start(max_tokens=4)
        request = await hand_off(p, d)
        assert await read_some(stream, 1) == [100]
        d.send_event(request, RequestEventKind.KV_UNAVAILABLE, message="expired")
        again = await hand_off(p, d, token=101)
        for kind in (RequestEventKind.FAILED, RequestEventKind.KV_UNAVAILABLE, RequestEventKind.REJECTED):
            d.send_event(request, kind)
        d.send_token(request, 2, 666)
        d.send_token(request, 1, 666)
        d.send_tokens(again, [(2, 102), (2, 666), (1, 666), (3, 103)], last=True)
        assert await read_all(stream, 1) == [101, 102, 103]
        assert rig.sample("pdserve_redispatches_total", reason="kv_unavailable") == 1


@with_workers("prefill-0", "decode-0")
async def test_a_gap_fails_the_attempt_not_the_request(p: ScriptedWorker, d: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(p, d)
        stream = rig.start(max_tokens=3)
        request = await hand_off(p, d)
        await until(lambda: isinstance(attempt_of(stream).state, Decoding))
        d.send_token(request, 2, 102)
        assert (await d.next_command("cancel")).cancel.attempt == 0
        again = await hand_off(p, d, token=101)
        d.send_token(again, 2, 102, last=True)
        assert await read_all(stream) == [100, 101, 102]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_step_may_fail_once_but_not_twice(phase: str) -> None:
    @with_workers("prefill-0", "decode-0")
    async def run(p: ScriptedWorker, d: ScriptedWorker) -> None:
        async with running_rig() as rig:
            await rig.up(p, d)
            stream = rig.start()
            for attempt in range(2):
                if phase == "prefill":
                    request = await p.next_submit()
                    p.send_event(request, RequestEventKind.FAILED, message="boom")
                else:
                    request = await hand_off(p, d, token=100 + attempt)
                    d.send_event(request, RequestEventKind.FAILED, message="boom")
                assert request.attempt == attempt
                if phase == "prefill":
                    await p.next_command("cancel")
                else:
                    await d.next_command("cancel")
            with pytest.raises(GenerationError) as caught:
                await read_all(stream)
            assert caught.value.status == 500
            assert "boom" not in caught.value.message
            assert stream.outcome is Outcome.FAILED

    run()


@with_workers("mixed-0")
async def test_work_that_a_worker_gives_up_as_late_is_late(m: ScriptedWorker) -> None:
    async with running_rig(max_silence_s=0.2) as rig:
        await rig.up(m)
        stream = rig.start()
        await m.next_submit()
        time.sleep(0.2)  # noqa: ASYNC251  # the sweep must not come first
        key = RequestKey(0, attempt_of(stream).request_id, 0)
        event = RequestEvent(key, RequestEventKind.FAILED, "deadline: 0.2 s have passed")
        rig.dispatcher.event_received(rig.cluster.workers["mixed-0"], event)
        with pytest.raises(GenerationError) as caught:
            await read_all(stream)
        assert caught.value.status == 504


@with_workers("mixed-0")
async def test_attempts_are_bounded(m: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(m)
        stream = rig.start()
        for _ in range(MAX_ATTEMPTS):
            request = await m.next_submit()
            m.send_event(request, RequestEventKind.CANCELLED, message="the session ended")
            await m.next_command("cancel")
        with pytest.raises(GenerationError) as caught:
            await read_all(stream)
        assert caught.value.status == 503


@with_workers("mixed-0", "mixed-1")
async def test_cancelled_between_attempts(m0: ScriptedWorker, m1: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(m0)
        stream = rig.start()
        await m0.next_submit()
        await m0.stop()
        await until(lambda: isinstance(attempt_of(stream).state, Queued))
        stream.cancel()
        assert rig.dispatcher.num_queued == 0
        await rig.up(m1)
        assert m1.commands.empty()
        assert stream.outcome is Outcome.CANCELLED


@with_workers("mixed-0", "mixed-1")
async def test_a_garbled_frame_breaks_the_session(m0: ScriptedWorker, m1: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(m0, m1)
        stream = rig.start(max_tokens=1)
        request = await m0.next_submit()
        columns = worker_pb2.Tokens(request_id=[request.request_id], attempt=[0, 0])
        m0.send(worker_pb2.StepFrame(tokens=columns))
        again = await m1.next_submit()
        m1.send_token(again, 0, 5, last=True)
        assert await read_all(stream) == [5]


@with_workers("prefill-0", "decode-0", "decode-1")
async def test_many_streams_survive_a_lost_worker(p: ScriptedWorker, d0: ScriptedWorker, d1: ScriptedWorker) -> None:
    """Sixteen streams lose half their decode workers; each client receives every token of its own prompt once."""

    async def play_prefill() -> None:
        while True:
            request = await p.next_submit()
            index = len(request.emitted_tokens)
            p.offer(request)
            p.send_token(request, index, request.prompt_tokens[0] * 100 + index)

    async def play_decode(d: ScriptedWorker) -> None:
        while True:
            request = await d.next_prepare()
            d.send_event(request, RequestEventKind.JOINED)
            first, base = len(request.emitted_tokens) + 1, request.prompt_tokens[0] * 100
            senders.append(asyncio.create_task(play_stream(d, request, first, base)))

    async def play_stream(d: ScriptedWorker, request: worker_pb2.Request, first: int, base: int) -> None:
        for index in range(first, 30):
            await asyncio.sleep(0.01)
            d.send_token(request, index, base + index, last=index == 29)

    senders: list[asyncio.Task[None]] = []
    async with running_rig() as rig:
        await rig.up(p, d0, d1)
        players = [asyncio.create_task(play) for play in (play_prefill(), play_decode(d0), play_decode(d1))]
        streams = [rig.start([number, 1, 2], max_tokens=30) for number in range(16)]
        answers = [asyncio.create_task(read_all(stream)) for stream in streams]
        await asyncio.sleep(0.15)
        await d0.stop()
        for number, answer in enumerate(answers):
            assert await answer == [number * 100 + index for index in range(30)]
        assert rig.sample("pdserve_redispatches_total", reason="worker_lost") > 0
        for task in (*players, *senders):
            task.cancel()


@pytest.mark.parametrize("kind", [RequestEventKind.KV_UNAVAILABLE, RequestEventKind.FAILED, RequestEventKind.CANCELLED])
def test_what_a_prefill_worker_says_after_the_join_ends_nothing(kind: RequestEventKind) -> None:
    """The puller's release may be lost; the prefill worker then gives up the prompt while it is being decoded."""

    @with_workers("prefill-0", "decode-0")
    async def run(p: ScriptedWorker, d: ScriptedWorker) -> None:
        async with running_rig() as rig:
            await rig.up(p, d)
            stream = rig.start(max_tokens=2)
            request = await hand_off(p, d, released=False)
            await until(lambda: isinstance(attempt_of(stream).state, Decoding))
            p.send_event(request, kind, message="parked: nobody pulled the prompt in time")
            await until(lambda: is_released(attempt_of(stream)))
            d.send_token(request, 1, 101, last=True)
            assert await read_all(stream) == [100, 101]
            assert p.commands.empty()
            assert d.commands.empty()

    run()


@with_workers("prefill-0", "prefill-1", "decode-0")
async def test_token_0_is_lost_after_the_decode_worker_heard_that_it_was_the_last(
    p0: ScriptedWorker, p1: ScriptedWorker, d: ScriptedWorker
) -> None:
    async with running_rig() as rig:
        await rig.up(p0, p1, d)
        stream = rig.start(max_tokens=1)
        p0.offer(await p0.next_submit())
        d.send_event(await d.next_prepare(), RequestEventKind.RELEASED)
        d.load["num_running"] = 1  # next load, which the router receives after the event
        await until(lambda: rig.cluster.workers["decode-0"].load.num_running == 1)
        await p0.stop()
        p1.send_token(await p1.next_submit(), 0, 9, last=True)
        assert await read_all(stream) == [9]


@with_workers("prefill-0", "prefill-1", "decode-0")
async def test_only_the_workers_of_an_attempt_are_heard(
    p: ScriptedWorker, stranger: ScriptedWorker, d: ScriptedWorker
) -> None:
    async with running_rig() as rig:
        await rig.up(p, stranger, d)
        stream = rig.start(max_tokens=2)
        request = await hand_off(p, d)
        stranger.send_token(request, 1, 666, last=True)
        stranger.send_event(request, RequestEventKind.FAILED)
        stranger.load["num_running"] = 1
        await until(lambda: rig.cluster.workers["prefill-1"].load.num_running == 1)
        d.send_token(request, 1, 101, last=True)
        assert await read_all(stream) == [100, 101]
