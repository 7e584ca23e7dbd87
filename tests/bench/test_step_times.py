from __future__ import annotations

import httpx
import pytest

from pdserve.bench.step_times import ratios_between, watched_step_times
from pdserve.contracts.placement import WorkerRole
from pdserve.proto.v1 import worker_pb2
from pdserve.router.metrics import RouterMetrics, WorkerMetrics


def test_ratios_are_of_what_grew_in_between_and_of_all_workers_of_a_role() -> None:
    metrics = RouterMetrics()
    workers = [WorkerMetrics(metrics, f"decode-{number}", WorkerRole.DECODE) for number in range(2)]
    idle = WorkerMetrics(metrics, "prefill-0", WorkerRole.PREFILL)
    for worker in (*workers, idle):
        worker.observe(worker_pb2.Load(step_s=5.0, step_tokens=1, predicted_step_s=1.0))
    before = metrics.render().decode()
    workers[0].observe(worker_pb2.Load(step_s=1.0, step_tokens=1, predicted_step_s=1.0))
    workers[1].observe(worker_pb2.Load(step_s=5.0, step_tokens=1, predicted_step_s=3.0))
    workers[1].observe(worker_pb2.Load(step_s=5.0, step_tokens=9, predicted_step_s=2.0, step_has_prefill=True))
    ratios = ratios_between(before, metrics.render().decode())
    assert ratios == {
        (WorkerRole.DECODE, "decode"): pytest.approx(1.5),
        (WorkerRole.DECODE, "prefill"): pytest.approx(2.5),
    }
    assert ratios_between("", before)[WorkerRole.PREFILL, "decode"] == 5.0


def test_a_router_that_is_gone_is_an_error() -> None:
    with pytest.raises(httpx.ConnectError), watched_step_times("http://127.0.0.1:1"):
        raise AssertionError("there is nothing to watch")
