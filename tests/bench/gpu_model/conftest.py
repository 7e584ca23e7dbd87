from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pdserve.bench.gpu_model.checkpoint import TINY, write_weights


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in float32."""
    return write_weights(tmp_path_factory.mktemp("tiny"), TINY, "float32", torch.device("cpu"))
