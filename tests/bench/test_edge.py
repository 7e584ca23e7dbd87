from __future__ import annotations

import multiprocessing

from pdserve.bench.edge import first_tokens, running, serve_bare, us_per_token


def test_the_cpu_time_of_a_token_is_that_of_the_server() -> None:
    received, ports = multiprocessing.Pipe(duplex=False)
    with running(serve_bare, ports) as pid:
        assert received.poll(60)
        spent_us = us_per_token(f"http://127.0.0.1:{received.recv()}", pid, num_streams=4, seconds=1)
    assert 0 < spent_us < 1e5


def test_first_tokens_are_timed_beside_streams() -> None:
    received, ports = multiprocessing.Pipe(duplex=False)
    with running(serve_bare, ports) as pid:
        assert received.poll(60)
        ttft_s, share = first_tokens(f"http://127.0.0.1:{received.recv()}", pid, num_streams=2, seconds=0.5)
    assert len(ttft_s) > 3
    assert all(0 < each < 30 for each in ttft_s.values())
    assert 0 < share < 1
