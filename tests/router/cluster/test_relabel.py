"""A list of targets that gives a known incarnation another role: what it has goes on, what comes heeds the new one."""

from __future__ import annotations

import pytest

from pdserve.contracts.deployment import POLICIES
from pdserve.contracts.events import RequestEventKind
from pdserve.contracts.worker_config import WorkerRole
from tests.router.rig import (
    Rig,
    attempt_of,
    hand_off,
    is_unbound,
    read_all,
    read_some,
    running_rig,
    with_workers,
)
from tests.router.scripted_worker import ScriptedWorker, until

PREFILL, DECODE = WorkerRole.PREFILL, WorkerRole.DECODE


async def take_roles(rig: Rig, roles: dict[ScriptedWorker, WorkerRole]) -> None:
    for worker, role in roles.items():
        worker.role = role
    await rig.cluster.set_targets([worker.endpoint for worker in roles])


@pytest.mark.parametrize("policy", POLICIES)
def test_new_requests_follow_the_roles_and_running_answers_stay(policy: str) -> None:
    @with_workers("prefill-0", "decode-0")
    async def run(p: ScriptedWorker, d: ScriptedWorker) -> None:
        async with running_rig(policy=policy) as rig:
            await rig.up(p, d)
            running = rig.start(max_tokens=3)
            old = await hand_off(p, d)
            assert await read_some(running, 1) == [100]
            await take_roles(rig, {p: DECODE, d: PREFILL})
            new = rig.start((7, 8, 9), max_tokens=2)
            prepared = await hand_off(d, p)
            p.send_token(prepared, 1, 101, last=True)
            assert await read_all(new) == [100, 101]
            d.send_token(old, 1, 55)
            d.send_token(old, 2, 56, last=True)
            assert await read_all(running, 1) == [55, 56]
            assert len(p.hellos) == len(d.hellos) == 1

    run()


@with_workers("prefill-0", "prefill-1", "prefill-2")
async def test_a_prompt_of_a_new_decode_worker_is_pulled_by_another(
    p: ScriptedWorker, other: ScriptedWorker, d: ScriptedWorker
) -> None:
    d.role = DECODE
    async with running_rig() as rig:
        await rig.up(p, other, d)
        stream = rig.start(max_tokens=2)
        request = await p.next_submit()
        await take_roles(rig, {p: DECODE, other: PREFILL, d: DECODE})
        p.offer(request)
        p.send_token(request, 0, 100)
        prepare = (await d.next_command("prepare")).prepare
        d.send_event(prepare.request, RequestEventKind.JOINED)
        d.send_token(prepare.request, 1, 101, last=True)
        assert await read_all(stream) == [100, 101]


@with_workers("prefill-0", "decode-0")
async def test_a_prompt_of_the_only_decode_worker_is_placed_anew(p: ScriptedWorker, d: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(p, d)
        stream = rig.start(max_tokens=3)
        request = await p.next_submit()
        p.send_event(request, RequestEventKind.STARTED)
        await take_roles(rig, {p: DECODE, d: PREFILL})
        p.send_token(request, 0, 100)
        p.offer(request)
        assert await read_some(stream, 1) == [100]
        assert (await p.next_command("cancel")).cancel.attempt == 0
        again = await hand_off(d, p, 101)
        assert again.attempt == 1
        assert list(again.emitted_tokens) == [100]
        p.send_token(again, 2, 102, last=True)
        assert await read_all(stream, 1) == [101, 102]
        assert rig.sample("pdserve_redispatches_total", reason="relabelled") == 1


@with_workers("prefill-0", "decode-0", "decode-1")
async def test_a_pull_that_began_goes_on_at_a_new_prefill_worker(
    p: ScriptedWorker, d: ScriptedWorker, other: ScriptedWorker
) -> None:
    async with running_rig() as rig:
        await rig.up(p, d, other)
        stream = rig.start(max_tokens=2)
        request = await p.next_submit()
        p.offer(request)
        prepare = (await d.next_command("prepare")).prepare
        await take_roles(rig, {p: PREFILL, d: PREFILL, other: DECODE})
        p.send_token(request, 0, 100)
        d.send_event(prepare.request, RequestEventKind.JOINED)
        d.send_token(prepare.request, 1, 101, last=True)
        assert await read_all(stream) == [100, 101]
        assert other.commands.empty()


@with_workers("prefill-0", "prefill-1")
async def test_a_parked_prompt_goes_to_the_first_decode_worker_that_there_is(
    p: ScriptedWorker, other: ScriptedWorker
) -> None:
    other.role = DECODE
    async with running_rig() as rig:
        await rig.up(p, other)
        stream = rig.start(max_tokens=2)
        request = await p.next_submit()
        await take_roles(rig, {p: PREFILL, other: PREFILL})
        assert not rig.cluster.is_ready
        p.offer(request)
        p.send_token(request, 0, 100)
        assert await read_some(stream, 1) == [100]
        assert is_unbound(attempt_of(stream))
        await take_roles(rig, {p: PREFILL, other: DECODE})
        prepare = (await other.next_command("prepare")).prepare
        other.send_event(prepare.request, RequestEventKind.JOINED)
        other.send_token(prepare.request, 1, 101, last=True)
        assert await read_all(stream, 1) == [101]


@with_workers("prefill-0", "decode-0")
async def test_metrics_have_the_new_role_and_count_what_is_new(p: ScriptedWorker, d: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(p, d)
        d.load["num_preemptions"] = 5
        await until(lambda: rig.cluster.workers["decode-0"].load.num_preemptions == 5)
        assert rig.sample("pdserve_preemptions_total", worker="decode-0", role="decode") == 5
        await take_roles(rig, {p: PREFILL, d: PREFILL})
        assert rig.sample("pdserve_worker_up", worker="decode-0", role="prefill") == 1
        assert rig.sample("pdserve_worker_up", worker="decode-0", role="decode") == 0
        d.load["num_preemptions"] = 7
        await until(lambda: rig.cluster.workers["decode-0"].load.num_preemptions == 7)
        assert rig.sample("pdserve_preemptions_total", worker="decode-0", role="prefill") == 2
        assert rig.sample("pdserve_ready_workers", role="prefill") == 2
        assert rig.sample("pdserve_worker_restarts_total", role="prefill") == 0


@with_workers("prefill-0", "decode-0")
async def test_a_worker_takes_its_role_though_its_session_is_broken(p: ScriptedWorker, d: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(p, d)
        d.load["num_running"] = 3
        await until(lambda: rig.cluster.workers["decode-0"].load.num_running == 3)
        await d.stop()
        await until(lambda: not rig.cluster.workers["decode-0"].is_up)
        await take_roles(rig, {p: DECODE, d: PREFILL})
        assert rig.sample("pdserve_worker_up", worker="decode-0", role="prefill") == 0
        assert rig.sample("pdserve_running_sequences", worker="decode-0", role="prefill") == 0
        await d.start()
        await until(lambda: rig.cluster.workers["decode-0"].is_up)
        stream = rig.start(max_tokens=2)
        prepared = await hand_off(d, p)
        p.send_token(prepared, 1, 101, last=True)
        assert await read_all(stream) == [100, 101]
