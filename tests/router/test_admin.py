"""Admin port over a live cluster of scripted workers: targets, status, drain, metrics, readiness."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, replace

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from pdserve.contracts.deployment import DeploymentConfig, ModelConfig, RouterConfig, SloConfig
from pdserve.contracts.events import RequestEventKind
from pdserve.contracts.metrics import TTFT_SECONDS
from pdserve.contracts.precision import Precision
from pdserve.contracts.worker_config import WorkerRole
from pdserve.model.cost.cost_model import CostModel
from pdserve.model.cost.hardware import hardware
from pdserve.planner.live.running import running_cluster
from pdserve.router.admin import create_admin_app
from pdserve.router.overview import Overview
from pdserve.router.process_config import RouterProcessConfig
from pdserve.router.requests.demand import Demand
from pdserve.router.requests.request import GenerationError
from tests.router.rig import SHAPE, Rig, hand_off, running_rig, with_workers
from tests.router.scripted_worker import ScriptedWorker, until

SERVED = RouterProcessConfig(
    deployment=DeploymentConfig(
        model=ModelConfig(path="/models/tiny", served_name="tiny"), slo=SloConfig(ttft_seconds=1.5, attainment=0.8)
    )
)
OPEN = replace(SERVED.deployment, router=RouterConfig(open_metrics=True))
COSTS = {WorkerRole.DECODE: CostModel(SHAPE, hardware("l4"), Precision())}


@asynccontextmanager
async def admin_client(rig: Rig, config: RouterProcessConfig = SERVED) -> AsyncIterator[httpx.AsyncClient]:
    overview = Overview(rig.cluster, config.deployment.slo, config.deployment.model.served_name)
    overview.sample(0.0)
    transport = httpx.ASGITransport(create_admin_app(rig.cluster, config, COSTS, overview))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:9") as client:
        yield client


def target(worker: ScriptedWorker) -> dict[str, object]:
    return {**asdict(worker.endpoint), "role": worker.role.value}


@with_workers("prefill-0", "decode-0")
async def test_targets_are_put_whole(p: ScriptedWorker, d: ScriptedWorker) -> None:
    async with running_rig() as rig, admin_client(rig) as client:
        assert (await client.get("/workers")).json() == []
        put = await client.put("/workers", json=[target(p), target(d)])
        assert put.json() == [target(d), target(p)]
        await until(lambda: all(worker.is_up for worker in rig.cluster.workers.values()))
        await client.put("/workers", json=[target(p)])
        assert (await client.get("/workers")).json() == [target(p)]
        assert rig.sample("pdserve_worker_up", worker="prefill-0", role="prefill") == 1
        assert "decode-0" not in (await client.get("/metrics")).text
        await client.put("/workers", json=[target(p)])
        assert len(p.hellos) == 1
        assert rig.sample("pdserve_ready_workers", role="decode") == 0
        assert rig.sample("pdserve_worker_restarts_total", role="decode") == 0
        await client.put("/workers", json=[target(p), {**target(d), "epoch": d.endpoint.epoch + 1}])
        assert rig.sample("pdserve_worker_restarts_total", role="decode") == 1
        for epoch in (3, 4):
            parts = [{**target(d), "worker_id": f"decode-1.{number}", "epoch": epoch} for number in range(2)]
            await client.put("/workers", json=[target(p), *parts])
        assert rig.sample("pdserve_worker_restarts_total", role="decode") == 2, "once for both micro-batches"


@with_workers("prefill-0")
async def test_prometheus_discovers_every_router(p: ScriptedWorker) -> None:
    async with running_rig() as rig, admin_client(rig) as client:

        async def discovered() -> list[str]:
            [group] = (await client.get("/targets")).json()
            assert group["labels"] == {"__meta_pdserve_model": SERVED.deployment.model.served_name}
            assert group["targets"] == (await client.get("/status")).json()["routers"]
            return group["targets"]  # type: ignore[no-any-return]

        assert await discovered() == ["127.0.0.1:9"]
        for ports in ([9, 10], [10, 9]):
            assert (await client.put("/routers", json=ports)).is_success
            assert await discovered() == ["127.0.0.1:9", "127.0.0.1:10"]
            assert rig.dispatcher.replicas.num == 2


@with_workers("prefill-0")
async def test_bad_targets_are_named(p: ScriptedWorker) -> None:
    async with running_rig() as rig, admin_client(rig) as client:
        for wrong in ({"role": "chef"}, {"address": "nowhere"}, {"epoch": -1}, {"color": "red"}):
            answer = await client.put("/workers", json=[{**target(p), **wrong}])
            assert answer.status_code == 422, wrong
            assert next(iter(wrong)) in answer.text
        twice = await client.put("/workers", json=[target(p), target(p)])
        assert twice.status_code == 400
        assert "same worker_id" in twice.text
        assert not rig.cluster.workers


@with_workers("prefill-0", "decode-0")
async def test_status_shows_workers_and_requests(p: ScriptedWorker, d: ScriptedWorker) -> None:
    async with running_rig() as rig, admin_client(rig) as client:
        await rig.up(p, d)
        stream = rig.start()
        await p.next_submit()
        p.load["num_blocks_referenced"] = 3
        await until(lambda: rig.cluster.workers["prefill-0"].load.num_blocks_referenced == 3)
        status = (await client.get("/status")).json()
        assert (status["in_flight"], status["queued"], status["accepted"]) == (1, 0, 1)
        assert [worker["worker_id"] for worker in status["workers"]] == ["decode-0", "prefill-0"]
        assert status["workers"][1]["load"]["num_blocks_referenced"] == 3
        assert status["workers"][0]["load"]["num_blocks_referenced"] == 0
        assert status["workers"][1]["load"]["num_preemptions"] == 0
        running = running_cluster(status)
        assert [worker.role.value for worker in running.workers] == ["decode", "prefill"], "the planner reads it"
        assert running.workers[0].max_batch_size == d.welcome["max_batch_size"]
        assert [worker.tensor_parallel for worker in running.workers] == [2, 2]
        assert (running.model.path, running.model.dtype) == (SERVED.deployment.model.path, "bfloat16")
        assert running.slo == SERVED.deployment.slo
        assert running.devices == {WorkerRole.DECODE: replace(hardware("l4"), sources={})}
        stream.cancel()
        assert (await client.get("/status")).json()["outcomes"]["cancelled"] == 1


@with_workers()
async def test_the_figures_of_a_plan_are_shown() -> None:
    async with running_rig() as rig, admin_client(rig) as client:
        plan = {"running": 2.5, "best": 4.0, "workers": {"prefill": 1, "decode": 3}}
        assert (await client.put("/plan", json=plan)).is_success
        assert rig.sample("pdserve_plan_goodput", placement="best") == 4
        assert rig.sample("pdserve_plan_workers", role="decode") == 3
        assert (await client.put("/plan", json={**plan, "workers": {"chef": 1}})).status_code == 422
        assert (await client.put("/scaled", params={"reason": "surplus"})).is_success
        assert (await client.put("/scaled", params={"reason": "boredom"})).status_code == 400
        assert 'pdserve_scale_changes_total{reason="surplus"} 1.0' in (await client.get("/metrics")).text
        assert Demand(**(await client.get("/demand")).json()) == Demand()


@with_workers("mixed-0")
async def test_drain(m: ScriptedWorker) -> None:
    async with running_rig() as rig, admin_client(rig) as client:
        await rig.up(m)
        stream = rig.start()
        assert (await client.post("/drain")).json() == {"draining": True, "in_flight": 1}
        with pytest.raises(GenerationError):
            rig.start()
        stream.cancel()
        status = (await client.get("/status")).json()
        assert status["draining"]
        assert status["in_flight"] == 0


@asynccontextmanager
async def keeping_proven(rig: Rig) -> AsyncIterator[None]:
    task = asyncio.create_task(rig.cluster.keep_proven())
    yield
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


@with_workers("prefill-0", "decode-0")
async def test_ready_after_a_round_trip_and_again_after_a_loss(p: ScriptedWorker, d: ScriptedWorker) -> None:
    async with running_rig() as rig, keeping_proven(rig):
        await rig.up(p, d)
        for _ in range(2):
            request = await hand_off(p, d)
            assert not rig.cluster.is_ready
            d.send_token(request, 1, 2, last=True)
            await until(lambda: rig.cluster.is_ready)
            await d.stop()
            await until(lambda: not rig.cluster.is_ready)
            await d.start()
        await p.next_submit()
        rig.dispatcher.fail_all("the test is over")


@with_workers("prefill-0", "decode-0")
async def test_ready_while_decode_workers_serve_without_prefill_workers(p: ScriptedWorker, d: ScriptedWorker) -> None:
    async with running_rig() as rig, keeping_proven(rig):
        await rig.up(p, d)
        d.send_token(await hand_off(p, d), 1, 2, last=True)
        await until(lambda: rig.cluster.is_ready)
        await p.stop()
        await until(lambda: len(rig.dispatcher.workers) == 1)
        assert rig.cluster.is_ready
        await d.stop()
        await until(lambda: not rig.cluster.is_ready)
        await d.start()
        await until(lambda: len(d.hellos) == 2)
        d.send_tokens(await d.next_submit(), [(0, 1), (1, 2)], last=True)
        await until(lambda: rig.cluster.is_ready)


@with_workers("mixed-0")
async def test_a_round_trip_that_fails_does_not_prove(m: ScriptedWorker) -> None:
    async with running_rig() as rig, keeping_proven(rig):
        await rig.up(m)
        m.send_event(await m.next_submit(), RequestEventKind.REJECTED, message="no")
        request = await m.next_submit()
        assert not rig.cluster.is_ready
        m.send_tokens(request, [(0, 1), (1, 2)], last=True)
        await until(lambda: rig.cluster.is_ready)


@with_workers("decode-0")
async def test_decode_alone_is_not_ready(d: ScriptedWorker) -> None:
    async with running_rig() as rig, keeping_proven(rig):
        await rig.up(d)
        await asyncio.sleep(0.2)
        assert d.commands.empty()
        assert not rig.cluster.is_ready


ROUTES = (
    ("GET", "/metrics"),
    ("GET", "/targets"),
    ("GET", "/workers"),
    ("PUT", "/workers"),
    ("POST", "/drain"),
    ("GET", "/status"),
)
TOKEN = {"Authorization": "Bearer secret"}


@with_workers()
async def test_every_route_needs_the_token() -> None:
    async with running_rig() as rig, admin_client(rig, replace(SERVED, admin_token="secret")) as client:
        for raw in ({}, {b"Authorization": b"Bearer wrong"}, {b"Authorization": b"Bearer \xff"}):
            for method, path in (*ROUTES, ("GET", "/absent")):
                assert (await client.request(method, path, headers=raw)).status_code == 401, path
        for path, has_another_way in (("/metrics", True), ("/status", False)):
            said = (await client.get(path)).json()["detail"]
            assert "admin_token" in said
            assert ("open_metrics" in said) is has_another_way
        status = await client.get("/status", headers=TOKEN)
        assert (status.status_code, status.json()["draining"]) == (200, False)


@with_workers()
async def test_metrics_are_open_by_choice() -> None:
    config = replace(SERVED, admin_token="secret", deployment=OPEN)
    async with running_rig() as rig, admin_client(rig, config) as client:
        codes = [(await client.request(*route)).status_code for route in ROUTES]
    assert codes == [200, 200, 401, 401, 401, 401]


@with_workers()
async def test_prometheus_gets_request_ids_as_exemplars_if_it_takes_them() -> None:
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
    async with running_rig() as rig, admin_client(rig) as client:
        rig.metrics[TTFT_SECONDS].observe(0.2, "id-1" * 40)
        plain, named = (await client.get("/metrics")), (await client.get("/metrics", headers=accept))
    assert "id-1" not in plain.text
    families = {family.name: family for family in text_string_to_metric_families(named.text)}  # type: ignore[no-untyped-call]
    [exemplar] = [each.exemplar for each in families["pdserve_ttft_seconds"].samples if each.exemplar]
    assert (exemplar.labels, exemplar.value) == ({"request_id": "id-1" * 25}, 0.2)


@with_workers()
async def test_pages_of_a_browser_are_refused() -> None:
    async with (
        running_rig() as rig,
        admin_client(rig, replace(SERVED, deployment=OPEN)) as client,
    ):
        for headers in ({"Origin": "http://127.0.0.1:9"}, {"Origin": "null"}, {"Host": "evil.example:9"}):
            for method, path in ROUTES:
                assert (await client.request(method, path, headers={**TOKEN, **headers})).status_code == 403, path
        assert not rig.dispatcher.admission.is_draining


@with_workers()
async def test_addresses_of_the_host_are_answered() -> None:
    async with running_rig() as rig, admin_client(rig) as client:
        for host in ("localhost:9", "127.0.0.1:9", "[::1]:9", "10.0.0.7"):
            assert (await client.get("/status", headers={"Host": host})).status_code == 200, host
