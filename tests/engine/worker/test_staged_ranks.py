"""Workers of several ranks with a pool each, separate from the memory their transfer process maps, as on GPUs.

The ranks are processes, exchange tensors through process groups, and copy their own heads and layers to and from the
staging file. Those of one stage have two steps in flight, and replay captured decode steps.
"""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest

from pdserve.contracts.precision import Precision
from pdserve.contracts.request import GenerationRequest, SamplingParams
from pdserve.contracts.worker_config import WorkerConfig, WorkerRole
from pdserve.model.weights.random_checkpoint import write_random_checkpoint
from tests.e2e.reference import assert_same_tokens, greedy_choices
from tests.engine.worker.test_followers import Degrees, followers_of, wait_until_ended
from tests.patience import HANG_S
from tests.workers import RouterClient, WorkerProcess

VOCAB_SIZE = 512
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def staged_worker(folder: Path, role: WorkerRole, degrees: Degrees, transport: str = "auto") -> WorkerProcess:
    config = WorkerConfig(
        worker_id=f"{role.value}-0",
        role=role,
        model_path=str(folder),
        precision=Precision(dtype="float32"),
        tensor_parallel=degrees[0],
        pipeline_parallel=degrees[1],
        device="cpu",
        max_model_len=256,
        num_kv_blocks=24 * degrees[1],
        max_batch_tokens=64,
        max_batch_size=8,
        swap_memory_bytes=1 << 24,
        transport=transport,
        cluster_token="secret",
    )
    return WorkerProcess(config, module="tests.staged_worker")


def make_requests(number: int = 0) -> list[GenerationRequest]:
    """More than a pool holds at once, so that blocks constantly get new owners. Each ``number`` has its own prompts."""
    sampling = [
        SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True),
        SamplingParams(temperature=1.1, seed=5, top_p=0.9, max_tokens=NUM_TOKENS, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=6, repetition_penalty=1.2, max_tokens=NUM_TOKENS, ignore_eos=True),
    ]
    return [
        GenerationRequest(
            request_id=6 * number + n,
            prompt_tokens=tuple((13 * position + 7 * n + number) % VOCAB_SIZE for position in range(20 + 17 * n)),
            sampling=sampling[n % 3],
        )
        for n in range(6)
    ]


Routers = list[RouterClient]
"""Of each micro-batch of a worker."""


def hand_off_all(
    sources: Routers, targets: Routers, requests: list[GenerationRequest], transport: str
) -> list[list[int]]:
    """The answers of requests, at the same time, on the micro-batches of two workers in turns."""
    num_frames = [len(target.frames) for target in targets]
    turns = list(zip(cycle(sources), cycle(targets), requests, strict=False))
    for source, _, request in turns:
        source.submit(replace(request, handoff=True))
    for source, target, request in turns:
        target.prepare(request, source.wait_for_source(request.request_id))
    answers = [
        source.wait_for_tokens(request.request_id, 1) + target.wait_for_answer(request.request_id)
        for source, target, request in turns
    ]
    for router in sources + targets:
        router.wait_until_free()
    new_frames = [frame for target, num in zip(targets, num_frames, strict=True) for frame in target.frames[num:]]
    pulls = [transfer for frame in new_frames for transfer in frame.transfers]
    assert {(pull.failure_stage, pull.transport) for pull in pulls} == {("", transport)}
    assert all(pull.bytes for pull in pulls)
    return answers


def test_ranks_hand_off_to_any_others(checkpoint: Path) -> None:
    """From pool to pool, and through the host between workers whose pools are reached in different ways."""
    with (
        staged_worker(checkpoint, WorkerRole.MIXED, (2, 1), "nccl") as two_ranks,
        staged_worker(checkpoint, WorkerRole.MIXED, (1, 1), "nccl") as one_rank,
        staged_worker(checkpoint, WorkerRole.MIXED, (2, 2), "cuda_ipc") as four_opened_ranks,
        staged_worker(checkpoint, WorkerRole.MIXED, (1, 1), "cuda_ipc") as one_opened_rank,
        ExitStack() as stack,
    ):
        workers = two_ranks, one_rank, four_opened_ranks, one_opened_rank
        two, one, four_opened, one_opened = (
            [stack.enter_context(worker.connect(micro_batch=index)) for index in range(len(worker.endpoints))]
            for worker in workers
        )
        handoffs = (
            (two, one, "nccl", one_opened),
            (one, two, "nccl", one_opened),
            (four_opened, one_opened, "cuda_ipc", one),
            (one_opened, four_opened, "cuda_ipc", one),
            (two, four_opened, "memfd", one),
            (four_opened, two, "memfd", one),
        )
        for number, (sources, targets, transport, (alone,)) in enumerate(handoffs):
            requests = make_requests(number)
            answers = hand_off_all(sources, targets, requests, transport)
            for request in requests:
                alone.submit(request)
            assert answers == [alone.wait_for_answer(request.request_id) for request in requests]
        for worker in workers:
            worker.process.send_signal(signal.SIGTERM)
            assert worker.process.wait(HANG_S) == 0
    prompts = [request.prompt_tokens for request in requests]
    assert_same_tokens(answers[::3], greedy_choices(checkpoint, prompts[::3], answers[::3]))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("degrees", [(2, 1), (1, 2)])
def test_a_worker_ends_with_any_of_its_ranks(checkpoint: Path, degrees: Degrees, number: signal.Signals) -> None:
    """Also where it waits for the rank in a collective, or for its message."""
    with staged_worker(checkpoint, WorkerRole.MIXED, degrees) as worker, worker.connect() as router:
        for request in make_requests():
            router.submit(request)
        router.wait_for_tokens(0, 3)
        (follower,) = followers_of(worker, "tests.staged_follower")
        children = worker.children()
        os.kill(follower, number)
        assert worker.process.wait(HANG_S) == 1
        wait_until_ended(children)
