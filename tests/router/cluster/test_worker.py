"""In-flight load: work sent to a worker that its reported load does not include yet."""

from __future__ import annotations

from pdserve.contracts.events import SchedulerLoad
from pdserve.contracts.worker_config import WorkerRole
from pdserve.router.cluster.worker import InFlightLoad, Worker
from pdserve.router.requests.placement import WorkerSnapshot

LOAD = SchedulerLoad(
    num_running=3,
    num_waiting=1,
    num_waiting_tokens=50,
    num_started_tokens=5,
    num_context_tokens=100,
    num_blocks_free=10,
    num_blocks_cached=7,
)


class IdleWorker(Worker):
    """Takes no commands."""

    submit = prepare = cancel = None  # type: ignore[assignment]


def view(in_flight: InFlightLoad) -> WorkerSnapshot:
    worker = IdleWorker("decode-0", WorkerRole.DECODE)
    worker.load, worker.in_flight = LOAD, in_flight
    return worker.snapshot()


def test_what_was_sent_counts_until_it_shows() -> None:
    in_flight = InFlightLoad()
    before = view(in_flight)
    assert (before.num_waiting_tokens, before.num_decoding, before.num_free_blocks) == (55, 4, 17)
    in_flight.add_prefill(1, 40)
    in_flight.add_prefill(2, 30)
    in_flight.add_decode(1, 40, 4)
    in_flight.add_decode(2, 30, 3)
    both = view(in_flight)
    assert (both.num_waiting_tokens, both.num_decoding, both.num_context_tokens, both.num_free_blocks) == (
        75,
        5,
        170,
        10,
    )
    in_flight.remove(1)
    one = view(in_flight)
    assert (one.num_waiting_tokens, one.num_decoding, one.num_context_tokens, one.num_free_blocks) == (55, 4, 130, 14)
    in_flight.remove(1)
    in_flight.remove(2)
    assert view(in_flight) == before
