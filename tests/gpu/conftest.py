"""Files of this folder run in processes of their own, which `tests.gpu.test_on_gpu` starts: a wild pointer on a GPU
ends all that its process has there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.gpu.device import DEVICE, IS_REHEARSED
from tests.gpu.on_gpu import FILES, IS_ON_GPU

if IS_REHEARSED:
    from tests.kernels import triton_interpreter

    triton_interpreter.install()

if not (IS_ON_GPU or IS_REHEARSED):
    collect_ignore = [path.name for path in FILES]


@pytest.fixture(autouse=True)
def _device_survives(request: pytest.FixtureRequest) -> Iterator[None]:
    """Once the device is lost to this process, no further test could pass."""
    yield
    if DEVICE.type == "cuda":
        try:
            torch.cuda.synchronize(DEVICE)
        except RuntimeError as error:
            request.session.shouldstop = f"the device is lost: {error}"
