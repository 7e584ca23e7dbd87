"""List of targets: replaced as a whole, in order, while sessions open and close."""

from __future__ import annotations

import asyncio

from tests.router.rig import running_rig, with_workers
from tests.router.scripted_worker import ScriptedWorker, until


@with_workers("mixed-0", "mixed-1")
async def test_the_last_of_two_lists_put_at_once_stands(m0: ScriptedWorker, m1: ScriptedWorker) -> None:
    async with running_rig() as rig:
        await rig.up(m0)
        old = rig.cluster.workers["mixed-0"]
        m0.epoch += 1000  # another incarnation of the same worker
        first = asyncio.create_task(rig.cluster.set_targets([m0.endpoint, m1.endpoint]))
        await asyncio.sleep(0)
        assert old not in rig.cluster.workers.values()  # its session is closing
        await rig.cluster.set_targets([m1.endpoint])
        await first
        assert [worker.endpoint for worker in rig.cluster.workers.values()] == [m1.endpoint]
        assert rig.sample("pdserve_worker_up", worker="mixed-0", role="mixed") == 0


@with_workers("mixed-0")
async def test_a_target_that_returns_is_met_with_a_newer_session(m: ScriptedWorker) -> None:
    """The worker remembers the router's last epoch and refuses any that is not newer."""
    async with running_rig() as rig:
        for count in range(1, 4):
            await rig.up(m)
            assert len(m.hellos) == count
            await rig.up()
        epochs = [hello.session_epoch for hello in m.hellos]
        assert epochs == sorted(set(epochs))


@with_workers("mixed-0", "mixed-1")
async def test_a_worker_with_a_shorter_limit_than_the_cluster_is_refused(
    m0: ScriptedWorker, m1: ScriptedWorker
) -> None:
    m1.welcome["max_model_len"] = m0.welcome["max_model_len"] - 1
    async with running_rig() as rig:
        await rig.up(m0)
        await rig.cluster.set_targets([m0.endpoint, m1.endpoint])
        await until(lambda: len(m1.hellos) == 2)  # refused, and asked again
        assert [worker.is_up for worker in rig.cluster.workers.values()] == [True, False]
