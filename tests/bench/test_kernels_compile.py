"""Every kernel of Triton as compiled for a Hopper GPU, which need not be here."""

from __future__ import annotations

import pytest

from pdserve.bench.kernels_compile import (
    MAX_SHARED_BYTES,
    Launch,
    compile_launch,
    compiled_kernels,
    launches,
    launches_of_a_step,
)


@pytest.mark.parametrize("launch", launches(), ids=lambda launch: launch.name)
def test_a_launch_fits_the_gpu(launch: Launch) -> None:
    kernels = compile_launch(launch)
    assert kernels
    for kernel in kernels:
        assert kernel.spilled_bytes == 0
        assert kernel.shared_bytes <= MAX_SHARED_BYTES
    assert any(kernel.has_wgmma for kernel in kernels) == launch.is_wgmma


def test_the_next_step_needs_no_other_kernels() -> None:
    """A batch of another shape moves what is told of it to other addresses."""
    steps = [
        [kernel for launch in launches_of_a_step(new_tokens) for kernel in compiled_kernels(launch)]
        for new_tokens in ((3,), (3, 3), (3, 3, 3, 1), (3,) + (1,) * 15)
    ]
    for step in steps[1:]:
        assert all(kernel is first for kernel, first in zip(step, steps[0], strict=True))
