"""Grafana dashboards of a cluster. Objectives are lines that the cluster itself reports.

Names of metrics are those of `pdserve.contracts.metrics`; names with colons come from `pdserve.deploy.observe.rules`.
Each row opens with a text on how to read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pdserve.deploy.observe.rules import BUSY

_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_NUM_COLUMNS = 24
_TEXT_HEIGHT = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    title: str
    unit: str
    """Grafana's name, such as ``s``, ``reqps``, ``percentunit`` or ``short``."""
    queries: tuple[tuple[str, str], ...]
    """(expression, legend)."""
    about: str = ""
    width: int = 8
    height: int = 8
    is_stacked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    title: str
    reading: str
    """How to read the row, in Markdown."""
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    uid: str
    title: str
    rows: tuple[Row, ...]


def _quantiles(metric: str, selector: str = "", by: str = "") -> tuple[tuple[str, str], ...]:
    """p50, p90 and p99 of a histogram, for each value of the label ``by`` if given."""
    labels, legend = ("le", "") if not by else (f"le, {by}", f"{{{{{by}}}}} ")
    return tuple(
        (f"histogram_quantile({share}, sum by ({labels}) (rate({metric}_bucket{selector}[5m])))", f"{legend}p{name}")
        for share, name in ((0.5, 50), (0.9, 90), (0.99, 99))
    )


def _objective(name: str) -> tuple[str, str]:
    return f'max(pdserve_slo_seconds{{objective="{name}"}})', "objective"


def _mean(metric: str, by: str, selector: str = "") -> str:
    return (
        f"sum by ({by}) (rate({metric}_sum{selector}[5m])) / (sum by ({by}) (rate({metric}_count{selector}[5m])) > 0)"
    )


_ATTAINMENT = Panel(
    title="Attainment",
    unit="percentunit",
    queries=(
        ("pdserve:slo_attainment:rate5m", "5 minutes"),
        ("pdserve:slo_attainment:rate1h", "1 hour"),
        ("max(pdserve_slo_attainment)", "objective"),
    ),
    about="Share of all requests that met both objectives. Refused and failed requests met neither.",
)
_BUSY = Panel(
    title="Busy",
    unit="percentunit",
    queries=((f"avg by (role) ({BUSY})", "{{role}}"),),
    about="Share of the time in which a step ran. Prefill near 100 % queues; decode may be near 100 % and well.",
)
_STALL = Panel(
    title="Handoff stall",
    unit="s",
    queries=_quantiles("pdserve_handoff_stall_seconds"),
    about="From the first token to the second of a request that was handed off; part of its TPOT.",
)
_PARKED = Panel(
    title="Parked prompts",
    unit="short",
    queries=(("sum by (worker) (pdserve_parked_sequences)", "{{worker}}"),),
    about="Prefilled prompts that no decode worker has pulled yet.",
)
_KV = Panel(
    title="KV blocks",
    unit="short",
    queries=(("sum by (role, state) (pdserve_kv_blocks)", "{{role}} {{state}}"),),
    about="Referenced blocks belong to requests; cached ones are given up when room is needed.",
    is_stacked=True,
)
_PREDICTION = Panel(
    title="Steps against their prediction",
    unit="percentunit",
    queries=(
        (
            "sum by (role, kind) (rate(pdserve_step_seconds_sum[5m])) / "
            "(sum by (role, kind) (rate(pdserve_predicted_step_seconds_total[5m])) > 0)",
            "{{role}} {{kind}}",
        ),
    ),
    about="100 %: steps take what the cost model says, on which placement and plans rest.",
)
_PULL_FAILURES = Panel(
    title="Failed pulls",
    unit="cps",
    queries=(("sum by (stage) (rate(pdserve_kv_transfer_failures_total[5m]))", "{{stage}}"),),
)

