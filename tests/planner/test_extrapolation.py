from __future__ import annotations

from dataclasses import replace

from pdserve.contracts.worker_config import WorkerRole
from pdserve.model.cost.hardware import Measured, hardware
from pdserve.planner.extrapolation import extrapolations
from pdserve.planner.layout import Layout, Pool
from tests.planner.stand_ins import LLAMA_3_8B

MODEL = replace(LLAMA_3_8B, name="llama")
DEVICE = replace(
    hardware("h100"),
    name="mine",
    measured=Measured(
        date="2026-11-21",
        model="llama bfloat16",
        step_tokens=(1, 2048),
        batch_size=(1, 256),
        context_tokens=(0, 4095),
    ),
)
LAYOUT = Layout(mixed=Pool(role=WorkerRole.MIXED, replicas=2, hardware=DEVICE))


def test_what_was_measured_is_not_flagged() -> None:
    assert extrapolations(MODEL, LAYOUT, 4096) == []


def test_the_catalogue_makes_no_claims() -> None:
    layout = Layout(mixed=Pool(role=WorkerRole.MIXED, replicas=2, hardware=hardware("h100")))
    assert extrapolations(MODEL, layout, 100_000) == []


def test_each_way_beyond_is_named_once() -> None:
    pool = Pool(
        role=WorkerRole.PREFILL,
        replicas=1,
        hardware=DEVICE,
        max_batch_tokens=4096,
        max_batch_size=300,
        tensor_parallel=2,
    )
    layout = Layout(prefill=pool, decode=replace(pool, role=WorkerRole.DECODE))
    found = extrapolations(replace(MODEL, precision=replace(MODEL.precision, quantization="int8")), layout, 5000)
    assert len(found) == 5
    for number, text in enumerate(
        ("with llama bfloat16 and", "up to 4096 may", "up to 300 may", "4999", "single device")
    ):
        assert text in found[number]
        assert found[number].startswith("mine was measured")
