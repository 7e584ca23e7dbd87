"""Handoffs: whether KV moves, at what cost, and what fails."""

from __future__ import annotations

from pdserve.deploy.observe.dashboards.shared import KV, PULL_FAILURES, STALL, quantiles
from pdserve.deploy.observe.grafana import Dashboard, Panel, Row

KV_TRANSFER = Dashboard(
    uid="pdserve-kv",
    title="pdserve: KV transfer",
    rows=(
        Row(
            title="Does KV move?",
            reading="Bytes follow prompts that are prefilled apart from their decode worker, less what it caches. "
            "Prompts that wait without bytes: KV is stuck, or decode has no room.",
            panels=(
                Panel(
                    title="Bytes",
                    unit="Bps",
                    queries=(("sum by (transport) (rate(pdserve_kv_transfer_bytes_sum[5m]))", "{{transport}}"),),
                    width=5,
                ),
                Panel(
                    title="Pulls",
                    unit="cps",
                    queries=(("sum by (transport) (rate(pdserve_kv_transfer_seconds_count[5m]))", "{{transport}}"),),
                    width=5,
                ),
                Panel(
                    title="Prompts that wait to be pulled",
                    unit="short",
                    queries=(("sum by (age) (pdserve_waiting_handoffs)", "{{age}}"),),
                    about="By the time since their first token.",
                    width=5,
                    is_stacked=True,
                ),
                Panel(
                    title="Tokens that need not move",
                    unit="short",
                    queries=(("sum(rate(pdserve_cached_pull_tokens_total[5m]))", "cached where they decode"),),
                    about="Tokens per second.",
                    width=4,
                ),
                Panel(
                    title="Prefixes pulled, not computed",
                    unit="short",
                    queries=(
                        ("sum by (source) (rate(pdserve_prefix_tokens_total[5m]))", "from {{source}} workers"),
                        ("sum(rate(pdserve_prefix_failures_total[5m]))", "pulls that failed"),
                        ("sum(rate(pdserve_prefix_saved_seconds_total[5m]))", "seconds saved"),
                    ),
                    about="Tokens per second from the caches of other workers. What does not come is computed.",
                    width=5,
                ),
            ),
        ),
        Row(
            title="What does it cost?",
            reading="The stall is what clients see of a handoff: choice of a decode worker, wait for blocks, and pull. "
            "A link is a pair of workers.",
            panels=(
                Panel(
                    title="Seconds of a pull",
                    width=6,
                    unit="s",
                    queries=quantiles("pdserve_kv_transfer_seconds", by="transport"),
                ),
                Panel(
                    title="Bytes of a pull",
                    width=6,
                    unit="bytes",
                    queries=quantiles("pdserve_kv_transfer_bytes", by="transport"),
                ),
                Panel(
                    title="Speed of the slowest links",
                    unit="Bps",
                    queries=(
                        (
                            "bottomk(5, sum by (source, worker) (rate(pdserve_kv_link_bytes_total[5m])) / "
                            "(sum by (source, worker) (rate(pdserve_kv_link_seconds_total[5m])) > 0))",
                            "{{source}} to {{worker}}",
                        ),
                    ),
                    about="Bytes per second of pulling.",
                    width=6,
                ),
                STALL,
            ),
        ),
        Row(
            title="Does the tier below the pool help?",
            reading="Only with `kv_tier`. Restores that are given up: its disk is slower than computing the prompts.",
            panels=(
                Panel(
                    title="Prompt tokens found",
                    unit="short",
                    queries=(
                        (
                            "sum(rate(pdserve_cached_prompt_tokens_total[5m])) - "
                            "sum(rate(pdserve_kv_tier_restored_tokens_total[5m]))",
                            "in the pool",
                        ),
                        ("sum(rate(pdserve_kv_tier_restored_tokens_total[5m]))", "in the tier"),
                    ),
                    about="Tokens per second.",
                    width=8,
                    is_stacked=True,
                ),
                Panel(
                    title="Seconds saved",
                    unit="s",
                    queries=(("sum by (worker) (rate(pdserve_kv_tier_saved_seconds_total[5m]))", "{{worker}}"),),
                    about="Per second: predicted ones of computing what was restored, less those of reading it.",
                    width=8,
                ),
                Panel(
                    title="Prompts that waited for the tier",
                    unit="cps",
                    queries=(
                        ("sum by (worker) (rate(pdserve_kv_tier_restores_total[5m]))", "{{worker}}"),
                        ("sum by (worker) (rate(pdserve_kv_tier_restores_given_up_total[5m]))", "{{worker}}, given up"),
                    ),
                    width=8,
                ),
            ),
        ),
        Row(
            title="What fails?",
            reading="`connect` and `deadline` are the network, `copy` a data stream that broke or could not be opened, "
            "`refused` and `grant` a source that is gone, `verify` damaged data, which is never decoded on.",
            panels=(
                PULL_FAILURES,
                Panel(
                    title="Failed pulls by link",
                    unit="cps",
                    queries=(
                        (
                            "topk(10, sum by (source, worker) "
                            '(rate(pdserve_kv_link_pulls_total{result="failed"}[5m])))',
                            "{{source}} to {{worker}}",
                        ),
                    ),
                    about="One source: its host. One puller: its host. One pair: the network between them.",
                    width=10,
                ),
                KV,
            ),
        ),
    ),
)
