from __future__ import annotations

from dataclasses import replace

import pytest

from pdserve.contracts.codec import to_plain
from pdserve.contracts.deployment import ModelConfig, SloConfig
from pdserve.contracts.precision import Precision
from pdserve.contracts.worker_config import WorkerRole
from pdserve.model.cost.hardware import Hardware, hardware, slowed
from pdserve.planner.live.live import LengthHistogram, LiveError, ObservedTraffic
from pdserve.planner.live.running import (
    RunningWorker,
    observed_traffic,
    running_cluster,
    running_layout,
    supplies,
)
from tests.planner.plans import MODEL

SLOW = slowed(hardware("h100-sxm"), 20.0)
OBSERVED = ObservedTraffic(
    seconds=10.0,
    num_requests=100,
    prompt_tokens=LengthHistogram(bounds=(256, 1024), counts=(50, 50), mean=400),
    output_tokens=LengthHistogram(bounds=(64,), counts=(100,), mean=40),
    cached_share=0.0,
    attainment=0.9,
    num_workers={},
)


def status_of(worker_id: str, role: str, **changes: object) -> dict[str, object]:
    return {
        "worker_id": worker_id,
        "role": role,
        "address": "10.0.0.1:4000",
        "epoch": 1,
        "up": True,
        "hardware": "h100-sxm",
        "tensor_parallel": 1,
        "pipeline_parallel": 1,
        "dtype": "bfloat16",
        "kv_dtype": "auto",
        "quantization": "auto",
        "cpu_products": "auto",
        "limits": {
            "max_model_len": 8192,
            "block_size": 16,
            "num_blocks": 1000,
            "max_batch_tokens": 2048,
            "max_batch_size": 256,
        },
        **changes,
    }


def status(*workers: dict[str, object], **changes: object) -> dict[str, object]:
    """Of a router on the machine that a test runs on."""
    return {
        "ready": True,
        "routers": ["127.0.0.1:9000"],
        "workers": list(workers),
        "model": {"path": "/models/llama", "name": "llama"},
        "slo": {"ttft_seconds": 0.25, "tpot_seconds": 0.02, "attainment": 0.8},
        "devices": {},
        "kv_transport": "auto",
        "expert_parallel": [],
        "policy": "goodput",
        **changes,
    }


def cluster(*workers: dict[str, object]) -> list[RunningWorker]:
    return list(running_cluster(status(*workers)).workers)


def named(worker: RunningWorker) -> Hardware:
    return hardware(worker.hardware)


def test_workers_that_are_up_are_read() -> None:
    workers = cluster(status_of("prefill-0", "prefill"), status_of("gone", "decode", up=False))
    assert workers == [
        RunningWorker(
            worker_id="prefill-0",
            role=WorkerRole.PREFILL,
            host="10.0.0.1",
            hardware="h100-sxm",
            tensor_parallel=1,
            pipeline_parallel=1,
            expert_parallel=False,
            precision=Precision(dtype="bfloat16"),
            max_model_len=8192,
            block_size=16,
            num_kv_blocks=1000,
            max_batch_tokens=2048,
            max_batch_size=256,
        )
    ]


def test_what_is_planned_for_is_what_the_cluster_says() -> None:
    running = running_cluster(
        status(
            status_of("m-0", "mixed", dtype="float16", kv_dtype="int8", quantization="int4"),
            status_of("m-1", "mixed", dtype="float16", kv_dtype="int8", quantization="int4"),
            devices={"mixed": to_plain(SLOW)},
        )
    )
    assert running.model == ModelConfig(
        path="/models/llama",
        served_name="llama",
        dtype="float16",
        kv_dtype="int8",
        quantization="int4",
        max_model_len=8192,
    )
    assert running.slo == SloConfig(ttft_seconds=0.25, tpot_seconds=0.02, attainment=0.8)
    assert running.devices == {WorkerRole.MIXED: SLOW}


@pytest.mark.parametrize(
    "changes",
    [
        {"workers": 3},
        {"workers": [{"up": True}]},
        {"workers": [status_of("x", "cook")]},
        {"workers": [1]},
        {"slo": {"ttft": 3}},
        {"slo": {"ttft_seconds": "soon"}},
        {"model": "llama"},
        {"devices": {"mixed": {"name": "abacus"}}},
    ],
)
def test_a_foreign_status_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(LiveError, match="this is not the status of a pdserve router"):
        running_cluster(status(status_of("m", "mixed"), **changes))
    with pytest.raises(LiveError, match="this is not the status of a pdserve router"):
        running_cluster({})


def test_workers_that_hold_the_model_in_two_ways_are_refused() -> None:
    with pytest.raises(LiveError, match=r"differ in precision or block size: .*float16"):
        cluster(status_of("p", "prefill"), status_of("d", "decode", dtype="float16"))


def test_a_cluster_without_workers_is_refused() -> None:
    with pytest.raises(LiveError, match="no worker of the cluster is up"):
        cluster(status_of("gone", "decode", up=False))


def test_the_layout_is_that_of_the_workers() -> None:
    workers = cluster(status_of("p", "prefill"), status_of("d-0", "decode"), status_of("d-1", "decode"))
    workers[1:] = (replace(each, tensor_parallel=2, num_kv_blocks=900) for each in workers[1:])
    layout = running_layout(workers, named)
    assert str(layout) == "1 x P(TP1) + 2 x D(TP2)"
    assert layout.decode is not None
    assert (layout.decode.num_kv_blocks, layout.num_hosts) == (900, 1)
    (supply,) = supplies(layout, workers)
    assert (supply.hardware.name, supply.num_nodes, supply.devices_per_node) == ("h100-sxm", 1, 5)


