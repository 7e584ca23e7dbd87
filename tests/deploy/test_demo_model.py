from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.contracts.errors import DeployError
from pdserve.deploy import demo_model


def test_an_installation_without_the_demo_model_says_how_to_name_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_model, "DEMO_MODEL", tmp_path / "pdserve-demo")
    with pytest.raises(DeployError, match=r"the demo model is not in .*pdserve-demo; name a model with --model FOLDER"):
        demo_model.demo_model_folder()
