"""Configuration of each process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from pdserve.contracts.codec import from_json, to_json
from pdserve.contracts.deployment import DeploymentConfig, ModelConfig
from pdserve.contracts.worker_config import WorkerConfig, WorkerRole
from pdserve.deploy.cluster.supervisor import curl_command
from pdserve.deploy.config import Use, parse_deployment
from pdserve.deploy.launch import Launch, router_config, worker_configs
from pdserve.model.cost.hardware import Hardware, hardware
from pdserve.router.process_config import RouterProcessConfig

DOCUMENT = {
    "model": {
        "path": "/models/small",
        "dtype": "bfloat16",
        "kv_dtype": "int8",
        "quantization": "int8",
        "block_size": 32,
        "max_model_len": 512,
    },
    "prefill": {"replicas": 2, "kv_memory": "1GiB", "max_batch_tokens": 100},
    "decode": {"max_batch_size": 7, "device": "cuda", "gpu_memory_utilization": 0.5},
    "kv_transfer": {"transport": "tcp"},
    "ports": "20000-20099",
    "router": {"port": 1234, "policy": "round-robin", "max_queued_requests": 5, "keep_alive_seconds": 0},
}
FOLDER, BOARD = "/run", "/run/cores"
EIGHT, FOUR = tuple(range(8)), tuple(range(4))


def deployment(document: dict[str, Any], use: Use = "serve") -> DeploymentConfig:
    """Parsed, with a dtype unless ``document`` has one."""
    return parse_deployment({**document, "model": {"dtype": "float32", **document.get("model", {})}}, use=use)


def device_of(config: WorkerConfig) -> Hardware:
    return from_json(Hardware, config.hardware, "a device")


def test_each_worker_gets_its_phase_and_its_cores() -> None:
    launch = Launch(config=deployment(DOCUMENT), emulate="a100", time_scale=2.0, cores=EIGHT)
    first, second, third = worker_configs(launch, "secret", FOLDER)
    assert [config.worker_id for config in (first, second, third)] == ["prefill-0", "prefill-1", "decode-0"]
    assert (first.kv_memory_bytes, third.kv_memory_bytes) == (2**30, 0)
    assert (second.max_batch_tokens, third.max_batch_size) == (100, 7)
    assert {(config.precision.dtype, config.precision.kv_dtype) for config in (first, second, third)} == {
        ("bfloat16", "int8")
    }
    assert {config.precision.quantization for config in (first, second, third)} == {"int8"}
    assert (first.device, first.gpu_memory_utilization) == ("auto", 0.9)
    assert (third.device, third.gpu_memory_utilization) == ("cuda", 0.5)
    assert (third.block_size, third.max_model_len, third.transport) == (32, 512, "tcp")
    assert third.ports == (20000, 20099)
    assert (third.emulate, third.time_scale, third.cluster_token) == ("a100", 2.0, "secret")
    assert (first.cpu_cores, second.cpu_cores, third.cpu_cores) == launch.split.worker_cores
    assert first.transfer_cpu_cores == launch.split.spare_cores
    assert [config.core_index for config in (first, second, third)] == [0, 1, 2]
    assert (third.core_board, third.core_sets) == (BOARD, launch.split.worker_cores)


def test_a_tier_goes_to_the_workers_of_its_pool() -> None:
    launch = Launch(config=deployment({"prefill": {"kv_tier": {"path": "/tiers", "size": "2GiB"}}}))
    configs = worker_configs(launch, "secret", "/tmp/cluster")
    assert {(each.role.value, each.kv_tier_path, each.kv_tier_bytes) for each in configs} == {
        ("prefill", "/tiers/cluster", 2**31),
        ("decode", "", 0),
    }
    assert launch.tier_paths == ["/tiers"]


def test_degrees_go_to_the_workers_and_the_router() -> None:
    degrees = {"prefill": {"pipeline_parallel": 2}, "decode": {"tensor_parallel": 4, "expert_parallel": True}}
    wide = deployment(degrees, use="emulate")
    launch = Launch(config=wide, emulate="a100", cores=EIGHT)
    configs = worker_configs(launch, "secret", FOLDER)
    assert [config.tensor_parallel for config in configs] == [1, 4]
    assert [config.pipeline_parallel for config in configs] == [2, 1]
    assert [config.expert_parallel for config in configs] == [False, True]
    assert router_config(launch, "secret").deployment.decode == launch.config.decode


def test_workers_without_cores_of_their_own_lend_nothing() -> None:
    launch = Launch(config=deployment({}), cores=(0,))
    (first, second) = worker_configs(launch, "", FOLDER)
    assert (first.core_board, second.core_board) == ("", "")


def test_phases_that_lend_no_cores_take_none_either() -> None:
    config = deployment({"prefill": {"lend_cores": False}, "decode": {"replicas": 2}})
    launch = Launch(config=config, cores=EIGHT)
    first, second, third = worker_configs(launch, "", FOLDER)
    assert [config.core_board for config in (first, second, third)] == ["", BOARD, BOARD]
    assert third.core_sets == ((), *launch.split.worker_cores[1:])
    assert first.cpu_cores == launch.split.worker_cores[0]


def test_transfers_run_anywhere_when_no_core_is_spare() -> None:
    launch = Launch(config=deployment({}), cores=(0, 1))
    assert launch.split.spare_cores == ()
    configs = worker_configs(launch, "", FOLDER)
    assert [config.transfer_cpu_cores for config in configs] == [(0, 1), (0, 1)]
    assert [config.num_host_workers for config in configs] == [2, 2]


def test_the_router_gets_its_model_limits_and_device() -> None:
    launch = Launch(config=deployment(DOCUMENT), drain_timeout_s=3.0, cores=EIGHT)
    config = router_config(launch, "secret")
    model, router = config.deployment.model, config.router
    assert (model.served_name, router.port, router.max_queued_requests) == ("small", 1234, 5)
    assert (router.keep_alive_seconds, router.policy) == (0, "round-robin")
    assert from_json(RouterProcessConfig, to_json(config), "it") == config
    assert (config.hardware, model.precision.dtype) == ("cpu", "bfloat16")
    assert (model.precision.kv_dtype, model.precision.quantization) == ("int8", "int8")
    assert config.drain_timeout_s == 3.0
    assert model.generation_config == "auto"
    assert config.cores_per_rank == 3
    assert config.cluster_token == "secret"


def test_a_model_is_called_by_its_repository_or_its_folder(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--Qwen--Qwen3-0.6B" / "snapshots" / "c1899de289a04d12100db370d81485cdf75e47ca"
    snapshot.mkdir(parents=True)
    (tmp_path / "current").symlink_to(snapshot)
    old, other = tmp_path / "models--gpt2" / "snapshots" / "1", tmp_path / "snapshots" / "7"
    names = {
        snapshot: "Qwen/Qwen3-0.6B",
        tmp_path / "current": "Qwen/Qwen3-0.6B",
        old: "gpt2",
        other: "7",
        tmp_path / "models--a--b": "models--a--b",
    }
    for folder, name in names.items():
        launch = Launch(config=DeploymentConfig(model=ModelConfig(path=str(folder), dtype="float32")))
        assert router_config(launch).deployment.model.served_name == name
    named = ModelConfig(path=str(snapshot), served_name="mine", dtype="float32")
    mine = router_config(Launch(config=DeploymentConfig(model=named)))
    assert mine.deployment.model.served_name == "mine"


def test_the_router_of_an_emulated_cluster_predicts_the_time_that_steps_really_take() -> None:
    launch = Launch(config=deployment(DOCUMENT), emulate="h100-sxm", time_scale=4.0, cores=EIGHT)
    config = router_config(launch, "secret")
    assert (config.hardware, config.time_scale) == ("h100-sxm", 4.0)


def test_workers_and_the_router_get_measured_devices() -> None:
    devices = {f"cpu-{count}": replace(hardware("cpu", num_cores=count), name=f"cpu-{count}") for count in (1, 2, 3)}
    launch = Launch(config=deployment({}), devices=devices, cores=FOUR)
    prefill, decode = worker_configs(launch)
    assert [device_of(config) for config in (prefill, decode)] == [devices["cpu-3"], devices["cpu-1"]]
    router = router_config(launch)
    assert router.devices == {WorkerRole.PREFILL: devices["cpu-3"], WorkerRole.DECODE: devices["cpu-1"]}
    unpinned = replace(launch, cores=(0,))
    alone, _ = worker_configs(unpinned)
    assert device_of(alone).name == "cpu-1"
    assert router_config(unpinned).devices[WorkerRole.DECODE] == devices["cpu-1"]


def test_workers_that_may_have_a_gpu_are_predicted_with_it_and_so_does_the_router() -> None:
    mixed_section = {"replicas": 1, "device": "cuda", "pipeline_parallel": 2}
    config = deployment({"decode": {"device": "cpu"}, "mixed": mixed_section})
    launch = Launch(config=config, gpu="h200", cores=FOUR)
    prefill, decode, mixed = worker_configs(launch)
    assert device_of(prefill) == device_of(mixed) == hardware("h200")
    assert decode.hardware == ""
    router = router_config(launch)
    assert router.devices == {WorkerRole.PREFILL: hardware("h200"), WorkerRole.MIXED: hardware("h200")}
    assert from_json(RouterProcessConfig, to_json(router), "it") == router
    emulated = worker_configs(replace(launch, emulate="l4"))
    assert {config.hardware for config in emulated} == {""}


def test_without_a_profile_the_catalogue_is_asked() -> None:
    launch = Launch(config=deployment({}), emulate="h100", cores=FOUR)
    assert {config.hardware for config in worker_configs(launch)} == {""}
    assert router_config(launch).devices == {}


def test_the_command_to_try_is_one_that_the_model_serves() -> None:
    assert "/v1/chat/completions -H" in curl_command("http://h:1", "m", False)
    command = curl_command("http://h:1", "m", False, has_chat=False)
    assert "http://h:1/v1/completions -H" in command
    assert '"prompt": "' in command
