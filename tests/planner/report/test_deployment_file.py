from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.contracts.deployment import DEFAULT_POLICY, DeploymentConfig, PhaseConfig
from pdserve.contracts.precision import Precision
from pdserve.contracts.worker_config import WorkerRole
from pdserve.deploy.config import read_deployment
from pdserve.model.cost.hardware import hardware
from pdserve.planner.layout import Layout
from pdserve.planner.report.deployment_file import (
    DevicePool,
    deployment_of,
    deployment_text,
    layout_of,
    problems,
)
from pdserve.planner.search.plan import Candidate
from tests.planner.plans import APART, MODEL, SLO, TOGETHER, WIDE, a_plan
from tests.planner.stand_ins import H100


def written(candidate: Candidate, tmp_path: Path) -> Path:
    file = tmp_path / "deployment.yaml"
    file.write_text(deployment_text(a_plan(), candidate, "/models/llama"))
    return file


def on_h100s(config: DeploymentConfig) -> Layout:
    pools = {role: DevicePool(H100, config.phase(role).kv_memory_bytes) for role in WorkerRole}
    return layout_of(config, MODEL, pools)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_written_can_be_served(tmp_path: Path, rank: int) -> None:
    candidate = a_plan().candidates[rank]
    config = read_deployment(written(candidate, tmp_path))
    assert config == deployment_of(candidate.layout, MODEL, SLO, "/models/llama")
    assert (config.model.path, config.slo, config.router.policy) == ("/models/llama", SLO, DEFAULT_POLICY)
    assert config.prefill.replicas + config.decode.replicas == (0 if candidate.layout.is_colocated else 2)
    assert config.kv_transfer.transport == MODEL.transport == "nccl"


def test_only_another_policy_than_the_default_is_written(tmp_path: Path) -> None:
    assert "policy" not in written(a_plan().best, tmp_path).read_text()
    other = replace(a_plan(), question=replace(a_plan().question, policy="least-time"))
    file = tmp_path / "other.yaml"
    file.write_text(deployment_text(other, other.best, "/models/llama"))
    assert read_deployment(file).router.policy == "least-time"


def test_what_the_engine_does_not_do_is_written_and_said(tmp_path: Path) -> None:
    deep = replace(WIDE, prefill=replace(next(iter(WIDE.pools)), tensor_parallel=1, pipeline_parallel=2))
    spread = replace(deep, hosts=(((0, 1),), ((1,),)))
    file = written(replace(a_plan().candidates[2], layout=spread), tmp_path)
    (parallel,) = problems(spread, MODEL)
    assert "the stages of a worker run on one host" in parallel
    assert problems(deep, MODEL) == problems(replace(deep, hosts=(((0,),), ((1,),))), MODEL) == []
    assert problems(APART, MODEL) == problems(WIDE, MODEL) == []
    assert problems(APART, replace(MODEL, unserved="no")) == ["no"]
    assert problems(APART, replace(MODEL, precision=Precision(quantization="fp8"))) == [
        "fp8 weights cannot be computed with yet"
    ]
    assert "# Cannot be started yet: the stages of a worker run on one host, and it has them" in file.read_text()
    assert read_deployment(file).prefill.pipeline_parallel == 2  # a file for emulation


def test_predictions_stand_beside_it(tmp_path: Path) -> None:
    text = written(a_plan().best, tmp_path).read_text()
    assert "# Predicted goodput: 16.0 requests/s (14.4 to 17.6 with 95 % confidence), at which 90 % of requests" in text
    assert (
        "# Estimated goodput, not simulated: 6.00 requests/s" in written(a_plan().candidates[2], tmp_path).read_text()
    )


def test_what_is_planned_for_several_hosts_says_which_has_what(tmp_path: Path) -> None:
    best = a_plan().best
    apart = replace(best, layout=replace(best.layout, hosts=(((0,),), ((1,),))))
    said = (
        "# On 2 hosts, by devices: 1 with 1 prefill, 1 with 1 decode; 0 % of the pulls cross the network.\n"
        "# Start it with pdserve up --ray-address auto --hosts 2, and security set: docs/hosts.md"
    )
    assert said in written(apart, tmp_path).read_text()
    assert "hosts" not in written(best, tmp_path).read_text()


