from __future__ import annotations

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from pdserve.contracts.events import RequestKey
from pdserve.contracts.request import GenerationRequest
from pdserve.engine.scheduling.queue import SequenceQueue
from pdserve.engine.scheduling.sequence import Sequence


def numbered(sequence_id: int) -> Sequence:
    return Sequence(
        sequence_id=sequence_id,
        key=RequestKey(0, sequence_id, 0),
        request=GenerationRequest(request_id=sequence_id, prompt_tokens=(1,)),
        arrived_s=0.0,
        block_size=4,
        is_handoff=False,
        max_length=2,
        stop_token_ids=frozenset(),
        early_end_ids=(),
    )


def test_an_empty_queue_has_no_first() -> None:
    queue = SequenceQueue()
    assert (queue.first(), queue.first_instant_s(), len(queue)) == (None, inf, 0)


def test_equal_instants_keep_the_order_of_arrival() -> None:
    queue, first, second = SequenceQueue(), numbered(1), numbered(2)
    queue.push(second, 5.0)
    queue.push(first, 5.0)
    assert queue.first() is first


actions = st.lists(st.tuples(st.integers(0, 9), st.none() | st.sampled_from([0.0, 1.0, 2.0])), max_size=300)


@given(actions)
def test_first_is_the_least_of_those_present(actions: list[tuple[int, float | None]]) -> None:
    queue, sequences = SequenceQueue(), [numbered(i) for i in range(10)]
    present: dict[int, float] = {}
    for sequence_id, instant_s in actions:
        queue.discard(sequences[sequence_id])
        present.pop(sequence_id, None)
        if instant_s is not None:
            queue.push(sequences[sequence_id], instant_s)
            present[sequence_id] = instant_s
        assert len(queue) == len(present)
        assert {sequence.sequence_id for sequence in sequences if sequence in queue} == present.keys()
        first = min(present, key=lambda i: (present[i], i), default=None)
        assert queue.first() is (None if first is None else sequences[first])
        assert queue.first_instant_s() == (inf if first is None else present[first])


def test_tokens_are_counted_as_they_were_pushed() -> None:
    """A preempted sequence may gain a token from a step in flight while it waits."""
    queue, first, second = SequenceQueue(), numbered(1), numbered(2)
    queue.push(first, 0.0)
    queue.push(second, 0.0)
    first.append(7)
    assert queue.num_tokens == 2
    queue.discard(first)
    assert queue.num_tokens == 1
    queue.push(first, 0.0)
    assert queue.num_tokens == 3