def test_ranks_have_whole_experts_as_the_deployment_says() -> None:
    workers = status_of("p", "prefill"), status_of("d", "decode", tensor_parallel=2)
    running = running_cluster(status(*workers, expert_parallel=["decode"]))
    assert str(running_layout(running.workers, named)) == "1 x P(TP1) + 1 x D(EP2)"


def test_micro_batches_of_a_pipeline_are_one_worker() -> None:
    staged = [status_of(f"d-{n // 2}.{n % 2}", "decode", pipeline_parallel=2) for n in range(4)]
    workers = cluster(status_of("p", "prefill"), *staged)
    assert [each.worker_id for each in workers] == ["p", "d-0", "d-1"]
    layout = running_layout(workers, named)
    assert str(layout) == "1 x P(TP1) + 2 x D(TP1 PP2)"
    assert layout.decode is not None
    assert (layout.decode.num_kv_blocks, layout.decode.max_batch_size) == (2000, 512)
    (supply,) = supplies(layout, workers)
    assert supply.num_nodes * supply.devices_per_node == 5


def test_workers_of_two_hosts_make_two_nodes() -> None:
    far = status_of("d", "decode", address="10.0.0.2:4000")
    workers = cluster(status_of("p", "prefill"), far)
    layout = running_layout(workers, named)
    assert layout.worker_hosts == {WorkerRole.PREFILL: ((0,),), WorkerRole.DECODE: ((1,),)}
    assert [(each.num_nodes, each.devices_per_node) for each in supplies(layout, workers)] == [(2, 1)]


def test_hosts_that_are_not_alike_are_taken_in_parts_that_are() -> None:
    far = {"address": "10.0.0.2:4000"}
    near = [status_of(f"p-{number}", "prefill") for number in range(2)]
    workers = cluster(*near, status_of("d-0", "decode"), status_of("d-1", "decode"), status_of("d-2", "decode", **far))
    layout = running_layout(workers, named)
    assert layout.worker_hosts == {WorkerRole.PREFILL: ((0,), (0,)), WorkerRole.DECODE: ((0,), (0,), (1,))}
    assert [(each.num_nodes, each.devices_per_node) for each in supplies(layout, workers)] == [(5, 1)]
    workers += cluster(status_of("d-3", "decode", **far))
    layout = running_layout(workers, named)
    assert [(each.num_nodes, each.devices_per_node) for each in supplies(layout, workers)] == [(3, 2)]
    wide = [replace(each, tensor_parallel=2) if each.role is WorkerRole.DECODE else each for each in workers[1:]]
    layout = running_layout(wide, named)
    assert [(each.num_nodes, each.devices_per_node) for each in supplies(layout, wide)] == [(1, 9)]


def test_each_kind_of_device_is_on_the_hosts_that_have_it() -> None:
    far = status_of("d", "decode", address="10.0.0.2:4000", hardware="a100-80gb-sxm")
    workers = cluster(status_of("p", "prefill"), status_of("p-1", "prefill"), far)
    found = supplies(running_layout(workers, named), workers)
    assert [(each.hardware.name, each.num_nodes, each.devices_per_node) for each in found] == [
        ("h100-sxm", 1, 2),
        ("a100-80gb-sxm", 1, 1),
    ]


def test_a_phase_may_be_served_by_mixed_workers_alone() -> None:
    for role, text in (("prefill", "1 x P(TP1) + 1 x M(TP1)"), ("decode", "1 x D(TP1) + 1 x M(TP1)")):
        assert str(running_layout(cluster(status_of("w", role), status_of("m", "mixed")), named)) == text


def test_a_pool_has_the_least_limits_of_its_workers_one_of_which_had_another_role() -> None:
    first = {
        "max_model_len": 8192,
        "block_size": 16,
        "num_blocks": 2000,
        "max_batch_tokens": 8192,
        "max_batch_size": 64,
    }
    became = status_of("prefill-1", "decode", limits=first)
    layout = running_layout(cluster(status_of("p", "prefill"), became, status_of("d", "decode")), named)
    assert layout.decode is not None
    assert layout.decode.replicas == 2
    assert (layout.decode.max_batch_tokens, layout.decode.max_batch_size, layout.decode.num_kv_blocks) == (
        2048,
        64,
        1000,
    )


def test_a_cluster_that_cannot_be_a_layout_is_refused() -> None:
    with pytest.raises(LiveError, match="no decode worker is up"):
        running_layout(cluster(status_of("p", "prefill")), named)
    with pytest.raises(LiveError, match="the prefill workers differ"):
        running_layout(cluster(status_of("p", "prefill"), status_of("q", "prefill", hardware="a10")), named)
    with pytest.raises(ValueError, match="unknown hardware 'abacus'"):
        running_layout(cluster(status_of("m", "mixed", hardware="abacus")), named)
    wide = status_of("e", "decode", tensor_parallel=2)
    with pytest.raises(LiveError, match="the decode workers differ"):
        running_layout(cluster(status_of("p", "prefill"), status_of("d", "decode"), wide), named)


def test_observed_requests_are_drawn_again_by_seed() -> None:
    traffic = observed_traffic(OBSERVED, MODEL)
    sample = traffic.draw(500, 1)
    assert sample.conversations == traffic.draw(500, 1).conversations != traffic.draw(500, 2).conversations
    statistics = sample.statistics()
    assert statistics.mean_prompt_tokens == pytest.approx(400, rel=0.01)
    assert statistics.mean_output_tokens == pytest.approx(40, rel=0.02)
    assert statistics.cacheable_share == 0.0
    assert not sample.conversations[0].segments


def test_what_caches_held_is_shared_again() -> None:
    sample = observed_traffic(replace(OBSERVED, cached_share=0.5), MODEL).draw(500, 1)
    assert sample.statistics().cacheable_share == pytest.approx(0.5, abs=0.02)
