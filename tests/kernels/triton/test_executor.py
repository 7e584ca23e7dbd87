"""The executor on the kernels of a GPU, in Triton's interpreter: tokens, and what a CUDA graph would be made of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pdserve.contracts.precision import Precision
from pdserve.contracts.request import SamplingParams
from pdserve.contracts.step import StepBatch, StepRow
from pdserve.kernels.triton.kernels import TRITON_KERNELS, TRITON_SAMPLING
from pdserve.model.config.decoder_config import DecoderConfig
from pdserve.model.decoder.decoder import Decoder
from pdserve.model.executors import decode_graphs, rank_model
from pdserve.model.executors import model as model_executor
from pdserve.model.executors.device_queue import DeviceQueue
from pdserve.model.executors.model import ModelExecutor
from pdserve.model.executors.step_inputs import StepShape
from pdserve.model.sampling.sampling import draw_into, plan_draws
from tests.kernels.launch_recorder import WAITING_OPERATIONS, Launches, recorded_launches
from tests.kernels.paged_batch import nan_pool
from tests.model.checkpoints import write_family

NUM_BLOCKS, BLOCK_SIZE = 24, 16
GREEDY = SamplingParams(temperature=0)
DRAWN = SamplingParams(temperature=0.8, top_p=0.9, top_k=20, min_p=0.01, seed=9)


class RecordingQueue(DeviceQueue):
    """Takes note of each replay."""

    def __init__(self) -> None:
        self.replays: list[Launches] = []

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        def replay() -> None:
            with recorded_launches() as launches:
                compute()
            self.replays.append(launches)

        return replay


def row(index: int, tokens: list[int], cached: int, sample: SamplingParams, previous_row: int = -1) -> StepRow:
    return StepRow(
        sequence_id=index,
        tokens=tokens,
        previous_row=previous_row,
        cached_length=cached,
        block_table=range(4 * index, 4 * index + 1 + (cached + max(1, len(tokens))) // BLOCK_SIZE),
        sample=sample,
        sample_position=cached + max(1, len(tokens)),
    )


def steps() -> list[list[StepRow]]:
    """A prefill, a mixed step, and decode steps of 4 and 3 rows, none of whose tokens is known beforehand."""
    samples, lengths = (GREEDY, DRAWN, GREEDY, DRAWN), (14, 3, 17)
    return [
        [row(index, [5 + index] * length, 0, samples[index]) for index, length in enumerate(lengths)],
        [
            row(2, [], 17, GREEDY, previous_row=2),
            row(3, [9] * 12, 0, DRAWN),
            *(row(index, [], lengths[index], samples[index], previous_row=index) for index in (0, 1)),
        ],
        [
            row(index, [], length + 1, samples[index], previous_row=place)
            for index, length, place in ((3, 11, 1), (0, 14, 2), (1, 3, 3), (2, 17, 0))
        ],
        [row(index, [], (16, 5, 19)[index], samples[index], previous_row=index + 1) for index in range(3)],
    ]


def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> RecordingQueue:
    """Executors that are built from here on run the kernels of a GPU, and share the queue."""
    queue = RecordingQueue()
    monkeypatch.setattr(rank_model, "select_queue", lambda device: queue)
    monkeypatch.setattr(rank_model, "select_kernels", lambda pool: TRITON_KERNELS)
    for module in (model_executor, rank_model):
        monkeypatch.setattr(module, "select_sampling_kernels", lambda device: TRITON_SAMPLING)
    return queue


@pytest.mark.parametrize("family", ["qwen3", "qwen2_moe"])
def test_steps_sample_what_one_at_a_time_does_and_wait_for_nothing(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_family(tmp_path, family, num_hidden_layers=1)
    config = DecoderConfig.from_folder(folder)
    layout = config.kv_layout(NUM_BLOCKS, BLOCK_SIZE, "float32", "hash")
    pools = [nan_pool(layout.shape), nan_pool(layout.shape)]
    expected = ModelExecutor(
        folder=folder, config=config, layout=layout, pool=pools[0], precision=Precision(quantization="int8")
    )
    queue = pretend_gpu(monkeypatch)
    executor = ModelExecutor(
        folder=folder,
        config=config,
        layout=layout,
        pool=pools[1],
        precision=Precision(quantization="int8"),
        max_captured_rows=4,
    )
    batches = [StepBatch(step_id=index, rows=rows) for index, rows in enumerate(steps())]
    outputs = [expected.submit(batch).result().sampled for batch in batches]
    # Fills what `torch.empty` gives with NaN.
    torch.use_deterministic_algorithms(True)
    with recorded_launches() as submitted:
        handles = [executor.submit(batch) for batch in batches]
    torch.use_deterministic_algorithms(False)
    assert [handle.result().sampled for handle in handles] == outputs
    assert len({sampled.token for output in outputs for sampled in output if sampled is not None}) > 5
    assert not submitted.operations() & WAITING_OPERATIONS

    # Of 4 rows, and of 3 and one of padding: the same launches, whatever they hold.
    full, padded = queue.replays
    assert len(full.launches) > 30
    assert full.launches == padded.launches
    written = ~(pools[0].values.isnan() & pools[1].values.isnan())
    torch.testing.assert_close(pools[1].values[written], pools[0].values[written], atol=1e-4, rtol=1e-4)
    assert torch.equal(pools[0].values.isnan(), pools[1].values.isnan())


def test_a_warm_up_launches_every_kernel_and_leaves_the_pool_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_graphs, "warmup_shapes", lambda max_rows: [StepShape(16, 36, 1, 1, 20, 1)])
    folder = write_family(tmp_path, "qwen3", num_hidden_layers=1)
    config = DecoderConfig.from_folder(folder)
    pool = nan_pool(config.kv_layout(2, BLOCK_SIZE, "float32", "hash").shape)
    before = pool.blocks.clone()
    decoder = Decoder(folder, config, Precision(quantization="int8"), TRITON_KERNELS)
    with recorded_launches() as recorded:
        decode_graphs.warm_up(
            decoder, pool, DeviceQueue(), TRITON_SAMPLING, vocab_size=config.shape.vocab_size, max_rows=1
        )
    assert torch.equal(pool.blocks, before)
    launched = {getattr(operation, "__name__", operation) for operation in recorded.operations()}
    assert launched >= {"_prefill_kernel", "_chunk_kernel", "_merge_kernel", "_rope_kernel", "_multiply_kernel"}
    assert launched >= {"_score_kernel", "_weigh_kernel", "_end_kernel"}


def test_of_logits_that_are_not_finite_some_token_comes() -> None:
    """The step behind takes it, before the host knows."""
    logits_BV = torch.full((2, 97), torch.nan)
    rows = [row(0, [1], 0, SamplingParams()), row(0, [1], 0, DRAWN)]
    plan = plan_draws(rows, 97)
    token_B = torch.zeros(2, dtype=torch.int64)
    # Fills what `torch.empty` gives with the largest of numbers.
    torch.use_deterministic_algorithms(True)
    draw_into(token_B, logits_BV, logits_BV[:, 0], plan, torch.from_numpy(plan.words), TRITON_SAMPLING)
    torch.use_deterministic_algorithms(False)
    assert ((token_B >= 0) & (token_B < 97)).all()
