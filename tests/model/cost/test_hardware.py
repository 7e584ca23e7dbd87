"""The hardware catalogue: names, and that each figure says where it comes from."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import fields, replace

import pytest

from pdserve.contracts.precision import Precision
from pdserve.model.config.shape import ModelShape
from pdserve.model.cost.cost_model import CostModel
from pdserve.model.cost.hardware import HARDWARE_NAMES, Hardware, catalogue_name, hardware, slowed
from pdserve.model.cost.hardware_catalogue import ALIASES, DRIVER_NAMES
from tests.model.published_configs import LLAMA_31_8B


@pytest.mark.parametrize("name", HARDWARE_NAMES)
def test_every_figure_has_a_source(name: str) -> None:
    assert hardware(name).name == name
    figures = {field.name for field in fields(Hardware)} - {"name", "sources", "measured"}
    assert set(hardware(name).sources) == figures
    assert all(hardware(name).sources.values())


@pytest.mark.parametrize("name", HARDWARE_NAMES)
def test_figures_are_sane(name: str) -> None:
    machine = hardware(name)
    assert 0 < machine.memory_efficiency <= 1
    assert 0 < machine.decode_attention_efficiency <= 1
    assert 0 < machine.link_efficiency <= 1
    assert 0 < machine.bandwidth <= machine.memory_bandwidth
    assert machine.peak("float32") <= machine.peak("bfloat16") == machine.peak("float16")
    assert 0 < machine.network_bandwidth < machine.link_bandwidth < machine.memory_bandwidth
    assert machine.memory_reserve_bytes < machine.memory_bytes / 4
    assert machine.price_per_hour_usd is None or 0 < machine.price_per_hour_usd < 20


def test_figures_of_known_devices() -> None:
    h100, l4 = hardware("h100"), hardware("l4")
    assert (h100.peak("bfloat16"), h100.peak("float8"), h100.memory_bytes) == (989e12, 1979e12, 80 * 10**9)
    assert (h100.memory_bandwidth, h100.link_bandwidth, h100.network_bandwidth) == (3.35e12, 450e9, 50e9)
    assert (l4.memory_bandwidth, l4.link_bandwidth) == (300e9, 32e9)
    assert l4.link_latency_s > h100.link_latency_s
    assert "float8" not in hardware("a100").peak_flops


@pytest.mark.parametrize("name", ["h100", "H100", "H100-SXM", "h100-sxm"])
def test_names_are_taken_in_any_case_and_by_alias(name: str) -> None:
    assert hardware(name).name == "h100-sxm"


def test_every_alias_names_a_device() -> None:
    assert {hardware(alias).name for alias in ALIASES} <= set(HARDWARE_NAMES)


@pytest.mark.parametrize(
    ("driver_name", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb-sxm"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb-sxm"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb-pcie"),
        ("NVIDIA A100-SXM-80GB", "a100-80gb-sxm"),
        ("NVIDIA A100-SXM-64GB", ""),
        ("NVIDIA H200 NVL", "h200-nvl"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", ""),
        ("NVIDIA GeForce RTX 4090 D", ""),
        ("NVIDIA GH200 480GB", ""),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", ""),
        ("Tesla T4", ""),
    ],
)
def test_gpus_are_known_by_what_their_driver_calls_them(driver_name: str, name: str) -> None:
    assert catalogue_name(driver_name) == name


def test_every_driver_s_name_is_of_a_device() -> None:
    assert {name for _, name in DRIVER_NAMES} <= set(HARDWARE_NAMES)


def test_an_unknown_name_lists_the_known_ones_nearest_first() -> None:
    with pytest.raises(ValueError, match=r"unknown hardware 'h10-sxm'; use one of h100-sxm, .*cpu"):
        hardware("h10-sxm")
    with pytest.raises(ValueError, match=r"use one of cpu, "):
        hardware("cpus")
    with pytest.raises(ValueError, match=r"use one of mine, "):
        hardware("mined", added={"mine": hardware("l4")})


def test_a_users_device_comes_first() -> None:
    mine = replace(hardware("h100"), memory_bytes=1)
    assert hardware("H100", added={"h100-sxm": mine}) is mine
    assert hardware("h100", added={"h100": mine}) is mine
    assert hardware("h200", added={"h100": mine}) is hardware("h200")


def test_cpu_figures_grow_with_cores_until_the_socket_is_full() -> None:
    one, two, four = (hardware("cpu", num_cores=n) for n in (1, 2, 4))
    assert four.peak("float32") == 4 * one.peak("float32")
    assert four.memory_bytes == 4 * one.memory_bytes
    assert one.bandwidth < two.bandwidth == four.bandwidth < 2 * one.bandwidth


def test_a_dtype_without_a_figure_is_refused() -> None:
    with pytest.raises(ValueError, match="cpu has no figure for 'int4'; use one of float32"):
        hardware("cpu").peak("int4")


def test_float8_is_read_by_gpus_that_have_it_and_by_cpus() -> None:
    for name in ("h100", "l4", "cpu"):
        hardware(name).check_reads("float8_e4m3fn")
    hardware("a100").check_reads("int8")
    with pytest.raises(ValueError, match="a10 has no float8; use kv_dtype int8"):
        hardware("a10").check_reads("float8_e4m3fn")


def test_a_device_can_be_a_key_and_go_to_another_process() -> None:
    device = hardware("h100")
    assert {device: 1}[replace(device)] == 1
    assert pickle.loads(pickle.dumps(device)) == device


SHAPE = ModelShape.from_hf_config(LLAMA_31_8B)


@pytest.mark.parametrize("time_scale", [0.25, 7.0])
@pytest.mark.parametrize("tensor_parallel", [1, 4])
def test_all_that_lasts_lasts_so_many_times_as_long(time_scale: float, tensor_parallel: int) -> None:
    device = hardware("h100-sxm")
    real, slow = (
        CostModel(SHAPE, each, Precision(dtype="bfloat16"), tensor_parallel)
        for each in (device, slowed(device, time_scale))
    )
    durations: list[Callable[[CostModel], float]] = [
        lambda cost: cost.step_s([(500, 0), (1, 3000)]),
        lambda cost: cost.prefill_s(2048, 512),
        lambda cost: cost.decode_s(64, 64000),
        lambda cost: cost.decode_run_s(64, 64000)[1],
        lambda cost: cost.mixed_s(256, 0, 32, 30000),
        lambda cost: cost.transfer_s(1000, same_host=True),
        lambda cost: cost.transfer_s(1000, same_host=False),
        lambda cost: cost.swap_s(1000),
    ]
    for seconds in durations:
        assert seconds(slow) == pytest.approx(time_scale * seconds(real))
    assert slow.max_kv_blocks(16) == real.max_kv_blocks(16)


def test_a_pull_between_two_devices_without_a_switch_has_one_of_their_links() -> None:
    precision = Precision(dtype="bfloat16")
    names = ("mi300x", "h100-sxm")
    mi300x, h100 = (CostModel(SHAPE, hardware(name), precision, transport="nccl") for name in names)
    num_bytes = 8000 * h100.kv_bytes_per_token
    assert mi300x.transfer_s(8000, same_host=True) == pytest.approx(num_bytes / (0.6 * 64e9))
    assert h100.transfer_s(8000, same_host=True) == pytest.approx(num_bytes / (0.6 * 450e9))
