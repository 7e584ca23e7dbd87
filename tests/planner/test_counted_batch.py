from __future__ import annotations

from pdserve.contracts.request import GenerationRequest, SamplingParams
from pdserve.contracts.step import ModelLimits
from pdserve.engine.scheduler import RequestKey
from pdserve.engine.sequence import Sequence
from pdserve.engine.sequence_table import SequenceTable
from pdserve.planner.counted_batch import CountedBatch
from pdserve.planner.counted_pool import CountedBlockPool

BLOCK_SIZE = 4


def sequences(pool: CountedBlockPool, *answers: int) -> list[Sequence]:
    """After a prompt of 5 tokens and the first of so many, with blocks for 12 tokens."""
    table = SequenceTable(pool, ModelLimits(max_model_len=400, vocab_size=100))
    started = []
    for number, max_tokens in enumerate(answers):
        request = GenerationRequest(
            request_id=number, prompt_tokens=(0,) * 5, sampling=SamplingParams(max_tokens=max_tokens)
        )
        sequence = table.open(RequestKey(0, number, 0), request, 0.0, is_handoff=False)
        assert sequence is not None
        sequence.start_at([], pool.allocate(sequence.num_blocks_with_headroom()))
        sequence.receive(5)
        sequence.append(0)
        started.append(sequence)
    return started


def test_steps_take_blocks_as_they_need_them() -> None:
    pool = CountedBlockPool(100, BLOCK_SIZE)
    batch = CountedBatch(pool, sequences(pool, 30, 40))
    num_held = pool.num_referenced
    assert batch.num_steps_to_first_end == 29
    assert [batch.num_blocks_for(n) for n in (7, 8, 11, 12)] == [0, 2, 2, 4]
    assert batch.advance(8) == []
    assert pool.num_referenced == num_held + 2
    assert batch.num_context_tokens == 2 * (5 + 8)


def test_who_ends_is_told_of_its_answer_and_blocks() -> None:
    pool = CountedBlockPool(100, BLOCK_SIZE)
    first, second = sequences(pool, 30, 40)
    batch = CountedBatch(pool, [first, second])
    assert batch.advance(29) == [first]
    assert (len(first.tokens), first.num_written, len(first.block_table)) == (35, 34, 9)
    assert len(second.tokens) == 6
    assert (batch.size, batch.num_context_tokens) == (1, 34)


def test_settling_tells_all_but_of_the_steps_in_flight() -> None:
    pool = CountedBlockPool(100, BLOCK_SIZE)
    first, second, third = sequences(pool, 3, 40, 40)
    batch = CountedBatch(pool, [first, second])
    batch.advance(1)
    batch.plan(7)
    batch.add(third)
    batch.plan(8)
    assert batch.settle() == {7: [first, second], 8: [second, third]}
    assert [len(sequence.tokens) for sequence in (first, second, third)] == [7, 7, 6]
