from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def nan_workspaces() -> Iterator[None]:
    """What `torch.empty` gives is filled with NaN, or the largest of integers."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
