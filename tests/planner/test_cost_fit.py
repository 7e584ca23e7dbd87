"""A fit finds the figures of a device whose steps it was given, and is honest about those that it was not given."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import log
from pathlib import Path

import numpy as np
import pytest

from pdserve.contracts.precision import Precision
from pdserve.model.config.shape import ModelShape
from pdserve.model.cost.cost_model import CostModel
from pdserve.model.cost.curve import Curve
from pdserve.model.cost.hardware import Hardware, hardware
from pdserve.model.cost.step_grid import GridLimits, StepKind, step_grid
from pdserve.planner import cost_fit
from pdserve.planner.cost_fit import CostFit, TimedStep, fit_hardware
from pdserve.planner.hardware_file import read_hardware_file, write_hardware_file
from pdserve.planner.layout import PlannedModel

MODEL = PlannedModel(
    name="small",
    precision=Precision(dtype="float32"),
    shape=ModelShape(
        num_layers=8,
        hidden_size=512,
        intermediate_size=1408,
        num_heads=8,
        num_kv_heads=4,
        head_dim=64,
        vocab_size=1000,
    ),
)
BASE = hardware("cpu", num_cores=2)
TRUE = replace(
    BASE,
    compute_efficiency=Curve(((1, 0.2), (64, 0.5), (1024, 0.7))),
    prefill_attention_efficiency=Curve(((16, 0.1), (1024, 0.4))),
    memory_efficiency=0.6,
    decode_attention_efficiency=0.2,
    step_overhead_s=1e-3,
    layer_overhead_s=1e-4,
    row_overhead_s=5e-5,
)
STEPS = step_grid(GridLimits(max_model_len=4096, num_kv_blocks=10_000))
NOISE = 0.03


def timed(device: Hardware, noise: float = NOISE) -> list[TimedStep]:
    """What a profile of ``device`` would give."""
    random = np.random.default_rng(0)
    result = []
    for num_layers, steps in ((8, STEPS), (1, STEPS[:60:3])):
        cost = CostModel(replace(MODEL.shape, num_layers=num_layers), device, MODEL.precision)
        for step in steps:
            seconds = cost.step_s(step.rows) * float(np.exp(random.normal(0, noise)))
            result.append(TimedStep(step, seconds, num_layers))
    return result


def fit(steps: list[TimedStep], base: Hardware = BASE) -> CostFit:
    return fit_hardware(base, MODEL, steps, date="2026-11-21", source="a made-up device")


def test_figures_are_found() -> None:
    fitted = fit(timed(TRUE)).hardware
    assert fitted.decode_attention_efficiency == pytest.approx(0.2, rel=0.05)
    assert fitted.step_overhead_s == pytest.approx(1e-3, rel=0.15)
    assert fitted.row_overhead_s == pytest.approx(5e-5, rel=0.3)
    assert fitted.compute_efficiency.at(512) == pytest.approx(TRUE.compute_efficiency.at(512), rel=0.1)


@pytest.mark.parametrize("num_layers", [2, 32])
def test_models_of_another_depth_are_predicted(num_layers: int) -> None:
    """Overhead per step and what each layer takes are told apart."""
    fitted = fit(timed(TRUE)).hardware
    shape = replace(MODEL.shape, num_layers=num_layers)
    predicted, true = (CostModel(shape, device, MODEL.precision) for device in (fitted, TRUE))
    for batch_size, context in ((1, 100), (32, 32 * 500)):
        assert predicted.decode_s(batch_size, context) == pytest.approx(true.decode_s(batch_size, context), rel=0.05)


def test_held_out_steps_are_predicted_and_never_seen() -> None:
    steps = timed(TRUE)
    first = fit(steps)
    for kind in StepKind:
        held_out = first.errors(kind)
        assert held_out.num_steps >= 5
        assert held_out.num_steps < first.errors(kind, held_out=False).num_steps
        assert held_out.median < 2 * NOISE
        assert held_out.median <= held_out.p90
        assert first.hardware.measured is not None
        assert first.hardware.measured.errors[kind.value] == pytest.approx(held_out.median, abs=1e-4)
    spoilt = [
        entry._replace(seconds=10 * entry.seconds) if fitted.is_held_out else entry
        for entry, fitted in zip(steps, first.steps, strict=True)
    ]
    second = fit(spoilt)
    assert replace(second.hardware, measured=None) == replace(first.hardware, measured=None)
    assert second.errors(StepKind.DECODE).median == pytest.approx(0.9, abs=0.05)


def test_a_device_that_beats_the_catalogue_gets_higher_peaks() -> None:
    faster = replace(
        TRUE,
        peak_flops={dtype: 20 * flops for dtype, flops in TRUE.peak_flops.items()},
        memory_bandwidth=20 * TRUE.memory_bandwidth,
        step_overhead_s=1e-6,
        layer_overhead_s=1e-6,
        row_overhead_s=1e-7,
    )
    result = fit(timed(faster))
    assert result.hardware.peak("float32") > 5 * BASE.peak("float32")
    assert max(result.errors(kind).median for kind in StepKind) < 3 * NOISE


def test_experts_that_a_step_does_not_read_tell_nothing_of_the_bandwidth() -> None:
    shape = replace(MODEL.shape, num_experts=64, experts_per_token=2, intermediate_size=512)
    cost = CostModel(shape, TRUE, MODEL.precision)
    steps = [TimedStep(step, cost.step_s(step.rows), 8) for step in STEPS]
    device = cost_fit._with_headroom(BASE, replace(MODEL, shape=shape), steps)
    assert device.memory_bandwidth == BASE.memory_bandwidth
    assert device.peak_flops == BASE.peak_flops
    wide = replace(BASE, peak_flops={"float32": BASE.peak("float32") / 100})
    # In the longest step, of whose operations 2 of 64 experts are a part.
    assert cost_fit._with_headroom(wide, replace(MODEL, shape=shape), steps).peak("float32") > wide.peak("float32")


def test_curves_keep_to_what_is_possible() -> None:
    """Times that make no sense: more tokens take less time."""
    steps = [entry._replace(seconds=1.0 / entry.step.num_new) for entry in timed(TRUE)]
    curve = fit(steps).hardware.compute_efficiency
    for (low, low_share), (high, high_share) in pairwise(curve.points):
        assert high_share - low_share <= low_share * log(high / low)


def test_the_file_says_how_far_it_reaches(tmp_path: Path) -> None:
    fitted = fit(timed(TRUE)).hardware
    assert fitted.measured is not None
    assert fitted.measured.date == "2026-11-21"
    assert fitted.measured.step_tokens == (1, 2048)
    assert fitted.measured.batch_size == (1, 256)
    assert fitted.measured.context_tokens == (0, 4095)
    assert "a made-up device" in fitted.sources["decode_attention_efficiency"]
    assert fitted.sources["memory_bytes"] == BASE.sources["memory_bytes"]
    write_hardware_file(tmp_path / "hardware.yaml", [fitted])
    assert read_hardware_file(tmp_path / "hardware.yaml")[fitted.name] == fitted
