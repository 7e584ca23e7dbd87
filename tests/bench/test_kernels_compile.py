"""Every kernel of Triton as compiled for a Hopper GPU, which need not be here."""

from __future__ import annotations

import pytest
import torch

from pdserve.bench.kernels_compile import (
    MAX_SHARED_BYTES,
    Launch,
    compile_launch,
    compiled_kernels,
    launches,
    launches_of_a_step,
    product_launch,
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


@pytest.mark.parametrize("is_int4", [False, True])
def test_the_number_of_tokens_needs_no_other_kernels(is_int4: bool) -> None:
    fewer, more = (compiled_kernels(product_launch(torch.bfloat16, num_tokens, 4, is_int4)) for num_tokens in (17, 32))
    assert len(fewer) == 2
    assert all(kernel is other for kernel, other in zip(fewer, more, strict=True))
