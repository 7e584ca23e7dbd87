"""Placement policies side by side, in the simulator: the share of requests that meet both objectives.

    python -m pdserve.bench.policies [--only NAME] [--policies A,B] [--requests N] [--seeds N] [--json FILE]

`goodput+refuse` is `goodput` that refuses what would meet its objectives nowhere (`slo.when_hopeless`).

Six settings in which some resource binds, and a control in which none does, on 6 to 10 H100 with Llama-3-8B. Every
policy serves the same requests at the same rates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from pdserve.bench.models import LLAMA_3_8B
from pdserve.bench.script import publish, script_parser
from pdserve.contracts.deployment import DEFAULT_POLICY, POLICIES, SloConfig
from pdserve.contracts.placement import WorkerRole
from pdserve.model.cost.hardware import hardware
from pdserve.planner.layout import Layout, Pool
from pdserve.planner.simulate.simulation import RequestTimes
from pdserve.planner.simulate.simulator import simulate
from pdserve.planner.workload.arrivals import POISSON, RandomGaps
from pdserve.planner.workload.conversations import Conversations, SystemPrompts
from pdserve.planner.workload.lengths import FixedLengths, LogNormalLengths, QuantileLengths
from pdserve.planner.workload.presets import preset
from pdserve.planner.workload.workload import Workload

H100 = hardware("h100-sxm")
BETWEEN_HOSTS = replace(H100, network_bandwidth=3e9)
"""24 Gb/s per device."""
NUM_KV_BLOCKS = 6000
"""Of a small KV pool: 96,000 tokens."""
MAX_IN_FLIGHT = 8192
"""Policies are compared, not this bound."""
REFUSING = "+refuse"
CASES = (*POLICIES, DEFAULT_POLICY + REFUSING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A layout under a workload."""

    workload: Workload
    layout: Layout
    ttft_s: float
    tpot_s: float
    rates: tuple[float, ...]
    """Requests per second."""

    @property
    def slo(self) -> SloConfig:
        return SloConfig(ttft_seconds=self.ttft_s, tpot_seconds=self.tpot_s)

    def are_met(self, times: RequestTimes) -> npt.NDArray[np.bool_]:
        """Which requests met both objectives; refused ones did not."""
        return (times.ttft_s <= self.ttft_s) & (times.tpot_s <= self.tpot_s) & ~times.is_rejected


def layout(prefill: int, decode: int, *, prefill_blocks: int = 0, decode_blocks: int = 0) -> Layout:
    return Layout(
        prefill=Pool(role=WorkerRole.PREFILL, replicas=prefill, hardware=H100, num_kv_blocks=prefill_blocks),
        decode=Pool(role=WorkerRole.DECODE, replicas=decode, hardware=H100, num_kv_blocks=decode_blocks),
    )


def _two_hosts() -> Layout:
    one_host = layout(4, 4)
    assert one_host.prefill is not None
    assert one_host.decode is not None
    return Layout(
        prefill=replace(one_host.prefill, hardware=BETWEEN_HOSTS),
        decode=replace(one_host.decode, hardware=BETWEEN_HOSTS),
        hosts=(((0,), (0,), (1,), (1,)),) * 2,
    )


_LONG_AMONG_SHORT = QuantileLengths(
    shares=(0, 0.9, 0.9001, 1), num_prompt_tokens=(200, 600, 12_000, 16_000), num_output_tokens=(50, 150, 150, 200)
)
_PREFIXED = Conversations(
    lengths=LogNormalLengths(mean_prompt_tokens=300, mean_output_tokens=150),
    system_prompts=SystemPrompts(num_prompts=40, num_tokens=6000, zipf_exponent=0.0),
)

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
        rates=(90, 100),
    ),
    Setting(
        workload=replace(preset("chat"), name="bursts", arrivals=RandomGaps(4.0)),
        layout=layout(4, 4),
        ttft_s=0.25,
        tpot_s=0.05,
        rates=(170, 200),
    ),
    Setting(
        workload=Workload(name="long-among-short", contents=Conversations(lengths=_LONG_AMONG_SHORT)),
        layout=layout(4, 4),
        ttft_s=0.5,
        tpot_s=0.05,
        rates=(110, 130),
    ),
    Setting(
        workload=Workload(name="prefixes", contents=_PREFIXED),
        layout=layout(4, 6, prefill_blocks=NUM_KV_BLOCKS),
        ttft_s=0.5,
        tpot_s=0.016,
        rates=(65, 80),
    ),
    Setting(
        workload=replace(preset("code"), name="two-hosts"),
        layout=_two_hosts(),
        ttft_s=0.45,
        tpot_s=0.04,
        rates=(110, 130, 200),
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
        rates=(14, 17, 20),
    ),
    Setting(
        workload=Workload(
            name="uniform",
            contents=Conversations(lengths=FixedLengths(num_prompt_tokens=1000, num_output_tokens=200)),
            arrivals=POISSON,
        ),
        layout=layout(4, 4),
        ttft_s=0.25,
        tpot_s=0.05,
        rates=(170, 200),
    ),
)


def attainment(setting: Setting, policy: str, rate: float, num_requests: int, seed: int) -> float:
    """Share of all requests, refused ones included, that met both objectives."""
    slo = replace(setting.slo, when_hopeless="refuse") if policy.endswith(REFUSING) else setting.slo
    sample = setting.workload.draw(num_requests, seed, max_model_len=LLAMA_3_8B.max_model_len)
    times = simulate(
        LLAMA_3_8B,
        setting.layout,
        sample.at_rate(rate),
        slo=slo,
        max_in_flight=MAX_IN_FLIGHT,
        policy=policy.removesuffix(REFUSING),
    ).times
    return float(np.mean(setting.are_met(times)))


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--only", default="", help="settings whose name contains this")
    parser.add_argument("--policies", default=",".join(CASES), help="policies, separated by commas")
    parser.add_argument("--requests", type=int, default=4000, help="requests per run")
    parser.add_argument("--seeds", type=int, default=5, help="runs for each setting, policy and rate")
    parser.add_argument("--first-seed", type=int, default=0, help="seed of the first run")
    arguments = parser.parse_args()
    policies = arguments.policies.split(",")
    unknown = [policy for policy in policies if policy not in CASES]
    if unknown:
        parser.error(f"--policies names {', '.join(unknown)}: use some of {', '.join(CASES)}")
    console = Console(stderr=True, width=160)
    table = Table("setting", "requests/s", *policies, box=None)
    records: list[dict[str, Any]] = []
    for setting in SETTINGS:
        if arguments.only not in setting.workload.name:
            continue
        for rate in setting.rates:
            record: dict[str, Any] = {"setting": setting.workload.name, "layout": str(setting.layout), "rate": rate}
            for policy in policies:
                shares = [
                    attainment(setting, policy, rate, arguments.requests, arguments.first_seed + number)
                    for number in range(arguments.seeds)
                ]
                record[policy] = [round(share, 4) for share in shares]
                console.print(f"{setting.workload.name} at {rate:g}/s, {policy}: {np.mean(shares):.1%}")
            records.append(record)
            shown = [f"{np.mean(record[policy]):.1%}" for policy in policies]
            table.add_row(setting.workload.name, f"{rate:g}", *shown)
    console.print(table)
    publish(
        {"requests_per_run": arguments.requests, "attainment_by_seed": records},
        arguments.json,
        unshown=("attainment_by_seed",),
    )


if __name__ == "__main__":
    main()
