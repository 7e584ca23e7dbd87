"""Goodput and attainment against the objectives, where the time goes, and who is hit."""

from __future__ import annotations

from pdserve.deploy.observe.dashboards.shared import ATTAINMENT, BURN, mean, objective, quantiles
from pdserve.deploy.observe.grafana import Dashboard, Panel, Row

SLO_OVERVIEW = Dashboard(
    uid="pdserve-slo",
    title="pdserve: SLO overview",
    rows=(
        Row(
            title="Are the objectives met?",
            reading="**Goodput** is the rate of requests that meet both objectives. Where it leaves the rate of all "
            "requests, attainment falls; *Misses* says which objective is missed.",
            panels=(
                ATTAINMENT,
                BURN,
                Panel(
                    title="Goodput",
                    width=6,
                    unit="reqps",
                    queries=(
                        ("pdserve:goodput:rate5m", "goodput"),
                        ("sum(rate(pdserve_slo_requests_total[5m]))", "all requests"),
                    ),
                ),
                Panel(
                    title="Misses",
                    width=6,
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
                Panel(title="TTFT", unit="s", queries=(*quantiles("pdserve_ttft_seconds"), objective("ttft"))),
                Panel(title="TPOT", unit="s", queries=(*quantiles("pdserve_tpot_seconds"), objective("tpot"))),
                Panel(title="Gaps between tokens", unit="s", queries=quantiles("pdserve_itl_seconds")),
            ),
        ),
        Row(
            title="Where the time goes",
            reading="Mean seconds by phase of TTFT, and of TPOT by cause. A queue that grows needs workers; `prefill` "
            "or `decode` that grow need a look at steps; `tokenise` and `first_write` are the router, `client` is a "
            "reader that does not keep up.",
            panels=(
                Panel(
                    title="Where TTFT goes",
                    unit="s",
                    queries=(
                        (
                            mean(
                                "pdserve_request_phase_seconds",
                                "phase",
                                '{phase=~"tokenise|queue|prefill_queue|prefill|first_write"}',
                            ),
                            "{{phase}}",
                        ),
                        objective("ttft"),
                    ),
                    is_stacked=True,
                ),
                Panel(
                    title="Where TPOT goes",
                    unit="s",
                    queries=((mean("pdserve_tpot_part_seconds", "part"), "{{part}}"), objective("tpot")),
                    about="Mean seconds per output token: decode steps, the stall of the handoff, preemptions, "
                    "fail-overs, and writes that waited for the client.",
                    is_stacked=True,
                ),
                Panel(
                    title="Causes of misses",
                    unit="reqps",
                    queries=(
                        (
                            "sum by (tier, objective, cause) (rate(pdserve_slo_misses_total[5m]))",
                            "{{tier}} {{objective}}: {{cause}}",
                        ),
                    ),
                    about="The longest part of a missed TTFT, and the part without which a missed TPOT would have been "
                    "met.",
                    is_stacked=True,
                ),
            ),
        ),
        Row(
            title="Who is hit?",
            reading="Tiers are those of `slo.tiers` in the deployment file, each with objectives of its own. Tenants "
            "are those of the API keys; without keys there is one, `anonymous`.",
            panels=(
                Panel(
                    title="Attainment by tier",
                    unit="percentunit",
                    queries=(
                        (
                            'sum by (tier) (rate(pdserve_slo_requests_total{ttft="met", tpot=~"met|none"}[5m])) / '
                            "(sum by (tier) (rate(pdserve_slo_requests_total[5m])) > 0)",
                            "{{tier}}",
                        ),
                        ("max(pdserve_slo_attainment)", "objective"),
                    ),
                ),
                Panel(
                    title="Worst tenants",
                    unit="percentunit",
                    queries=(
                        (
                            'bottomk(5, sum by (tenant) (rate(pdserve_tenant_requests_total{verdict="good"}[5m])) / '
                            "(sum by (tenant) (rate(pdserve_tenant_requests_total[5m])) > 0))",
                            "{{tenant}}",
                        ),
                        ("max(pdserve_slo_attainment)", "objective"),
                    ),
                    about="Share of requests within both objectives.",
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
