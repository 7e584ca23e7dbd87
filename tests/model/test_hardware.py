"""The hardware catalogue: names, and that each figure says where it comes from."""

from __future__ import annotations

from dataclasses import fields

import pytest

from pdserve.model.hardware import HARDWARE_NAMES, Hardware, hardware


@pytest.mark.parametrize("name", HARDWARE_NAMES)
def test_every_figure_has_a_source(name: str) -> None:
    assert hardware(name).name == name
    assert set(hardware(name).sources) == {field.name for field in fields(Hardware)} - {"name", "sources"}


@pytest.mark.parametrize("name", HARDWARE_NAMES)
def test_figures_are_sane(name: str) -> None:
    machine = hardware(name)
    assert 0 < machine.compute_efficiency <= 1
    assert 0 < machine.memory_efficiency <= 1
    assert 0 < machine.bandwidth <= machine.memory_bandwidth
    assert 0 < machine.flops("float32") <= machine.peak_flops["float32"]
    assert 0 < machine.network_bandwidth < machine.link_bandwidth < machine.memory_bandwidth


@pytest.mark.parametrize("name", ["h100", "H100", "H100-SXM", "h100-sxm"])
def test_names_are_taken_in_any_case_and_by_alias(name: str) -> None:
    assert hardware(name).name == "h100-sxm"


def test_an_unknown_name_lists_the_known_ones_nearest_first() -> None:
    with pytest.raises(ValueError, match=r"unknown hardware 'h10-sxm'; use one of h100-sxm, cpu"):
        hardware("h10-sxm")
    with pytest.raises(ValueError, match=r"use one of cpu, h100-sxm"):
        hardware("cpus")


def test_cpu_figures_grow_with_cores_until_the_socket_is_full() -> None:
    one, two, four = (hardware("cpu", num_cores=n) for n in (1, 2, 4))
    assert four.flops("float32") == 4 * one.flops("float32")
    assert four.memory_bytes == 4 * one.memory_bytes
    assert one.bandwidth < two.bandwidth == four.bandwidth < 2 * one.bandwidth


def test_a_dtype_without_a_figure_is_refused() -> None:
    with pytest.raises(ValueError, match="cpu has no figure for 'int4'; use one of float32"):
        hardware("cpu").flops("int4")
