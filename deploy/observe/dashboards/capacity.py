"""Which phase is short, how full workers are, and whether predictions hold."""

from __future__ import annotations

from pdserve.deploy.observe.dashboards.shared import BUSY_PANEL, KV, PREDICTION, pair, quantiles
from pdserve.deploy.observe.grafana import Dashboard, Panel, Row

CAPACITY = Dashboard(
    uid="pdserve-capacity",
    title="pdserve: capacity and plan",
    rows=(
        Row(
            title="Which phase is short?",
            reading="Prefill busy and decode idle, or the reverse: `pdserve plan --live URL` proposes another "
            "placement, and shows here what it would give. The cluster is saturated where requests reach the goodput "
            "of the running placement.",
            panels=(
                BUSY_PANEL,
                Panel(
                    title="Busy by worker and kind of step",
                    unit="percentunit",
                    queries=(
                        ("sum by (worker, kind) (rate(pdserve_worker_busy_seconds_total[5m]))", "{{worker}} {{kind}}"),
                    ),
                    about="Steps with prompt tokens in them are `prefill`, all others `decode`.",
                    width=6,
                    is_stacked=True,
                ),
                KV,
                Panel(
                    title="Requests, and goodput by the planner",
                    unit="reqps",
                    queries=(
                        ("sum(rate(pdserve_slo_requests_total[5m]))", "requests"),
                        ("max by (placement) (pdserve_plan_goodput)", "{{placement}} placement"),
                    ),
                    about="As of the last `pdserve plan --live URL`; empty before.",
                    width=6,
                ),
            ),
        ),
        Row(
            title="What is there, and is it full?",
            reading="Batches that are full to their limits, on workers that are always busy, are saturated.",
            panels=(
                Panel(
                    title="Workers ready and wanted",
                    unit="short",
                    queries=(
                        ("max by (role) (max_over_time(pdserve_ready_workers[1h]))", "{{role}} in the last hour"),
                        ("sum by (role) (pdserve_ready_workers)", "{{role}} ready"),
                        ("sum by (role) (pdserve_worker_ranks)", "{{role}} ranks"),
                        ("max by (role) (pdserve_plan_workers)", "{{role}} by the plan"),
                    ),
                    width=5,
                ),
                Panel(
                    title="Changes that the load asked for",
                    unit="short",
                    queries=(("sum by (reason) (increase(pdserve_scale_changes_total[5m]))", "{{reason}}"),),
                    about="In 5 minutes. Empty without `max_replicas`.",
                    width=4,
                ),
                Panel(
                    title="Batch",
                    unit="percentunit",
                    queries=(
                        (
                            "sum by (role) (pdserve_running_sequences) / "
                            'sum by (role) (pdserve_worker_limit{limit="sequences"})',
                            "{{role}}",
                        ),
                    ),
                    about="Running sequences, of those that fit a batch.",
                    width=5,
                ),
                Panel(
                    title="Token budget of steps",
                    unit="percentunit",
                    queries=(
                        (
                            "sum by (role) (rate(pdserve_step_tokens_sum[5m])) / "
                            "(sum by (role) (rate(pdserve_step_tokens_count[5m])) > 0) / "
                            'avg by (role) (pdserve_worker_limit{limit="tokens"})',
                            "{{role}}",
                        ),
                    ),
                    about="Mean new tokens of a step, of `max_batch_tokens`.",
                    width=5,
                ),
                Panel(
                    title="Cost of a million output tokens",
                    unit="currencyUSD",
                    queries=(
                        (
                            "sum(pdserve_worker_usd_per_hour * pdserve_worker_up) / 3600 * 1e6 / "
                            "(sum(rate(pdserve_output_tokens_total[5m])) > 0) > 0",
                            "list price of devices",
                        ),
                    ),
                    about="Empty where no price is known; a hardware file gives one (`price_per_hour_usd`).",
                    width=5,
                ),
            ),
        ),
        Row(
            title="Do predictions hold?",
            reading="Plans and placements are as good as the cost model; `pdserve profile` measures this hardware, and "
            "`pdserve plan --live URL` says what another placement would give.",
            panels=(
                PREDICTION,
                pair("Steps", "step_seconds", by="kind"),
                pair("TTFT", "ttft_seconds", about="As predicted when the prompt was placed, and as observed."),
                pair("TPOT", "tpot_seconds", about="Predicted as one step of the batch that the answer joined."),
            ),
        ),
        Row(
            title="What do clients ask?",
            reading="Lengths decide the placement: long prompts need prefill, long answers decode.",
            panels=(
                Panel(
                    title="Prompt tokens of a request",
                    width=6,
                    unit="short",
                    queries=quantiles("pdserve_request_prompt_tokens"),
                ),
                Panel(
                    title="Answer tokens of a request",
                    width=6,
                    unit="short",
                    queries=quantiles("pdserve_request_output_tokens"),
                ),
                Panel(
                    title="Seconds of a request",
                    unit="s",
                    queries=quantiles("pdserve_request_seconds"),
                    width=6,
                ),
                Panel(
                    title="Output tokens per worker",
                    unit="short",
                    queries=(("sum(rate(pdserve_output_tokens_total[5m])) / sum(pdserve_worker_up)", "per second"),),
                    width=6,
                ),
            ),
        ),
    ),
)
