from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pdserve.kernels.cpu.threads import use_threads


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    """The models of these tests are too small to share, and threads that spin on busy cores are far slower."""
    num_threads = torch.get_num_threads()
    use_threads(1)
    yield
    torch.set_num_threads(num_threads)
