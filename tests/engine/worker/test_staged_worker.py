"""Workers whose KV pool is separate from the memory their transfer processes map, as on a GPU: tokens do not change.

The emulated executor checks every byte of a row's KV in every step, so that blocks copied late or never fail the
step.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from pdserve.contracts.request import GenerationRequest
from pdserve.contracts.worker_config import WorkerConfig, WorkerRole
from pdserve.model.weights.random_checkpoint import write_random_checkpoint
from pdserve.proto.v1 import worker_pb2
from tests.engine.worker.test_worker import VOCAB_SIZE, a_request, oracle, real_model_config
from tests.patience import HANG_S
from tests.shared import shared
from tests.workers import RouterClient, WorkerProcess, emulated_config, hand_off


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_checkpoint(
        tmp_path_factory.mktemp("checkpoint"),
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        vocab_size=VOCAB_SIZE,
    )


class Pair(NamedTuple):
    prefill: RouterClient
    decode: RouterClient

    def hand_off(self, request: GenerationRequest) -> list[int]:
        return hand_off(self.prefill, self.decode, request)


@contextmanager
def staged_pair(config_of: Callable[[WorkerRole], WorkerConfig], *, is_forked: bool = True) -> Iterator[Pair]:
    """Two workers, which must be free at the end and stop when asked."""
    start = partial(WorkerProcess, module="tests.staged_worker", is_forked=is_forked)
    with (
        start(config_of(WorkerRole.PREFILL)) as prefill_worker,
        start(config_of(WorkerRole.DECODE)) as decode_worker,
        prefill_worker.connect() as prefill,
        decode_worker.connect() as decode,
    ):
        yield Pair(prefill, decode)
        prefill.wait_until_free()
        decode.wait_until_free()
        for worker in (prefill_worker, decode_worker):
            worker.process.send_signal(signal.SIGTERM)
            assert worker.process.wait(HANG_S) == 0


@pytest.fixture(scope="module", params=["nccl", "cuda_ipc", "memfd"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pair(request: pytest.FixtureRequest, checkpoint: Path, transport: str) -> Pair:
    """Small pools, so that blocks constantly move between sequences, pulls and host slots."""
    config = partial(emulated_config, checkpoint, num_kv_blocks=40, swap_memory_bytes=2**30, transport=transport)
    return shared(request, lambda: staged_pair(config), of=transport)


def test_handoffs_with_and_without_cached_prefixes(pair: Pair, transport: str) -> None:
    for n in range(6):
        request = a_request(n, num_prompt=30 + 40 * n, max_tokens=1 if n == 4 else 30, seed=n)
        assert pair.hand_off(request) == oracle(request)
    again = replace(a_request(5, num_prompt=230, max_tokens=20, seed=9), request_id=6)
    assert pair.hand_off(again) == oracle(again)
    started = pair.prefill.wait_for_event(6, worker_pb2.RequestEvent.STARTED)
    assert started.num_cached_tokens == 224
    pulls = [transfer for frame in pair.decode.frames for transfer in frame.transfers]
    assert all(pull.failure_stage == "" for pull in pulls)
    assert {pull.transport for pull in pulls} == {transport}
    assert 0 < pulls[-1].bytes < pulls[-2].bytes


def test_further_choices_reuse_the_prompt(pair: Pair) -> None:
    for n, num_prompt in ((10, 40), (20, 48)):  # the last block partly filled, and full
        request = a_request(n, num_prompt=num_prompt, seed=n)
        for choice in range(3):
            assert pair.hand_off(replace(request, request_id=n + choice, choice=choice)) == oracle(request, choice)


def test_answers_that_outgrow_the_pool_are_swapped_out_and_in(pair: Pair) -> None:
    requests = [a_request(n, num_prompt=n, max_tokens=450, seed=n) for n in range(40, 48)]
    for request in requests:
        pair.prefill.submit(replace(request, handoff=True))
    for request in requests:
        pair.decode.prepare(request, pair.prefill.wait_for_source(request.request_id))
    for request in requests:
        first = pair.prefill.wait_for_tokens(request.request_id, 1)
        assert first + pair.decode.wait_for_answer(request.request_id) == oracle(request)
    assert pair.decode.load.num_swap_ins > 0


def test_cancelled_handoffs_leave_the_others_alone(pair: Pair) -> None:
    """Clients leave at every stage: their blocks get new owners while grants and pulls of them are in flight."""
    requests = [a_request(n, num_prompt=n, max_tokens=40, seed=n) for n in range(60, 84)]
    for request in requests:
        n = request.request_id
        pair.prefill.submit(replace(request, handoff=True))
        if n % 4 == 1:
            pair.prefill.cancel(n)
            continue
        pair.decode.prepare(request, pair.prefill.wait_for_source(n))
        if n % 4 == 3:
            pair.decode.cancel(n)
            pair.prefill.cancel(n)
    for request in requests[::2]:
        first = pair.prefill.wait_for_tokens(request.request_id, 1)
        assert first + pair.decode.wait_for_answer(request.request_id) == oracle(request)


def test_handoffs_of_the_real_model_equal_a_mixed_worker(checkpoint: Path) -> None:
    """With int8 KV, in a gRPC stream."""
    requests = [a_request(n, num_prompt=50 + 20 * n) for n in range(4)]
    mixed_config = real_model_config(checkpoint, WorkerRole.MIXED, 0, "int8")
    with WorkerProcess(mixed_config) as mixed_worker, mixed_worker.connect() as mixed:
        for request in requests:
            mixed.submit(request)
        expected = [mixed.wait_for_answer(request.request_id) for request in requests]

    def config_of(role: WorkerRole) -> WorkerConfig:
        core = int(role is WorkerRole.DECODE)
        return replace(real_model_config(checkpoint, role, core, "int8"), transport="tcp")

    with staged_pair(config_of, is_forked=False) as pair:
        assert [pair.hand_off(request) for request in requests] == expected
