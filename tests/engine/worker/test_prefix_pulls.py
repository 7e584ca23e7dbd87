"""Workers that pull prefixes of prompts from others, as processes, over their real sessions and transfer processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.contracts.request import GenerationRequest, PrefixSource
from pdserve.contracts.worker_config import WorkerRole
from pdserve.proto.v1 import worker_pb2
from tests.engine.worker.test_worker import a_request, checkpoint, oracle
from tests.workers import RouterClient, WorkerProcess, emulated_config, hand_off, wait_until

__all__ = ["checkpoint"]
ROLES = (WorkerRole.PREFILL, WorkerRole.PREFILL, WorkerRole.DECODE)
NUM_SHARED = 32
"""Tokens that prompts of `a_request` share: two blocks."""


@contextmanager
def workers(checkpoint: Path, **fields: object) -> Iterator[list[tuple[WorkerProcess, RouterClient]]]:
    with ExitStack() as stack:
        started = [
            stack.enter_context(
                WorkerProcess(emulated_config(checkpoint, role, worker_id=f"{role.value}-{i}", **fields))
            )
            for i, role in enumerate(ROLES)
        ]
        yield [(worker, stack.enter_context(worker.connect())) for worker in started]


def from_source(
    request: GenerationRequest, worker: WorkerProcess, router: RouterClient, max_s: float = 20.0
) -> GenerationRequest:
    source = PrefixSource(
        address=router.welcome.kv_address,
        worker_epoch=worker.endpoint.epoch,
        num_tokens=400,
        min_tokens=1,
        max_s=max_s,
    )
    return replace(request, prefix_source=source)


def cached_tokens(router: RouterClient, request_id: int) -> int:
    return router.wait_for_event(request_id, worker_pb2.RequestEvent.STARTED).num_cached_tokens


def prefix_reports(router: RouterClient) -> list[worker_pb2.TransferReport]:
    return [report for frame in router.frames for report in frame.transfers if report.is_prefix]


@pytest.mark.parametrize("transport", ["memfd", "tcp"])
def test_a_prompt_pulls_what_another_worker_caches_and_has_the_same_tokens(checkpoint: Path, transport: str) -> None:
    with workers(checkpoint, transport=transport) as ((one, first), (_, second), (three, decode)):
        request = a_request(1, num_prompt=200, seed=1)
        assert hand_off(first, decode, request) == oracle(request)
        pulled = replace(from_source(request, one, first), request_id=2)
        assert hand_off(second, decode, pulled) == oracle(request)
        assert cached_tokens(second, 2) == 192
        (report,) = prefix_reports(second)
        assert (report.transport, report.failure_stage, report.num_tokens) == (transport, "", 192)
        assert report.source == first.welcome.kv_address
        longer = replace(request, request_id=3, prompt_tokens=(*request.prompt_tokens, *oracle(request)[:19]))
        assert hand_off(second, decode, from_source(longer, three, decode)) == oracle(longer)
        assert cached_tokens(second, 3) == 208, "the block of the answer is from the decode worker"
        other = replace(pulled, request_id=4, cache_salt=b"another tenant")
        assert hand_off(second, decode, other) == oracle(request)
        assert cached_tokens(second, 4) == 0
        assert prefix_reports(second)[-1].num_tokens == 0
        for router in (first, second, decode):
            router.wait_until_free()


def test_a_prompt_is_computed_whose_source_hangs_ends_or_is_not_there(checkpoint: Path) -> None:
    with workers(checkpoint) as ((one, first), (_, second), (_, decode)):
        request = a_request(1, num_prompt=200, seed=1)
        assert hand_off(first, decode, request) == oracle(request)
        transfer = max(one.children())
        for pid in (one.process.pid, transfer):
            os.kill(pid, signal.SIGSTOP)
        slow = replace(from_source(request, one, first, max_s=0.3), request_id=2, cache_salt=b"2")
        began_s = time.monotonic()
        assert hand_off(second, decode, slow) == oracle(request)
        assert time.monotonic() - began_s > 0.3
        assert [report.failure_stage for report in prefix_reports(second)] == ["deadline"]
        os.kill(transfer, signal.SIGCONT)  # it answers, and the engine lends nothing
        killed = replace(from_source(request, one, first), request_id=3, cache_salt=b"3", handoff=True)
        second.submit(killed)
        wait_until(lambda: second.load.num_waiting == 1, "the pull")
        time.sleep(0.3)
        assert not second.tokens[3]
        one.process.kill()
        assert second.wait_for_tokens(3, 1) == oracle(request)[:1]
        second.cancel(3)
        gone = replace(from_source(request, one, first), request_id=4, cache_salt=b"4")
        assert hand_off(second, decode, gone) == oracle(request)
        assert len(prefix_reports(second)) == 3
        assert all(report.failure_stage for report in prefix_reports(second))
        second.wait_until_free()


def test_a_model_goes_on_from_a_pulled_prefix_as_from_one_that_it_computed(checkpoint: Path) -> None:
    with workers(checkpoint, emulate="", time_scale=1.0, device="cpu") as ((one, first), (_, second), (_, decode)):
        request = a_request(1, num_prompt=200, seed=1)
        answer = hand_off(first, decode, request)
        pulled = replace(from_source(request, one, first), request_id=2)
        assert hand_off(second, decode, pulled) == answer
        assert [report.num_tokens for report in prefix_reports(second)] == [192]
        computed = replace(request, request_id=3, cache_salt=b"computed")
        assert hand_off(second, decode, computed) == answer
        assert cached_tokens(second, 3) == 0
