"""The dashboards' figures against the load generator's own, of the same requests."""

from __future__ import annotations

import time
from bisect import bisect_left
from pathlib import Path
from typing import Any

import numpy as np

from pdserve.contracts import metrics
from pdserve.deploy.observe.drill.live import GPU, Prometheus, emulated_cluster, planning, running_prometheus, send
from pdserve.deploy.observe.drill.pictures import draw_all
from pdserve.deploy.observe.grafana import dashboards
from pdserve.deploy.observe.rules import alerts
from pdserve.planner.workload.requests import SimulatedRequest

TIME_SCALE = 3.0
SLO = {"ttft_seconds": 0.4, "tpot_seconds": 0.03, "attainment": 0.9}
"""In real seconds: a part of the requests misses each."""
RATE = 6.0
NUM_REQUESTS = 400
QUANTILES = (0.5, 0.9, 0.99)
PORT = 9390


def compare(pictures: Path | None) -> tuple[dict[str, Any], bool]:
    """Returns the figures, and whether they agree and every query has data."""
    deployment = {"slo": SLO, "prefill": {"replicas": 1}, "decode": {"replicas": 2}}
    with (
        emulated_cluster(deployment, "--time-scale", str(TIME_SCALE)) as cluster,
        running_prometheus(cluster.admin_url, PORT) as prometheus,
    ):
        if pictures:
            draw_all(prometheus, pictures / "empty", time.time() - 30, time.time())
        began_s = time.time()
        # The slowest answer ends before the windows of the dashboards, 5 minutes, do.
        with planning(cluster.admin_url):
            measured = send(cluster, _requests(np.random.default_rng(0)))
        time.sleep(7)  # scraped every second, rules evaluated every five
        if pictures:
            draw_all(prometheus, pictures / "load", began_s, time.time())
        silent = _silent(prometheus)
        shown = _shown(prometheus)
    times = measured.times
    ttft_s, tpot_s = times.ttft_s, times.tpot_s
    is_good = (ttft_s <= SLO["ttft_seconds"]) & (tpot_s <= SLO["tpot_seconds"])
    client = {
        "good": int(np.count_nonzero(is_good)),
        "all": len(ttft_s),
        "attainment": float(np.mean(is_good)),
        **{f"ttft_p{share * 100:g}": float(np.quantile(ttft_s, share)) for share in QUANTILES},
        **{f"tpot_p{share * 100:g}": float(np.quantile(tpot_s, share)) for share in QUANTILES},
    }
    apart = {
        name: abs(_bucket(name, client[name]) - _bucket(name, shown[name]))
        for name in client
        if name.startswith(("ttft", "tpot"))
    }
    result = {
        "gpu": GPU,
        "time_scale": TIME_SCALE,
        "slo": SLO,
        "dashboards": shown,
        "client": client,
        "buckets_apart": apart,
        "without_data": silent,
        "generator_problems": measured.health.problems(),
    }
    agrees = (shown["good"], shown["all"]) == (client["good"], client["all"]) and max(apart.values()) <= 1
    return result, agrees and not silent


def _requests(random: np.random.Generator) -> list[SimulatedRequest]:
    arrivals_s = np.cumsum(random.exponential(1 / RATE, NUM_REQUESTS))
    prompts = np.clip(random.lognormal(6.3, 0.7, NUM_REQUESTS), 16, 4000).astype(int)
    outputs = np.clip(random.lognormal(3.5, 0.6, NUM_REQUESTS), 2, 200).astype(int)
    return [
        SimulatedRequest(float(arrived_s), int(prompt), int(output))
        for arrived_s, prompt, output in zip(arrivals_s, prompts, outputs, strict=True)
    ]


def _shown(prometheus: Prometheus) -> dict[str, float]:
    """What the panels show now; counts are those since the cluster began."""
    good = 'sum(pdserve_slo_requests_total{ttft="met", tpot=~"met|none"})'
    shown = {
        "good": prometheus.number(good),
        "all": prometheus.number("sum(pdserve_slo_requests_total)"),
        "attainment": prometheus.number("pdserve:slo_attainment:rate5m"),
    }
    for name in ("ttft", "tpot"):
        for share, (expr, _) in zip(QUANTILES, _latency_panel(name), strict=False):
            shown[f"{name}_p{share * 100:g}"] = prometheus.number(expr)
    return shown


def _latency_panel(name: str) -> tuple[tuple[str, str], ...]:
    [row] = [row for row in dashboards()[0].rows if row.title.startswith("Latency")]
    [panel] = [panel for panel in row.panels if panel.title == name.upper()]
    return panel.queries


def _bucket(name: str, seconds: float) -> int:
    bounds = metrics.TTFT_BUCKETS_S if name.startswith("ttft") else metrics.ITL_BUCKETS_S
    return bisect_left(bounds, seconds)


def _silent(prometheus: Prometheus) -> list[str]:
    """Queries of panels and alerts, and rules, without data."""
    panels = [panel for dashboard in dashboards() for row in dashboard.rows for panel in row.panels]
    exprs = [expr for panel in panels for expr, _ in panel.queries] + [alert.query for alert in alerts()]
    return prometheus.rules_without_data() + [expr for expr in exprs if not prometheus.query(expr)]
