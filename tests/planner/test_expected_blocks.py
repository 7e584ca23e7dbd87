from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdserve.contracts.request import GenerationRequest, SamplingParams
from pdserve.contracts.step import ModelLimits
from pdserve.engine.scheduler import RequestKey
from pdserve.engine.sequence import Sequence
from pdserve.engine.sequence_table import SequenceTable
from pdserve.planner.counted_pool import CountedBlockPool
from pdserve.planner.expected_blocks import ExpectedBlocks


def sequences(block_size: int, lengths: list[tuple[int, int]]) -> list[Sequence]:
    """Of so many prompt tokens and tokens to answer each, with the first of these."""
    table = SequenceTable(CountedBlockPool(10**6, block_size), ModelLimits(max_model_len=10**6, vocab_size=10))
    opened = []
    for number, (num_prompt, max_tokens) in enumerate(lengths):
        sampling = SamplingParams(max_tokens=max_tokens)
        request = GenerationRequest(request_id=number, prompt_tokens=(0,) * num_prompt, sampling=sampling)
        sequence = table.open(RequestKey(0, number, 0), request, 0.0, is_handoff=False)
        assert sequence is not None
        sequence.append(0)
        opened.append(sequence)
    return opened


@given(
    st.sampled_from([1, 3, 16, 100]),
    st.lists(st.tuples(st.integers(1, 300), st.integers(3, 400)), min_size=1, max_size=100),
    st.data(),
)
def test_all_together_need_what_each_does(block_size: int, lengths: list[tuple[int, int]], data: st.DataObject) -> None:
    expected = ExpectedBlocks(block_size)
    members = sequences(block_size, lengths)
    num_before = data.draw(st.integers(0, 50))
    for sequence in members:
        expected.add(sequence, num_before + sequence.max_length - len(sequence.tokens))
    for gone in data.draw(st.lists(st.sampled_from(members), unique=True)):
        expected.remove(gone)
        members.remove(gone)
    num_steps = min([sequence.max_length - len(sequence.tokens) for sequence in members], default=0)
    for step in range(num_steps):
        assert expected.total(num_before + step) == sum(sequence.num_blocks_expected() for sequence in members)
        for sequence in members:
            sequence.append(0)


def test_what_is_known_of_a_sequence_does_not_shrink_before_its_first_step() -> None:
    (sequence,) = sequences(4, [(100, 300)])
    expected = ExpectedBlocks(4)
    expected.add(sequence, 10 + sequence.max_length - len(sequence.tokens))
    assert expected.total(7) == expected.total(10) == sequence.num_blocks_expected()
    assert expected.total(200) > sequence.num_blocks_expected()
