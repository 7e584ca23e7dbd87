"""Metrics registry against the contract, and the reports of workers and the edge."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdserve.contracts import metrics as names
from pdserve.contracts.deployment import SloConfig, Tier
from pdserve.contracts.events import SchedulerLoad
from pdserve.contracts.request import Outcome
from pdserve.contracts.worker_config import WorkerRole
from pdserve.proto.v1 import worker_pb2
from pdserve.router import metrics as router_metrics
from pdserve.router.cluster.worker_metrics import WorkerMetrics
from pdserve.router.metrics import RouterMetrics
from tests.router.records import answer_record, new_record
from tests.router.rig import sample
from tests.scrape import scrape


def kind(metric: names.Metric) -> str:
    return type(metric).__name__.lower()


def test_every_family_of_the_contract_is_there_and_no_other() -> None:
    text = scrape(RouterMetrics())
    rendered = {family.name: family for family in text_string_to_metric_families(text)}
    assert set(rendered) == {metric.name for metric in names.FAMILIES}
    for metric in names.FAMILIES:
        assert rendered[metric.name].type == kind(metric)
        assert rendered[metric.name].documentation == metric.help


def test_families_are_those_that_dashboards_of_others_know() -> None:
    """A change of `families.txt` breaks what users have built on it."""
    told = [f"{kind(each)} {each.name} {','.join(each.labels) or '-'} {each.help}" for each in names.FAMILIES]
    assert told == (Path(__file__).parent / "families.txt").read_text().splitlines()


def test_one_of_several_routers_shows_the_workers() -> None:
    text = scrape(RouterMetrics(has_workers=False))
    shown = {family.name for family in text_string_to_metric_families(text)}
    assert shown == {each.name for each in names.FAMILIES} - {each.name for each in names.OF_WORKERS}
    assert {"pdserve_slo_requests", "pdserve_plan_workers"} < shown


def test_a_frame_becomes_the_workers_series() -> None:
    metrics = RouterMetrics()
    worker = WorkerMetrics(metrics, "decode-0", WorkerRole.DECODE)
    load = SchedulerLoad(
        num_running=3,
        num_blocks_free=5,
        num_blocks_referenced=9,
        num_blocks_parked=2,
        num_preemptions=2,
        num_swap_outs=2,
        num_swap_ins=1,
        num_guesses=7,
        num_right_guesses=5,
        num_restored_tokens=96,
        restore_saved_s=2.5,
        num_restores=3,
        num_restores_given_up=1,
        tier_failure="No space left on device",
    )
    step = worker_pb2.Step(seconds=0.01, num_tokens=3, predicted_s=0.008)
    labels = {"worker": "decode-0", "role": "decode"}
    worker.observe(load, [step, step])
    assert sample(metrics, "pdserve_running_sequences", **labels) == 3
    assert sample(metrics, "pdserve_kv_blocks", state="referenced", **labels) == 7
    assert sample(metrics, "pdserve_step_seconds_count", kind="decode", role="decode") == 2
    assert sample(metrics, "pdserve_predicted_step_seconds_sum", kind="decode", role="decode") == 0.016
    assert sample(metrics, "pdserve_step_seconds_count", kind="prefill", role="decode") == 0
    assert sample(metrics, "pdserve_worker_busy_seconds_total", kind="decode", **labels) == 0.02
    assert sample(metrics, "pdserve_step_tokens_sum", role="decode") == 6
    assert sample(metrics, "pdserve_preemptions_total", **labels) == 2
    assert sample(metrics, "pdserve_swap_outs_total", **labels) == 2
    assert sample(metrics, "pdserve_swap_ins_total", **labels) == 1
    assert sample(metrics, "pdserve_guesses_total", **labels) == 7
    assert sample(metrics, "pdserve_right_guesses_total", **labels) == 5
    assert sample(metrics, "pdserve_kv_tier_restored_tokens_total", **labels) == 96
    assert sample(metrics, "pdserve_kv_tier_saved_seconds_total", **labels) == 2.5
    assert sample(metrics, "pdserve_kv_tier_off", **labels) == 1
    assert sample(metrics, "pdserve_kv_tier_restores_total", **labels) == 3
    assert sample(metrics, "pdserve_kv_tier_restores_given_up_total", **labels) == 1
    worker.observe(SchedulerLoad(num_preemptions=2, num_blocks_referenced=5, num_blocks_parked=6))
    assert sample(metrics, "pdserve_kv_blocks", state="referenced", **labels) == 0, "prompts share blocks"
    assert sample(metrics, "pdserve_kv_blocks", state="parked", **labels) == 5
    assert sample(metrics, "pdserve_step_seconds_count", kind="decode", role="decode") == 2
    prefill_step = worker_pb2.Step(seconds=0.2, num_tokens=50, predicted_s=0.1, has_prefill=True)
    worker.observe(SchedulerLoad(), [prefill_step])
    assert sample(metrics, "pdserve_step_seconds_sum", kind="prefill", role="decode") == 0.2
    assert sample(metrics, "pdserve_worker_busy_seconds_total", kind="prefill", **labels) == 0.2
    assert sample(metrics, "pdserve_worker_predicted_busy_seconds_total", kind="prefill", **labels) == 0.1
    assert sample(metrics, "pdserve_worker_busy_seconds_total", kind="decode", **labels) == 0.02, "counted once"
    micro_batch = worker_pb2.Welcome(tensor_parallel=2, pipeline_parallel=3, max_batch_size=8, max_batch_tokens=512)
    worker.came_up(micro_batch, 1.5)
    assert sample(metrics, "pdserve_worker_ranks", **labels) == 2, "its share of 6"
    assert sample(metrics, "pdserve_worker_usd_per_hour", **labels) == 3
    assert sample(metrics, "pdserve_worker_limit", limit="tokens", **labels) == 512
    worker.observe(load)
    worker.went_down()
    assert sample(metrics, "pdserve_running_sequences", **labels) == 0, "what it held is gone"
    worker.observe(load)
    assert sample(metrics, "pdserve_swap_outs_total", **labels) == 4, "only the session was lost"
    worker.went_down()
    assert sample(metrics, "pdserve_worker_up", **labels) == sample(metrics, "pdserve_worker_ranks", **labels) == 0
    worker.remove()
    assert "decode-0" not in scrape(metrics)


def test_prefixes_are_counted_by_the_role_of_their_source() -> None:
    metrics = RouterMetrics()
    for seconds in (0.5, 9.0):
        report = worker_pb2.TransferReport(num_tokens=80, bytes=9, seconds=seconds)
        metrics.observe_prefix(report, WorkerRole.DECODE, 2.0)
    metrics.observe_prefix(worker_pb2.TransferReport(failure_stage="deadline"), WorkerRole.PREFILL, 0.0)
    metrics.observe_prefix(worker_pb2.TransferReport(failure_stage="aborted"), WorkerRole.PREFILL, 0.0)
    assert sample(metrics, "pdserve_prefix_saved_seconds_total", source="decode") == 1.5
    assert sample(metrics, "pdserve_prefix_tokens_total", source="decode") == 160
    assert sample(metrics, "pdserve_prefix_tokens_total", source="prefill") == 0
    assert sample(metrics, "pdserve_prefix_failures_total", source="prefill") == 1
    assert sample(metrics, "pdserve_prefix_failures_total", source="decode") == 0


def test_pulls_that_fail_are_counted_by_stage_and_transport() -> None:
    metrics = RouterMetrics()
    link = ("prefill-0", "decode-1")
    metrics.observe_transfer(worker_pb2.TransferReport(transport="memfd", seconds=0.002, bytes=4096), *link)
    metrics.observe_transfer(worker_pb2.TransferReport(transport="memfd", failure_stage="verify"), *link)
    labels = {"source": "prefill-0", "worker": "decode-1"}
    assert sample(metrics, "pdserve_kv_link_bytes_total", **labels) == 4096
    assert sample(metrics, "pdserve_kv_link_pulls_total", result="done", **labels) == 1
    assert sample(metrics, "pdserve_kv_link_pulls_total", result="failed", **labels) == 1
    assert sample(metrics, "pdserve_kv_transfer_seconds_count", transport="memfd") == 1
    assert sample(metrics, "pdserve_kv_transfer_bytes_sum", transport="memfd") == 4096
    assert sample(metrics, "pdserve_kv_transfer_failures_total", stage="verify", transport="memfd") == 1
    metrics.observe_transfer(worker_pb2.TransferReport(failure_stage="connect"), "prefill-0", "decode-0")
    assert sample(metrics, "pdserve_kv_transfer_failures_total", stage="connect", transport="none") == 1
    assert sample(metrics, "pdserve_kv_transfer_failures_total", stage="connect", transport="tcp") == 0
    metrics.observe_transfer(worker_pb2.TransferReport(transport="memfd", ended_request=True, seconds=9.0), *link)
    for _ in range(2):
        metrics.observe_transfer(worker_pb2.TransferReport(transport="memfd", failure_stage="aborted"), *link)
    counts = [
        sample(metrics, "pdserve_kv_link_pulls_total", result=result, **labels)
        for result in ("done", "ended", "aborted", "failed")
    ]
    assert counts == [1, 1, 2, 1]
    assert sample(metrics, "pdserve_kv_transfer_seconds_count", transport="memfd") == 1
    assert sample(metrics, "pdserve_kv_transfer_failures_total", stage="aborted", transport="memfd") is None


@pytest.mark.parametrize(
    ("ttft_s", "gaps_s", "verdict"),
    [
        (0.1, [0.01], ("met", "met")),
        (0.3, [0.01], ("missed", "met")),
        (0.1, [0.2], ("met", "missed")),
        (0.25, [], ("met", "none")),
    ],
)
def test_the_slo_verdict_is_joint(ttft_s: float, gaps_s: list[float], verdict: tuple[str, str]) -> None:
    metrics = RouterMetrics(SloConfig(ttft_seconds=0.25, tpot_seconds=0.05))
    metrics.responded("/v1/completions", 200)
    metrics[names.TTFT_SECONDS].observe(ttft_s)
    metrics.itl_seconds.observe(0.01)
    record = answer_record(ttft_s, gaps_s)
    metrics.answered(record)
    metrics.served(record)
    is_good = "missed" not in verdict
    assert sample(metrics, "pdserve_slo_requests_total", tier="default", ttft=verdict[0], tpot=verdict[1]) == 1
    assert sample(metrics, "pdserve_tenant_requests_total", tenant="anonymous", verdict="good") == is_good
    assert sample(metrics, "pdserve_output_tokens_total") == sample(metrics, "pdserve_output_tokens_total") == 2
    assert sample(metrics, "pdserve_itl_seconds_count") == 1
    assert sample(metrics, "pdserve_requests_total", route="/v1/completions", code="200") == 1
    assert sample(metrics, "pdserve_tpot_seconds_count") == len(gaps_s)


def test_misses_are_counted_by_cause() -> None:
    metrics = RouterMetrics(SloConfig(ttft_seconds=0.25, tpot_seconds=0.05))
    for ttft_s, gaps_s in ((1.0, [0.06]), (1.0, [0.01]), (0.1, [])):
        record = answer_record(ttft_s, gaps_s)
        record.journeys[0].spent("prefill_queue", 0.9, 10.9)
        record.journeys[0].preempted_s = 0.03
        metrics.answered(record)
    assert sample(metrics, "pdserve_slo_misses_total", tier="default", objective="ttft", cause="prefill_queue") == 2
    assert sample(metrics, "pdserve_slo_misses_total", tier="default", objective="tpot", cause="preemption") == 1
    assert sum(each.value for family in metrics[names.SLO_MISSES].collect() for each in family.samples) == 3


def test_each_tier_has_objectives_of_its_own() -> None:
    bounded = Tier(ttft_seconds=1.0, tpot_seconds=0.05, max_gap_seconds=0.1)
    metrics = RouterMetrics(SloConfig(ttft_seconds=1.0, tpot_seconds=0.05, tiers={"bounded": bounded}))
    for tier, verdict in (("default", "met"), ("bounded", "missed")):
        metrics.answered(answer_record(0.1, [0.01, 0.12, 0.01], tier=tier))
        assert sample(metrics, "pdserve_slo_requests_total", tier=tier, ttft="met", tpot=verdict) == 1
    assert sample(metrics, "pdserve_slo_misses_total", tier="bounded", objective="tpot", cause="gap") == 1
    assert sample(metrics, "pdserve_slo_seconds", tier="bounded", objective="max_gap") == 0.1


def test_links_beyond_the_bound_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_metrics, "MAX_LINKS", 2)
    metrics = RouterMetrics()
    for index in range(5):
        report = worker_pb2.TransferReport(transport="tcp", seconds=0.1, bytes=1)
        metrics.observe_transfer(report, "prefill-0", f"decode-{index}")
    assert sample(metrics, "pdserve_kv_link_pulls_total", source="other", worker="other", result="done") == 3
    assert sum(len(family.samples) for family in metrics[names.LINK_BYTES].collect()) == 3


def test_a_request_is_timed_beside_its_predictions() -> None:
    metrics = RouterMetrics()
    record = answer_record(0.2, [0.1, 0.1])
    [journey] = record.journeys
    journey.token_s, journey.stall_s = 10.15, 0.06
    journey.predicted_ttft_s, journey.predicted_tpot_s = 0.1, 0.04
    metrics.answered(record)
    assert sample(metrics, "pdserve_predicted_ttft_seconds_sum") == 0.1
    assert sample(metrics, "pdserve_predicted_tpot_seconds_sum") == 0.04
    assert sample(metrics, "pdserve_request_phase_seconds_sum", phase="first_write") == pytest.approx(0.05)
    parts = {part: sample(metrics, "pdserve_tpot_part_seconds_sum", part=part) for part in ("handoff", "decode")}
    assert parts == pytest.approx({"handoff": 0.03, "decode": 0.07})


def test_failed_and_refused_requests_miss_both_objectives() -> None:
    metrics = RouterMetrics()
    for outcome in (Outcome.CANCELLED, Outcome.FAILED):
        record = new_record(num_prompts=3)
        for answer, of_prompt in zip(record.answers, (Outcome.CANCELLED, outcome, Outcome.CANCELLED), strict=True):
            answer.outcome = of_prompt
        record.ended(200)
        metrics.served(record)
    metrics.refused("default")
    assert sample(metrics, "pdserve_slo_requests_total", tier="default", ttft="failed", tpot="failed") == 1
    assert sample(metrics, "pdserve_slo_requests_total", tier="default", ttft="refused", tpot="refused") == 1


def test_objectives_and_placements_are_reported() -> None:
    batch = Tier(ttft_seconds=9.0, tpot_seconds=0.2)
    metrics = RouterMetrics(SloConfig(ttft_seconds=0.25, tpot_seconds=0.05, attainment=0.9, tiers={"batch": batch}))
    metrics.placed("goodput", WorkerRole.DECODE, is_late=True)
    assert sample(metrics, "pdserve_slo_seconds", tier="default", objective="tpot") == 0.05
    assert sample(metrics, "pdserve_slo_seconds", tier="batch", objective="ttft") == 9
    assert sample(metrics, "pdserve_slo_attainment") == 0.9
    assert sample(metrics, "pdserve_placements_total", policy="goodput", role="decode", expected="late") == 1
