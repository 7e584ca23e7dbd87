"""Every kernel of Triton as compiled for a Hopper GPU, which need not be here, and those that need most for others."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from pdserve.bench.kernels.attention import ATTENTION_KERNELS
from pdserve.bench.kernels_compile import (
    HOPPER,
    MAX_SHARED_BYTES,
    WEIGHT_FORMS,
    Compiled,
    Launch,
    WeightForm,
    attention_launch,
    compile_all,
    compile_launch,
    compiled_kernels,
    experts_launch,
    fits,
    launches,
    product_launch,
    rope_launch,
)


def launches_that_need_most() -> list[Launch]:
    """All but attention by fewer rules than in another launch for the same tensors: that one has its code, and more."""

    def is_part(name: str, other: str) -> bool:
        words, others = name.split(), other.split()
        return words[:5] == others[:5] and set(words[5:]) < set(others[5:]) and "rows" not in others

    names = [launch.name for launch in launches() if "_attention" in launch.name]
    return [launch for launch in launches() if not any(is_part(launch.name, name) for name in names)]


@pytest.mark.parametrize("launch", launches_that_need_most(), ids=lambda launch: launch.name)
def test_a_launch_fits_the_gpu(launch: Launch) -> None:
    kernels = compile_launch(launch)
    assert kernels
    assert all(fits(kernel) for kernel in kernels)
    assert any(kernel.has_wgmma for kernel in kernels) == launch.is_wgmma
    if "_attention" in launch.name and "float32 over" not in launch.name:
        assert kernels[0].num_ahead > 0


@pytest.mark.parametrize("capability", [80, 86, 100, 120])
@pytest.mark.parametrize(("kv_dtype", "head_dim"), [(torch.bfloat16, 128), (torch.int8, 256)], ids=str)
def test_attention_that_needs_most_fits_other_gpus_and_loads_ahead(
    kv_dtype: torch.dtype, head_dim: int, capability: int
) -> None:
    softcap = 50.0 * (head_dim == 256)
    launch = attention_launch("prefill_attention", torch.bfloat16, kv_dtype, head_dim, softcap=softcap)
    (compiled,) = compile_launch(launch, capability)
    assert fits(compiled, capability), compiled
    assert compiled.num_ahead > 0


def launches_of_a_step(new_tokens: tuple[int, ...]) -> list[Launch]:
    """Launches of one model that depend on the batch, of kernels that are compiled above."""
    bf16 = torch.bfloat16
    attention = partial(attention_launch, dtype=bf16, kv_dtype=bf16, head_dim=128, new_tokens=new_tokens, window=4096)
    return [
        *(attention(kernel) for kernel in ATTENTION_KERNELS),
        rope_launch(bf16, bf16, 128, new_tokens),
    ]


def test_the_next_step_needs_no_other_kernels() -> None:
    """A batch of another shape moves what is told of it to other addresses."""
    steps = [
        [kernel for launch in launches_of_a_step(new_tokens) for kernel in compiled_kernels(launch)]
        for new_tokens in ((3,), (3, 3), (3, 3, 3, 1), (3,) + (1,) * 15)
    ]
    for step in steps[1:]:
        assert all(kernel is first for kernel, first in zip(step, steps[0], strict=True))


@pytest.mark.parametrize("num_tokens", [64, 65])
@pytest.mark.parametrize(
    ("capability", "form"),
    [
        (80, WeightForm("int8", 128, has_zeros=True)),
        (80, WeightForm("int4", 64, has_zeros=True)),
        (80, WeightForm("e4m3", 128)),
        (89, WeightForm("e4m3", 128)),
        (80, WeightForm("e2m1", 32)),
        (89, None),
    ],
    ids=str,
)
def test_products_that_need_most_fit_older_gpus(num_tokens: int, capability: int, form: WeightForm | None) -> None:
    """Registers, and shared memory for float weights of experts."""
    if form is None:
        kernels = compile_launch(experts_launch(torch.bfloat16, 2 * num_tokens), capability)
    else:
        kernels = compile_launch(product_launch(torch.bfloat16, num_tokens, 1, form), capability)
    assert kernels
    assert all(fits(kernel, capability) for kernel in kernels), kernels


@pytest.mark.parametrize("capability", [80, 89])
@pytest.mark.parametrize("kernel", ATTENTION_KERNELS)
def test_attention_with_sinks_fits_older_gpus(kernel: str, capability: int) -> None:
    """And a window, without which they need less."""
    launch = attention_launch(kernel, torch.bfloat16, torch.bfloat16, 64, window=128, has_sinks=True)
    kernels = compile_launch(launch, capability)
    assert kernels
    assert all(fits(each, capability) for each in kernels), kernels


@pytest.mark.parametrize("form", WEIGHT_FORMS[:2], ids=lambda form: form.name)
def test_the_number_of_tokens_needs_no_other_kernels(form: WeightForm) -> None:
    fewer, more = (compiled_kernels(product_launch(torch.bfloat16, num_tokens, 4, form)) for num_tokens in (17, 32))
    assert len(fewer) == 2
    assert all(kernel is other for kernel, other in zip(fewer, more, strict=True))


@pytest.mark.parametrize(
    ("spilled_bytes", "shared_bytes", "expected"),
    [(0, MAX_SHARED_BYTES[HOPPER], True), (8, 0, False), (0, MAX_SHARED_BYTES[HOPPER] + 1, False)],
)
def test_what_fits(spilled_bytes: int, shared_bytes: int, expected: bool) -> None:
    assert fits(Compiled(32, spilled_bytes, shared_bytes, has_wgmma=False, num_ahead=0)) == expected


def test_launches_are_printed_a_line_for_each_kernel() -> None:
    some = [launch for launch in launches() if "gates bfloat16" in launch.name]
    lines: list[str] = []
    assert compile_all(some, lines.append) == 0
    assert lines[0].split() == ["launch", "registers", "spilled", "shared", "KiB", "ahead", "wgmma"]
    assert [line.split()[-1] for line in lines[1:]] == ["False"] * 4
    documents: list[str] = []
    assert compile_all(some, documents.append, as_json=True) == 0
    document = json.loads(documents[0])
    assert document["target"] == "sm_90"
    assert [kernel["spilled_bytes"] for kernel in document["kernels"]] == [0] * 4
    assert all(kernel["num_registers"] > 0 for kernel in document["kernels"])


def test_gpus_before_ada_have_no_float8_kv() -> None:
    of_ada, of_ampere = ({launch.name for launch in launches(capability)} for capability in (89, 86))
    assert of_ampere < of_ada
    assert all("over float8" in name for name in of_ada - of_ampere)


def test_what_does_not_fit_is_in_the_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MAX_SHARED_BYTES, HOPPER, -1)
    some = [launch for launch in launches() if "gates bfloat16" in launch.name]
    assert compile_all(some, lambda line: None) == 1
