"""The grid covers what a worker may run, and nothing that it may not."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pdserve.model.cost.step_grid import GridLimits, Step, StepKind, StepRow, step_grid


def test_steps_say_what_they_are() -> None:
    chunk, decode = StepRow(512, 2048), StepRow(1, 100)
    assert Step((chunk,)).kind is StepKind.PREFILL
    assert Step((decode,) * 3).kind is StepKind.DECODE
    mixed = Step((chunk, decode, decode))
    assert (mixed.kind, mixed.num_new, mixed.num_cached) == (StepKind.MIXED, 514, 2248)
    assert mixed.num_blocks(16) == 160 + 2 * 7
    assert str(mixed) == "512 + 2048 cached, 2 x (1 + 100 cached)"
    assert str(Step((StepRow(64, 0),))) == "64"


def test_grid_reaches_every_limit() -> None:
    limits = GridLimits(max_model_len=4096, max_batch_tokens=1024, max_batch_size=64, num_kv_blocks=100_000)
    steps = step_grid(limits)
    assert len(steps) < 150
    assert min(Counter(step.kind for step in steps).values()) >= 15
    assert max(len(step.rows) for step in steps) >= 64
    assert max(step.rows[0].num_new for step in steps) == 1024
    assert max(step.rows[0].num_cached for step in steps if step.kind is StepKind.DECODE) == 4095


@given(
    max_model_len=st.integers(2, 10_000),
    max_batch_tokens=st.integers(1, 5000),
    max_batch_size=st.integers(1, 500),
    num_kv_blocks=st.integers(2, 2000),
    block_size=st.integers(1, 64),
)
def test_grid_stays_within_limits(
    max_model_len: int, max_batch_tokens: int, max_batch_size: int, num_kv_blocks: int, block_size: int
) -> None:
    limits = GridLimits(
        max_model_len=max_model_len,
        max_batch_tokens=max_batch_tokens,
        max_batch_size=max_batch_size,
        num_kv_blocks=num_kv_blocks,
        block_size=block_size,
    )
    steps = step_grid(limits)
    assert len(set(steps)) == len(steps)
    for step in steps:
        assert all(row.num_new >= 1 and row.num_cached >= 0 for row in step.rows)
        assert all(row.num_new + row.num_cached <= max_model_len for row in step.rows)
        assert step.num_new <= max_batch_tokens
        assert step.num_blocks(block_size) <= num_kv_blocks
        assert sum(row.num_new == 1 for row in step.rows) <= max_batch_size


def test_steps_have_a_few_tokens_of_each_sequence_as_with_guesses() -> None:
    limits = GridLimits(max_model_len=1024, num_kv_blocks=4096)
    steps = {(step.rows[0].num_new, len(step.rows)) for step in step_grid(limits) if step.rows[0].num_cached}
    assert {(tokens, batch) for tokens in (2, 4, 8) for batch in (1, 8)} <= steps
