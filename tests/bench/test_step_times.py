from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest

from pdserve.bench.step_times import SAMPLE_S, ratios_of, watched_step_times
from pdserve.contracts.placement import WorkerRole


def _status(prefill: float, decode: float, *, is_up: bool = True) -> dict[str, object]:
    load = {"prefill_correction": prefill, "decode_correction": decode}
    return {"workers": [{"role": role, "up": is_up, "load": load} for role in ("prefill", "decode", "mixed")]}


def test_each_role_is_judged_by_the_steps_it_is_there_for() -> None:
    assert dict(ratios_of(_status(1.25, 0.8))) == {
        WorkerRole.PREFILL: 1.25,
        WorkerRole.DECODE: 0.8,
        WorkerRole.MIXED: 1.25,
    }
    assert dict(ratios_of(_status(0.0, 0.0)))[WorkerRole.DECODE] == 1.0
    assert not list(ratios_of(_status(1.0, 1.0, is_up=False)))


def test_ratios_are_averaged_over_the_watch() -> None:
    num_asked = 0

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            nonlocal num_asked
            num_asked += 1
            body = json.dumps(_status(1.0 if num_asked == 1 else 2.0, 1.0)).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: nobody reads it."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        with watched_step_times(f"http://127.0.0.1:{server.server_port}") as ratios:
            while num_asked < 4:
                time.sleep(SAMPLE_S / 10)
        server.shutdown()
        thread.join()
    assert 1.5 <= ratios[WorkerRole.PREFILL] < 2.0
    assert ratios[WorkerRole.DECODE] == 1.0


def test_a_router_that_is_gone_is_an_error() -> None:
    with pytest.raises(httpx.ConnectError), watched_step_times("http://127.0.0.1:1"):
        time.sleep(2 * SAMPLE_S)