SLO_OVERVIEW = Dashboard(
    uid="pdserve-slo",
    title="pdserve: SLO overview",
    rows=(
        Row(
            title="Are the objectives met?",
            reading="**Goodput** is the rate of requests that meet both objectives. Where it leaves the rate of all "
            "requests, attainment falls; *Misses* says which objective is missed.",
            panels=(
                _ATTAINMENT,
                Panel(
                    title="Goodput",
                    unit="reqps",
                    queries=(
                        ("pdserve:goodput:rate5m", "goodput"),
                        ("sum(rate(pdserve_slo_requests_total[5m]))", "all requests"),
                    ),
                ),
                Panel(
                    title="Misses",
                    unit="reqps",
                    queries=(
                        (
                            "sum by (ttft, tpot) (rate(pdserve_slo_requests_total[5m])) unless "
                            'sum by (ttft, tpot) (rate(pdserve_slo_requests_total{ttft="met", tpot=~"met|none"}[5m]))',
                            "TTFT {{ttft}}, TPOT {{tpot}}",
                        ),
                    ),
                    is_stacked=True,
                ),
            ),
        ),
        Row(
            title="Latency against its objective",
            reading="A p90 below the line of the objective leaves at most one miss in ten.",
            panels=(
                Panel(title="TTFT", unit="s", queries=(*_quantiles("pdserve_ttft_seconds"), _objective("ttft"))),
                Panel(title="TPOT", unit="s", queries=(*_quantiles("pdserve_tpot_seconds"), _objective("tpot"))),
                Panel(title="Gaps between tokens", unit="s", queries=_quantiles("pdserve_itl_seconds")),
            ),
        ),
        Row(
            title="Where the time goes",
            reading="Mean seconds of a request in each phase. `queue`, `prefill_queue` and `prefill` make TTFT; "
            "`handoff`, `decode_queue` and `decode` follow the first token. A queue that grows needs workers; a phase "
            "that grows needs a look at its steps.",
            panels=(
                Panel(
                    title="Time budget",
                    unit="s",
                    queries=((_mean("pdserve_request_phase_seconds", "phase"), "{{phase}}"),),
                    is_stacked=True,
                ),
                Panel(
                    title="Causes of misses",
                    unit="reqps",
                    queries=(
                        ("sum by (objective, cause) (rate(pdserve_slo_misses_total[5m]))", "{{objective}}: {{cause}}"),
                    ),
                    about="The longest part of a missed TTFT, and what lengthened a missed TPOT: a fail-over, the "
                    "stall of the handoff, a preemption, or the decode steps themselves.",
                    is_stacked=True,
                ),
                Panel(
                    title="Outcomes",
                    unit="reqps",
                    queries=(("sum by (outcome) (rate(pdserve_request_outcomes_total[5m]))", "{{outcome}}"),),
                    is_stacked=True,
                ),
            ),
        ),
    ),
)

