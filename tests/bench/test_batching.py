from __future__ import annotations

import pytest

from pdserve.bench.batching import BATCH_SIZE, MAX_WAIT_S, served
from pdserve.engine.worker.batches import scheduler_with
from pdserve.engine.worker.scheduler import Scheduler

_AT_ONCE = 1e6


def test_batches_run_to_their_longest_answer() -> None:
    """With answers of one length all gates keep the slots full; else batches wait for the longest of each."""
    equal = [served(gate, 0.0, _AT_ONCE, 2 * BATCH_SIZE).output_tokens_per_s for gate in ("continuous", "static")]
    assert equal[1] > 0.9 * equal[0]
    continuous, dynamic, static = (
        served(gate, 1.0, _AT_ONCE, 4 * BATCH_SIZE) for gate in ("continuous", "dynamic", "static")
    )
    assert continuous.output_tokens_per_s > 1.5 * static.output_tokens_per_s
    assert dynamic.output_tokens_per_s == pytest.approx(static.output_tokens_per_s)
    assert continuous.pools[0].mean_batch_size > 1.5 * static.pools[0].mean_batch_size


def test_only_a_static_batch_waits_until_it_is_full() -> None:
    rate, num_requests = 1.0, 2 * BATCH_SIZE
    continuous, dynamic, static = (
        served(gate, 0.0, rate, num_requests).ttft for gate in ("continuous", "dynamic", "static")
    )
    assert static.percentile(50) > BATCH_SIZE / rate / 4
    assert MAX_WAIT_S < dynamic.percentile(50) < 2.0
    assert continuous.percentile(50) < MAX_WAIT_S


def test_continuous_batching_has_no_gate() -> None:
    assert scheduler_with("continuous") is Scheduler
