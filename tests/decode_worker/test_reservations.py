"""Reservations against the pool: the blocks counted must equal the blocks allocated."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.contracts.events import RequestKey
from pdserve.contracts.request import GenerationRequest, KvSource, SamplingParams
from pdserve.contracts.step import ModelLimits
from pdserve.decode_worker.reservations import OLDEST_EVERY, Reservations
from pdserve.engine.scheduling.sequence import LOOKAHEAD_TOKENS
from pdserve.engine.scheduling.table import AdmissionBudget, SequenceTable
from pdserve.kv_transfer.block_pool import BlockPool

SOURCE = KvSource(address="there", worker_epoch=1, handle=b"handle")


@pytest.mark.parametrize("block_size", [1, LOOKAHEAD_TOKENS, 2 * LOOKAHEAD_TOKENS])
def test_what_is_counted_covers_what_is_taken(block_size: int) -> None:
    """Also if one block of headroom exceeds the tokens expected."""
    pool = BlockPool(num_blocks=1024 // block_size, block_size=block_size)
    table = SequenceTable(pool, ModelLimits(max_model_len=512, vocab_size=100))
    reservations = Reservations(table)
    request = GenerationRequest(request_id=1, prompt_tokens=(5,) * 10, sampling=SamplingParams(max_tokens=400))
    sequence = table.open(RequestKey(0, 1, 0), request, 0.0, is_handoff=False)
    assert sequence is not None
    reservations.push(sequence, SOURCE)

    num_needed = sequence.num_blocks_expected()
    pool.allocate(pool.num_blocks - num_needed + 1)
    assert not reservations.reserve(sequence, AdmissionBudget(1, num_needed - 1), now_s=0.0)
    pool.release([0])
    budget = AdmissionBudget(1, num_needed)
    assert reservations.reserve(sequence, budget, now_s=0.0)
    assert (budget.num_slots, budget.num_blocks) == (0, 0)
    assert len(sequence.block_table) <= num_needed
    pool.check_integrity()


class Queue:
    """Reservations that all fit."""

    def __init__(self) -> None:
        self._table = SequenceTable(BlockPool(4096, 16), ModelLimits(max_model_len=4096, vocab_size=100))
        self.reservations = Reservations(self._table)
        self._num_pushed = 0

    def push(self, num_tokens: int, stall_slo_s: float, now_s: float) -> None:
        request = GenerationRequest(
            request_id=self._num_pushed,
            prompt_tokens=(5,) * num_tokens,
            sampling=SamplingParams(max_tokens=40),
            stall_slo_s=stall_slo_s,
        )
        sequence = self._table.open(RequestKey(0, self._num_pushed, 0), request, now_s, is_handoff=False)
        assert sequence is not None
        self._num_pushed += 1
        self.reservations.push(sequence, SOURCE)

    def take(self, now_s: float = 100.0) -> int:
        """Reserve; returns the number of the request."""
        sequence = self.reservations.first_waiting(now_s)
        assert sequence is not None
        assert self.reservations.reserve(sequence, AdmissionBudget(1, 4096), now_s)
        return sequence.request.request_id


def test_the_best_chance_per_block_goes_first() -> None:
    queue = Queue()
    pushed = ((16, 5.0, 0.0), (600, 5.0, 1.0), (600, 0.0, 1.0), (16, 5.0, 1.0), (16, 5.0, 90.0))
    for num_tokens, stall_slo_s, now_s in pushed:
        queue.push(num_tokens, stall_slo_s, now_s)
    assert [queue.take() for _ in range(5)] == [0, 4, 3, 1, 2], "the oldest; the newest small one; what has lost all"


@pytest.mark.parametrize("start_s", [0.0, 1e6])
def test_the_order_depends_on_the_wait_and_not_on_the_clock(start_s: float) -> None:
    queue = Queue()
    for num_tokens, stall_slo_s, waited_s in ((16, 9.0, 9.0), (16, 4.0, 1.0), (1600, 3.5, 1.0), (16, 1.0, 3.0)):
        queue.push(num_tokens, stall_slo_s, start_s - waited_s)
    assert [queue.take(start_s) for _ in range(4)] == [0, 1, 3, 2], "chances of 78, 5 and 75 %; 2, 2 and 101 blocks"


def test_without_objectives_the_first_goes_first() -> None:
    queue = Queue()
    for num_tokens in (600, 16, 300, 700, 16):
        queue.push(num_tokens, 0.0, 0.0)
    assert [queue.take() for _ in range(5)] == [0, 1, 2, 3, 4]


@given(st.lists(st.tuples(st.integers(1, 900), st.sampled_from([0.0, 0.1, 5.0]), st.integers(0, 2)), max_size=60))
def test_none_starves(arrivals: list[tuple[int, float, int]]) -> None:
    """A request with n others before it reserves within n + 1 rounds."""
    queue, limits, num_taken = Queue(), dict[int, int](), 0

    def take() -> None:
        nonlocal num_taken
        num_taken += 1
        assert num_taken <= limits.pop(queue.take())

    for number, (num_tokens, stall_slo_s, num_to_take) in enumerate(arrivals):
        limits[number] = num_taken + OLDEST_EVERY * (len(limits) + 1)
        queue.push(num_tokens, stall_slo_s, float(number))
        for _ in range(min(num_to_take, len(limits))):
            take()
    while limits:
        take()