REQUEST_FLOW = Dashboard(
    uid="pdserve-flow",
    title="pdserve: request flow",
    rows=(
        Row(
            title="1. Arrival and placement",
            reading="Requests wait in the router only while no worker is up. `late` placements found no worker that "
            "would meet the TTFT objective: the cluster is beyond its goodput.",
            panels=(
                Panel(
                    title="Requests",
                    unit="reqps",
                    queries=(("sum by (code) (rate(pdserve_requests_total[5m]))", "{{code}}"),),
                    width=6,
                    is_stacked=True,
                ),
                Panel(
                    title="In the router",
                    unit="short",
                    queries=(
                        ("sum(pdserve_requests_in_flight)", "in flight"),
                        ("sum(pdserve_requests_queued)", "without a worker"),
                        ("sum(rate(pdserve_requests_accepted_total[5m]))", "accepted per second"),
                    ),
                    width=6,
                ),
                Panel(
                    title="Placements",
                    unit="reqps",
                    queries=(
                        (
                            "sum by (policy, role, expected) (rate(pdserve_placements_total[5m]))",
                            "{{policy}} to {{role}}, {{expected}}",
                        ),
                    ),
                    width=6,
                ),
                Panel(
                    title="Time of a decision",
                    unit="s",
                    queries=_quantiles("pdserve_route_decision_seconds"),
                    width=6,
                ),
            ),
        ),
        Row(
            title="2. Prefill",
            reading="Prompts wait for blocks and budget, then run in chunks. A high cached share makes prefill cheap.",
            panels=(
                Panel(
                    title="Prefill workers",
                    unit="short",
                    queries=(
                        ('sum by (worker) (pdserve_waiting_sequences{role=~"prefill|mixed"})', "{{worker}} waiting"),
                        ('sum by (worker) (pdserve_running_sequences{role=~"prefill|mixed"})', "{{worker}} running"),
                    ),
                    width=6,
                ),
                Panel(
                    title="Wait for prefill",
                    unit="s",
                    queries=_quantiles("pdserve_request_phase_seconds", '{phase="prefill_queue"}'),
                    width=6,
                ),
                Panel(
                    title="Prompt tokens",
                    unit="short",
                    queries=(
                        ("sum(rate(pdserve_prompt_tokens_total[5m]))", "all"),
                        ("sum(rate(pdserve_cached_prompt_tokens_total[5m]))", "cached"),
                    ),
                    about="Tokens per second.",
                    width=6,
                ),
                Panel(
                    title="Prefill steps",
                    unit="s",
                    queries=_quantiles("pdserve_step_seconds", '{kind="prefill"}'),
                    width=6,
                ),
            ),
        ),
        Row(
            title="3. Handoff",
            reading="Parked prompts wait for a decode worker with room; the pull itself takes milliseconds.",
            panels=(_PARKED, _STALL, _PULL_FAILURES),
        ),
        Row(
            title="4. Decode",
            reading="Steps grow with the batch: TPOT is about one step. Preemptions mean that KV blocks are short.",
            panels=(
                Panel(
                    title="Decode workers",
                    unit="short",
                    queries=(
                        ('sum by (worker) (pdserve_running_sequences{role=~"decode|mixed"})', "{{worker}} running"),
                        ('sum by (worker) (pdserve_waiting_sequences{role=~"decode|mixed"})', "{{worker}} waiting"),
                    ),
                    width=6,
                ),
                Panel(
                    title="Decode steps",
                    unit="s",
                    queries=(*_quantiles("pdserve_step_seconds", '{kind="decode"}'), _objective("tpot")),
                    width=6,
                ),
                Panel(
                    title="Preemptions and swaps",
                    unit="cps",
                    queries=(
                        ("sum(rate(pdserve_preemptions_total[5m]))", "preempted"),
                        ("sum(rate(pdserve_swap_outs_total[5m]))", "swapped out"),
                        ("sum(rate(pdserve_swap_ins_total[5m]))", "swapped in"),
                    ),
                    width=6,
                ),
                Panel(
                    title="Output tokens",
                    unit="short",
                    queries=(("sum(rate(pdserve_output_tokens_total[5m]))", "tokens per second"),),
                    width=6,
                ),
            ),
        ),
        Row(
            title="5. Loss and retries",
            reading="Requests of a lost worker go on elsewhere, by reason. `rebound` prompts were only pulled again.",
            panels=(
                Panel(
                    title="Workers",
                    unit="short",
                    queries=(("sum by (role) (pdserve_worker_up)", "{{role}} up"),),
                    width=12,
                ),
                Panel(
                    title="Requests sent to another worker",
                    unit="cps",
                    queries=(("sum by (reason) (rate(pdserve_redispatches_total[5m]))", "{{reason}}"),),
                    width=12,
                ),
            ),
        ),
    ),
)

KV_TRANSFER = Dashboard(
    uid="pdserve-kv",
    title="pdserve: KV transfer",
    rows=(
        Row(
            title="Does KV move?",
            reading="Bytes follow prompts that are prefilled apart from their decode worker, less what it caches. "
            "Parked prompts without bytes: KV is stuck, or decode has no room.",
            panels=(
                Panel(
                    title="Bytes",
                    unit="Bps",
                    queries=(("sum by (transport) (rate(pdserve_kv_transfer_bytes_sum[5m]))", "{{transport}}"),),
                ),
                Panel(
                    title="Pulls",
                    unit="cps",
                    queries=(("sum by (transport) (rate(pdserve_kv_transfer_seconds_count[5m]))", "{{transport}}"),),
                ),
                _PARKED,
            ),
        ),
        Row(
            title="What does it cost?",
            reading="The stall is what clients see of a handoff: choice of a decode worker, wait for blocks, and pull.",
            panels=(
                Panel(
                    title="Seconds of a pull",
                    unit="s",
                    queries=_quantiles("pdserve_kv_transfer_seconds", by="transport"),
                ),
                Panel(
                    title="Bytes of a pull",
                    unit="bytes",
                    queries=_quantiles("pdserve_kv_transfer_bytes", by="transport"),
                ),
                _STALL,
            ),
        ),
        Row(
            title="What fails?",
            reading="`connect` and `deadline` are the network, `refused` and `grant` a source that is gone, `verify` "
            "damaged data, which is never decoded on.",
            panels=(_PULL_FAILURES, _KV),
        ),
    ),
)

