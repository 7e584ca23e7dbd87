"""A parked prompt is pulled by another decode worker if the first fails; only then is it prefilled again."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.contracts.events import RefusalCode, RequestEventKind
from pdserve.contracts.request import Outcome
from pdserve.proto.v1 import worker_pb2
from pdserve.router.requests.attempt import Parked, Queued
from pdserve.router.token_stream import TokenStream
from tests.router.rig import (
    Rig,
    attempt_of,
    hand_off,
    is_released,
    is_unbound,
    read_all,
    read_some,
    running_rig,
    with_workers,
)
from tests.router.scripted_worker import ScriptedWorker, until

LINK_FAILURE = "connect: UNAVAILABLE: no route"


async def park(rig: Rig, p: ScriptedWorker, d: ScriptedWorker) -> tuple[TokenStream, worker_pb2.Prepare]:
    """Start a request of two tokens: token 0 is out, ``p`` has parked its prompt, and ``d`` was asked to pull it."""
    stream = rig.start(max_tokens=2)
    request = await p.next_submit()
    p.offer(request)
    p.send_token(request, 0, 100)
    assert await read_some(stream, 1) == [100]
    return stream, (await d.next_command("prepare")).prepare


async def finish(rig: Rig, stream: TokenStream, d: ScriptedWorker, prepare: worker_pb2.Prepare) -> None:
    """``d`` pulls the prompt and sends the last token, as part of the first attempt."""
    assert prepare.request.attempt == 0
    assert not prepare.request.emitted_tokens
    d.send_event(prepare.request, RequestEventKind.JOINED)
    d.send_token(prepare.request, 1, 101, last=True)
    assert await read_all(stream, 1) == [101]
    assert rig.sample("pdserve_redispatches_total", reason="rebound") == 1


@with_workers("prefill-0", "decode-0", "decode-1")
async def test_a_decode_worker_dies_before_it_joined(p: ScriptedWorker, d0: ScriptedWorker, d1: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(p, d0, d1)
        stream, first = await park(rig, p, d0)
        await d0.stop()
        prepare = (await d1.next_command("prepare")).prepare
        assert prepare.source == first.source
        assert p.commands.empty()
        await finish(rig, stream, d1, prepare)
        assert rig.sample("pdserve_redispatches_total", reason="worker_lost") == 0


@with_workers("prefill-0", "decode-0", "decode-1")
async def test_a_decode_worker_dies_before_token_0(p: ScriptedWorker, d0: ScriptedWorker, d1: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(p, d0, d1)
        stream = rig.start(max_tokens=2)
        request = await p.next_submit()
        p.offer(request)
        await d0.next_prepare()
        await d0.stop()
        prepare = (await d1.next_command("prepare")).prepare
        p.send_token(request, 0, 100)
        assert await read_some(stream, 1) == [100]
        await finish(rig, stream, d1, prepare)


@with_workers("prefill-0", "decode-0")
async def test_the_only_decode_worker_is_replaced_in_time(p: ScriptedWorker, d: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(p, d)
        stream, _ = await park(rig, p, d)
        await d.stop()
        await until(lambda: is_unbound(attempt_of(stream)))
        assert isinstance(attempt_of(stream).state, Parked)
        d.epoch += 1000
        await d.start()
        await rig.cluster.set_targets([p.endpoint, d.endpoint])
        await until(lambda: not is_unbound(attempt_of(stream)))
        await finish(rig, stream, d, (await d.next_command("prepare")).prepare)


@with_workers("prefill-0", "decode-0")
async def test_the_prompt_expires_before_a_decode_worker_comes(p: ScriptedWorker, d: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(p, d)
        stream, prepare = await park(rig, p, d)
        await d.stop()
        await until(lambda: is_unbound(attempt_of(stream)))
        p.send_event(prepare.request, RequestEventKind.KV_UNAVAILABLE, message="parked: nobody pulled it")
        await until(lambda: isinstance(attempt_of(stream).state, Queued))
        stream.cancel()


@pytest.mark.parametrize("ending", ["lost", "failed", "refused", "expired"])
def test_the_second_failure_costs_the_attempt(ending: str) -> None:
    @with_workers("prefill-0", "decode-0", "decode-1")
    async def run(p: ScriptedWorker, d0: ScriptedWorker, d1: ScriptedWorker) -> None:
        async with running_rig() as rig:
            await rig.up(p, d0, d1)
            stream, first = await park(rig, p, d0)
            d0.send_event(first.request, RequestEventKind.KV_UNAVAILABLE, message=LINK_FAILURE)
            second = (await d1.next_command("prepare")).prepare
            match ending:
                case "lost":
                    await d1.stop()
                case "failed":
                    d1.send_event(second.request, RequestEventKind.KV_UNAVAILABLE, message="verify: a digest differs")
                case "refused":
                    d1.send_event(second.request, RequestEventKind.KV_UNAVAILABLE, refusal=RefusalCode.SOURCE)
                case "expired":
                    p.send_event(first.request, RequestEventKind.KV_UNAVAILABLE, message="parked: nobody pulled it")
            again = await p.next_submit()
            assert (again.attempt, list(again.emitted_tokens)) == (1, [100])
            stream.cancel()

    run()


@with_workers("prefill-0", "decode-0", "decode-1")
async def test_what_the_prefill_worker_refuses_is_prefilled_again(
    p: ScriptedWorker, d0: ScriptedWorker, d1: ScriptedWorker
) -> None:
    async with running_rig() as rig:
        await rig.up(p, d0, d1)
        stream, first = await park(rig, p, d0)
        d0.send_event(first.request, RequestEventKind.KV_UNAVAILABLE, refusal=RefusalCode.SOURCE)
        assert (await p.next_submit()).attempt == 1
        assert d1.commands.empty()
        stream.cancel()


@with_workers("prefill-0", "decode-0", "decode-1")
async def test_after_the_release_there_is_nothing_to_pull(
    p: ScriptedWorker, d0: ScriptedWorker, d1: ScriptedWorker
) -> None:
    """The puller has all KV, and dies before it reports its join."""
    async with running_rig() as rig:
        await rig.up(p, d0, d1)
        stream, first = await park(rig, p, d0)
        p.send_event(first.request, RequestEventKind.RELEASED)
        await until(lambda: is_released(attempt_of(stream)))
        await d0.stop()
        assert (await p.next_submit()).attempt == 1
        stream.cancel()


@with_workers("prefill-0", "decode-0")
async def test_a_prompt_released_to_a_worker_that_was_lost_waits_for_no_other(
    p: ScriptedWorker, d: ScriptedWorker
) -> None:
    """The release is heard after the loss of the puller, and no other is up."""
    async with running_rig() as rig:
        await rig.up(p, d)
        stream, first = await park(rig, p, d)
        await d.stop()
        await until(lambda: is_unbound(attempt_of(stream)))
        p.send_event(first.request, RequestEventKind.RELEASED)
        await until(lambda: isinstance(attempt_of(stream).state, Queued))
        stream.cancel()


@with_workers("prefill-0", "decode-0", "decode-1")
async def test_a_draining_decode_worker_passes_the_prompt_on(
    p: ScriptedWorker, d0: ScriptedWorker, d1: ScriptedWorker
) -> None:
    async with running_rig() as rig:
        await rig.up(p, d0, d1)
        stream, first = await park(rig, p, d0)
        d0.load["draining"] = True
        d0.send_event(first.request, RequestEventKind.REJECTED, message="not now", refusal=RefusalCode.DRAINING)
        await finish(rig, stream, d1, (await d1.next_command("prepare")).prepare)


@with_workers("prefill-0", "decode-0", "decode-1")
async def test_the_worker_that_was_let_go_is_not_heard(
    p: ScriptedWorker, d0: ScriptedWorker, d1: ScriptedWorker
) -> None:
    async with running_rig() as rig:
        await rig.up(p, d0, d1)
        stream, first = await park(rig, p, d0)
        d0.send_event(first.request, RequestEventKind.KV_UNAVAILABLE, message=LINK_FAILURE)
        prepare = (await d1.next_command("prepare")).prepare
        d0.send_event(first.request, RequestEventKind.JOINED)
        d0.send_token(first.request, 1, 666, last=True)
        d0.send_event(first.request, RequestEventKind.FAILED)
        d0.load["num_running"] = 1
        await until(lambda: rig.cluster.workers["decode-0"].load.num_running == 1)
        await finish(rig, stream, d1, prepare)


@with_workers("prefill-0", "decode-0", "decode-1")
async def test_cancelled_after_it_was_bound_anew(p: ScriptedWorker, d0: ScriptedWorker, d1: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(p, d0, d1)
        stream, first = await park(rig, p, d0)
        d0.send_event(first.request, RequestEventKind.KV_UNAVAILABLE, message=LINK_FAILURE)
        await d1.next_command("prepare")
        stream.cancel()
        await p.next_command("cancel")
        await d1.next_command("cancel")
        assert d0.commands.empty()
        assert stream.outcome is Outcome.CANCELLED


@with_workers("prefill-0", "prefill-1", "decode-0", "decode-1")
async def test_a_broken_link_is_avoided_for_its_prefill_worker_only(
    p0: ScriptedWorker, p1: ScriptedWorker, d0: ScriptedWorker, d1: ScriptedWorker
) -> None:
    async with running_rig() as rig:
        await rig.up(p0, d0, d1)
        stream, first = await park(rig, p0, d0)
        d0.send_event(first.request, RequestEventKind.KV_UNAVAILABLE, message=LINK_FAILURE)
        d1.load["num_context_tokens"] = 1000  # d0 is the better choice from now on
        await finish(rig, stream, d1, (await d1.next_command("prepare")).prepare)
        again, _ = await park(rig, p0, d1)
        again.cancel()
        await d1.next_command("cancel")
        await rig.up(p1, d0, d1)
        other = rig.start(max_tokens=2)
        await hand_off(p1, d0)
        other.cancel()


@with_workers("prefill-0", "decode-0", "decode-1")
async def test_a_broken_link_is_tried_again_later(p: ScriptedWorker, d0: ScriptedWorker, d1: ScriptedWorker) -> None:
    async with running_rig(cut_off_s=0.3) as rig:
        await rig.up(p, d0, d1)
        stream, first = await park(rig, p, d0)
        d0.send_event(first.request, RequestEventKind.KV_UNAVAILABLE, message=LINK_FAILURE)
        await finish(rig, stream, d1, (await d1.next_command("prepare")).prepare)
        await asyncio.sleep(0.3)
        again, _ = await park(rig, p, d0)
        again.cancel()
