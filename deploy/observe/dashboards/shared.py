"""Queries and panels of several dashboards."""

from __future__ import annotations

from pdserve.deploy.observe.grafana import Panel
from pdserve.deploy.observe.rules import BUSY


def quantiles(metric: str, selector: str = "", by: str = "") -> tuple[tuple[str, str], ...]:
    """p50, p90 and p99 of a histogram, for each value of the label ``by`` if given."""
    labels, legend = ("le", "") if not by else (f"le, {by}", f"{{{{{by}}}}} ")
    return tuple(
        (f"histogram_quantile({share}, sum by ({labels}) (rate({metric}_bucket{selector}[5m])))", f"{legend}p{name}")
        for share, name in ((0.5, 50), (0.9, 90), (0.99, 99))
    )


def objective(name: str) -> tuple[str, str]:
    """Of each tier."""
    return f'max by (tier) (pdserve_slo_seconds{{objective="{name}"}})', "objective {{tier}}"


def mean(metric: str, by: str, selector: str = "") -> str:
    return (
        f"sum by ({by}) (rate({metric}_sum{selector}[5m])) / (sum by ({by}) (rate({metric}_count{selector}[5m])) > 0)"
    )


ATTAINMENT = Panel(
    title="Attainment",
    unit="percentunit",
    queries=(
        ("pdserve:slo_attainment:rate5m", "5 minutes"),
        ("pdserve:slo_attainment:rate1h", "1 hour"),
        ("max(pdserve_slo_attainment)", "objective"),
    ),
    about="Share of all requests that met both objectives. Refused and failed requests met neither.",
    width=6,
)
BURN = Panel(
    title="Error budget burnt",
    unit="percentunit",
    queries=tuple(
        (
            f"(1 - pdserve:slo_attainment:rate{window}) / scalar(1 - max(pdserve_slo_attainment))",
            f"over {window}",
        )
        for window in ("1h", "6h")
    ),
    about="100 %: as many misses as the objective allows.",
    width=6,
)
BUSY_PANEL = Panel(
    title="Busy",
    unit="percentunit",
    queries=((f"avg by (role) ({BUSY})", "{{role}}"),),
    about="Share of the time in which a step ran. Prefill near 100 % queues; decode may be near 100 % and well.",
    width=6,
)
STALL = Panel(
    title="Handoff stall",
    unit="s",
    queries=quantiles("pdserve_handoff_stall_seconds"),
    about="From the first token to the second of a request that was handed off; part of its TPOT.",
    width=6,
)
PARKED = Panel(
    title="Parked prompts",
    unit="short",
    queries=(("sum by (worker) (pdserve_parked_sequences)", "{{worker}}"),),
    about="Prefilled prompts that no decode worker has pulled yet.",
    width=6,
)
KV = Panel(
    title="KV blocks in use",
    unit="percentunit",
    queries=(
        (
            'sum by (role, state) (pdserve_kv_blocks{state!="free"}) / on (role) group_left '
            "sum by (role) (pdserve_kv_blocks)",
            "{{role}} {{state}}",
        ),
    ),
    about="Share of the blocks of a role. Referenced ones belong to requests, parked ones to prompts that wait to be "
    "pulled; cached ones are given up when room is needed.",
    width=6,
)
PREDICTION = Panel(
    title="Steps against their prediction",
    unit="percentunit",
    queries=(
        (
            "sum by (role, kind) (rate(pdserve_step_seconds_sum[5m])) / "
            "(sum by (role, kind) (rate(pdserve_predicted_step_seconds_sum[5m])) > 0)",
            "{{role}} {{kind}}",
        ),
    ),
    about="100 %: steps take what the cost model says, on which placement and plans rest.",
    width=6,
)
PULL_FAILURES = Panel(
    title="Failed pulls",
    unit="cps",
    queries=(("sum by (stage) (rate(pdserve_kv_transfer_failures_total[5m]))", "{{stage}}"),),
    width=6,
)


def pair(title: str, name: str, by: str = "", about: str = "") -> Panel:
    """Observed and predicted figures of the same requests or steps."""
    labels, legend = ("le", "") if not by else (f"le, {by}", f"{{{{{by}}}}} ")
    queries = tuple(
        (
            f"histogram_quantile({share}, sum by ({labels}) (rate(pdserve_{prefix}{name}_bucket[5m])))",
            f"{legend}p{share * 100:.0f} {word}",
        )
        for share in (0.5, 0.9)
        for prefix, word in (("", "observed"), ("predicted_", "predicted"))
    )
    return Panel(title=title, unit="s", queries=queries, about=about, width=6)