CAPACITY = Dashboard(
    uid="pdserve-capacity",
    title="pdserve: capacity and plan",
    rows=(
        Row(
            title="Which phase is short?",
            reading="Prefill busy and decode idle, or the reverse: `pdserve plan --live` proposes another placement.",
            panels=(
                _BUSY,
                Panel(
                    title="Busy by worker",
                    unit="percentunit",
                    queries=((f"{BUSY}", "{{worker}}"),),
                ),
                _KV,
            ),
        ),
        Row(
            title="Do predictions hold?",
            reading="Plans are as good as the cost model. `pdserve profile` measures this hardware.",
            panels=(
                _PREDICTION,
                Panel(
                    title="Tokens of a step",
                    unit="short",
                    queries=_quantiles("pdserve_step_tokens", by="role"),
                ),
                Panel(
                    title="Output tokens per worker",
                    unit="short",
                    queries=(("sum(rate(pdserve_output_tokens_total[5m])) / sum(pdserve_worker_up)", "per second"),),
                ),
            ),
        ),
        Row(
            title="What do clients ask?",
            reading="Lengths decide the placement: long prompts need prefill, long answers decode.",
            panels=(
                Panel(
                    title="Prompt tokens of a request",
                    unit="short",
                    queries=_quantiles("pdserve_request_prompt_tokens"),
                ),
                Panel(
                    title="Answer tokens of a request",
                    unit="short",
                    queries=_quantiles("pdserve_request_output_tokens"),
                ),
                Panel(
                    title="Seconds of a request",
                    unit="s",
                    queries=_quantiles("pdserve_request_seconds"),
                ),
            ),
        ),
    ),
)

DASHBOARDS = (SLO_OVERVIEW, REQUEST_FLOW, KV_TRANSFER, CAPACITY)


def dashboard_json(dashboard: Dashboard) -> dict[str, Any]:
    """Dashboard as Grafana 10 or later loads it."""
    panels: list[dict[str, Any]] = []
    top = 0
    for row in dashboard.rows:
        panels.append({"type": "row", "title": row.title, "collapsed": False, "gridPos": _place(0, top, 24, 1)})
        text = {"mode": "markdown", "content": row.reading}
        panels.append({"type": "text", "options": text, "gridPos": _place(0, top + 1, 24, _TEXT_HEIGHT)})
        top += 1 + _TEXT_HEIGHT
        left = 0
        for panel in row.panels:
            assert left + panel.width <= _NUM_COLUMNS, f"the row {row.title} is too wide"
            panels.append(_panel_json(panel) | {"gridPos": _place(left, top, panel.width, panel.height)})
            left += panel.width
        top += max(panel.height for panel in row.panels)
    for number, each in enumerate(panels, 1):
        each["id"] = number
    others = {"type": "dashboards", "title": "pdserve", "tags": ["pdserve"], "asDropdown": True, "keepTime": True}
    datasource = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["pdserve"],
        "schemaVersion": 39,
        "timezone": "browser",
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "10s",
        "graphTooltip": 1,
        "links": [others],
        "templating": {"list": [datasource]},
        "annotations": {"list": [_alert_annotation()]},
        "panels": panels,
    }


def _place(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _alert_annotation() -> dict[str, Any]:
    """Firing alerts, as regions in every panel."""
    return {
        "name": "Alerts",
        "datasource": _DATASOURCE,
        "expr": 'ALERTS{alertstate="firing", job=~"pdserve|"}',
        "titleFormat": "{{alertname}}",
        "enable": True,
        "iconColor": "red",
    }


def _panel_json(panel: Panel) -> dict[str, Any]:
    custom: dict[str, Any] = {"fillOpacity": 20 if panel.is_stacked else 0, "showPoints": "never"}
    if panel.is_stacked:
        custom["stacking"] = {"mode": "normal", "group": "A"}
    line = {"matcher": {"id": "byName", "options": "objective"}, "properties": [
        {"id": "color", "value": {"mode": "fixed", "fixedColor": "red"}},
        {"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [10, 10]}},
        {"id": "custom.fillOpacity", "value": 0},
    ]}  # fmt: skip
    has_objective = any(legend == "objective" for _, legend in panel.queries)
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": _DATASOURCE,
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": _DATASOURCE, "expr": expr, "legendFormat": legend}
            for index, (expr, legend) in enumerate(panel.queries)
        ],
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "custom": custom},
            "overrides": [line] if has_objective else [],
        },
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
    }
