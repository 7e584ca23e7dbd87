"""A file of devices: what is read, what is refused and how, and that what is written is read again."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.contracts.errors import ConfigError
from pdserve.model.cost.curve import Curve
from pdserve.model.cost.hardware import HARDWARE_NAMES, Hardware, Measured, hardware
from pdserve.planner.hardware_file import read_hardware_file, write_hardware_file


def read(tmp_path: Path, text: str) -> dict[str, Hardware]:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return read_hardware_file(path)


def test_a_base_gives_what_is_left_out(tmp_path: Path) -> None:
    devices = read(
        tmp_path, "devices:\n  Mine:\n    base: L40S\n    link_bandwidth: 28e9\n    price_per_hour_usd: null\n"
    )
    expected = dataclasses.replace(
        hardware("l40s"),
        name="mine",
        link_bandwidth=28e9,
        price_per_hour_usd=None,
        sources={**hardware("l40s").sources, "link_bandwidth": "mine.yaml", "price_per_hour_usd": "mine.yaml"},
    )
    assert devices == {"mine": expected}
    assert hardware("MINE", added=devices) == expected


def test_a_name_of_the_catalogue_changes_that_device(tmp_path: Path) -> None:
    devices = read(tmp_path, "devices: {h100: {memory_bytes: 64e9, sources: {memory_bytes: half of it}}}")
    assert hardware("h100", added=devices) == hardware("h100-sxm", added=devices) == devices["h100-sxm"]
    assert devices["h100-sxm"].memory_bytes == 64 * 10**9
    assert devices["h100-sxm"].sources["memory_bytes"] == "half of it"
    assert devices["h100-sxm"].memory_bandwidth == hardware("h100").memory_bandwidth


def test_a_device_above_is_a_base_and_cpu_has_cores(tmp_path: Path) -> None:
    text = "devices:\n  a: {base: cpu, num_cores: 4, compute_efficiency: 0.5}\n  b: {base: a, step_overhead_s: 0}\n"
    devices = read(tmp_path, text)
    assert devices["b"].peak("float32") == hardware("cpu", num_cores=4).peak("float32")
    assert devices["b"].compute_efficiency == Curve.constant(0.5)
    assert devices["b"].step_overhead_s == 0


def test_what_was_measured_is_read(tmp_path: Path) -> None:
    text = """
devices:
  this-machine:
    base: cpu
    compute_efficiency: [[1, 0.2], [64, 0.7]]
    measured: {date: 2026-11-21, model: tiny, step_tokens: [1, 2048], batch_size: [1, 64], context_tokens: [0, 4096],
               errors: {prefill: 0.04}}
"""
    device = read(tmp_path, text)["this-machine"]
    assert device.compute_efficiency == Curve(((1, 0.2), (64, 0.7)))
    assert device.measured == Measured(
        date="2026-11-21",
        model="tiny",
        step_tokens=(1, 2048),
        batch_size=(1, 64),
        context_tokens=(0, 4096),
        errors={"prefill": 0.04},
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty; write devices:"),
        ("devices: [", "is not valid YAML"),
        ("device: {}", r":1: unknown key 'device' in the hardware file; did you mean 'devices'\?"),
        ("devices: 3", r":1: devices is 3 \(int\); write keys and values"),
        (
            "devices:\n  mine:\n    base: h100\n    memory_bandwith: 1e12",
            r":4: unknown key 'memory_bandwith' in devices.mine; did you mean 'memory_bandwidth'\? \(valid: .*, base, ",
        ),
        ("devices: {mine: {base: h1000}}", "devices.mine.base: unknown hardware 'h1000'; use one of h100-sxm"),
        ("devices: {mine: {memory_bytes: 1e9}}", ":1: devices.mine lacks peak_flops, .*; write them, or give a base"),
        ("devices: {mine: {base: h100, num_cores: 2}}", "num_cores is of base: cpu; leave it out"),
        (
            "devices: {h100: {memory_bytes: lots}}",
            r"devices.h100.memory_bytes is 'lots' \(str\); write a number above 0",
        ),
        ("devices: {h100: {memory_bytes: 0}}", "memory_bytes is 0; write a number above 0"),
        ("devices: {h100: {memory_bytes: 1.5}}", "memory_bytes is 1.5 .*; write a number above 0"),
        ("devices: {h100: {link_bandwidth: .inf}}", "link_bandwidth is inf; write a number above 0"),
        ("devices: {h100: {link_bandwidth: -1}}", "link_bandwidth is -1.0; write a number above 0"),
        ("devices: {h100: {step_overhead_s: -1}}", "step_overhead_s is -1.0; write 0 or a number above it"),
        ("devices: {h100: {memory_efficiency: 90}}", "memory_efficiency is 90.0; write a share above 0 and up to 1"),
        ("devices: {h100: {compute_efficiency: [0.5]}}", r"compute_efficiency\[0\] is 0.5 .*\[tokens, share\] pairs"),
        ("devices: {h100: {compute_efficiency: [[64, 0.1], [65, 1]]}}", "would do more work in less time"),
        (
            "devices: {h100: {peak_flops: {float32: fast}}}",
            "devices.h100.peak_flops.float32 is 'fast' .*; write a number above 0",
        ),
        ("devices: {h100: {pipeline_depth: 3}}", "pipeline_depth is 3; write a whole number from 1 to 2"),
        (
            "devices: {h100: {sources: {memory: x}}}",
            "unknown key 'memory' in devices.h100.sources; did you mean 'memory_bytes'",
        ),
        (
            "devices: {h100: {measured: {date: x}}}",
            "measured lacks model, step_tokens, batch_size, context_tokens; write them",
        ),
        ("devices: {h100: {}, H100-SXM: {}}", "a device of the name h100-sxm stands above"),
        ("devices: {mine: {base: h100, base: h200}}", "key 'base' is written twice.*line 1"),
        ("devices: {[1]: {}}", "a key is not text"),
    ],
)
def test_what_makes_no_device_is_refused_with_file_line_and_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as failure:
        read(tmp_path, text)
    assert "mine.yaml" in str(failure.value)
    assert "\n" not in str(failure.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none\.yaml: No such file"):
        read_hardware_file(tmp_path / "none.yaml")


def test_the_catalogue_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "all.yaml"
    devices = {name: hardware(name) for name in HARDWARE_NAMES}
    write_hardware_file(path, devices.values())
    assert read_hardware_file(path) == devices


@given(
    share=st.floats(1e-3, 1),
    seconds=st.floats(0, 1),
    rate=st.floats(1, 1e16),
    measured=st.one_of(
        st.none(),
        st.builds(
            Measured,
            date=st.just("2026-11-21"),
            model=st.sampled_from(["tiny bfloat16", "null", "3", "yes: no"]),
            step_tokens=st.just((1, 2)),
            batch_size=st.just((3, 4)),
            context_tokens=st.just((0, 10**7)),
            errors=st.dictionaries(st.sampled_from(["prefill", "decode"]), st.floats(0, 2)),
        ),
    ),
)
def test_any_device_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, share: float, seconds: float, rate: float, measured: Measured | None
) -> None:
    device = dataclasses.replace(
        hardware("cpu", num_cores=3),
        name="mine",
        memory_efficiency=share,
        compute_efficiency=Curve(((1, share / 2), (10**6, share))),
        step_overhead_s=seconds,
        peak_flops={"float32": rate},
        measured=measured,
    )
    path = tmp_path_factory.mktemp("file") / "mine.yaml"
    write_hardware_file(path, [device])
    assert read_hardware_file(path) == {"mine": device}
