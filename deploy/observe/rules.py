"""Prometheus rules of a cluster: recording rules for goodput, and alerts with their impact and what to do.

`docs/runbook.md` is written from the alerts. Names of metrics are those of `pdserve.contracts.metrics`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

_MET = 'pdserve_slo_requests_total{ttft="met", tpot=~"met|none"}'
WINDOWS = ("5m", "30m", "1h", "6h")

_BUSY = "sum by (role, worker) (rate(pdserve_worker_busy_seconds_total[5m]))"
BUSY = "pdserve:worker_busy:rate5m"
_MISSES = "(1 - pdserve:slo_attainment:rate{window})"
_SPENT, _PREDICTED = (
    f"sum by (role, worker, kind) (rate(pdserve_worker_{name}_seconds_total[5m]))"
    for name in ("busy", "predicted_busy")
)
_ASKED = "sum(rate(pdserve_slo_requests_total[5m]))"
_BUDGET = "scalar(1 - max(pdserve_slo_attainment))"


def recording_rules() -> dict[str, str]:
    """Expressions by name."""
    rules = {"pdserve:goodput:rate5m": f"sum(rate({_MET}[5m]))", BUSY: _BUSY}
    for window in WINDOWS:
        rules[f"pdserve:slo_attainment:rate{window}"] = (
            f"sum(rate({_MET}[{window}])) / sum(rate(pdserve_slo_requests_total[{window}]))"
        )
    return rules


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    name: str
    expr: str
    for_: str
    severity: str
    """``page`` or ``ticket``."""
    impact: str
    query: str
    """What to look at first."""
    steps: str


def _burn(name: str, factor: int, short: str, long: str, severity: str) -> Alert:
    exprs = [f"{_MISSES.format(window=window)} > {factor} * {_BUDGET}" for window in (short, long)]
    return Alert(
        name=name,
        expr=" and ".join(exprs),
        for_="2m",
        severity=severity,
        impact=f"Requests miss their objectives at {factor} x the rate that the SLO allows, for {short} and {long}.",
        query="sum by (ttft, tpot) (rate(pdserve_slo_requests_total[5m]))",
        steps="See which objective is missed, whether it is the one that was meant (`pdserve_slo_seconds`), and why "
        "(`sum by (objective, cause) (rate(pdserve_slo_misses_total[5m]))`). "
        "TTFT: the phases in *SLO overview* say which queue is long; add prefill "
        "workers, or lower the load. TPOT: compare decode steps with the prediction, and look for preemptions and long "
        "handoffs. `refused` and `failed` are no latency problem: see the outcomes and the router's log.",
    )


def _missed(objective: str, causes: str) -> str:
    """Rate of answers that missed the objective of their tier by one of these causes."""
    return f'sum(rate(pdserve_slo_misses_total{{objective="{objective}", cause=~"{causes}"}}[5m]))'


ALERTS = (
    _burn("SloBudgetBurnsFast", 3, "5m", "1h", "page"),
    _burn("SloBudgetBurns", 1, "30m", "6h", "ticket"),
    Alert(
        name="RouterDown",
        expr='up{job="pdserve"} == 0 or absent(up{job="pdserve"})',
        for_="1m",
        severity="page",
        impact="Prometheus cannot read the router: either no request is served, or nobody sees how.",
        query='up{job="pdserve"}',
        steps="`pdserve status` on the router's host. If it answers, the token file in `prometheus.yml` is old: a "
        "cluster without `router.admin_token_file` makes a new one at each start.",
    ),
    Alert(
        name="NoPrefillWorker",
        expr='sum(pdserve_ready_workers{role=~"prefill|mixed"}) == 0',
        for_="1m",
        severity="page",
        impact="Prompts are prefilled on decode workers or wait; most requests will miss TTFT or get 503.",
        query="pdserve_ready_workers",
        steps="`pdserve status`, then the supervisor's log for the reason of the last end of a worker.",
    ),
    Alert(
        name="NoDecodeWorker",
        expr='sum(pdserve_ready_workers{role=~"decode|mixed"}) == 0',
        for_="1m",
        severity="page",
        impact="New requests get a 503 after five seconds; prompts that are computed already stay parked.",
        query="pdserve_ready_workers",
        steps="`pdserve status`, then the supervisor's log for the reason of the last end of a worker.",
    ),
    Alert(
        name="WorkerFlaps",
        expr="sum by (role) (increase(pdserve_worker_restarts_total[15m])) > 2 or "
        "max by (role) (changes(pdserve_worker_up[15m])) > 4",
        for_="0m",
        severity="ticket",
        impact="A worker is lost again and again. Its answers go on elsewhere, each with a gap and a replayed prompt.",
        query="max by (role, worker) (changes(pdserve_worker_up[15m]))",
        steps="The worker's log has the reason of its ends: out of memory, a failed device, or a lost rank.",
    ),
    Alert(
        name="KvDoesNotMove",
        expr='sum(pdserve_parked_sequences{role="prefill"}) > 0 and '
        "sum(rate(pdserve_kv_transfer_seconds_count[2m])) == 0",
        for_="2m",
        severity="page",
        impact="Prompts are prefilled and wait for a decode worker to pull them: clients see one token and no more.",
        query="sum by (stage) (increase(pdserve_kv_transfer_failures_total[5m]))",
        steps="Failures by stage say where pulls end: `connect` and `deadline` are the network, `copy` a data stream "
        "that broke or could not be opened (`ulimit -n`), `refused` a restarted worker, `verify` broken data. Without "
        "failures, decode workers have no room: see *DecodeKvFull*.",
    ),
    Alert(
        name="KvPullsFail",
        expr='sum by (source, worker) (rate(pdserve_kv_link_pulls_total{result="failed"}[5m])) > '
        "0.01 * sum by (source, worker) (rate(pdserve_kv_link_pulls_total[5m]))",
        for_="5m",
        severity="ticket",
        impact="More than 1 % of pulls of one decode worker from one prefill worker fail; each costs its request the "
        "time of another handoff or prefill.",
        query='sum by (source, worker) (rate(pdserve_kv_link_pulls_total{result="failed"}[5m]))',
        steps="Pulls of one worker from all sources fail: look at its host. Of all workers from one source: look at "
        "that one. Of one pair: the network between their hosts. Then as for *KvDoesNotMove*.",
    ),
    Alert(
        name="ParkedPromptsExpire",
        expr='sum(rate(pdserve_redispatches_total{reason="expired"}[5m])) > 0.02 or '
        "max(pdserve_oldest_handoff_seconds) > 15",
        for_="5m",
        severity="ticket",
        impact="Prompts wait for a decode worker for half of the time for which they are kept, or are thrown away and "
        "computed again; their clients see one token and no more.",
        query="max(pdserve_oldest_handoff_seconds)",
        steps="Decode has no room for what prefill makes: add decode workers, or move a prefill worker to decode. "
        "`pdserve plan --live URL` proposes a placement.",
    ),
    Alert(
        name="ScaleFlaps",
        expr='sum(increase(pdserve_scale_changes_total{reason="surplus"}[30m])) > 5 and '
        'sum(increase(pdserve_scale_changes_total{reason=~"prefill_short|decode_short"}[30m])) > 5',
        for_="0m",
        severity="ticket",
        impact="Workers are added and taken away again, six times and more in half an hour. Each start costs its time.",
        query="sum by (reason) (increase(pdserve_scale_changes_total[30m]))",
        steps="If the load itself comes and goes in minutes, raise `min_replicas` to what it needs at its height. Else "
        "compare steps with the prediction, as for *StepsSlowerThanPredicted*. `failed`: the supervisor's log has the "
        "reason.",
    ),
    Alert(
        name="PrefillBusierThanDecode",
        expr=f'avg({BUSY}{{role="prefill"}}) > 0.8 and avg({BUSY}{{role="decode"}}) < 0.5',
        for_="10m",
        severity="ticket",
        impact="Prefill limits the cluster while decode workers idle: TTFT suffers, and devices are paid for nothing.",
        query=f"avg by (role) ({BUSY})",
        steps="`pdserve plan --live URL` proposes a placement with more prefill.",
    ),
    Alert(
        name="DecodeBusierThanPrefill",
        expr=f'avg({BUSY}{{role="decode"}}) > 0.95 and avg({BUSY}{{role="prefill"}}) < 0.3 and '
        f"{_missed('tpot', 'decode')} > 0.1 * {_ASKED}",
        for_="10m",
        severity="ticket",
        impact="Decode limits the cluster, and one request in ten misses its TPOT, while prefill workers idle.",
        query=f"avg by (role) ({BUSY})",
        steps="`pdserve plan --live URL` proposes a placement with more decode.",
    ),
    Alert(
        name="DecodeKvFull",
        expr='sum(pdserve_kv_blocks{role=~"decode|mixed", state="referenced"}) > '
        '0.95 * sum(pdserve_kv_blocks{role=~"decode|mixed"})',
        for_="5m",
        severity="ticket",
        impact="Decode workers have no free KV blocks: handoffs wait, and running answers are preempted.",
        query="sum by (worker, state) (pdserve_kv_blocks)",
        steps="Add decode workers or memory for KV (`kv_memory`, `kv_dtype: int8`), or limit `max_tokens`.",
    ),
    Alert(
        name="PromptsWait",
        expr=f"{_missed('ttft', 'queue|prefill_queue')} > 0.1 * {_ASKED}",
        for_="5m",
        severity="ticket",
        impact="One request in ten misses its TTFT because its prompt waits.",
        query="sum by (worker) (pdserve_waiting_sequences)",
        steps="If some workers wait and others do not, look at placement; if all do, add prefill workers.",
    ),
    Alert(
        name="AnswersArePreempted",
        expr="sum(rate(pdserve_preemptions_total[5m])) > 0.05 * sum(rate(pdserve_requests_accepted_total[5m]))",
        for_="5m",
        severity="ticket",
        impact="More than one preemption for 20 requests: streams stop until their KV is back.",
        query="sum by (worker) (rate(pdserve_preemptions_total[5m]))",
        steps="As for *DecodeKvFull*. `swap_memory` makes preemptions cheaper.",
    ),
    Alert(
        name="KvTierOff",
        expr="max by (worker) (pdserve_kv_tier_off) > 0",
        for_="1m",
        severity="ticket",
        impact="A worker's KV tier failed: what its pool evicts is computed again.",
        query="max by (worker) (pdserve_kv_tier_off)",
        steps="`pdserve status` and the worker's log have the reason, most often a full disk. Mend it, or lower "
        "`kv_tier.size`, then `pdserve restart` the worker.",
    ),
    Alert(
        name="KvTierSlow",
        expr="sum by (worker) (rate(pdserve_kv_tier_restores_given_up_total[5m])) > "
        "0.2 * sum by (worker) (rate(pdserve_kv_tier_restores_total[5m]))",
        for_="10m",
        severity="ticket",
        impact="One prompt in five that waits for KV of a worker's tier computes it: restoring takes longer.",
        query="sum by (worker) (rate(pdserve_kv_tier_restores_given_up_total[5m]))",
        steps="The disk is slow or shared: put `kv_tier.path` on a faster one, or leave `kv_tier` out.",
    ),
    Alert(
        name="StepsSlowerThanPredicted",
        expr=f"{_SPENT} > 1.5 * {_PREDICTED}",
        for_="10m",
        severity="ticket",
        impact="The cost model is wrong for this worker, so that placement and plans are, too.",
        query=f"{_SPENT} / {_PREDICTED}",
        steps="One worker alone: its device is throttled or shared. All: measure a profile with `pdserve profile`.",
    ),
    Alert(
        name="PromptsPlacedLate",
        expr='sum(rate(pdserve_placements_total{expected="late"}[5m])) > 0.5 * sum(rate(pdserve_placements_total[5m]))',
        for_="10m",
        severity="ticket",
        impact="Most prompts find no worker that would meet their TTFT: placement only limits the damage.",
        query="sum by (role, expected) (rate(pdserve_placements_total[5m]))",
        steps="The load is beyond the cluster's goodput: add workers, or refuse what comes too late with "
        "`slo.when_hopeless: refuse`.",
    ),
    Alert(
        name="PlacementFallsBack",
        expr="sum(rate(pdserve_placement_fallbacks_total[5m])) > 0.1 * sum(rate(pdserve_placements_total[5m]))",
        for_="5m",
        severity="ticket",
        impact="More than one placement in ten had no free choice: requests go where they can, not where they should.",
        query="sum by (reason) (rate(pdserve_placement_fallbacks_total[5m]))",
        steps="`no_worker`, `no_prefill` and `no_decode`: workers are down, see `pdserve status`. `no_room`: as for "
        "*DecodeKvFull*. `cut_off`: pulls fail, as for *KvPullsFail*, or steps, of which the workers' logs have the "
        "reason.",
    ),
)


def rule_file() -> dict[str, Any]:
    """Contents of a Prometheus rule file."""
    records = [{"record": name, "expr": expr} for name, expr in recording_rules().items()]
    alerts = [
        {
            "alert": alert.name,
            "expr": alert.expr,
            "for": alert.for_,
            "labels": {"severity": alert.severity},
            "annotations": {
                "summary": alert.impact,
                "query": alert.query,
                "runbook": f"docs/runbook.md#{alert.name.lower()}",
            },
        }
        for alert in ALERTS
    ]
    return {
        "groups": [{"name": "pdserve", "rules": records}, {"name": "pdserve-alerts", "rules": alerts}],
    }


def runbook() -> str:
    """Text of `docs/runbook.md`."""
    parts = [
        "# Runbook\n\nWhat each alert means and what to do. "
        "Written by `python -m pdserve.deploy.observe.rules` from its alerts.\n"
    ]
    for alert in ALERTS:
        parts.append(
            f"## {alert.name}\n\n{alert.impact}\n\nLook at first:\n\n```promql\n{alert.query}\n```\n\n{alert.steps}\n\n"
            f"It fires ({alert.severity}) after {alert.for_} of:\n\n```promql\n{alert.expr}\n```\n"
        )
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(runbook())
