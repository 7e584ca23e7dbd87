"""Corrections of the cost model by observed step times."""

from __future__ import annotations

import pytest

from pdserve.contracts.precision import Precision
from pdserve.contracts.request import SamplingParams
from pdserve.contracts.step import BlockCopy, StepBatch, StepRow
from pdserve.engine.step_times import StepTimes
from pdserve.model.cost import CostModel
from pdserve.model.hardware import hardware
from pdserve.model.shape import ModelShape
from pdserve.proto.v1 import worker_pb2

SHAPE = ModelShape(
    num_layers=2, hidden_size=64, intermediate_size=128, num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=512
)
COST = CostModel(SHAPE, hardware("h100-sxm"), Precision(dtype="bfloat16"))


def a_batch(*rows: tuple[int, int]) -> StepBatch:
    """Rows of (new tokens, cached tokens)."""
    return StepBatch(
        step_id=1,
        rows=[
            StepRow(
                sequence_id=n, tokens=[1] * num_new, cached_length=num_cached, block_table=[], sample=SamplingParams()
            )
            for n, (num_new, num_cached) in enumerate(rows)
        ],
    )


@pytest.mark.parametrize("rows", [[(1, 100), (1, 7), (1, 31)], [(1, 100), (40, 0), (24, 16)]])
def test_a_step_is_predicted_by_the_cost_model(rows: list[tuple[int, int]]) -> None:
    assert StepTimes(COST).predict(a_batch(*rows)).predicted_s == pytest.approx(COST.step_s(rows))


def test_prefill_and_decode_are_corrected_apart() -> None:
    times = StepTimes(COST)
    decode, prefill = (
        times.predict(batch)._replace(predicted_s=0.1) for batch in (a_batch((1, 100)), a_batch((1, 100), (40, 0)))
    )
    for _ in range(100):
        times.observe(decode, 2 * decode.predicted_s)
        times.observe(prefill, prefill.predicted_s / 2)
    load = worker_pb2.Load()
    times.add_to(load)
    assert load.decode_correction == pytest.approx(2, rel=0.01)
    assert load.prefill_correction == pytest.approx(0.5, rel=0.01)
    assert times.corrected_s(decode) == pytest.approx(2 * decode.predicted_s, rel=0.01)


def test_steps_that_do_more_than_compute_tokens_say_nothing_of_others() -> None:
    times = StepTimes(COST)
    prompt_logprobs = a_batch((1, 100), (40, 0))
    prompt_logprobs.rows[1].prompt_targets = [1] * 39
    copies_only = StepBatch(step_id=1, rows=[], swap_outs=[BlockCopy(0, 0)])
    both = a_batch((1, 100))
    both.swap_ins.append(BlockCopy(0, 0))
    for batch in (copies_only, both, prompt_logprobs):
        times.observe(times.predict(batch), 1.0)
    load = worker_pb2.Load()
    times.add_to(load)
    assert load.decode_correction == load.prefill_correction == 1
