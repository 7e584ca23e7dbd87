"""Speed of the planner's simulator: simulated requests per second of CPU time, on one core.

    python -m pdserve.bench.simulator_speed [--runs 3] [--json FILE] [--peer FOLDER --peer-python PYTHON]

The time covers everything that a search computes for a point: scaling a drawn workload to a rate, `simulate`, and the
latencies and attainment. Each case runs several times; the fastest run counts, as the least disturbed, and all are
kept. Alternating runs time the router's policy, its in-flight load and both schedulers, with all that they call: the
floor for any simulator that runs these parts of the cluster.

With a checkout of DistServe (OSDI 2024; LLMServe/DistServe) and an interpreter that has simpy and pandas, DistServe's
simulator gets the requests of the first case too, alternating run by run with this one. Its event loop alone, and
everything that its search computes for a point, are timed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Any
from unittest.mock import patch

import numpy as np
from rich.console import Console

from pdserve.bench.distserve import OPT_13B
from pdserve.contracts.deployment import SloConfig
from pdserve.contracts.placement import WorkerRole
from pdserve.decode_worker.scheduler import DecodeScheduler
from pdserve.model.config.shape import ModelShape
from pdserve.model.cost.hardware import hardware
from pdserve.planner import simulator
from pdserve.planner.conversations import Conversations, SystemPrompts
from pdserve.planner.layout import Layout, PlannedModel, Pool
from pdserve.planner.presets import preset
from pdserve.planner.requests import SimulatedRequest
from pdserve.planner.workload import Workload, WorkloadSample
from pdserve.prefill_worker.scheduler import PrefillScheduler
from pdserve.router.cluster.worker import InFlightLoad
from pdserve.router.requests import dispatch

LLAMA_3_8B = PlannedModel(
    shape=ModelShape.from_hf_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
        }
    ),
    max_model_len=131072,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A point of a search: a workload at a rate on a layout."""

    name: str
    model: PlannedModel
    layout: Layout
    workload: Workload
    requests_per_s: float
    num_requests: int


def pools(gpu: str, replicas: int, prefill_tensor_parallel: int = 1) -> Layout:
    """As many prefill as decode workers."""

    def pool(role: WorkerRole, tensor_parallel: int) -> Pool:
        return Pool(role=role, replicas=replicas, hardware=hardware(gpu), tensor_parallel=tensor_parallel)

    return Layout(prefill=pool(WorkerRole.PREFILL, prefill_tensor_parallel), decode=pool(WorkerRole.DECODE, 1))


def cases() -> list[Case]:
    """DistServe's example, and two with prefixes to share."""
    sharegpt = preset("sharegpt-synthetic")
    assert isinstance(sharegpt.contents, Conversations)
    system_prompts = Workload(
        name="sharegpt-synthetic after 8 system prompts of 1,024 tokens",
        contents=Conversations(lengths=sharegpt.contents.lengths, system_prompts=SystemPrompts(8, 1024)),
        slo=sharegpt.slo,
    )
    return [
        Case(
            name="1 prefill, 1 decode, nothing shared",
            model=OPT_13B,
            layout=pools("a100-80gb-sxm", 1, prefill_tensor_parallel=2),
            workload=sharegpt,
            requests_per_s=4.7,
            num_requests=5000,
        ),
        Case(
            name="4 prefill, 4 decode, shared system prompts",
            model=LLAMA_3_8B,
            layout=pools("h100-sxm", 4),
            workload=system_prompts,
            requests_per_s=60.0,
            num_requests=5000,
        ),
        Case(
            name="4 prefill, 4 decode, agents",
            model=LLAMA_3_8B,
            layout=pools("h100-sxm", 4),
            workload=preset("agent"),
            requests_per_s=20.0,
            num_requests=2000,
        ),
    ]


def run_once(case: Case, sample: WorkloadSample) -> tuple[float, float]:
    """CPU seconds, and the attainment that a search would learn."""
    slo = case.workload.slo or SloConfig()
    began_s = process_time()
    times = simulator.simulate(case.model, case.layout, sample.at_rate(case.requests_per_s), slo=slo).times
    is_met = (times.ttft_s <= slo.ttft_seconds) & (times.tpot_s <= slo.tpot_seconds)
    attainment = float(is_met.mean())
    return process_time() - began_s, attainment


