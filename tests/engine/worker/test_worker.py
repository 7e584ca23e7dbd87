"""Worker processes of every role, driven over their real gRPC sessions."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import grpc
import psutil
import pytest

from pdserve.contracts.block_hash import block_hashes
from pdserve.contracts.codec import to_json
from pdserve.contracts.precision import Precision
from pdserve.contracts.request import GenerationRequest, KvSource, SamplingParams
from pdserve.contracts.worker_config import WorkerConfig, WorkerRole
from pdserve.model.weights.decoder_weights import products_of
from pdserve.model.weights.random_checkpoint import write_random_checkpoint
from pdserve.proto.v1 import worker_pb2
from tests.expected_tokens import expected_tokens
from tests.patience import HANG_S
from tests.shared import shared
from tests.workers import RouterClient, WorkerProcess, emulated_config, hand_off, wait_until

VOCAB_SIZE = 512
EOS = 2
SLOW = 100.0
"""Time scale that makes an emulated decode step last about 33 ms."""

LONG = 450
"""Tokens of an answer that takes 15 s at that scale."""

SOON_S = 8.0
"""Deadline that expires before such an answer is complete."""


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


@pytest.fixture
def slow_mixed(request: pytest.FixtureRequest, checkpoint: Path) -> WorkerProcess:
    config = emulated_config(checkpoint, WorkerRole.MIXED, time_scale=SLOW)
    return shared(request, lambda: WorkerProcess(config))


def a_request(request_id: int, num_prompt: int = 40, max_tokens: int = 20, seed: int = 0) -> GenerationRequest:
    """Prompts of different ids share their first 32 tokens."""
    prompt = [(7 * position) % VOCAB_SIZE for position in range(num_prompt)]
    prompt[32:] = [(11 * position + request_id) % VOCAB_SIZE for position in range(32, num_prompt)]
    sampling = SamplingParams(temperature=0.0 if seed == 0 else 1.0, seed=seed, max_tokens=max_tokens)
    return GenerationRequest(request_id=request_id, prompt_tokens=tuple(prompt), sampling=sampling)


def oracle(request: GenerationRequest, choice: int = 0) -> list[int]:
    return expected_tokens(
        request.prompt_tokens,
        request.sampling.max_tokens,
        VOCAB_SIZE,
        sampling=request.sampling,
        choice=choice,
        eos_token_ids=(EOS,),
    )


def test_a_mixed_worker_streams_the_tokens_of_the_oracle(checkpoint: Path) -> None:
    config = emulated_config(checkpoint, WorkerRole.MIXED)
    with WorkerProcess(config) as worker, worker.connect() as router:
        requests = [a_request(n, num_prompt=20 + 13 * n, max_tokens=5 + 9 * n, seed=n) for n in range(12)]
        for request in requests:
            router.submit(request)
        for request in requests:
            assert router.wait_for_answer(request.request_id) == oracle(request)
        router.wait_until_free()
        assert router.welcome.worker_id == worker.endpoint.worker_id
        assert router.welcome.worker_epoch == worker.endpoint.epoch
        assert router.welcome.hardware == "h100-sxm"
        assert router.load.num_blocks_cached > 0


def test_a_request_resumes_after_what_was_already_emitted(slow_mixed: WorkerProcess) -> None:
    whole = a_request(1, max_tokens=12)
    answer = oracle(whole)
    with slow_mixed.connect() as router:
        router.submit(replace(whole, attempt=1, emitted_tokens=tuple(answer[:5])))
        assert router.wait_for_answer(1) == answer[5:]
        assert router.tokens[1][0].index == 5
        assert router.tokens[1][0].key.attempt == 1


@pytest.mark.parametrize("transport", ["memfd", "tcp"])
def test_a_handoff_streams_the_tokens_of_the_oracle(checkpoint: Path, transport: str) -> None:
    prefill_config = emulated_config(checkpoint, WorkerRole.PREFILL, transport=transport)
    decode_config = emulated_config(checkpoint, WorkerRole.DECODE, transport=transport)
    with (
        WorkerProcess(prefill_config) as prefill_worker,
        WorkerProcess(decode_config) as decode_worker,
        prefill_worker.connect() as prefill,
        decode_worker.connect() as decode,
    ):
        for n in range(6):
            request = a_request(n, num_prompt=30 + 40 * n, max_tokens=1 if n == 4 else 30, seed=n)
            assert hand_off(prefill, decode, request) == oracle(request)
        prefill.wait_until_free()
        decode.wait_until_free()
        pulls = [transfer for frame in decode.frames for transfer in frame.transfers]
        assert pulls
        assert all(pull.failure_stage == "" for pull in pulls)
        assert {pull.transport for pull in pulls} <= {transport, ""}
        assert any(pull.bytes for pull in pulls)
        for worker in (prefill_worker, decode_worker):
            worker.process.send_signal(signal.SIGTERM)
            assert worker.process.wait(HANG_S) == 0


def test_every_micro_batch_hands_off_to_every_other(checkpoint: Path) -> None:
    prefill_config, decode_config = (
        emulated_config(checkpoint, role, pipeline_parallel=2) for role in (WorkerRole.PREFILL, WorkerRole.DECODE)
    )
    with (
        WorkerProcess(prefill_config) as prefill_worker,
        WorkerProcess(decode_config) as decode_worker,
        ExitStack() as stack,
    ):
        prefills, decodes = (
            [stack.enter_context(worker.connect(micro_batch=index)) for index in range(2)]
            for worker in (prefill_worker, decode_worker)
        )
        for n, (prefill, decode) in enumerate(product(prefills, decodes)):
            request = a_request(n, num_prompt=70 + 40 * n, max_tokens=30, seed=n)
            assert hand_off(prefill, decode, request) == oracle(request)
        for index, router in enumerate(prefills + decodes):
            router.wait_until_free()
            assert router.welcome.worker_id == f"{'decode' if index > 1 else 'prefill'}-0.{index % 2}"
            assert (router.welcome.num_blocks, router.welcome.pipeline_parallel) == (64, 2)


@pytest.mark.parametrize("transport", ["memfd", "tcp"])
def test_further_choices_compute_and_pull_only_the_last_block_of_their_prompt(checkpoint: Path, transport: str) -> None:
    prefill_config = emulated_config(checkpoint, WorkerRole.PREFILL, transport=transport)
    decode_config = emulated_config(checkpoint, WorkerRole.DECODE, transport=transport)
    with (
        WorkerProcess(prefill_config) as prefill_worker,
        WorkerProcess(decode_config) as decode_worker,
        prefill_worker.connect() as prefill,
        decode_worker.connect() as decode,
    ):
        for n, num_prompt in enumerate((40, 48)):  # the last block partly filled, and full
            prompt = a_request(n, num_prompt=num_prompt, seed=n + 1)
            for choice in range(3):
                request_id = 3 * n + choice
                request = replace(prompt, request_id=request_id, choice=choice)
                prefill.submit(replace(request, handoff=True))
                first = prefill.wait_for_tokens(request_id, 1)
                decode.prepare(request, prefill.wait_for_source(request_id))
                assert first + decode.wait_for_answer(request_id) == oracle(request, choice)
                started = prefill.wait_for_event(request_id, worker_pb2.RequestEvent.STARTED)
                assert started.num_cached_tokens == (32 if request_id else 0)
                pulled = decode.wait_for_event(request_id, worker_pb2.RequestEvent.STARTED)
                assert pulled.num_cached_tokens == (num_prompt // 16 * 16 if choice else 32 * n)
        prefill.wait_until_free()
        decode.wait_until_free()
        for worker in (prefill_worker, decode_worker):
            worker.process.send_signal(signal.SIGTERM)
            assert worker.process.wait(HANG_S) == 0


def real_model_config(
    checkpoint: Path, role: WorkerRole, core: int, quantization: str = "none", dtype: str = "float32"
) -> WorkerConfig:
    """Configuration with quantised KV if weights are quantised."""
    cores = sorted(os.sched_getaffinity(0))
    return WorkerConfig(
        worker_id=role.value,
        role=role,
        model_path=str(checkpoint),
        max_model_len=256,
        device="cpu",
        num_kv_blocks=64,
        max_batch_tokens=64,
        precision=Precision(
            dtype=dtype, kv_dtype="auto" if quantization == "none" else "int8", quantization=quantization
        ),
        cpu_cores=(cores[core % len(cores)],),
    )


def test_choices_of_the_real_model_differ_and_are_the_same_over_a_cached_prompt(checkpoint: Path) -> None:
    config = real_model_config(checkpoint, WorkerRole.MIXED, 0)
    with WorkerProcess(config) as worker, worker.connect() as router:
        for num_prompt in (50, 64):  # the last block partly filled, and full
            prompt = a_request(num_prompt, num_prompt=num_prompt, seed=3)
            answers: list[list[int]] = []
            for choice in (0, 1, 2, 0):
                request = replace(prompt, request_id=4 * num_prompt + len(answers), choice=choice)
                router.submit(request)
                answers.append(router.wait_for_answer(request.request_id))
            assert answers[3] == answers[0]
            assert len({tuple(answer) for answer in answers}) == 3


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [("none", "float32"), ("int8", "float32"), ("int4", "float32"), ("none", "bfloat16"), ("int4", "bfloat16")],
)
def test_a_handoff_of_the_real_model_equals_a_mixed_worker(checkpoint: Path, quantization: str, dtype: str) -> None:
    """Token by token, int8 KV included: compiled kernels compute a row alike in any batch."""
    config = partial(real_model_config, checkpoint, quantization=quantization, dtype=dtype)
    requests = [a_request(n, num_prompt=50 + 20 * n) for n in range(4)]
    with (
        WorkerProcess(config(WorkerRole.MIXED, 0)) as mixed_worker,
        WorkerProcess(config(WorkerRole.DECODE, 1)) as decode_worker,
        mixed_worker.connect() as mixed,
        decode_worker.connect() as decode,
    ):
        for request in requests:
            mixed.submit(request)
        expected = [mixed.wait_for_answer(request.request_id) for request in requests]
        assert mixed.welcome.products == products_of(Precision(dtype=dtype))
        assert len({tuple(answer) for answer in expected}) > 1
        # Of another salt: prompts are computed again, each by itself.
        again = [replace(each, request_id=10 + each.request_id, cache_salt=b"again") for each in requests]
        assert [hand_off(mixed, decode, request) for request in again] == expected
        assert mixed.wait_for_event(10, worker_pb2.RequestEvent.STARTED).num_cached_tokens == 0
        mixed.wait_until_free()
        decode.wait_until_free()


class Killed(NamedTuple):
    """What a killed worker leaves."""

    second: GenerationRequest
    """The second turn of a conversation."""
    answer: list[int]
    """To it."""
    file: bytes
    """Blocks of both turns."""


def tiered_config(checkpoint: Path, folder: Path) -> WorkerConfig:
    config = real_model_config(checkpoint, WorkerRole.MIXED, 0)
    return replace(config, cluster_token="secret", kv_tier_path=str(folder), kv_tier_bytes=2**20)


@pytest.fixture(scope="module")
def killed(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Killed:
    folder = tmp_path_factory.mktemp("tier")
    config, path = tiered_config(checkpoint, folder), folder / "mixed.kv"
    first = a_request(1, num_prompt=150, max_tokens=12)
    with WorkerProcess(config) as worker, worker.connect() as router:
        router.submit(first)
        answer = router.wait_for_answer(1)
        second = replace(a_request(2), prompt_tokens=(*first.prompt_tokens, *answer, *range(40)))
        router.submit(second)
        expected = router.wait_for_answer(2)
        blocks = block_hashes(second.prompt_tokens, config.block_size)
        wait_until(lambda: all(each in path.read_bytes() for each in blocks), "copies of the prompt's blocks")
    return Killed(second, expected, path.read_bytes())


@pytest.mark.parametrize("damage", ["none", "flipped", "cut", "deleted"])
def test_a_killed_workers_successor_restores_its_prompts(
    checkpoint: Path, killed: Killed, tmp_path: Path, damage: str
) -> None:
    """The second turn of a conversation, after the file of the killed worker was damaged."""
    path, data = tmp_path / "mixed.kv", killed.file
    slots = 4 * 4096  # behind the header and 251 entries
    if damage == "none":
        path.write_bytes(data)
    elif damage == "flipped":
        path.write_bytes(data[:slots] + bytes(byte ^ 1 for byte in data[slots:]))
    elif damage == "cut":
        path.write_bytes(data[:slots])
    with WorkerProcess(tiered_config(checkpoint, tmp_path)) as worker, worker.connect() as router:
        router.submit(killed.second)
        assert router.wait_for_answer(2) == killed.answer
        num_cached = router.wait_for_event(2, worker_pb2.RequestEvent.STARTED).num_cached_tokens
        assert num_cached == (192 if damage == "none" else 0)
        assert router.load.num_restored_tokens == num_cached
        router.wait_until_free()


def test_the_requests_of_a_broken_session_are_cancelled_and_their_blocks_freed(slow_mixed: WorkerProcess) -> None:
    with slow_mixed.connect() as witness:
        with slow_mixed.connect() as router:
            router.submit(a_request(1, max_tokens=LONG))
            router.wait_for_tokens(1, 2)
            witness.wait_for(lambda: witness.load.num_blocks_referenced > 0, "referenced blocks")
        witness.wait_until_free(SOON_S)


def test_a_newer_session_of_a_router_fences_the_older(slow_mixed: WorkerProcess) -> None:
    with slow_mixed.connect(router_id="r", epoch=1) as old:
        old.submit(a_request(1, max_tokens=LONG))
        old.wait_for_tokens(1, 2)
        with slow_mixed.connect(router_id="r", epoch=2) as new:
            new.wait_until_free(SOON_S)
            old.wait_for(lambda: old.error is grpc.StatusCode.ABORTED, "the end of the old stream")
            new.submit(a_request(1, max_tokens=3))
            assert new.wait_for_answer(1) == oracle(a_request(1, max_tokens=3))


def test_a_router_that_does_not_read_delays_no_other(slow_mixed: WorkerProcess) -> None:
    stalled = slow_mixed.connect(is_reading=False)
    for n in range(4):
        stalled.submit(a_request(n, max_tokens=LONG))
    with slow_mixed.connect() as router:
        request = a_request(9, max_tokens=10)
        router.submit(request)
        assert router.wait_for_answer(9) == oracle(request)
        stalled.close()
        router.wait_until_free(SOON_S)


def test_a_cancelled_request_frees_its_blocks(slow_mixed: WorkerProcess) -> None:
    with slow_mixed.connect() as router:
        router.submit(a_request(1, max_tokens=LONG))
        router.wait_for_tokens(1, 2)
        router.cancel(1)
        router.wait_for_event(1, worker_pb2.RequestEvent.CANCELLED)
        router.wait_until_free(SOON_S)


@pytest.mark.parametrize("token", ["", "wrong"])
def test_a_bad_cluster_token_is_refused(slow_mixed: WorkerProcess, token: str) -> None:
    with RouterClient(slow_mixed.endpoint.address, token=token) as router:
        router.wait_for(lambda: router.error is grpc.StatusCode.UNAUTHENTICATED, "a refusal")
        assert not router.welcome.worker_id


def test_a_parked_prompt_that_nobody_pulls_expires(checkpoint: Path) -> None:
    config = emulated_config(checkpoint, WorkerRole.PREFILL, park_timeout_s=0.3)
    with WorkerProcess(config) as worker, worker.connect() as router:
        router.submit(replace(a_request(1), handoff=True))
        router.wait_for_event(1, worker_pb2.RequestEvent.KV_UNAVAILABLE)
        router.wait_until_free()


def test_a_source_that_is_not_there_is_reported(slow_mixed: WorkerProcess) -> None:
    with slow_mixed.connect() as router:
        router.prepare(a_request(1), KvSource(address="127.0.0.1:1", worker_epoch=1, handle=bytes(16)))
        event = router.wait_for_event(1, worker_pb2.RequestEvent.KV_UNAVAILABLE)
        assert event.message
        router.wait_until_free()


def test_sigterm_finishes_what_runs_and_refuses_the_rest(checkpoint: Path) -> None:
    config = emulated_config(checkpoint, WorkerRole.MIXED, time_scale=SLOW)
    with WorkerProcess(config) as worker, worker.connect() as router:
        request = a_request(1, max_tokens=40)
        router.submit(request)
        router.wait_for_tokens(1, 2)
        worker.process.send_signal(signal.SIGTERM)
        router.wait_for(lambda: router.load.draining, "draining")
        router.submit(a_request(2))
        assert router.wait_for_event(2, worker_pb2.RequestEvent.REJECTED).message == "draining"
        assert router.wait_for_answer(1) == oracle(request)
        assert worker.process.wait(HANG_S) == 0


def test_a_draining_prefill_worker_waits_for_its_parked_prompts(checkpoint: Path) -> None:
    with (
        WorkerProcess(emulated_config(checkpoint, WorkerRole.PREFILL)) as prefill_worker,
        WorkerProcess(emulated_config(checkpoint, WorkerRole.DECODE)) as decode_worker,
        prefill_worker.connect() as prefill,
        decode_worker.connect() as decode,
    ):
        request = a_request(1)
        prefill.submit(replace(request, handoff=True))
        first = prefill.wait_for_tokens(1, 1)
        prefill_worker.process.send_signal(signal.SIGTERM)
        prefill.wait_for(lambda: prefill.load.draining and prefill.load.num_parked == 1, "a parked prompt")
        decode.prepare(request, prefill.wait_for_source(1))
        assert first + decode.wait_for_answer(1) == oracle(request)
        assert prefill_worker.process.wait(HANG_S) == 0


def test_a_second_sigterm_ends_the_process_at_once(checkpoint: Path) -> None:
    config = emulated_config(checkpoint, WorkerRole.MIXED, time_scale=SLOW)
    with WorkerProcess(config) as worker, worker.connect() as router:
        router.submit(a_request(1, max_tokens=LONG))
        router.wait_for_tokens(1, 2)
        worker.process.send_signal(signal.SIGTERM)
        router.wait_for(lambda: router.load.draining, "draining")
        worker.process.send_signal(signal.SIGTERM)
        assert worker.process.wait(HANG_S) == 1


def test_sigkill_leaves_no_process(checkpoint: Path) -> None:
    with WorkerProcess(emulated_config(checkpoint, WorkerRole.DECODE)) as worker:
        children = worker.children()
        assert children
        worker.process.kill()
        worker.process.wait()
        wait_until(lambda: not any(_is_running(pid) for pid in children), "the end of the transfer process")


def test_the_death_of_the_transfer_process_ends_the_worker(checkpoint: Path) -> None:
    with WorkerProcess(emulated_config(checkpoint, WorkerRole.DECODE)) as worker:
        for pid in worker.children():
            os.kill(pid, signal.SIGKILL)
        assert worker.process.wait(HANG_S) == 1


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"num_kv_blocks": 31}, "raise num_kv_blocks to 32"),
        ({"model_path": "/nowhere"}, "/nowhere"),
        ({"emulate": "abacus"}, "abacus"),
        ({"model_digest": "0"}, "is not the one with which the cluster started; put that back"),
    ],
)
def test_what_cannot_be_served_is_said_in_one_line(checkpoint: Path, fields: dict[str, object], complaint: str) -> None:
    config = replace(emulated_config(checkpoint, WorkerRole.DECODE), **fields)  # type: ignore[arg-type]
    command = [sys.executable, "-m", "pdserve.engine.worker.process", "--config", to_json(config)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stdout == ""
    assert complaint in result.stderr.splitlines()[-1]
