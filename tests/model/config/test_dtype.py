"""The dtype that a checkpoint's configuration names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdserve.model.config.dtype import checkpoint_dtype


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"torch_dtype": "torch.bfloat16"}, "bfloat16"),
        ({"text_config": {"dtype": "bfloat16"}}, "bfloat16"),
        ({"dtype": None, "text_config": {"torch_dtype": "float16"}}, "float16"),
        ({}, "float32"),
        ([], "float32"),
    ],
)
def test_it_is_named_in_several_ways(tmp_path: Path, config: object, dtype: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert checkpoint_dtype(tmp_path) == checkpoint_dtype(tmp_path / "config.json") == dtype


def test_a_missing_or_broken_file_is_for_others_to_report(tmp_path: Path) -> None:
    assert checkpoint_dtype(tmp_path / "absent") == "float32"
    (tmp_path / "config.json").write_text("{")
    assert checkpoint_dtype(tmp_path) == "float32"


def test_others_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"dtype": "float64"}')
    with pytest.raises(ValueError, match=r"dtype 'float64' is not served; set model.dtype to one of float32, bfloat16"):
        checkpoint_dtype(tmp_path)
