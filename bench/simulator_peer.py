"""The peer's part of `pdserve.bench.simulator_speed`: DistServe's simulator on a file of requests.

    python simulator_peer.py CHECKOUT REQUESTS NUMBER

Runs under an interpreter with simpy and pandas, on a checkout of DistServe, so it imports nothing of pdserve. A prefill
instance of TP 2 and a decode instance of TP 1 serve OPT-13B. Prints one JSON line: CPU seconds of the event loop, and
of everything that DistServe's search computes for a point.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def main() -> None:
    checkout, requests, num_requests = sys.argv[1:]
    sys.path[0] = checkout  # in place of this file's folder
    import simpy  # type: ignore[import-not-found, unused-ignore]
    from simdistserve.benchmarks.simulate_dist import (  # type: ignore[import-not-found, unused-ignore]
        parse_args,
        run_experiment,
    )

    loop_s = 0.0
    run_events = simpy.Environment.run

    def timed_run(environment: Any, *arguments: Any) -> Any:
        nonlocal loop_s
        began_s = time.process_time()
        result = run_events(environment, *arguments)
        loop_s += time.process_time() - began_s
        return result

    simpy.Environment.run = timed_run
    options = ["--workload", requests, "--N", num_requests, "--tp-prefill", "2", "--slas", "[]", "--slo-scales", "[1]"]
    criteria = ["--prefill-containment", "90", "--decode-containment", "90"]
    began_s = time.process_time()
    run_experiment(parse_args([*options, *criteria]))
    whole_s = time.process_time() - began_s
    sys.stdout.write(json.dumps({"event_loop_s": loop_s, "whole_s": whole_s}) + "\n")


if __name__ == "__main__":
    main()
