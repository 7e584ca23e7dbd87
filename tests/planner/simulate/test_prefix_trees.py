"""Scout and judge share the same blocks: those of a tree of prompts, and those with equal hashes."""

from __future__ import annotations

from itertools import combinations, pairwise, takewhile

import pytest

pytest.importorskip("numba", reason="the scout needs the planner's extra")

from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.planner.simulate.scout import PrefixTree, ScoutRequests
from pdserve.planner.workload.prompts import Prompt, PromptTable
from pdserve.planner.workload.requests import Segment, SimulatedRequest

BLOCK_SIZE = 4
_SHARED = [Segment(content, 3 + 5 * content) for content in range(4)]
"""A length for each content, as workloads have it."""
_MESSAGES = st.lists(st.sampled_from(_SHARED), max_size=3)


def conversation(messages: list[tuple[list[Segment], int, int]], first_private: int) -> SimulatedRequest:
    """Turns of (shared segments, tokens of the rest, tokens of the answer)."""
    num_tokens, turns = 0, []
    for row, (shared, num_private, num_answer) in enumerate(messages):
        segments = (*shared, Segment(first_private + row, num_private))
        num_tokens += sum(segment.num_tokens for segment in segments)
        turns.append((num_tokens, num_answer, segments))
        num_tokens += num_answer
    request = None
    for num_prompt, num_answer, segments in reversed(turns):
        request = SimulatedRequest(0.0, num_prompt, num_answer, segments, request)
    assert request is not None
    return request


@st.composite
def conversations(draw: st.DrawFn) -> list[SimulatedRequest]:
    lengths = st.integers(1, 9)
    drawn = draw(st.lists(st.lists(st.tuples(_MESSAGES, lengths, lengths), min_size=1, max_size=3), min_size=2))
    return [conversation(messages, 100 + 10 * number) for number, messages in enumerate(drawn)]


def num_shared_in_tree(tree: PrefixTree, one: int, other: int) -> int:
    """Leading full blocks that both prompts have, one node after the other as the scout counts them."""
    begins = [0, *tree.ends[:-1].tolist()]
    paths = [tree.paths[begins[row] : tree.ends[row]].tolist() for row in (one, other)]
    common = takewhile(lambda nodes: nodes[0] == nodes[1], zip(*paths, strict=False))
    return sum(int(tree.to_tokens[node] // BLOCK_SIZE - tree.from_tokens[node] // BLOCK_SIZE) for node, _ in common)


def prompts_of(requests: list[SimulatedRequest]) -> list[Prompt]:
    """Prompts of all turns: the first ones, then each conversation's others."""
    table, first, later = PromptTable(requests, BLOCK_SIZE), [], []
    for request in requests:
        turns = list(request.turns())
        prompts = [table.write(turns[0])]
        for before, turn in pairwise(turns):
            prompts.append(table.write(turn, table.answered(prompts[-1], before.num_output_tokens)))
        first.append(prompts[0])
        later.append(prompts)
    return first + [prompts[turn] for turn in range(1, 3) for prompts in later if turn < len(prompts)]


@settings(max_examples=100, deadline=None)
@given(conversations())
def test_both_share_the_same_blocks(requests: list[SimulatedRequest]) -> None:
    tree, prompts = ScoutRequests.of(requests).prefixes, prompts_of(requests)
    assert len(tree.ends) == len(prompts)
    for one, other in combinations(range(len(prompts)), 2):
        hashes = zip(prompts[one].block_hashes, prompts[other].block_hashes, strict=False)
        num_equal = len(list(takewhile(lambda pair: pair[0] == pair[1], hashes)))
        assert num_shared_in_tree(tree, one, other) == num_equal, (one, other)


@settings(max_examples=50, deadline=None)
@given(conversations())
def test_a_path_covers_its_prompt_and_goes_on_with_the_answer_in_the_next_turn(
    requests: list[SimulatedRequest],
) -> None:
    scouted = ScoutRequests.of(requests)
    tree = scouted.prefixes
    paths = [
        [*tree.paths[begin:end].tolist(), answer]
        for begin, end, answer in zip([0, *tree.ends[:-1]], tree.ends, tree.answers.tolist(), strict=True)
    ]
    for path, num_prompt, num_output, after in zip(
        paths, scouted.num_prompt_tokens, scouted.num_output_tokens, scouted.next_turn, strict=True
    ):
        spans = [(int(tree.from_tokens[node]), int(tree.to_tokens[node])) for node in path]
        assert spans[0][0] == 0
        assert all(before[1] == after[0] for before, after in pairwise(spans))
        assert spans[-1] == (num_prompt, num_prompt + num_output)
        assert after < 0 or paths[after][: len(path)] == path
