"""Worker processes on a GPU: host staging of its pool, and prompts handed from one worker to another."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pdserve.contracts.kv_layout import KvLayout
from pdserve.contracts.request import GenerationRequest, SamplingParams
from pdserve.contracts.worker_config import WorkerConfig, WorkerRole
from pdserve.kv_transfer import host_staging
from pdserve.kv_transfer.host_staging import HostStaging
from pdserve.kv_transfer.pool_memory import PoolMemory
from pdserve.model.weights.demo_model import DEMO_MODEL
from tests.gpu.device import DEVICE, sized
from tests.workers import WorkerProcess, hand_off

LAYOUT = KvLayout(
    num_blocks=64, num_kv_heads=2, num_layers=3, block_size=16, head_dim=8, dtype="float32", model_hash="model"
)


@pytest.mark.parametrize("num_staged", [3, 1000])
def test_blocks_go_to_the_host_and_come_back(num_staged: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the device is busy with something else."""
    monkeypatch.setattr(host_staging, "PINNED_BYTES", num_staged * LAYOUT.block_bytes)
    memory = PoolMemory.create(LAYOUT)
    given = torch.randint(1, 256, (LAYOUT.num_blocks, LAYOUT.block_bytes), dtype=torch.uint8)
    pool = given.to(DEVICE, copy=True)
    staging = HostStaging(pool, memory)
    out, back = [60, 0, 33, 7, 12], [7, 33, 1]
    busy = torch.randn(sized(4096, 64), sized(4096, 64), device=DEVICE)
    for _ in range(20):
        busy = torch.tanh(busy @ busy)
    staging.copy_d2h(out, [1] * len(out))
    staged = torch.frombuffer(memory.blocks, dtype=torch.uint8).view(given.shape)
    assert torch.equal(staged[out], given[out])
    assert staged.any(dim=1).sum() == len(out)
    staged[1] = 9
    pool[back] = 0
    if DEVICE.type == "cuda":
        torch.cuda.synchronize(DEVICE)
    staging.copy_h2d(back)
    expected = given.clone()
    expected[1] = 9
    assert torch.equal(pool.cpu(), expected)


def config_of(role: WorkerRole, device: str) -> WorkerConfig:
    """Two of them have to fit beside each other, and beside other tests."""
    return WorkerConfig(
        worker_id=f"{role.value}-{device}",
        role=role,
        model_path=str(DEMO_MODEL),
        max_model_len=512,
        device=device,
        num_kv_blocks=128,
        max_batch_tokens=128,
        max_batch_size=8,
        swap_memory_bytes=0,
    )


@pytest.mark.parametrize(
    ("transport", "num_ranks"),
    [
        *[(transport, 1) for transport in sized(["memfd", "tcp", "cuda_ipc"], ["memfd"])],
        pytest.param(
            "memfd",
            2,
            marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two ranks need two GPUs"),
        ),
    ],
)
def test_a_pair_on_gpus_answers_as_a_worker_on_a_cpu(transport: str, num_ranks: int) -> None:
    """The prefill worker has ``num_ranks``."""
    requests = [
        GenerationRequest(
            request_id=number,
            prompt_tokens=tuple((7 * position + number) % 2800 + 3 for position in range(10 + 37 * number)),
            sampling=SamplingParams(temperature=number % 2 * 0.8, seed=number, max_tokens=24),
        )
        for number in range(6)
    ]
    with WorkerProcess(config_of(WorkerRole.MIXED, "cpu")) as worker, worker.connect() as mixed:
        for request in requests:
            mixed.submit(request)
        expected = [mixed.wait_for_answer(request.request_id) for request in requests]
    prefill_config, decode_config = (
        replace(config_of(role, DEVICE.type), transport=transport) for role in (WorkerRole.PREFILL, WorkerRole.DECODE)
    )
    prefill_config = replace(prefill_config, tensor_parallel=num_ranks)
    with (
        WorkerProcess(prefill_config, is_forked=False) as prefill_worker,
        WorkerProcess(decode_config, is_forked=False) as decode_worker,
        prefill_worker.connect() as prefill,
        decode_worker.connect() as decode,
    ):
        assert [hand_off(prefill, decode, request) for request in requests] == expected
        prefill.wait_until_free()
        decode.wait_until_free()
        pulls = [transfer for frame in decode.frames for transfer in frame.transfers]
        assert {pull.transport for pull in pulls if pull.bytes} == {transport}
        assert all(pull.failure_stage == "" for pull in pulls)
