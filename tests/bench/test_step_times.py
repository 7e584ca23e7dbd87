from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from pdserve.bench.step_times import WatchedStepTimes, watched_step_times
from pdserve.contracts.placement import WorkerRole
from pdserve.proto.v1 import worker_pb2
from pdserve.router.metrics import RouterMetrics, WorkerMetrics
from tests.scrape import scrape

DECODING, PREFILLING = (WorkerRole.DECODE, "decode"), (WorkerRole.DECODE, "prefill")


@pytest.fixture
def metrics() -> RouterMetrics:
    return RouterMetrics()


@pytest.fixture
def failures() -> queue.SimpleQueue[None]:
    """As many answers as it holds are errors."""
    return queue.SimpleQueue()


@pytest.fixture
def admin_url(metrics: RouterMetrics, failures: queue.SimpleQueue[None]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(HTTPStatus.OK if failures.empty() else HTTPStatus.INTERNAL_SERVER_ERROR)
            self.end_headers()
            self.wfile.write(scrape(metrics).encode())
            if not failures.empty():
                failures.get()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_ratios_are_of_what_grew_in_between_and_of_all_workers_of_a_role(metrics: RouterMetrics) -> None:
    workers = [WorkerMetrics(metrics, f"decode-{number}", WorkerRole.DECODE) for number in range(2)]
    idle = WorkerMetrics(metrics, "prefill-0", WorkerRole.PREFILL)
    for worker in (*workers, idle):
        worker.observe(worker_pb2.Load(step_s=5.0, step_tokens=1, predicted_step_s=1.0))
    before = scrape(metrics)
    workers[0].observe(worker_pb2.Load(step_s=1.0, step_tokens=1, predicted_step_s=1.0))
    workers[1].observe(worker_pb2.Load(step_s=5.0, step_tokens=1, predicted_step_s=3.0))
    workers[1].observe(worker_pb2.Load(step_s=5.0, step_tokens=9, predicted_step_s=2.0, step_has_prefill=True))
    ratios = WatchedStepTimes([(0.0, before), (9.0, scrape(metrics))]).ratios()
    assert ratios == {DECODING: pytest.approx(1.5), PREFILLING: pytest.approx(2.5)}
    assert WatchedStepTimes([(0.0, ""), (9.0, before)]).ratios()[WorkerRole.PREFILL, "decode"] == 5.0


def test_ratios_change_over_time(metrics: RouterMetrics) -> None:
    """Where few steps of a kind were made, or none, they are as long as usual."""
    worker = WorkerMetrics(metrics, "decode-0", WorkerRole.DECODE)
    looks = [(10.0, scrape(metrics))]
    for predicted_s, step_s in ((1.0, 1.0), (1.0, 3.0), (0.0, 0.0), (0.001, 0.02)):
        if predicted_s:
            worker.observe(worker_pb2.Load(step_s=step_s, step_tokens=1, predicted_step_s=predicted_s))
        looks.append((10.0 + len(looks), scrape(metrics)))
    worker.observe(worker_pb2.Load(step_s=4.0, step_tokens=9, predicted_step_s=2.0, step_has_prefill=True))
    looks.append((15.0, scrape(metrics)))
    usual = 4.02 / 2.001
    ratios = WatchedStepTimes(looks).ratios_over_time()
    assert [from_s for from_s, _ in ratios] == [10.0, 11.0, 12.0, 13.0, 14.0]
    assert [each[DECODING] for _, each in ratios] == pytest.approx(
        [1.0 + (usual - 1.0) / 101, 3.0 + (usual - 3.0) / 101, usual, usual + (20.0 - usual) / 11, usual]
    )
    assert [each[PREFILLING] for _, each in ratios] == pytest.approx([2.0] * 5)


def test_the_router_is_looked_at_again_and_again(metrics: RouterMetrics, admin_url: str) -> None:
    worker = WorkerMetrics(metrics, "decode-0", WorkerRole.DECODE)
    with watched_step_times(admin_url, every_s=0.01) as times:
        worker.observe(worker_pb2.Load(step_s=1.0, step_tokens=1, predicted_step_s=1.0))
        num_looks = len(times.looks)
        while len(times.looks) < num_looks + 2:  # of the second no part was before the step
            time.sleep(0.01)
        worker.observe(worker_pb2.Load(step_s=3.0, step_tokens=1, predicted_step_s=1.0))
    assert times.ratios() == {DECODING: pytest.approx(2.0)}
    over_time = [ratios[DECODING] for _, ratios in times.ratios_over_time()]
    assert min(over_time) < 1.2
    assert max(over_time) > 2.8
    num_looks = len(times.looks)
    time.sleep(0.05)
    assert len(times.looks) == num_looks, "nobody looks any more"


def test_a_router_that_is_gone_is_an_error() -> None:
    with pytest.raises(httpx.ConnectError), watched_step_times("http://127.0.0.1:1"):
        raise AssertionError("there is nothing to watch")


def test_a_router_that_fails_meanwhile_is_an_error(admin_url: str, failures: queue.SimpleQueue[None]) -> None:
    def watch_until_it_has_failed() -> None:
        with watched_step_times(admin_url, every_s=0.01):
            failures.put(None)
            while not failures.empty():
                time.sleep(0.01)

    with pytest.raises(httpx.HTTPStatusError):
        watch_until_it_has_failed()