def test_workers_are_on_one_host_as_long_as_it_has_devices_or_on_hosts_of_the_size_that_is_named() -> None:
    pools = {role: DevicePool(H100) for role in WorkerRole}

    def hosts(prefill: int, decode: int, tensor_parallel: int, devices_per_host: int = 0) -> int:
        phases = [PhaseConfig(replicas=number, tensor_parallel=tensor_parallel) for number in (prefill, decode)]
        config = DeploymentConfig(prefill=phases[0], decode=phases[1])
        return layout_of(config, MODEL, pools, devices_per_host=devices_per_host).num_hosts

    assert [hosts(2, 6, 1), hosts(3, 6, 1), hosts(3, 6, 1, 16), hosts(1, 1, 2, 2), hosts(1, 1, 16)] == [1, 2, 1, 2, 2]
    with pytest.raises(ValueError, match=r"does not fit hosts of 2 x h100-sxm"):
        hosts(1, 1, 4, 2)


def test_whole_experts_are_simulated_as_deployed() -> None:
    phase = PhaseConfig(tensor_parallel=2, expert_parallel=True)
    config, pools = DeploymentConfig(prefill=phase, decode=phase), {role: DevicePool(H100) for role in WorkerRole}
    with pytest.raises(ValueError, match="expert_parallel is set, and the model has no experts"):
        layout_of(config, MODEL, pools)
    shape = replace(MODEL.shape, num_experts=8, experts_per_token=2)
    layout = layout_of(config, replace(MODEL, shape=shape), pools)
    assert [pool.expert_parallel for pool in layout.pools] == [True, True]


def test_two_kinds_that_fit_one_host_are_on_one_unless_its_size_is_named() -> None:
    pools = {role: DevicePool(hardware("h200") if role is WorkerRole.DECODE else H100) for role in WorkerRole}
    config = DeploymentConfig()
    assert [layout_of(config, MODEL, pools, devices_per_host=size).num_hosts for size in (0, 8)] == [1, 2]


@pytest.mark.parametrize("layout", [APART, TOGETHER, WIDE])
def test_a_layout_comes_back_from_its_deployment(layout: Layout) -> None:
    back = on_h100s(deployment_of(layout, MODEL, SLO, "/models/llama"))
    for pool, again in zip(layout.pools, back.pools, strict=True):
        most = pool.cost(MODEL).max_kv_blocks(MODEL.block_size)
        assert most - 1 <= again.num_kv_blocks <= most, "memory is written in whole MiB"
        assert replace(again, num_kv_blocks=0) == pool


def test_memory_that_is_automatic_takes_what_fits() -> None:
    layout = on_h100s(DeploymentConfig(decode=PhaseConfig(max_batch_size=2)))
    prefill, decode = layout.pools
    assert prefill.num_kv_blocks == prefill.cost(MODEL).max_kv_blocks(MODEL.block_size) > 2 * 8192 // 16
    assert decode.num_kv_blocks == 2 * 8192 // 16, "as workers: two sequences of 8,192 tokens need no more"


def test_memory_that_holds_no_block_is_named() -> None:
    config = DeploymentConfig(decode=PhaseConfig(kv_memory="1KiB"))
    with pytest.raises(ValueError, match=r"decode.kv_memory of 1024 bytes holds no KV block: raise it, or say auto"):
        on_h100s(config)


def test_memory_that_no_device_has_is_refused() -> None:
    config = DeploymentConfig(decode=PhaseConfig(kv_memory="200GiB"))
    with pytest.raises(ValueError, match=r"decode.kv_memory of 214748364800 bytes does not fit 1 x .*: lower it"):
        on_h100s(config)
    whole = on_h100s(DeploymentConfig(decode=PhaseConfig(kv_memory="56GiB"))).decode
    assert whole is not None
    assert whole.num_kv_blocks > whole.cost(MODEL).max_kv_blocks(MODEL.block_size), "as workers: beyond the usual share"
