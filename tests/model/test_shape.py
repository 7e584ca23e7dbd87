from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from pdserve.model.config import DecoderConfig
from pdserve.model.shape import ModelShape
from tests.model.checkpoints import FAMILIES, VARIANTS, write_checkpoint
from tests.model.published_configs import LLAMA_31_8B, NUM_PARAMETERS


@pytest.mark.parametrize(("config", "num_parameters"), NUM_PARAMETERS, ids=lambda value: str(value)[:40])
def test_parameters_of_published_models(config: dict[str, Any], num_parameters: int) -> None:
    assert ModelShape.from_hf_config(config).num_parameters == num_parameters


@pytest.mark.parametrize(
    "changes", [{"model_type": name, **FAMILIES[name]} for name in FAMILIES] + [*VARIANTS.values()]
)
def test_parameters_are_those_of_the_checkpoint(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = write_checkpoint(tmp_path, **changes)
    with safe_open(folder / "model.safetensors", framework="np") as file:
        stored = sum(file.get_tensor(name).size for name in file.keys())  # noqa: SIM118
    assert DecoderConfig.from_folder(folder).num_parameters == stored


def test_an_unknown_architecture_counts_as_llamas() -> None:
    stranger = {**LLAMA_31_8B, "architectures": ["StrangerForCausalLM"]}
    assert ModelShape.from_hf_config(stranger) == ModelShape.from_hf_config(LLAMA_31_8B)


@pytest.mark.parametrize("value", [None, 0, "32", -1, True])
def test_a_config_without_a_count_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="num_hidden_layers must be a positive integer"):
        ModelShape.from_hf_config({**LLAMA_31_8B, "num_hidden_layers": value})
