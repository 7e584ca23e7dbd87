"""How the choices of a request part: what they share, what each has alone, what one that is over gives back."""

from __future__ import annotations

import pytest

from pdserve.contracts.request import FinishReason, GenerationRequest, SamplingParams
from pdserve.contracts.step import ModelLimits
from pdserve.engine.scheduler import FirstToken, RequestKey
from pdserve.engine.sequence import Sequence
from pdserve.engine.sequence_group import SequenceGroup, fork
from pdserve.engine.sequence_table import SequenceTable
from pdserve.kv_transfer.block_pool import BlockPool

BLOCK_SIZE = 4
KEY = RequestKey(0, 0, 0)


def a_group(num_tokens: int = 10, num_choices: int = 3, choice: int = 0) -> tuple[SequenceTable, SequenceGroup]:
    """A request whose prompt is computed, in a pool that holds nothing else."""
    table = SequenceTable(BlockPool(64, BLOCK_SIZE), ModelLimits(max_model_len=64, vocab_size=100))
    request = GenerationRequest(
        request_id=0,
        prompt_tokens=tuple(range(num_tokens)),
        choice=choice,
        num_choices=num_choices,
        sampling=SamplingParams(max_tokens=40),
    )
    root = table.open(KEY, request, 0.0, is_handoff=False)
    assert root is not None
    new_blocks = table.pool.allocate(root.num_blocks_with_headroom())
    root.start_at([], new_blocks, table.pool.allocate(root.num_fork_blocks()))
    root.receive(num_tokens)
    table.register_written(root)
    return table, table.group_of(root)


def first_tokens(*tokens: int) -> list[FirstToken]:
    return [FirstToken(token) for token in tokens]


def private_blocks(sequence: Sequence, num_shared: int) -> set[int]:
    return set(sequence.block_table[num_shared:])


def test_choices_share_the_full_blocks_and_copy_the_last_one() -> None:
    table, group = a_group(num_tokens=10)
    root = group.root
    last = root.block_table[2]
    forks = fork(group, table.pool, first_tokens(50, 51, 52))
    assert [(s.sequence_id, s.choice, s.num_choices, s.tokens[-1]) for s in forks] == [(1, 1, 1, 51), (2, 2, 1, 52)]
    assert group.sequences == [root, *forks]
    for sequence in forks:
        assert sequence.block_table[:2] == root.block_table[:2]
        assert sequence.copy_source == last
        assert (sequence.num_computed, sequence.num_written, sequence.num_registered_blocks) == (10, 10, 2)
        assert sequence.num_blocks_with_headroom() <= len(sequence.block_table)
    alone = [private_blocks(sequence, 2) for sequence in group.sequences]
    assert len(set.union(*alone)) == sum(map(len, alone)), "no two write to the same block"
    assert root.copy_source == -1, "the first choice keeps the original"


def test_there_is_nothing_to_copy_after_a_full_block() -> None:
    table, group = a_group(num_tokens=8)
    forks = fork(group, table.pool, first_tokens(50, 51, 52))
    assert [(sequence.copy_source, len(sequence.block_table)) for sequence in forks] == [(-1, 3)] * 2
    assert all(sequence.block_table[:2] == group.root.block_table[:2] for sequence in forks)


def test_a_choice_that_is_over_gets_no_sequence_and_its_blocks_go_back() -> None:
    table, group = a_group(num_tokens=10)
    num_reserved = len(group.root.fork_blocks)
    referenced = table.pool.num_referenced
    group.drop([0, 1])
    [only] = fork(group, table.pool, first_tokens(50, 51, 52))
    assert only.choice == 2
    assert table.pool.num_referenced == referenced - num_reserved // 2
    table.close(group.root)
    table.close(only)
    assert table.get(KEY) is None
    assert table.pool.num_referenced == 0
    table.pool.check_integrity()


def test_the_last_block_of_the_prompt_outlives_the_first_choice() -> None:
    table, group = a_group(num_tokens=10, num_choices=2)
    source = group.root.block_table[2]
    [other] = fork(group, table.pool, first_tokens(50, 51))
    table.close(group.root)
    assert table.pool.num_unreferenced([source]) == 0, "it is still to be copied"
    table.close(other)
    assert table.pool.num_referenced == 0


def test_choices_count_from_the_first_one_of_the_request() -> None:
    table, group = a_group(num_choices=2, choice=5)
    assert group.open_choices == {5, 6}
    [other] = fork(group, table.pool, first_tokens(50, 51))
    assert (group.root.choice, other.choice) == (5, 6)


def test_what_is_dropped_ends_the_sequences_that_stand_for_nothing_else() -> None:
    table, group = a_group()
    assert group.drop([1, 7]) == []
    assert group.drop([0, 1]) == []
    assert group.drop([2]) == [group.root]
    table, group = a_group()
    _, second, third = [group.root, *fork(group, table.pool, first_tokens(50, 51, 52))]
    assert group.drop([1]) == [second]
    table.close(second)
    assert not group.finish(0)
    assert group.finish(2)
    assert group.drop([]) == [group.root, third]


@pytest.mark.parametrize("num_tokens", [8, 10])
def test_what_is_expected_covers_what_is_taken_and_counts_shared_blocks_once(num_tokens: int) -> None:
    _, one = a_group(num_tokens, num_choices=1)
    _, three = a_group(num_tokens, num_choices=3)
    alone = one.root.num_blocks_expected()
    assert three.root.num_blocks_expected() == 3 * alone - 2 * (num_tokens // BLOCK_SIZE)
    assert three.root.num_blocks_held <= three.root.num_blocks_expected()
    assert three.root.num_blocks_held == 3 * one.root.num_blocks_held - 2 * (num_tokens // BLOCK_SIZE)


def test_a_choice_that_ends_with_its_first_token_needs_no_block_of_its_own() -> None:
    table, group = a_group()
    group.drop([1])
    forks = fork(group, table.pool, [FirstToken(50), FirstToken(51, FinishReason.STOP), FirstToken(52)])
    assert [sequence.choice for sequence in forks] == [2]
