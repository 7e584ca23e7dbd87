"""Dataclasses survive JSON, and what is not one of them is named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Annotated, Any

import pytest

from pdserve.contracts.codec import between, from_json, from_plain, to_json, to_plain
from pdserve.contracts.deployment import DeploymentConfig, PhaseConfig, RouterConfig
from pdserve.contracts.errors import ConfigError
from pdserve.contracts.precision import Precision
from pdserve.contracts.worker_config import WorkerConfig, WorkerEndpoint, WorkerRole
from pdserve.kv_transfer.transfer_client import TransferConfig
from pdserve.model.cost.hardware import HARDWARE_NAMES, Hardware, Measured, hardware
from pdserve.router.process_config import RouterProcessConfig
from tests.kv_transfer.peer import EPOCH, LAYOUT

MEASURED = Measured(
    date="2026-11-21",
    model="tiny float32",
    step_tokens=(1, 2048),
    batch_size=(1, 64),
    context_tokens=(0, 4095),
    errors={"prefill": 0.04},
)
WORKER = WorkerConfig(
    worker_id="decode-1",
    role=WorkerRole.DECODE,
    model_path="/m",
    precision=Precision(dtype="bfloat16"),
    cpu_cores=(2, 3),
    core_sets=((0, 1), (), (2, 3)),
    emulate="h100-sxm",
    time_scale=0.5,
)
TRANSFER = TransferConfig(
    layout=LAYOUT,
    worker_epoch=EPOCH,
    host="127.0.0.1",
    cluster_token="geheim ü",
    transport="auto",
    cpu_cores=(0, 3),
    parent_pid=12,
)
ROUTER = RouterProcessConfig(
    deployment=DeploymentConfig(router=RouterConfig(port=1)),
    cluster_token="t",
    devices={WorkerRole.MIXED: hardware("cpu")},
)


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, kw_only=True)
class Size:
    width: Annotated[int, between(1, 9)] = 3
    height: int | None = None


@dataclass(frozen=True, kw_only=True)
class Door:
    name: str
    colour: Colour = Colour.RED
    size: Size = field(default_factory=lambda: Size(width=5))
    hinges: tuple[Size, ...] = ()
    span: tuple[int, float] = (1, 2.0)
    prices: Mapping[Colour, float] = field(default_factory=dict)
    is_open: bool = False
    label: str | int = ""
    notes: Any = None


@pytest.mark.parametrize(
    "value",
    [
        WORKER,
        WorkerEndpoint(worker_id="p", role=WorkerRole.PREFILL, address="h:1", epoch=2**63 - 1),
        TRANSFER,
        ROUTER,
        DeploymentConfig(decode=PhaseConfig(swap_memory=0, resources={"a": 1.5})),
        *(replace(hardware(name, num_cores=3), measured=MEASURED) for name in HARDWARE_NAMES),
        Door(name="d", hinges=(Size(), Size(height=2)), prices={Colour.BLUE: 1.0}, label=3, notes={"a": [1]}),
    ],
)
def test_configuration_survives_json(value: Any) -> None:
    assert from_json(type(value), to_json(value), "it") == value


def test_absent_keys_are_defaults_and_those_of_a_section_the_defaults_of_the_whole() -> None:
    minimal = from_plain(WorkerConfig, {"worker_id": "w", "role": "mixed", "model_path": "m"}, "it")
    assert minimal == WorkerConfig(worker_id="w", role=WorkerRole.MIXED, model_path="m")
    assert from_plain(Door, {"name": "d", "size": {"height": 1}}, "it").size == Size(width=5, height=1)
    assert from_plain(Door, {"name": "d", "size": None}, "it").size == Size(width=5)


def test_whole_numbers_are_numbers_and_the_other_way_round() -> None:
    door = from_plain(Door, {"name": "d", "span": [2e3, 1], "size": {"width": 4.0}}, "it")
    assert (door.span, door.size.width) == ((2000, 1.0), 4)
    assert list(map(type, (*door.span, door.size.width))) == [int, float, int]


@pytest.mark.parametrize(
    ("text", "said", "key"),
    [
        ("{", "it is not JSON: ", ""),
        ("[]", r"it holds \[\] \(list\); write keys and values", ""),
        ("{}", "it lacks name; write it", ""),
        ('{"name": 1}', r"name is 1 \(int\); write text", "name"),
        ('{"naem": ""}', r"unknown key 'naem' in it; did you mean 'name'\? \(valid: name, colour, ", "naem"),
        ('{"size": {"depth": 1}}', r"unknown key 'depth' in size; did you mean 'width'\?", "size.depth"),
        ('{"size": 3}', r"size holds 3 \(int\); write keys and values", "size"),
        ('{"size": {"width": 10}}', "size.width is 10; write a whole number from 1 to 9", "size.width"),
        ('{"size": {"width": "x"}}', r"size.width is 'x' \(str\); write a whole number from 1 to 9", "size.width"),
        ('{"size": {"width": 1.5}}', r"size.width is 1.5 \(float\); write", "size.width"),
        ('{"size": {"height": true}}', r"size.height is True \(bool\); write a whole number", "size.height"),
        ('{"colour": "green"}', "colour is 'green'; write one of red, blue", "colour"),
        ('{"colour": []}', "colour is .*; write one of red, blue", "colour"),
        ('{"hinges": [{}, {"width": 0}]}', r"hinges\[1\].width is 0; write", "hinges[1].width"),
        ('{"hinges": "no"}', r"hinges is 'no' \(str\); write a list", "hinges"),
        ('{"span": [1]}', r"span is \[1\]; write 2 values in brackets", "span"),
        ('{"span": [1, "x"]}', r"span\[1\] is 'x' \(str\); write a number", "span[1]"),
        ('{"prices": {"green": 1}}', "prices is 'green'; write one of red, blue", "prices"),
        ('{"prices": {"red": null}}', "prices.red is empty; write a number", "prices.red"),
        ('{"prices": []}', "prices is .*; write keys and values", "prices"),
        ('{"is_open": 1}', r"is_open is 1 \(int\); write true or false", "is_open"),
        ('{"label": true}', r"label is True \(bool\); write text or a whole number", "label"),
    ],
)
def test_mistakes_are_named_with_their_key_and_a_remedy(text: str, said: str, key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{said}") as caught:
        from_json(Door, text, "it")
    assert caught.value.key == key
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_size", 0),
        ("max_batch_tokens", 0),
        ("max_batch_size", 0),
        ("device", "tpu"),
        ("speculation", "luck"),
        ("transport", "rdma"),
    ],
)
def test_a_worker_reads_no_limits_or_settings_that_it_does_not_know(key: str, value: object) -> None:
    plain = {"worker_id": "w", "role": "mixed", "model_path": "m", key: value}
    with pytest.raises(ConfigError, match=f"^{key} is .*; write "):
        from_plain(WorkerConfig, plain, "it")


def test_errors_of_a_dataclass_itself_get_its_key() -> None:
    device = to_plain(hardware("cpu"))
    device["compute_efficiency"]["points"] = [[1, 2.0]]
    with pytest.raises(ConfigError, match=r"^compute_efficiency: \(1, 2.0\) is no point") as caught:
        from_json(Hardware, json.dumps(device), "a device")
    assert caught.value.key == "compute_efficiency"
