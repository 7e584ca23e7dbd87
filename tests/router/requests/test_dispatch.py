"""Life of a request over scripted workers without failures: placement, handoff, end, refusal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest

from pdserve.contracts.block_hash import block_hashes
from pdserve.contracts.deployment import SloConfig
from pdserve.contracts.events import RefusalCode, RequestEventKind
from pdserve.contracts.request import Outcome, SamplingParams
from pdserve.proto.v1 import worker_pb2
from pdserve.router.requests.attempt import Decoding, Parked, Prefilling, State
from pdserve.router.requests.request import GenerationError, RequestSpec
from pdserve.router.text.answer import Answer, Generation, Outbox
from tests.router.rig import Rig, attempt_of, hand_off, is_unbound, read_all, read_some, running_rig, with_workers
from tests.router.scripted_worker import ScriptedWorker, until


def num_overtook(state: State) -> int:
    return len(state.pull.overtook) if isinstance(state, Parked) and state.pull is not None else 0


def is_preempted(state: State) -> bool:
    return isinstance(state, Decoding) and state.preempted_s is not None


def is_handed_off(state: State) -> bool:
    assert isinstance(state, Prefilling)
    return state.sent.handoff


@with_workers("prefill-0", "decode-0")
async def test_prefill_then_decode(p: ScriptedWorker, d: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(p, d)
        stream = rig.start()
        assert isinstance(attempt_of(stream).state, Prefilling)
        answer = asyncio.create_task(read_all(stream))
        request = await hand_off(p, d)
        assert list(request.prompt_tokens) == [1, 2, 3, 4, 5]
        assert not request.emitted_tokens
        await until(lambda: isinstance(attempt_of(stream).state, Decoding))
        d.send_tokens(request, [(1, 101), (2, 102), (3, 103)], last=True)
        assert await answer == [100, 101, 102, 103]
        assert stream.outcome is Outcome.FINISHED
        assert stream.num_cached_tokens == 1
        assert rig.sample("pdserve_request_outcomes_total", outcome="finished") == 1
        assert rig.sample("pdserve_handoff_stall_seconds_count") == 1
        for phase in ("queue", "prefill_queue", "prefill", "handoff", "decode_queue", "decode"):
            assert rig.sample("pdserve_request_phase_seconds_count", phase=phase) == 1, phase
            spent_s = rig.sample("pdserve_request_phase_seconds_sum", phase=phase)
            assert stream.journeys[0].phase_s(phase) == pytest.approx(spent_s)


@with_workers("prefill-0", "decode-0")
async def test_the_decode_worker_is_asked_before_token_0_is_out(p: ScriptedWorker, d: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(p, d)
        stream = rig.start()
        request = await p.next_submit()
        p.offer(request)
        prepare = (await d.next_command("prepare")).prepare
        assert prepare.source.worker_epoch == p.epoch
        assert prepare.source.handle == request.request_id.to_bytes(16, "big")
        assert isinstance(attempt_of(stream).state, Parked)
        stream.cancel()


@with_workers("prefill-0", "decode-0")
async def test_a_request_that_ends_with_token_0_is_cancelled_on_both(p: ScriptedWorker, d: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(p, d)
        stream = rig.start(max_tokens=1)
        request = await p.next_submit()
        p.offer(request)
        await d.next_prepare()
        p.send_token(request, 0, 9, last=True)
        assert await read_all(stream) == [9]
        await p.next_command("cancel")
        await d.next_command("cancel")


@with_workers("prefill-0", "decode-0")
async def test_tokens_that_overtake_token_0_wait_for_it(p: ScriptedWorker, d: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(p, d)
        stream = rig.start()
        request = await p.next_submit()
        p.offer(request)
        await d.next_prepare()
        d.send_event(request, RequestEventKind.JOINED)
        d.send_token(request, 1, 101)
        d.send_tokens(request, [(2, 102), (3, 103)], last=True)
        await until(lambda: num_overtook(attempt_of(stream).state) == 3)
        p.send_token(request, 0, 100)
        assert await read_all(stream) == [100, 101, 102, 103]


@with_workers("mixed-0")
async def test_a_mixed_worker_runs_it_all(m: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(m)
        stream = rig.start(max_tokens=2)
        request = await m.next_submit()
        assert not request.handoff
        m.send_tokens(request, [(0, 1), (1, 2)], last=True)
        assert await read_all(stream) == [1, 2]
        assert m.commands.empty()


@with_workers("decode-0")
async def test_without_prefill_workers_decode_prefills_for_itself(d: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(d)
        stream = rig.start(max_tokens=1)
        request = await d.next_submit()
        assert not request.handoff
        d.send_token(request, 0, 1, last=True)
        assert await read_all(stream) == [1]


@with_workers("prefill-0", "prefill-1", "decode-0", "decode-1")
async def test_load_spreads_over_workers(
    p0: ScriptedWorker, p1: ScriptedWorker, d0: ScriptedWorker, d1: ScriptedWorker
) -> None:
    async with running_rig() as rig:
        await rig.up(p0, p1, d0, d1)
        streams = [rig.start() for _ in range(6)]
        for prefill in (p0, p1):
            for _ in range(3):
                prefill.offer(await prefill.next_submit())
        for decode in (d0, d1):
            for _ in range(3):
                await decode.next_prepare()
        for stream in streams:
            stream.cancel()


@with_workers("prefill-0", "decode-0")
async def test_preemption_is_seen(p: ScriptedWorker, d: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(p, d)
        stream = rig.start()
        request = await hand_off(p, d)
        d.send_event(request, RequestEventKind.PREEMPTED)
        await until(lambda: is_preempted(attempt_of(stream).state))
        d.send_event(request, RequestEventKind.RESUMED)
        await until(lambda: not is_preempted(attempt_of(stream).state))
        stream.cancel()


@with_workers("prefill-0", "decode-0")
async def test_requests_wait_for_workers_of_both_phases(p: ScriptedWorker, d: ScriptedWorker) -> None:
    async with running_rig() as rig:
        stream = rig.start()
        assert rig.dispatcher.num_queued == 1
        await rig.up(p)
        assert rig.dispatcher.num_queued == 1
        await rig.up(p, d)
        await p.next_submit()
        assert rig.dispatcher.num_queued == 0
        stream.cancel()


@with_workers("prefill-0", "decode-0", "decode-1")
async def test_a_parked_prompt_waits_for_a_decode_worker(
    p: ScriptedWorker, d: ScriptedWorker, other: ScriptedWorker
) -> None:
    async with running_rig() as rig:
        await rig.up(p, d)
        stream = rig.start()
        request = await p.next_submit()
        await rig.up(p)
        p.offer(request)
        p.send_token(request, 0, 100)
        await until(lambda: is_unbound(attempt_of(stream)))
        await rig.up(p, other)
        prepared = await other.next_prepare()
        assert prepared.attempt == 0
        assert not prepared.emitted_tokens  # the parked blocks hold the KV of the prompt, not of token 0
        other.send_token(prepared, 1, 101, last=True)
        assert await read_all(stream) == [100, 101]


@with_workers("prefill-0", "decode-0")
async def test_a_request_that_can_never_run_is_refused(p: ScriptedWorker, d: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(p, d)
        stream = rig.start()
        p.send_event(await p.next_submit(), RequestEventKind.REJECTED, message="the prompt needs 900 blocks")
        with pytest.raises(GenerationError, match="900 blocks") as caught:
            await read_all(stream)
        assert caught.value.status == 400
        assert stream.outcome is Outcome.REJECTED


@with_workers("mixed-0")
async def test_the_end_of_a_drain_wakes_queued_requests(m: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(m)
        m.load["draining"] = True
        await until(lambda: not rig.cluster.workers["mixed-0"].takes_work)
        stream = rig.start(max_tokens=1)
        assert rig.dispatcher.num_queued == 1
        m.load["draining"] = False
        m.send_token(await m.next_submit(), 0, 7, last=True)
        assert await read_all(stream) == [7]


@with_workers("prefill-0", "decode-0")
async def test_the_end_of_a_drain_binds_parked_prompts(p: ScriptedWorker, d: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(p, d)
        stream = rig.start(max_tokens=2)
        request = await p.next_submit()
        d.load["draining"] = True
        await until(lambda: not rig.cluster.workers["decode-0"].takes_work)
        p.offer(request)
        await until(lambda: is_unbound(attempt_of(stream)))
        d.load["draining"] = False
        assert (await d.next_prepare()).request_id == request.request_id
        stream.cancel()


@with_workers("prefill-0", "prefill-1", "decode-0")
async def test_a_draining_worker_passes_requests_on(p0: ScriptedWorker, p1: ScriptedWorker, d: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(p0, p1, d)
        stream = rig.start()
        p0.load["draining"] = True
        p0.send_event(
            await p0.next_submit(), RequestEventKind.REJECTED, message="not now", refusal=RefusalCode.DRAINING
        )
        request = await p1.next_submit()
        assert request.attempt == 1
        stream.cancel()
        later = rig.start()
        assert (await p1.next_command("cancel")).cancel.attempt == 1
        assert (await p1.next_submit()).attempt == 0
        later.cancel()


@with_workers("prefill-0", "decode-0")
async def test_cancel_reaches_both_workers_and_counts_once(p: ScriptedWorker, d: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(p, d)
        stream = rig.start()
        request = await p.next_submit()
        p.offer(request)
        await d.next_prepare()
        stream.cancel()
        rig.dispatcher.finish(stream, 0)
        assert stream.outcome is Outcome.CANCELLED
        assert (await p.next_command("cancel")).cancel.request_id == request.request_id
        assert (await d.next_command("cancel")).cancel.request_id == request.request_id
        p.send_token(request, 0, 1)
        assert await read_all(stream) == []
        assert rig.dispatcher.outcomes[Outcome.CANCELLED] == 1


@with_workers("mixed-0")
async def test_a_stop_string_finishes(m: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(m)
        stream = rig.start()
        rig.dispatcher.finish(stream, 0)
        assert stream.outcome is Outcome.FINISHED
        await m.next_submit()
        await m.next_command("cancel")


def test_too_many_are_refused_with_a_time_to_come_back() -> None:
    async def run() -> None:
        async with running_rig(max_in_flight=2) as rig:
            streams = [rig.start(), rig.start()]
            with pytest.raises(GenerationError) as caught:
                rig.start()
            assert caught.value.status == 429
            assert caught.value.retry_after_s is not None
            streams[0].cancel()
            streams.append(rig.start())
            assert rig.dispatcher.num_accepted == 3
            for stream in streams:
                stream.cancel()

    asyncio.run(run())


def test_prompts_of_one_client_are_accepted_together_or_not_at_all() -> None:
    async def run() -> None:
        async with running_rig(max_in_flight=6) as rig:

            def generation(num_prompts: int) -> Generation:
                sampling = SamplingParams(temperature=0.0, max_tokens=2)
                specs = [
                    RequestSpec(prompt_tokens=(1, number), sampling=sampling, arrived_s=time.monotonic(), tenant="a")
                    for number in range(num_prompts)
                ]
                return Generation(rig.dispatcher, [Answer(spec, ()) for spec in specs], Outbox())

            with generation(4):  # one after the other, the last would be over its tenant's share
                for num_prompts in (1, 3, 7):
                    with pytest.raises(GenerationError), generation(num_prompts):
                        pass
                assert rig.dispatcher.num_accepted == rig.dispatcher.num_in_flight == 4
            assert rig.dispatcher.num_in_flight == 0

    asyncio.run(run())


@with_workers("prefill-0", "decode-0")
async def test_a_new_request_waits_shortly_for_workers(p: ScriptedWorker, d: ScriptedWorker) -> None:
    async with running_rig(new_wait_s=0.2) as rig:
        for missing, workers in (("no worker", ()), ("no decode worker", (p,))):
            await rig.up(*workers)
            with pytest.raises(GenerationError, match=missing) as caught:
                await read_all(rig.start())
            assert caught.value.status == 503
            assert caught.value.retry_after_s is not None
        assert rig.dispatcher.outcomes[Outcome.FAILED] == 2


@with_workers("mixed-0")
async def test_a_request_that_had_a_worker_waits_longer(m: ScriptedWorker) -> None:
    async with running_rig(new_wait_s=0.1, worker_wait_s=0.6) as rig:
        await rig.up(m)
        stream = rig.start()
        m.send_token(await m.next_submit(), 0, 100)
        assert await read_some(stream, 1) == [100]
        lost_s = time.monotonic()
        await m.stop()
        with pytest.raises(GenerationError, match="no worker"):
            await read_all(stream)
        assert time.monotonic() - lost_s > 0.5


@with_workers("prefill-0", "decode-0")
async def test_token_0_that_does_not_come(p: ScriptedWorker, d: ScriptedWorker) -> None:
    async with running_rig(max_silence_s=0.3) as rig:
        await rig.up(p, d)
        stream = rig.start()
        assert 0 < (await p.next_submit()).deadline_s <= 0.3
        with pytest.raises(GenerationError, match=r"0\.3 s: raise router\.max_silence_seconds") as caught:
            await read_all(stream)
        assert caught.value.status == 504
        await p.next_command("cancel")


@with_workers("mixed-0")
async def test_a_drain_refuses_new_and_finishes_old(m: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(m)
        stream = rig.start(max_tokens=1)
        rig.dispatcher.admission.begin_drain()
        with pytest.raises(GenerationError, match="draining") as caught:
            rig.start()
        assert caught.value.status == 503
        idle = asyncio.create_task(rig.cluster.wait_idle())
        await asyncio.sleep(0.05)
        assert not idle.done()
        m.send_token(await m.next_submit(), 0, 5, last=True)
        assert await read_all(stream) == [5]
        await asyncio.wait_for(idle, 5)


@with_workers("mixed-0", "mixed-1")
async def test_a_worker_of_another_model_takes_no_work(m: ScriptedWorker, other: ScriptedWorker) -> None:
    other.welcome["model_hash"] = "another"
    async with running_rig() as rig:
        await rig.up(m)
        await rig.cluster.set_targets([m.endpoint, other.endpoint])
        await until(lambda: len(other.hellos) >= 2)
        assert [worker.worker_id for worker in rig.cluster.workers.values() if worker.is_up] == ["mixed-0"]


@with_workers("mixed-0", "mixed-1")
async def test_cache_events_steer_requests(m0: ScriptedWorker, m1: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(m0, m1)
        tokens = list(range(400))
        await cache(rig, m1, tokens)
        first = rig.start(tokens)
        await m1.next_submit()
        m1.send(worker_pb2.StepFrame(cache=[worker_pb2.CacheEvents(evicted=block_hashes(tokens, 4))]))
        await until(lambda: not rig.cluster.workers["mixed-1"].cached_blocks)
        second = rig.start(tokens)
        await m0.next_submit()
        first.cancel()
        second.cancel()


async def cache(rig: Rig, worker: ScriptedWorker, tokens: Sequence[int]) -> None:
    """Report to the router that ``worker`` caches ``tokens``."""
    hashes = block_hashes(tokens, 4)
    worker.send(worker_pb2.StepFrame(cache=[worker_pb2.CacheEvents(stored=hashes)]))
    await until(lambda: all(each in rig.cluster.workers[worker.worker_id].cached_blocks for each in hashes))


@with_workers("prefill-0", "decode-0")
async def test_a_turn_is_prefilled_where_its_history_is(p: ScriptedWorker, d: ScriptedWorker) -> None:
    async with running_rig(slo=SloConfig(ttft_seconds=0.0, tpot_seconds=1.0)) as rig:
        await rig.up(p, d)
        await cache(rig, d, range(400))
        stream = rig.start(range(420), max_tokens=2)
        request = await d.next_submit()
        assert not request.handoff
        assert rig.cluster.workers["decode-0"].snapshot().num_waiting_tokens == 20
        d.send_tokens(request, [(0, 1), (1, 2)], last=True)
        assert await read_all(stream) == [1, 2]
        assert p.commands.empty()
        probe = rig.start_spec(
            RequestSpec(
                prompt_tokens=tuple(range(420)),
                sampling=SamplingParams(),
                arrived_s=time.monotonic(),
                is_probe=True,
            )
        )
        assert (await p.next_submit()).handoff
        probe.cancel()


@with_workers("prefill-0", "decode-0")
async def test_turns_that_come_at_once_take_no_batch_slot_twice(p: ScriptedWorker, d: ScriptedWorker) -> None:
    async with running_rig(slo=SloConfig(ttft_seconds=0.0, tpot_seconds=10.0), policy="least-time") as rig:
        await rig.up(p, d)
        await cache(rig, d, range(60))
        streams = [rig.start(range(62)) for _ in range(20)]
        assert sum(not is_handed_off(attempt_of(stream).state) for stream in streams) == 8  # the worker's batch slots
        assert rig.cluster.workers["decode-0"].snapshot().num_decoding == 8
        for stream in streams:
            stream.cancel()
        assert rig.cluster.workers["decode-0"].snapshot().num_decoding == 0


@with_workers("prefill-0", "decode-0", "decode-1")
async def test_a_prompt_is_pulled_where_most_of_it_is_cached(
    p: ScriptedWorker, d0: ScriptedWorker, d1: ScriptedWorker
) -> None:
    async with running_rig() as rig:
        await rig.up(p, d0, d1)
        await cache(rig, d1, range(400))
        stream = rig.start(range(420))
        p.offer(await p.next_submit())
        await d1.next_prepare()
        stream.cancel()
