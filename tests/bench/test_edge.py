from __future__ import annotations

import json
import multiprocessing

from pdserve.bench.edge import BODY_BYTES, large_bodies, running, serve_bare, us_per_token


def test_bodies_are_just_below_the_limit_and_all_but_two_are_json() -> None:
    broken = set()
    for kind, (path, body) in large_bodies().items():
        assert path.startswith(("/v1/", "/tokenize"))
        assert 0.7 * BODY_BYTES < len(body) < 8 * 2**20
        try:
            json.loads(body)
        except (ValueError, RecursionError):
            broken.add(kind)
    assert broken == {"deep lists", "no JSON at the end"}


def test_the_cpu_time_of_a_token_is_that_of_the_server() -> None:
    received, ports = multiprocessing.Pipe(duplex=False)
    with running(serve_bare, ports) as pid:
        assert received.poll(60)
        spent_us = us_per_token(f"http://127.0.0.1:{received.recv()}", pid, num_streams=4, seconds=2)
    assert 0 < spent_us < 1e5