class Stopwatch:
    """Adds up how long calls last that are not made within one another."""

    def __init__(self) -> None:
        self.elapsed_s = 0.0
        self._is_running = False

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``, with its time taken."""

        @wraps(call)
        def timed_call(*arguments: object, **options: object) -> object:
            if self._is_running:
                return call(*arguments, **options)
            self._is_running = True
            began_s = perf_counter()
            try:
                return call(*arguments, **options)
            finally:
                self.elapsed_s += perf_counter() - began_s
                self._is_running = False

        return timed_call


@contextmanager
def timed_policy_and_schedulers() -> Iterator[Stopwatch]:
    """Takes the time that simulations spend in the policy, promises and schedulers meanwhile."""
    stopwatch = Stopwatch()
    with ExitStack() as stack:
        for owner in (PrefillScheduler, DecodeScheduler, InFlightLoad):
            for name in dir(owner):
                if not name.startswith("_") and callable(call := getattr(owner, name)):
                    stack.enter_context(patch.object(owner, name, stopwatch.timed(call)))
        for name in ("choose_prefill", "choose_decode"):
            stack.enter_context(patch.object(dispatch, name, stopwatch.timed(getattr(dispatch, name))))
        yield stopwatch


@dataclass(frozen=True, slots=True)
class Peer:
    """DistServe's simulator."""

    folder: Path
    """A checkout of DistServe."""
    python: str

    def run(self, requests: Sequence[SimulatedRequest]) -> dict[str, float]:
        """CPU seconds: `event_loop_s` and `whole_s`.

        Raises:
            subprocess.CalledProcessError: it failed; what it said is on standard error.
        """
        rows = [
            {"start_time": each.arrived_s, "prompt_len": each.num_prompt_tokens, "output_len": each.num_output_tokens}
            for each in requests
        ]
        with TemporaryDirectory() as work:
            file = Path(work) / "requests.json"
            file.write_text(json.dumps(rows))
            script = Path(__file__).with_name("simulator_peer.py")
            command = [self.python, str(script), str(self.folder), str(file), str(len(rows))]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        cpu_s: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return cpu_s


def measure(case: Case, num_runs: int, peer: Peer | None = None) -> dict[str, Any]:
    """What is kept of a case, and of the peer's runs, which take turns with this simulator's."""
    sample = case.workload.draw(case.num_requests, max_model_len=case.model.max_model_len)
    statistics = sample.statistics()
    runs, peer_runs, policy_and_schedulers_s = [], [], []
    for _ in range(num_runs):
        runs.append(run_once(case, sample))
        with timed_policy_and_schedulers() as stopwatch:
            run_once(case, sample)
        policy_and_schedulers_s.append(stopwatch.elapsed_s)
        if peer is not None:
            peer_runs.append(peer.run(sample.at_rate(case.requests_per_s)))
    fastest_s = min(cpu_s for cpu_s, _ in runs)
    kept_of_peer = {
        f"distserve_{part}": {
            "simulated_requests_per_s": round(sample.num_requests / min(run[part] for run in peer_runs)),
            "cpu_s": [round(run[part], 3) for run in peer_runs],
        }
        for part in (peer_runs[0] if peer_runs else ())
    }
    return {
        "name": case.name,
        "layout": str(case.layout),
        "workload": case.workload.name,
        "requests_per_s": case.requests_per_s,
        "num_requests": sample.num_requests,
        "mean_prompt_tokens": round(statistics.mean_prompt_tokens, 1),
        "mean_output_tokens": round(statistics.mean_output_tokens, 1),
        "cacheable_share": round(statistics.cacheable_share, 3),
        "attainment": round(runs[0][1], 4),
        "simulated_requests_per_s": round(sample.num_requests / fastest_s),
        "simulated_tokens_per_s": round(int(np.sum(statistics.num_output_tokens)) / fastest_s),
        "cpu_s": [round(cpu_s, 3) for cpu_s, _ in runs],
        "most_simulated_requests_per_s": round(sample.num_requests / min(policy_and_schedulers_s)),
        "policy_and_schedulers_s": [round(elapsed_s, 3) for elapsed_s in policy_and_schedulers_s],
        **kept_of_peer,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="of each case")
    parser.add_argument("--json", type=Path, help="also write the result here")
    parser.add_argument("--peer", type=Path, help="a checkout of DistServe")
    parser.add_argument("--peer-python", default="python3", help="an interpreter that has simpy and pandas")
    arguments = parser.parse_args()
    console = Console()
    results = []
    for number, case in enumerate(cases()):
        peer = Peer(arguments.peer, arguments.peer_python) if arguments.peer and number == 0 else None
        result = measure(case, arguments.runs, peer)
        results.append(result)
        console.print(
            f"{result['name']}: {result['simulated_requests_per_s']:,} requests/s "
            f"({result['simulated_tokens_per_s']:,} tokens/s), attainment {result['attainment']:.3f}; "
            f"{result['most_simulated_requests_per_s']:,} with policy and schedulers alone"
        )
        if peer is not None:
            loop, whole = (
                result[f"distserve_{part}"]["simulated_requests_per_s"] for part in ("event_loop_s", "whole_s")
            )
            console.print(f"  DistServe's simulator: {loop:,} requests/s in its event loop, {whole:,} with all")
    report = {
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "cases": results,
        "python": platform.python_version(),
        "cpu": platform.processor() or platform.machine(),
        "num_cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
