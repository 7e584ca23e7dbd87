"""Rows in the order in which a request travels."""

from __future__ import annotations

from pdserve.deploy.observe.dashboards.shared import PARKED, STALL, mean, objective, quantiles
from pdserve.deploy.observe.grafana import Dashboard, Panel, Row

REQUEST_FLOW = Dashboard(
    uid="pdserve-flow",
    title="pdserve: request flow",
    rows=(
        Row(
            title="1. Arrival and placement",
            reading="Requests wait in the router while no worker is up, while those that have just come up have two "
            "steps of others to compute, and before retries. A prompt goes to a prefill worker, to a decode worker "
            "(which then prefills it itself), or to a mixed one. `late` placements found no worker that would meet the "
            "TTFT objective: the cluster is beyond its goodput. Fallbacks had no free choice.",
            panels=(
                Panel(
                    title="Requests",
                    unit="reqps",
                    queries=(("sum by (code) (rate(pdserve_requests_total[5m]))", "{{code}}"),),
                    width=5,
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
                    width=5,
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
                    width=5,
                ),
                Panel(
                    title="Fallbacks",
                    unit="cps",
                    queries=(("sum by (reason) (rate(pdserve_placement_fallbacks_total[5m]))", "{{reason}}"),),
                    about="No worker up; no prefill worker up, so that decode workers prefill; no decode worker up, or "
                    "none with room; only decode workers on which pulls or steps failed recently.",
                    width=5,
                ),
                Panel(
                    title="Time of a decision",
                    unit="s",
                    queries=quantiles("pdserve_route_decision_seconds"),
                    width=4,
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
                    queries=quantiles("pdserve_request_phase_seconds", '{phase="prefill_queue"}'),
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
                    queries=quantiles("pdserve_step_seconds", '{kind="prefill"}'),
                    width=6,
                ),
            ),
        ),
        Row(
            title="3. Handoff",
            reading="Parked prompts wait for a decode worker with room; the pull itself takes milliseconds.",
            panels=(
                PARKED,
                Panel(
                    title="Oldest handoff",
                    unit="s",
                    queries=(("max(pdserve_oldest_handoff_seconds)", "since its first token"),),
                    about="Prompts are thrown away, and computed again, after 30 s.",
                    width=6,
                ),
                STALL,
                Panel(
                    title="Between the phases",
                    unit="s",
                    queries=(
                        (
                            mean("pdserve_request_phase_seconds", "phase", '{phase=~"handoff|decode_queue"}'),
                            "{{phase}}",
                        ),
                    ),
                    about="`decode_queue`: the wait for blocks on the decode worker, which may begin before the first "
                    "token. `handoff`: from the first token until the decode worker holds the prompt.",
                    width=6,
                ),
            ),
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
                    queries=(*quantiles("pdserve_step_seconds", '{kind="decode"}'), objective("tpot")),
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
                    width=4,
                ),
                Panel(
                    title="Output tokens",
                    unit="short",
                    queries=(("sum(rate(pdserve_output_tokens_total[5m]))", "tokens per second"),),
                    width=4,
                ),
                Panel(
                    title="Guesses",
                    unit="short",
                    queries=(
                        ("sum(rate(pdserve_guesses_total[5m]))", "tokens per second"),
                        ("sum(rate(pdserve_right_guesses_total[5m]))", "right"),
                    ),
                    about="Of workers with `speculation`. Each right one spares a step.",
                    width=4,
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
                    queries=(
                        ("sum by (role) (pdserve_ready_workers)", "{{role}} up"),
                        ("sum by (role) (increase(pdserve_worker_restarts_total[5m]))", "{{role}} restarted"),
                    ),
                ),
                Panel(
                    title="Requests sent to another worker",
                    unit="cps",
                    queries=(("sum by (reason) (rate(pdserve_redispatches_total[5m]))", "{{reason}}"),),
                ),
                Panel(
                    title="Tokens to compute again",
                    unit="short",
                    queries=(("sum by (reason) (rate(pdserve_replayed_tokens_total[5m]))", "{{reason}}"),),
                    about="Prompt and answer tokens of those requests, per second.",
                ),
            ),
        ),
    ),
)
