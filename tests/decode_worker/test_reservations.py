"""Reservations against the pool: the blocks counted must equal the blocks allocated."""

from __future__ import annotations

import pytest

from pdserve.contracts.events import RequestKey
from pdserve.contracts.request import GenerationRequest, KvSource, SamplingParams
from pdserve.contracts.step import ModelLimits
from pdserve.decode_worker.reservations import Reservations
from pdserve.engine.scheduling.sequence import LOOKAHEAD_TOKENS
from pdserve.engine.scheduling.table import AdmissionBudget, SequenceTable
from pdserve.kv_transfer.block_pool import BlockPool

SOURCE = KvSource(address="there", worker_epoch=1, handle=b"handle")


@pytest.mark.parametrize("block_size", [1, LOOKAHEAD_TOKENS, 2 * LOOKAHEAD_TOKENS])
def test_what_is_counted_covers_what_is_taken(block_size: int) -> None:
    """Also if one block of headroom exceeds the tokens expected."""
    pool = BlockPool(num_blocks=1024 // block_size, block_size=block_size)
    table = SequenceTable(pool, ModelLimits(max_model_len=512, vocab_size=100))
    reservations = Reservations(table, pull_timeout_s=60.0)
    request = GenerationRequest(request_id=1, prompt_tokens=(5,) * 10, sampling=SamplingParams(max_tokens=400))
    sequence = table.open(RequestKey(0, 1, 0), request, 0.0, is_handoff=False)
    assert sequence is not None
    reservations.push(sequence, SOURCE)

    num_needed = sequence.num_blocks_expected()
    pool.allocate(pool.num_blocks - num_needed + 1)
    assert not reservations.reserve(AdmissionBudget(1, num_needed - 1), now_s=0.0)
    pool.release([0])
    budget = AdmissionBudget(1, num_needed)
    assert reservations.reserve(budget, now_s=0.0)
    assert (budget.num_slots, budget.num_blocks) == (0, 0)
    assert len(sequence.block_table) <= num_needed
    pool.check_integrity()
