"""What the dispatcher reports of a request on its way."""

from __future__ import annotations

import asyncio

from pdserve.contracts.events import RequestEventKind
from pdserve.contracts.metrics import HANDOFF_AGES_S
from pdserve.router.requests.attempt import Decoding
from tests.router.rig import attempt_of, hand_off, read_all, read_some, running_rig, with_workers
from tests.router.scripted_worker import ScriptedWorker, until

FALLBACKS = "pdserve_placement_fallbacks_total"


@with_workers("prefill-0", "decode-0")
async def test_every_phase_of_a_handed_off_request_is_a_span(p: ScriptedWorker, d: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(p, d)
        stream = rig.start(max_tokens=2)
        request = await hand_off(p, d)
        assert await read_some(stream, 1) == [100]
        await until(lambda: isinstance(attempt_of(stream).state, Decoding))
        d.send_token(request, 1, 101, last=True)
        assert await read_all(stream, 1) == [101]
        journey = stream.journeys[0]
        phases = [span.phase for span in journey.spans]
        assert phases[:2] == ["tokenise", "queue"]
        assert set(phases[2:]) >= {"prefill_queue", "prefill", "handoff", "decode"}
        assert all(span.seconds >= 0 for span in journey.spans)
        assert journey.token_s > 0
        assert journey.predicted_ttft_s > 0
        assert journey.predicted_tpot_s > 0
        assert journey.stall_s > 0


@with_workers("prefill-0", "decode-0")
async def test_pauses_of_an_answer_are_timed(p: ScriptedWorker, d: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(p, d)
        stream = rig.start(max_tokens=4)
        request = await hand_off(p, d)
        d.send_tokens(request, [(1, 101)], last=False)
        assert await read_some(stream, 2) == [100, 101]
        d.send_event(request, RequestEventKind.PREEMPTED)
        await until(lambda: getattr(attempt_of(stream).state, "preempted_s", 0))
        await asyncio.sleep(0.02)
        d.send_event(request, RequestEventKind.RESUMED)
        await until(lambda: stream.journeys[0].preempted_s)
        assert stream.journeys[0].preempted_s >= 0.02
        d.send_event(request, RequestEventKind.FAILED)
        again = await hand_off(p, d, token=102)
        assert await read_some(stream, 1) == [102]
        assert stream.journeys[0].lost_s > 0
        assert rig.sample("pdserve_replayed_tokens_total", reason="failed") == 5 + 2
        d.send_token(again, 3, 103, last=True)
        assert await read_all(stream, 3) == [103]


@with_workers("prefill-0", "decode-0")
async def test_a_prompt_that_no_one_pulls_ages_and_expires(p: ScriptedWorker, d: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(p, d)
        stream = rig.start(max_tokens=2)
        request = await p.next_submit()
        p.offer(request)
        p.send_token(request, 0, 100)
        await d.next_prepare()
        assert await read_some(stream, 1) == [100]
        assert 0 < rig.sample("pdserve_oldest_handoff_seconds") < 5
        assert sum(rig.sample("pdserve_waiting_handoffs", age=age) for age in HANDOFF_AGES_S) == 1
        p.send_event(request, RequestEventKind.KV_UNAVAILABLE, message="expired")
        await hand_off(p, d, token=101)
        assert rig.sample("pdserve_redispatches_total", reason="expired") == 1
        await until(lambda: isinstance(attempt_of(stream).state, Decoding))
        assert rig.sample("pdserve_oldest_handoff_seconds") == 0
        assert rig.sample("pdserve_waiting_handoffs", age="up to 1 s") == 0
        stream.cancel()


@with_workers("decode-0", "prefill-0")
async def test_placements_without_a_choice_are_counted(d: ScriptedWorker, p: ScriptedWorker) -> None:
    async with running_rig() as rig:
        waiting = rig.start(max_tokens=1)
        assert rig.sample(FALLBACKS, reason="no_worker") == 1
        await rig.up(d)
        request = await d.next_submit()
        assert rig.sample(FALLBACKS, reason="no_prefill") == 1
        d.send_token(request, 0, 100, last=True)
        assert await read_all(waiting) == [100]
        assert rig.sample(FALLBACKS, reason="no_worker") == 1


@with_workers("prefill-0", "decode-0")
async def test_a_decode_worker_without_room_is_a_fallback(p: ScriptedWorker, d: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(p, d)
        d.load["num_blocks_free"] = 0
        await until(lambda: rig.cluster.workers["decode-0"].load.num_blocks_free == 0)
        stream = rig.start(max_tokens=2)
        request = await hand_off(p, d)
        assert rig.sample(FALLBACKS, reason="no_room") == 1
        d.send_token(request, 1, 101, last=True)
        assert await read_all(stream) == [100, 101]
