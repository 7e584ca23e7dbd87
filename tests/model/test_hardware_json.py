from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pdserve.model.hardware import HARDWARE_NAMES, Measured, hardware
from pdserve.model.hardware_json import hardware_from_json, hardware_to_json

MEASURED = Measured(
    date="2026-11-21",
    model="tiny float32",
    step_tokens=(1, 2048),
    batch_size=(1, 64),
    context_tokens=(0, 4095),
    errors={"prefill": 0.04},
)


@pytest.mark.parametrize("name", HARDWARE_NAMES)
def test_devices_survive_the_way_into_a_process(name: str) -> None:
    device = replace(hardware(name, num_cores=3), measured=MEASURED)
    assert hardware_from_json(hardware_to_json(device)) == device


@pytest.mark.parametrize("text", ["", "[]", "{}", "{", json.dumps({"colour": "red"}), json.dumps({"name": 1})])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no device as JSON"):
        hardware_from_json(text)
