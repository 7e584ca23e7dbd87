from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.bench.simulator_speed import Case, Peer, cases, measure

SIMPY = """
import time
class Environment:
    def run(self):
        began_s = time.process_time()
        while time.process_time() - began_s < 0.02: pass
"""
SIMULATE_DIST = """
import argparse, json, simpy, time
def parse_args(arguments):
    parser = argparse.ArgumentParser()
    for name in ("workload", "N", "tp-prefill", "slas", "slo-scales", "prefill-containment", "decode-containment"):
        parser.add_argument("--" + name)
    return parser.parse_args(arguments)
def run_experiment(arguments):
    with open(arguments.workload) as file:
        requests = json.load(file)
    assert len(requests) == int(arguments.N) == 60
    assert all(request["prompt_len"] > 0 and request["output_len"] > 0 for request in requests)
    arrivals_s = [request["start_time"] for request in requests]
    assert 0 < arrivals_s[-1] < 60 and arrivals_s == sorted(arrivals_s)
    print("progress")
    simpy.Environment().run()
    simpy.Environment().run()
    began_s = time.process_time()
    while time.process_time() - began_s < 0.08: pass
"""
"""What is used of DistServe and of its simulation library, with times that are known."""


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_every_case_is_one_that_its_layout_can_serve(case: Case) -> None:
    """A simulator that only rejects would be fast."""
    result = measure(replace(case, num_requests=60), num_runs=2)
    assert result["num_requests"] == 60
    assert result["attainment"] > 0.9
    assert len(result["cpu_s"]) == 2
    assert result["simulated_requests_per_s"] == pytest.approx(60 / min(result["cpu_s"]), rel=0.1)


def test_the_peer_gets_the_same_requests_and_is_timed(tmp_path: Path) -> None:
    (tmp_path / "simdistserve" / "benchmarks").mkdir(parents=True)
    (tmp_path / "simpy.py").write_text(SIMPY)
    (tmp_path / "simdistserve" / "benchmarks" / "simulate_dist.py").write_text(SIMULATE_DIST)
    result = measure(replace(cases()[0], num_requests=60), num_runs=2, peer=Peer(tmp_path, sys.executable))
    loop, whole = result["distserve_event_loop_s"], result["distserve_whole_s"]
    for figures, least_s in ((loop, 0.04), (whole, 0.12)):
        assert len(figures["cpu_s"]) == 2
        assert min(figures["cpu_s"]) >= least_s
        assert figures["simulated_requests_per_s"] == pytest.approx(60 / min(figures["cpu_s"]), rel=0.1)
    assert min(whole["cpu_s"]) - min(loop["cpu_s"]) >= 0.07
