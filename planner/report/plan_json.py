"""Plans and simulations as JSON for programs: the figures of the tables and more.

Units are seconds, bytes, requests per second and US dollars; ``null`` marks a missing or infinite figure. Called by
the command line.
"""

from __future__ import annotations

from math import isfinite

from pdserve.contracts.codec import to_plain
from pdserve.planner.layout import Layout, PlannedModel, Pool
from pdserve.planner.report.plan_rows import findings, screening_words
from pdserve.planner.search.plan import Candidate, Plan
from pdserve.planner.simulate.attainment import Attainment, Distribution

Json = dict[str, object]
_PERCENTILES = (50, 90, 95, 99)


def plan_json(plan: Plan, traffic: str) -> Json:
    """The whole plan.

    Args:
        traffic: description of the traffic.
    """
    question, verdict = plan.question, plan.verdict
    return {
        "model": model_json(question.model),
        "traffic": traffic,
        "mean_prompt_tokens": plan.mean_prompt_tokens,
        "mean_output_tokens": plan.mean_output_tokens,
        "slo": to_plain(question.slo),
        "fleet": [
            {
                "hardware": supply.hardware.name,
                "num_nodes": supply.num_nodes,
                "devices_per_node": supply.devices_per_node,
                "dollars_per_hour": _finite(supply.price),
            }
            for supply in question.fleet
        ],
        "policy": question.policy,
        "objective": question.objective.value,
        "rate": question.rate if question.objective.has_rate else None,
        "verdict": {
            "serve_colocated": verdict.serve_colocated,
            "gain": _finite(verdict.gain),
            "is_clear": verdict.is_clear,
            "text": verdict.text,
        },
        "findings": list(findings(plan)),
        "candidates": [_candidate(plan, candidate) for candidate in plan.candidates],
        "screening": {**to_plain(plan.screening), "text": screening_words(plan)},
        "notes": list(plan.notes),
        "elapsed_s": plan.elapsed_s,
    }


def model_json(model: PlannedModel) -> Json:
    """The model and its precision."""
    return {
        "name": model.name,
        "num_parameters": model.shape.num_parameters,
        **to_plain(model.precision),
        "block_size": model.block_size,
        "max_model_len": model.max_model_len,
        "kv_transport": model.transport,
    }


def layout_json(layout: Layout) -> Json:
    """The pools of a layout by role, with each worker's hosts, and the total number of devices."""
    hosts = layout.worker_hosts
    pools = {pool.role.value: {**_pool(pool), "hosts": hosts[pool.role]} for pool in layout.pools}
    return {"text": str(layout), "num_devices": layout.num_devices, "num_hosts": layout.num_hosts, **pools}


def attainment_json(point: Attainment) -> Json:
    """Result of a placement at one rate."""
    return {
        "rate": _finite(point.rate),
        "share": point.share,
        "share_interval": list(point.interval),
        "ttft_share": point.ttft_share,
        "tpot_share": point.tpot_share,
        "ttft_s": _distribution(point.ttft),
        "tpot_s": _distribution(point.tpot),
        "itl_s": _distribution(point.itl),
        "num_requests": point.num_requests,
        "num_counted": point.num_counted,
        "num_rejected": point.num_rejected,
        "warm_up_s": point.warm_up_s,
        "mean_residence_s": _finite(point.mean_residence_s),
        "output_tokens_per_s": point.output_tokens_per_s,
        "interactivity": _finite(point.interactivity),
        "pools": to_plain(point.pools),
        "is_saturated": point.is_saturated,
    }


def _pool(pool: Pool) -> Json:
    return {
        "replicas": pool.replicas,
        "hardware": pool.hardware.name,
        "tensor_parallel": pool.tensor_parallel,
        "pipeline_parallel": pool.pipeline_parallel,
        "expert_parallel": pool.expert_parallel,
        "max_batch_tokens": pool.max_batch_tokens,
        "max_batch_size": pool.max_batch_size,
    }


def _candidate(plan: Plan, candidate: Candidate) -> Json:
    goodput = candidate.goodput
    return {
        "layout": layout_json(candidate.layout),
        "rate": candidate.rate,
        "rate_per_device": candidate.rate_per_device,
        "interval": list(map(_finite, goodput.interval)) if goodput is not None else None,
        "is_estimated": candidate.is_estimated,
        "resource": candidate.resource.value,
        "estimate": _finite(candidate.estimate.rate),
        "dollars_per_hour": _finite(candidate.dollars_per_hour),
        "dollars_per_million_tokens": _finite(candidate.dollars_per_million_tokens(plan.mean_output_tokens)),
        "output_tokens_per_s": candidate.rate * plan.mean_output_tokens,
        "saturation_rate": _finite(candidate.saturation_rate),
        "sensitivity": to_plain(candidate.sensitivity),
        "pools": to_plain(candidate.pools),
        "reasons": list(candidate.reasons),
        "at_winners_rate": attainment_json(candidate.at_winners_rate) if candidate.at_winners_rate else None,
        "points": [attainment_json(point) for point in goodput.points] if goodput is not None else [],
    }


def _distribution(latency: Distribution) -> Json:
    return {f"p{percent}": _finite(latency.percentile(percent)) for percent in _PERCENTILES}


def _finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None
