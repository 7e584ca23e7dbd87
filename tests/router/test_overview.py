"""Figures of the page and `pdserve top` against values that are known."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pdserve.contracts import metrics as names
from pdserve.contracts.deployment import SloConfig
from pdserve.proto.v1 import worker_pb2
from pdserve.router.metrics import MAX_FAILURES, RouterMetrics
from pdserve.router.overview import LONG_WINDOW_S, POINT_S, WINDOW_S, Overview
from pdserve.router.requests.request import GenerationError
from tests.router.rig import Rig, hand_off, read_some, running_rig, with_workers
from tests.router.scripted_worker import ScriptedWorker, until

SLO = SloConfig(ttft_seconds=0.2, tpot_seconds=0.05, attainment=0.9)


def overview_of(rig: Rig) -> Overview:
    return Overview(rig.cluster, SLO, "tiny")


def last(overview: Overview) -> Any:
    return overview.now()["last"]


async def on_idle_rig(check: Any) -> None:
    async with running_rig() as rig:
        check(rig.metrics, overview_of(rig))


def test_only_what_is_new_counts() -> None:
    def check(metrics: RouterMetrics, overview: Overview) -> None:
        metrics[names.TTFT_SECONDS].observe(50.0)
        overview.sample(100.0)
        for _ in range(100):
            metrics[names.TTFT_SECONDS].observe(0.011)
        overview.sample(110.0)
        bounds = names.TTFT_SECONDS.buckets
        low, high = max(each for each in bounds if each <= 0.011), min(each for each in bounds if each > 0.011)
        assert last(overview)["ttft_s"] == pytest.approx([low + share * (high - low) for share in (0.5, 0.9, 0.99)])
        assert last(overview)["tpot_s"] is None

    asyncio.run(on_idle_rig(check))


def test_values_beyond_the_last_bucket_count_as_its_bound() -> None:
    def check(metrics: RouterMetrics, overview: Overview) -> None:
        overview.sample(0.0)
        metrics[names.TPOT_SECONDS].observe(1e6)
        overview.sample(1.0)
        assert last(overview)["tpot_s"] == [names.TPOT_SECONDS.buckets[-1]] * 3

    asyncio.run(on_idle_rig(check))


def test_goodput_and_attainment_count_failures() -> None:
    def check(metrics: RouterMetrics, overview: Overview) -> None:
        overview.sample(0.0)
        assert last(overview)["attainment"] is None
        for ttft, tpot, count in (("met", "met", 6), ("met", "none", 1), ("missed", "met", 2), ("failed", "failed", 1)):
            metrics[names.SLO_REQUESTS].labels("default", ttft, tpot).inc(count)
        metrics.itl_seconds.counts[0] += 500
        metrics[names.SLO_MISSES].labels("default", "ttft", "queue").inc()
        metrics[names.SLO_MISSES].labels("default", "tpot", "decode").inc(2)
        overview.sample(2.0)
        found = last(overview)
        assert found["misses"] == [("tpot", "decode", 2), ("ttft", "queue", 1)]
        assert (found["good_per_s"], found["tokens_per_s"], found["attainment"]) == (3.5, 250, 0.7)
        assert found["good_per_s"] == found["attainment"] * found["ended_per_s"], "of the same requests"
        overview.sample(2.0 + WINDOW_S + 2)
        assert last(overview)["attainment"] is None
        assert overview.now()["long"]["attainment"] == 0.7

    asyncio.run(on_idle_rig(check))


def test_hours_of_samples_take_bounded_room() -> None:
    def check(metrics: RouterMetrics, overview: Overview) -> None:
        for second in range(4 * 900):
            metrics.itl_seconds.counts[0] += 10
            overview.sample(float(second))
        assert last(overview)["window_s"] == WINDOW_S
        assert last(overview)["tokens_per_s"] == pytest.approx(10)
        assert overview.now()["long"]["window_s"] == LONG_WINDOW_S
        assert len(overview._samples) == pytest.approx(LONG_WINDOW_S, abs=3)
        points = overview.points
        assert len(points) == LONG_WINDOW_S / POINT_S
        assert points[-1]["at_s"] - points[0]["at_s"] == LONG_WINDOW_S - POINT_S

    asyncio.run(on_idle_rig(check))


@with_workers("prefill-0", "decode-0")
async def test_workers_links_and_losses_are_shown(p: ScriptedWorker, d: ScriptedWorker) -> None:
    async with running_rig() as rig:
        overview = overview_of(rig)
        await rig.up(p, d)
        overview.sample(0.0)
        assert overview.now()["links"] == []
        stream = rig.start()
        await hand_off(p, d)
        await read_some(stream, 1)
        p.load["num_blocks_referenced"] = 3
        p.load["tier_failure"] = "No space left on device"
        await until(lambda: rig.cluster.workers["prefill-0"].load.num_blocks_referenced == 3)
        now = overview.now()
        assert now["links"] == [["prefill-0", "decode-0", 1, ""]]
        report = worker_pb2.TransferReport(transport="tcp", seconds=0.1, bytes=1)
        rig.metrics.observe_transfer(report, "prefill-0", "decode-0")
        assert overview.now()["links"] == [["prefill-0", "decode-0", 1, "tcp"]]
        assert [(each["id"], each["role"], each["state"]) for each in now["workers"]] == [
            ("decode-0", "decode", "up"),
            ("prefill-0", "prefill", "up"),
        ]
        assert now["workers"][1]["blocks_used"] == 3
        assert now["workers"][1]["tier_failure"] == "No space left on device"
        await d.stop()
        await until(lambda: not rig.cluster.workers["decode-0"].is_up)
        now = overview.now()
        assert now["workers"][0]["state"] == "down"
        assert [each["text"].partition(":")[0] for each in now["failures"]] == ["decode-0 was lost"]
        stream.cancel()


def test_failures_in_a_row_are_one_entry() -> None:
    async def run() -> None:
        async with running_rig(max_in_flight=1, new_wait_s=0.05) as rig:
            for _ in range(3):
                with pytest.raises(GenerationError, match="no worker is up"):
                    await anext(rig.start())
            (failure,) = rig.metrics.failures
            assert (failure.times, failure.text) == (3, "503: no worker is up")
            for number in range(2 * MAX_FAILURES):
                rig.metrics.failed(str(number))
            assert len(rig.metrics.failures) == MAX_FAILURES

    asyncio.run(run())
