"""How batches of short and long rows are shared between the kernels of attention."""

from __future__ import annotations

import pytest
import torch

from pdserve.kernels.operations import AttentionRule
from pdserve.kernels.triton import attention as triton_attention
from pdserve.kernels.triton.attention import paged_attention
from tests.kernels.launch_recorder import recorded_launches
from tests.kernels.paged_batch import LAYER, Row, make_batch, reference_attention


@pytest.mark.parametrize(
    ("rows", "launches"),
    [
        ((Row(0, 8), Row(3, 8)), ["decode"]),
        ((Row(0, 9), Row(20, 12)), ["prefill"]),
        ((Row(20, 9), Row(40, 1), Row(0, 8)), ["decode", "prefill"]),
    ],
    ids=["short", "long", "mixed"],
)
def test_every_row_is_computed_once(
    rows: tuple[Row, ...], launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = []
    for kernel in ("decode", "prefill"):
        launch = getattr(triton_attention, f"{kernel}_attention")

        def record(*args: object, kernel: str = kernel, launch: object = launch, **options: object) -> None:
            assert callable(launch)
            launched.append(kernel)
            launch(*args, **options)

        monkeypatch.setattr(triton_attention, f"{kernel}_attention", record)
    batch = make_batch(rows, num_kv_heads=1, group=4, head_dim=16)
    rule = AttentionRule(scale=0.25)
    # Fills what `torch.empty` gives with NaN.
    torch.use_deterministic_algorithms(True)
    o_TND = paged_attention(batch.queries, batch.kv_pool, LAYER, batch.metadata, rule)
    torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(o_TND.double(), reference_attention(batch, rule), atol=2e-5, rtol=2e-5)
    assert launched == launches


@pytest.mark.parametrize(("num_new", "num_merged"), [(1, 1), (2, 8)])
def test_of_a_mixed_step_only_tokens_of_short_rows_are_merged(num_new: int, num_merged: int) -> None:
    batch = make_batch((Row(20, 9), Row(40, num_new), Row(300, 1)), num_kv_heads=1, group=2, head_dim=16)
    with recorded_launches() as recorded:
        o_TND = paged_attention(batch.queries, batch.kv_pool, LAYER, batch.metadata, AttentionRule(scale=0.25))
    torch.testing.assert_close(
        o_TND.double(), reference_attention(batch, AttentionRule(scale=0.25)), atol=2e-5, rtol=2e-5
    )
    grids = [launch[1] for launch in recorded.launches if getattr(launch[0], "__name__", "") == "_merge_kernel"]
    assert [grid[1] for grid in grids if isinstance(grid, tuple)] == [2 * num_merged]


def test_large_groups_decode_one_token_at_a_time() -> None:
    batch = make_batch((Row(20, 1), Row(3, 2)), num_kv_heads=1, group=40, head_dim=16)
    o_TND = paged_attention(batch.queries, batch.kv_pool, LAYER, batch.metadata, AttentionRule(scale=0.25))
    torch.testing.assert_close(
        o_TND.double(), reference_attention(batch, AttentionRule(scale=0.25)), atol=2e-5, rtol=2e-5
    )
