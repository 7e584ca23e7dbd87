"""Placement policies side by side, in the simulator: the rate at which 90 % of requests meet both objectives.

    python -m pdserve.bench.policies [--data FOLDER] [--only NAME] [--policies A,B] [--requests N] [--seeds N]
                                     [--other-seeds N] [--rates RATE ...] [--json FILE]

Settings in which some resource binds, traffic as presets and a trace have it, and a control in which nothing binds, on
6 to 10 H100 with Llama-3-8B. Mooncake's conversations are those of ``--data``, a section of them for each seed, in
their pattern at other rates.

All policies serve the same requests, drawn once per seed; all requests of a run count, but later turns that arrive when
no session begins any more. Sessions need runs of several times their length: ``--rates`` serves a few rates in place of
a search. The goodput of a policy and seed
is searched until two rates differ by 8 %, and interpolated twice between those around it. All policies also serve 1.2
and 2 times the goodput of ``least-time``. ``goodput`` and ``least-time`` get ``--seeds`` draws, the others the first
``--other-seeds`` of them. ``goodput+refuse`` refuses what would meet its objectives nowhere (``slo.when_hopeless``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pdserve.bench.models import LLAMA_3_8B, QWEN3_CODER_30B
from pdserve.bench.script import publish, script_parser, show_table
from pdserve.contracts.deployment import DEFAULT_POLICY, POLICIES, SloConfig
from pdserve.contracts.worker_config import WorkerRole
from pdserve.model.cost.hardware import hardware
from pdserve.planner.layout import Layout, PlannedModel, Pool
from pdserve.planner.search.rates import highest_rate
from pdserve.planner.simulate.simulator import simulate
from pdserve.planner.workload.arrivals import POISSON, RandomGaps
from pdserve.planner.workload.conversations import Conversations, SystemPrompts, Turns
from pdserve.planner.workload.lengths import FixedLengths, LogNormalLengths, QuantileLengths
from pdserve.planner.workload.presets import preset
from pdserve.planner.workload.trace_reading import read_trace
from pdserve.planner.workload.workload import Workload, trace_workload

H100 = hardware("h100-sxm")
BETWEEN_HOSTS = replace(H100, network_bandwidth=3e9)
"""24 Gb/s per device."""
NUM_KV_BLOCKS = 6000
"""Of a small KV pool: 96,000 tokens."""
MAX_IN_FLIGHT = 8192
"""Policies are compared, not this bound."""
BASELINE = "least-time"
"""Policy with which all are compared."""
REFUSING = "+refuse"
REFUSED = DEFAULT_POLICY + REFUSING
CASES = (*POLICIES, REFUSED)
TARGET = 0.9
"""Attainment at the goodput."""
OVERLOADS = (1.2, 2.0)
"""Shares of the goodput of ``least-time``."""
GOODPUT = "goodput"
MOONCAKE = "mooncake_conversation_trace.jsonl"
_TOLERANCE = 1.08
"""Ratio of the first two rates of a search, and of the two that it ends with at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A layout under a workload."""

    workload: Workload
    layout: Layout
    ttft_s: float
    tpot_s: float
    rate: float
    """Requests per second of which ``goodput`` serves about 90 %."""
    rates: tuple[float, ...] = ()
    """Further rates to serve."""
    may_refuse: bool = False
    """Run `REFUSED`, too."""
    model: PlannedModel = LLAMA_3_8B

    @property
    def name(self) -> str:
        return self.workload.name

    def rates_around(self, base: float) -> dict[str, float]:
        """Rates that all policies serve, by name; ``base`` is the goodput of ``least-time``."""
        return {f"{share:g} x": share * base for share in OVERLOADS} | {f"{rate:g}/s": rate for rate in self.rates}

    @property
    def slo(self) -> SloConfig:
        return SloConfig(ttft_seconds=self.ttft_s, tpot_seconds=self.tpot_s, attainment=TARGET)


def layout(prefill: int, decode: int, *, prefill_blocks: int = 0, decode_blocks: int = 0) -> Layout:
    return Layout(
        prefill=Pool(role=WorkerRole.PREFILL, replicas=prefill, hardware=H100, num_kv_blocks=prefill_blocks),
        decode=Pool(role=WorkerRole.DECODE, replicas=decode, hardware=H100, num_kv_blocks=decode_blocks),
    )


def _two_hosts() -> Layout:
    pools = (replace(pool, hardware=BETWEEN_HOSTS) for pool in layout(4, 4).pools)
    return Layout.of(pools, hosts=(((0,), (0,), (1,), (1,)),) * 2)


_LONG_AMONG_SHORT = QuantileLengths(
    shares=(0, 0.9, 0.9001, 1), num_prompt_tokens=(200, 600, 12_000, 16_000), num_output_tokens=(50, 150, 150, 200)
)
_PREFIXED = Conversations(
    lengths=LogNormalLengths(mean_prompt_tokens=300, mean_output_tokens=150),
    system_prompts=SystemPrompts(num_prompts=40, num_tokens=6000, zipf_exponent=0.0),
)

_H20 = replace(
    H100,
    name="h20",
    peak_flops={**H100.peak_flops, "bfloat16": 148e12},
    memory_bytes=96 * 10**9,
    memory_bandwidth=4.0e12,
)
CODER = Setting(
    workload=Workload(
        name="coder",
        contents=Conversations(
            lengths=LogNormalLengths(
                mean_prompt_tokens=1500, mean_output_tokens=250, prompt_variation=1.5, output_variation=1.0
            ),
            system_prompts=SystemPrompts(num_prompts=4, num_tokens=2000),
            turns=Turns(mean_turns=20, mean_think_s=5.0),
        ),
    ),
    layout=Layout.of(replace(pool, hardware=_H20, max_batch_tokens=8192) for pool in layout(4, 4).pools),
    ttft_s=2.0,
    tpot_s=0.05,
    rate=4,
    model=QWEN3_CODER_30B,
)
"""Sessions of a coder on eight H20, as gahow/agentic-kvc describes them (May 2026); turns, lengths and tools are
assumed."""

SETTINGS = (
    Setting(
        workload=Workload(
            name="decode-bound",
            contents=Conversations(
                lengths=LogNormalLengths(
                    mean_prompt_tokens=500, mean_output_tokens=600, prompt_variation=0.5, output_variation=0.5
                )
            ),
        ),
        layout=layout(2, 4),
        ttft_s=0.5,
        tpot_s=0.012,
        rate=57,
        rates=(70,),
        may_refuse=True,
    ),
    Setting(
        workload=replace(preset("chat"), name="bursts", arrivals=RandomGaps(4.0)),
        layout=layout(4, 4),
        ttft_s=0.25,
        tpot_s=0.05,
        rate=170,
        may_refuse=True,
    ),
    Setting(
        workload=Workload(name="long-among-short", contents=Conversations(lengths=_LONG_AMONG_SHORT)),
        layout=layout(4, 4),
        ttft_s=0.5,
        tpot_s=0.05,
        rate=125,
        may_refuse=True,
    ),
    Setting(
        workload=Workload(name="prefixes", contents=_PREFIXED),
        layout=layout(4, 6, prefill_blocks=NUM_KV_BLOCKS),
        ttft_s=0.5,
        tpot_s=0.016,
        rate=70,
    ),
    Setting(
        workload=replace(preset("code"), name="two-hosts"),
        layout=_two_hosts(),
        ttft_s=0.45,
        tpot_s=0.04,
        rate=130,
    ),
    Setting(
        workload=replace(preset("chat"), name="one-link"),
        layout=layout(1, 3),
        ttft_s=0.25,
        tpot_s=0.1,
        rate=60,
        model=replace(LLAMA_3_8B, transport="auto"),
    ),
    Setting(
        workload=Workload(
            name="kv-bound",
            contents=Conversations(lengths=LogNormalLengths(mean_prompt_tokens=3000, mean_output_tokens=500)),
            arrivals=RandomGaps(2.0),
        ),
        layout=layout(4, 3, decode_blocks=NUM_KV_BLOCKS),
        ttft_s=0.5,
        tpot_s=0.04,
        rate=15,
        rates=(20,),
    ),
    Setting(workload=preset("code"), layout=layout(6, 2), ttft_s=0.45, tpot_s=0.04, rate=150),
    Setting(workload=preset("agent"), layout=layout(4, 4), ttft_s=2.0, tpot_s=0.05, rate=120),
    CODER,
    Setting(
        workload=Workload(
            name="uniform",
            contents=Conversations(lengths=FixedLengths(num_prompt_tokens=1000, num_output_tokens=200)),
            arrivals=POISSON,
        ),
        layout=layout(4, 4),
        ttft_s=0.25,
        tpot_s=0.05,
        rate=190,
    ),
)


def mooncake(data: Path, *, sessions: bool = False) -> Setting:
    """Conversations of up to 128,000 tokens; objectives as in `pdserve.bench.plans_that_hold`.

    Args:
        sessions: each turn waits for the answer before it.
    """
    name = "mooncake-sessions" if sessions else "mooncake"
    return Setting(
        workload=replace(trace_workload(read_trace(data / MOONCAKE, sessions=sessions)), name=name),
        layout=layout(5, 3),
        ttft_s=5.0,
        tpot_s=0.05,
        rate=10,
        rates=(10,),
        model=replace(LLAMA_3_8B, max_model_len=131_072),
    )


class Served(NamedTuple):
    """One run."""

    share: float
    """Of requests that arrive while sessions begin, refused ones included: those that met both objectives."""
    ttft_p95_s: float
    """Of those that were answered."""
    ttft_p99_s: float


def served(setting: Setting, policy: str, rate: float, num_requests: int, seed: int) -> Served:
    slo = replace(setting.slo, when_hopeless="refuse") if policy.endswith(REFUSING) else setting.slo
    sample = setting.workload.draw(num_requests, seed, max_model_len=setting.model.max_model_len)
    run = simulate(
        setting.model,
        setting.layout,
        sample.at_rate(rate),
        slo=slo,
        max_in_flight=MAX_IN_FLIGHT,
        policy=policy.removesuffix(REFUSING),
    )
    is_offered = run.times.arrived_s <= run.offered_until_s
    p95_s, p99_s = np.nanpercentile(run.times.ttft_s[is_offered], (95, 99)).tolist()
    return Served(float(np.mean(run.times.are_within(setting.slo)[is_offered])), p95_s, p99_s)


def goodput(share_at: Callable[[float], float], start_rate: float, tolerance: float = _TOLERANCE) -> float:
    """Rate per second at which the attainment falls to `TARGET`; 0 if it is below at all rates, and the highest
    one tried if it is above at all.

    Args:
        tolerance: ratio of the first two rates tried, and at most of the two between which it is interpolated, twice.
    """
    shares: dict[float, float] = {}

    def meets(rate: float) -> bool:
        shares[rate] = share_at(rate)
        return shares[rate] >= TARGET

    low = highest_rate(meets, start_rate, tolerance, tolerance)
    if not low or low == max(shares):
        return low
    high = min(rate for rate in shares if rate > low)

    def between() -> float:
        return low + (high - low) * (shares[low] - TARGET) / (shares[low] - shares[high])

    rate = between()
    low, high = (rate, high) if meets(rate) else (low, rate)
    return between()


def outcome(
    setting: Setting, policy: str, num_requests: int, seed: int, start_rate: float, base: float
) -> dict[str, float]:
    """Goodput of a policy, and its good requests per second and TTFT at some rates.

    Args:
        base: goodput of ``least-time``; 0 if it is this one's.
    """
    run = cache(lambda rate: served(setting, policy, rate, num_requests, seed))
    found = goodput(lambda rate: run(rate).share, start_rate)
    values = {GOODPUT: found, "TTFT p95 at 1 x": run(base or found).ttft_p95_s}
    for name, rate in setting.rates_around(base or found).items():
        values[f"good/s at {name}"] = rate * run(rate).share
        values[f"TTFT p99 at {name}"] = run(rate).ttft_p99_s
    return values


def outcome_at(setting: Setting, policy: str, num_requests: int, seed: int, rates: Sequence[float]) -> dict[str, float]:
    """Share within both objectives and p95 of TTFT of a policy at each rate."""
    values: dict[str, float] = {}
    for rate in rates:
        run = served(setting, policy, rate, num_requests, seed)
        values |= {f"share at {rate:g}/s": run.share, f"TTFT p95 at {rate:g}/s": run.ttft_p95_s}
    return values


def outcomes(
    setting: Setting,
    policies: Sequence[str],
    num_requests: int,
    seeds: Sequence[int],
    num_others: int,
    rates: Sequence[float] = (),
) -> dict[str, dict[str, list[float]]]:
    """What `outcome` found, by policy; one value per seed. ``least-time``, with which all are compared, is among the
    policies. Those but it and ``goodput`` get the first ``num_others`` seeds."""
    found: dict[str, dict[str, list[float]]] = {}
    for policy in dict.fromkeys([BASELINE, *policies]):
        values: dict[str, list[float]] = {}
        num_seeds = len(seeds) if policy in (BASELINE, DEFAULT_POLICY) else num_others
        for index, seed in enumerate(seeds[:num_seeds]):
            if rates:
                seen = outcome_at(setting, policy, num_requests, seed, rates)
            else:
                base = found[BASELINE][GOODPUT][index] if found else 0.0
                start_rate = (values or next(iter(found.values()), {})).get(GOODPUT, [0.0])[0] or setting.rate
                seen = outcome(setting, policy, num_requests, seed, start_rate, base)
            for name, value in seen.items():
                values.setdefault(name, []).append(round(value, 4))
        found[policy] = values
    return found


def against(values: Sequence[float], others: Sequence[float]) -> str:
    """Mean, and the mean ratio to ``others`` of the same seeds, with the least and the highest."""
    ratios = np.array(values) / np.maximum(others[: len(values)], 1e-9)
    return f"{np.mean(values):.3g}: {ratios.mean():.2f} ({ratios.min():.2f} to {ratios.max():.2f})"


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--data", type=Path, help=f"folder of {MOONCAKE}; without it that setting is left out")
    parser.add_argument("--only", default="", help="settings whose name contains this")
    parser.add_argument(
        "--policies", default="", help=f"separated by commas; by default all, {REFUSED} where it matters"
    )
    parser.add_argument("--requests", type=int, default=4000, help="requests per run")
    parser.add_argument("--seeds", type=int, default=5, help="draws of the requests")
    parser.add_argument("--other-seeds", type=int, default=5, help="of them, those for other policies than these two")
    parser.add_argument("--rates", type=float, nargs="+", default=(), help="requests per second, in place of a search")
    parser.add_argument("--first-seed", type=int, default=100)
    arguments = parser.parse_args()
    chosen = [policy for policy in arguments.policies.split(",") if policy]
    unknown = [policy for policy in chosen if policy not in CASES]
    if unknown:
        parser.error(f"--policies names {', '.join(unknown)}: use some of {', '.join(CASES)}")
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    records: list[dict[str, Any]] = []
    traces = [mooncake(arguments.data, sessions=each) for each in (False, True)] if arguments.data else []
    for setting in (*SETTINGS, *traces):
        if arguments.only not in setting.name:
            continue
        policies = chosen or [*POLICIES, *([REFUSED] if setting.may_refuse else [])]
        found = outcomes(setting, policies, arguments.requests, seeds, arguments.other_seeds, arguments.rates)
        base = found[BASELINE]
        shown = [name for name in base if arguments.rates or not name.startswith("TTFT")]
        table = [(policy, *(against(values[name], base[name]) for name in shown)) for policy, values in found.items()]
        show_table(setting.name, ("policy", *shown), table)
        of_all = {"setting": setting.name, "layout": str(setting.layout)}
        records += [{**of_all, "policy": policy, **values} for policy, values in found.items()]
    run = {"requests_per_run": arguments.requests, "seeds": list(seeds)}
    publish({**run, "by_seed": records}, arguments.json, unshown=("by_seed",))


if __name__ == "__main__":
    main()
