"""Every kernel of Triton as compiled for a Hopper GPU, which need not be here."""

from __future__ import annotations

import pytest

from pdserve.bench.kernels_compile import MAX_SHARED_BYTES, Launch, compile_launch, launches


@pytest.mark.parametrize("launch", launches(), ids=lambda launch: launch.name)
def test_a_launch_fits_the_gpu(launch: Launch) -> None:
    kernels = compile_launch(launch)
    assert kernels
    for kernel in kernels:
        assert kernel.spilled_bytes == 0
        assert kernel.shared_bytes <= MAX_SHARED_BYTES
    assert any(kernel.has_wgmma for kernel in kernels) == launch.is_wgmma
