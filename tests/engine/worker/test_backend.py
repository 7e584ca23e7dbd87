"""Memory sizing of a worker before anything is allocated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.contracts.codec import to_json
from pdserve.contracts.precision import Precision
from pdserve.contracts.worker_config import TlsFiles, WorkerConfig, WorkerRole
from pdserve.engine.worker import backend
from pdserve.engine.worker.backend import choose_backend
from pdserve.engine.worker.draft import read_draft
from pdserve.engine.worker.model_device import build_copies
from pdserve.engine.worker.pool_size import AUTO_MEMORY_SHARE
from pdserve.engine.worker.ranks import MIN_RANK_WAIT_S, longest_wait_s
from pdserve.engine.worker.served_model import cost_of, served_model
from pdserve.kv_transfer.pool_memory import PoolMemory
from pdserve.kv_transfer.resharding import KvShard
from pdserve.model.config.decoder_config import DecoderConfig
from pdserve.model.cost.hardware import hardware
from pdserve.model.executors.draft_model import DraftModel
from pdserve.model.executors.model import ModelExecutor
from pdserve.model.weights.decoder_weights import held_bytes as weights_held
from pdserve.model.weights.random_checkpoint import write_random_checkpoint
from tests.kv_transfer.peer import LAYOUT
from tests.model.quantised_checkpoints import write_quantised
from tests.staged_worker import staged_device

MAX_MODEL_LEN = 64
SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 512,
}  # fmt: skip


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> WorkerConfig:
    folder = write_random_checkpoint(tmp_path_factory.mktemp("checkpoint"), **SIZES)
    return WorkerConfig(
        worker_id="w",
        role=WorkerRole.MIXED,
        model_path=str(folder),
        precision=Precision(dtype="bfloat16"),
        max_model_len=MAX_MODEL_LEN,
    )


@pytest.fixture(autouse=True)
def settings_of_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings that a worker makes in its process must not outlive the test."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")


def with_precision(config: WorkerConfig, **changed: str) -> WorkerConfig:
    return replace(config, precision=replace(config.precision, **changed))


def held_bytes(config: WorkerConfig) -> int:
    return weights_held(
        DecoderConfig.from_folder(Path(config.model_path)).shape, config.precision.dtype, config.precision.quantization
    )


def test_an_automatic_pool_shares_what_the_weights_leave(config: WorkerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    available_bytes = held_bytes(config) + 10**6
    monkeypatch.setattr(backend, "available_memory_bytes", lambda: available_bytes)
    layout = choose_backend(config).layout
    assert layout.num_blocks == int(10**6 * AUTO_MEMORY_SHARE) // layout.block_bytes


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_a_quantised_pool_has_more_blocks_in_the_same_memory(config: WorkerConfig, dtype: str) -> None:
    config = replace(config, kv_memory_bytes=10**5)
    whole, quantised = choose_backend(config), choose_backend(with_precision(config, kv_dtype=dtype))
    assert quantised.layout.dtype == dtype
    assert quantised.layout.num_blocks == 10**5 // quantised.layout.block_bytes
    # 8 values take 16 bytes in bfloat16, and 12 bytes at one byte each plus a scale.
    assert quantised.layout.num_blocks == pytest.approx(whole.layout.num_blocks * 16 / 12, abs=2)


def test_weights_are_counted_as_they_are_held(config: WorkerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "available_memory_bytes", lambda: held_bytes(config) - 1)
    with pytest.raises(ValueError, match="serve a smaller model"):
        choose_backend(config)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_weights_leave_more_memory_and_are_another_model(
    config: WorkerConfig, monkeypatch: pytest.MonkeyPatch, quantization: str
) -> None:
    quantised = with_precision(config, quantization=quantization)
    saved_bytes = held_bytes(config) - held_bytes(quantised)
    assert saved_bytes > 0
    monkeypatch.setattr(backend, "available_memory_bytes", lambda: held_bytes(config) + 10**6)
    layouts = [choose_backend(one).layout for one in (config, quantised)]
    assert layouts[1].num_blocks == int((10**6 + saved_bytes) * AUTO_MEMORY_SHARE) // layouts[1].block_bytes
    assert layouts[0].model_hash != layouts[1].model_hash


@pytest.mark.parametrize(
    ("form", "fields", "reason"),
    [
        (
            "awq",
            {"precision": Precision(quantization="int8")},
            r"has int4 weights \(AWQ\).*set model.quantization to auto",
        ),
        ("awq", {"tensor_parallel": 4}, "tensor_parallel 4 divides the 48 inputs of the MLP within groups of 32"),
        ("gptq-act-order", {"tensor_parallel": 2}, r"tensor_parallel is 2, .*act-order \(desc_act .*: set it to 1"),
    ],
)
def test_what_a_quantised_checkpoint_cannot_be_is_refused(
    config: WorkerConfig, tmp_path: Path, form: str, fields: dict[str, Any], reason: str
) -> None:
    folder, _ = write_quantised(tmp_path, "llama", form, intermediate_size=48, num_key_value_heads=4)
    quantised = replace(config, model_path=str(folder), max_model_len=0)
    choose_backend(replace(quantised, precision=Precision(dtype="bfloat16")))
    with pytest.raises(ValueError, match=reason):
        choose_backend(replace(quantised, **fields))


def test_int8_kv_of_another_dtype_is_of_another_model(config: WorkerConfig) -> None:
    config = with_precision(config, kv_dtype="int8")
    layouts = [choose_backend(with_precision(config, dtype=dtype)).layout for dtype in ("float32", "bfloat16")]
    assert layouts[0].model_hash != layouts[1].model_hash


def test_a_told_pool_must_fit_beside_the_weights(config: WorkerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "available_memory_bytes", lambda: held_bytes(config) + 10**5)
    assert choose_backend(replace(config, kv_memory_bytes=10**5)).layout.pool_bytes <= 10**5
    with pytest.raises(ValueError, match="available after the weights: lower kv_memory"):
        choose_backend(replace(config, kv_memory_bytes=2 * 10**5))


@pytest.mark.parametrize(
    ("fields", "remedy"),
    [
        ({"precision": Precision(dtype="int8")}, "use one of float32"),
        ({"transport": "nccl"}, "nccl, which copies KV between GPUs, and there is none: use auto"),
        ({"transport": "nccl", "emulate": "h100-sxm"}, "nccl, which copies KV between GPUs, and there is none"),
        ({"transport": "cuda_ipc"}, "cuda_ipc, which copies KV between GPUs, and there is none: use auto"),
        (
            {"precision": Precision(kv_dtype="int4")},
            "kv_dtype 'int4' is not supported: use one of auto, int8, float8_e4m3fn",
        ),
        (
            {"precision": Precision(quantization="awq")},
            "quantization 'awq' is not supported: use one of auto, none, int8, int4",
        ),
    ],
)
def test_what_cannot_be_served_is_said(config: WorkerConfig, fields: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        choose_backend(replace(config, **fields))


def test_a_worker_that_gets_no_gpu_predicts_with_the_figures_of_its_cpu(config: WorkerConfig) -> None:
    expecting_gpu = replace(config, hardware=to_json(hardware("h100-sxm")), cpu_cores=(0,))
    assert choose_backend(expecting_gpu).cost.hardware == hardware("cpu", num_cores=1)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tls": TlsFiles(ca="a", certificate="b", key="c")}, "NCCL does not encrypt, and security.tls is set"),
    ],
)
def test_a_pool_that_cannot_be_copied_directly_is_copied_through_the_host(
    config: WorkerConfig, fields: dict[str, Any], reason: str
) -> None:
    memory = PoolMemory.create(LAYOUT)
    pool = torch.zeros((LAYOUT.num_blocks, LAYOUT.block_bytes), dtype=torch.uint8)
    shards = [KvShard(range(LAYOUT.num_kv_heads), range(LAYOUT.num_layers))]
    assert build_copies(replace(config, transport="nccl"), pool, memory, shards) is not None
    assert build_copies(config, pool, memory, shards) is None
    with pytest.raises(ValueError, match=f"nccl, which is impossible here: {reason}. Use auto"):
        build_copies(replace(config, transport="nccl", **fields), pool, memory, shards)


def test_a_pool_that_no_other_process_can_open_is_one_line_with_the_remedy(
    config: WorkerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = replace(config, transport="cuda_ipc", device="cpu")

    def refuse(storage: object) -> None:
        raise RuntimeError("operation not supported")

    monkeypatch.setattr(torch.UntypedStorage, "_share_fd_cpu_", refuse)
    memory = PoolMemory.create(LAYOUT)
    pool = torch.zeros((LAYOUT.num_blocks, LAYOUT.block_bytes), dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"cuda_ipc, which is impossible here: operation not supported\. Use auto"):
        build_copies(opened, pool, memory, [KvShard(range(LAYOUT.num_kv_heads), range(LAYOUT.num_layers))])
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with staged_device(), pytest.raises(ValueError, match="remove expandable_segments from PYTORCH_CUDA_ALLOC_CONF"):
        choose_backend(opened)


def test_kv_of_dynamic_rope_is_of_one_length(config: WorkerConfig, tmp_path: Path) -> None:
    """Two lengths rotate keys differently; without dynamic RoPE the length changes nothing."""
    stretched = write_random_checkpoint(
        tmp_path, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    )
    for path, num_hashes in ((str(stretched), 2), (config.model_path, 1)):
        configs = [replace(config, model_path=path, max_model_len=length) for length in (1024, 2048)]
        assert len({choose_backend(config).layout.model_hash for config in configs}) == num_hashes


def test_a_gpu_that_is_not_here_is_one_line_with_the_remedy(
    config: WorkerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert choose_backend(replace(config, device="auto")).layout == choose_backend(replace(config, device="cpu")).layout
    with pytest.raises(ValueError, match=r"torch sees no GPU: check nvidia-smi .* or set device to cpu") as error:
        choose_backend(replace(config, device="cuda"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("device", "has_pool_on_gpu"), [("auto", True), ("cuda", True), ("cpu", False)])
def test_a_pool_on_a_gpu_is_sized_by_what_is_free_there(
    config: WorkerConfig, monkeypatch: pytest.MonkeyPatch, device: str, has_pool_on_gpu: bool
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (2 * 10**6, 2 * 10**6))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(backend, "available_memory_bytes", lambda: 10**9)
    told = replace(
        config,
        device=device,
        hardware=to_json(replace(hardware("cpu"), memory_reserve_bytes=50_000)),
        gpu_memory_utilization=0.5,
        max_batch_tokens=16,
        max_batch_size=100,
    )
    chosen = choose_backend(told)
    memory = chosen.cost.rank_memory(max_batch_tokens=16, max_batch_size=100)
    on_gpu = int(10**6 - memory.weight_bytes - memory.activation_bytes - 50_000) // chosen.layout.block_bytes
    on_host = int((10**9 - held_bytes(config)) * AUTO_MEMORY_SHARE) // chosen.layout.block_bytes
    useful = 100 * MAX_MODEL_LEN // config.block_size
    assert on_gpu < useful < on_host
    assert chosen.layout.num_blocks == (on_gpu if has_pool_on_gpu else useful)


@pytest.mark.parametrize(("kv_dtype", "capability"), [("float8_e4m3fn", (8, 9)), ("int8", (8, 0)), ("auto", (8, 0))])
def test_kv_of_float8_is_of_gpus_that_have_it(
    config: WorkerConfig, monkeypatch: pytest.MonkeyPatch, kv_dtype: str, capability: tuple[int, int]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (10**9, 10**9))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    choose_backend(with_precision(config, kv_dtype=kv_dtype))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 0))
    with pytest.raises(ValueError, match="NVIDIA A100 has no float8: set kv_dtype to int8"):
        choose_backend(with_precision(config, kv_dtype="float8_e4m3fn"))


def test_gpus_that_are_too_old_are_refused_by_name(config: WorkerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (7, 5))
    with pytest.raises(ValueError, match=r"Tesla T4 has compute capability 7\.5, .* set device to cpu, or use another"):
        choose_backend(replace(config, device="auto"))
    choose_backend(replace(config, device="cpu"))


def test_pickles_are_named_before_anything_is_allocated(config: WorkerConfig, tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to(Path(config.model_path) / "config.json")
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ValueError, match="are pickles, which can run code"):
        choose_backend(replace(config, model_path=str(tmp_path)))


def test_an_emulated_worker_predicts_the_time_that_its_steps_really_take(config: WorkerConfig) -> None:
    real, slow, instant = (
        choose_backend(replace(config, emulate="h100-sxm", time_scale=scale)) for scale in (1.0, 8.0, 0.0)
    )
    assert slow.cost.decode_s(4, 100) == pytest.approx(8 * real.cost.decode_s(4, 100))
    assert instant.cost.decode_s(4, 100) == real.cost.decode_s(4, 100)
    pulls_s = [each.emulated_pull_s(10) if each.emulated_pull_s else -1.0 for each in (real, slow, instant)]
    assert pulls_s == pytest.approx([pulls_s[0], 8 * pulls_s[0], 0.0])
    assert pulls_s[0] > 0
    assert slow.layout == real.layout


def test_a_measured_device_predicts_the_worker(config: WorkerConfig) -> None:
    measured = replace(hardware("cpu"), step_overhead_s=0.25)
    computed = choose_backend(replace(config, hardware=to_json(measured)))
    assert computed.cost.hardware == measured
    emulated = choose_backend(replace(config, emulate="mine", time_scale=0.0, hardware=to_json(measured)))
    assert emulated.cost.hardware == measured


@pytest.mark.parametrize(
    ("degrees", "remedy"),
    [
        (
            {"tensor_parallel": 4},
            "tensor_parallel is 4 and pipeline_parallel 1, and the worker sees 3 GPUs: lower them",
        ),
        ({"tensor_parallel": 2, "pipeline_parallel": 2}, "is 2 and pipeline_parallel 2, and the worker sees 3 GPUs"),
    ],
)
def test_ranks_that_the_gpus_do_not_hold(
    config: WorkerConfig, monkeypatch: pytest.MonkeyPatch, degrees: dict[str, int], remedy: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    with pytest.raises(ValueError, match=remedy):
        choose_backend(replace(config, device="cuda", **degrees))  # type: ignore[arg-type]


@pytest.mark.parametrize("degree", ["tensor_parallel", "pipeline_parallel"])
def test_two_gpus_hold_the_blocks_of_two(config: WorkerConfig, monkeypatch: pytest.MonkeyPatch, degree: str) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (7 * 10**5, 7 * 10**5))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 0))
    config = replace(config, max_batch_tokens=16, max_batch_size=100)
    chosen = choose_backend(replace(config, **{degree: 2}))  # type: ignore[arg-type]
    memory = chosen.cost.rank_memory(max_batch_tokens=16, max_batch_size=100)
    left_bytes = 7 * 10**5 * 0.9 - memory.weight_bytes - memory.activation_bytes - memory.reserve_bytes
    assert (chosen.layout.num_kv_heads, chosen.layout.num_layers) == (2, 2)
    assert chosen.layout.num_blocks == int(left_bytes) // (chosen.layout.block_bytes // 2)


def test_an_emulated_pool_has_what_its_gpu_would(config: WorkerConfig) -> None:
    small = replace(hardware("h100-sxm"), name="small", memory_bytes=10**9, memory_reserve_bytes=0)
    emulated = replace(config, emulate="small", hardware=to_json(small), max_batch_size=10**5)
    whole, part = (choose_backend(replace(emulated, gpu_memory_utilization=share)).layout for share in (1.0, 0.9))
    assert part.num_blocks < whole.num_blocks < 4 * 10**5, "no limit but memory"
    with pytest.raises(ValueError, match=f"needs {200 * 2**30} bytes and .* after the weights: lower kv_memory"):
        choose_backend(replace(emulated, kv_memory_bytes=200 * 2**30))


def test_emulated_ranks_share_the_work(config: WorkerConfig) -> None:
    wide = replace(config, tensor_parallel=2)
    one, two = (choose_backend(replace(each, emulate="h100-sxm")) for each in (config, wide))
    assert (one.cost.tensor_parallel, two.cost.tensor_parallel) == (1, 2)


@pytest.mark.parametrize(
    ("num_ranks", "num_stages", "quantization", "reason"),
    [
        (3, 1, "none", "tensor_parallel 3 does not divide 4 heads and 2 KV heads"),
        (
            2,
            1,
            "int4",
            "tensor_parallel 2 divides the 32 inputs of the heads within groups of 128",
        ),
        (1, 5, "none", "pipeline_parallel 5 does not divide 2 layers"),
    ],
)
def test_ranks_that_cannot_share_the_model_are_refused(
    config: WorkerConfig, num_ranks: int, num_stages: int, quantization: str, reason: str
) -> None:
    divided = replace(config, tensor_parallel=num_ranks, pipeline_parallel=num_stages)
    with pytest.raises(ValueError, match=reason):
        choose_backend(with_precision(divided, quantization=quantization))


@pytest.mark.parametrize(
    ("num_experts", "expert_parallel", "quantization", "reason"),
    [
        (0, True, "none", "expert_parallel is set, and the model has no experts; remove it"),
        (3, True, "none", "expert_parallel: tensor_parallel 2 does not divide 3 experts; use a divisor, or set"),
        (4, False, "int4", r"inputs of the experts within groups .*: .* or expert_parallel true or quantization int8"),
        (4, True, "int4", ""),
    ],
)
def test_experts_that_ranks_cannot_share_are_refused(
    tmp_path: Path, num_experts: int, expert_parallel: bool, quantization: str, reason: str
) -> None:
    folder = write_random_checkpoint(tmp_path, hidden_size=256, intermediate_size=128, num_experts=num_experts)
    config = WorkerConfig(worker_id="w", role=WorkerRole.MIXED, model_path=str(folder), tensor_parallel=2)
    config = with_precision(replace(config, expert_parallel=expert_parallel), quantization=quantization)
    if not reason:
        assert choose_backend(config).cost.tensor_parallel == 2
        return
    with pytest.raises(ValueError, match=reason):
        choose_backend(config)


def test_ranks_of_short_steps_wait_for_one_that_compiles_a_kernel(config: WorkerConfig) -> None:
    config = replace(config, num_kv_blocks=8)
    model, _ = served_model(config)
    cost = cost_of(config, model)
    assert longest_wait_s(config, cost, choose_backend(config).layout) == MIN_RANK_WAIT_S


def test_every_micro_batch_holds_a_sequence_of_the_models_length(config: WorkerConfig) -> None:
    staged = replace(config, pipeline_parallel=2, max_model_len=64, num_kv_blocks=7)
    with pytest.raises(ValueError, match=r"in each of its 2 micro-batches: raise num_kv_blocks to 8 blocks"):
        choose_backend(staged)
    backend = choose_backend(replace(staged, num_kv_blocks=8, role=WorkerRole.DECODE, emulate="h100-sxm"))
    assert (backend.layout.num_blocks, backend.num_swap_slots, backend.cost.pipeline_depth) == (8, 1, 1)


@pytest.mark.parametrize(("num_ranks", "num_stages", "num_copies"), [(1, 1, 1), (2, 1, 1), (4, 1, 2), (4, 2, 2)])
def test_ranks_with_pools_of_their_own_swap_within_swap_memory(
    config: WorkerConfig, num_ranks: int, num_stages: int, num_copies: int
) -> None:
    """Of 2 KV heads."""
    block_bytes = choose_backend(config).layout.block_bytes
    config = replace(config, num_kv_blocks=64, swap_memory_bytes=8 * block_bytes)
    config = replace(config, tensor_parallel=num_ranks, pipeline_parallel=num_stages)
    with staged_device():
        assert choose_backend(config).num_swap_slots == 8 // num_copies // num_stages
    assert choose_backend(config).num_swap_slots == 8 // num_stages


def test_a_tier_below_a_gpus_pool_or_a_pipelines_is_refused(config: WorkerConfig) -> None:
    tiered = replace(config, kv_tier_path="/tiers", kv_tier_bytes=2**30)
    choose_backend(tiered)
    with pytest.raises(ValueError, match=r"mixed\.kv_tier is set, and pipelines have no tier so far: leave it out"):
        choose_backend(replace(tiered, pipeline_parallel=2))
    with staged_device(), pytest.raises(ValueError, match="GPUs, emulated ones too, have no tier"):
        choose_backend(tiered)
    with pytest.raises(ValueError, match="GPUs, emulated ones too, have no tier"):
        choose_backend(replace(tiered, emulate="h100-sxm"))


def test_a_draft_model_on_a_gpu_is_refused(config: WorkerConfig) -> None:
    drafting, guessing = replace(config, speculation="draft"), replace(config, speculation="ngram")
    backend._check_speculation(drafting, is_on_host=True)
    backend._check_speculation(guessing, is_on_host=False)
    with pytest.raises(ValueError, match=r"mixed\.speculation has a draft model, which guesses on CPUs only so far"):
        backend._check_speculation(drafting, is_on_host=False)
    choose_backend(replace(guessing, emulate="h100-sxm", time_scale=0.0))


def test_a_draft_model_takes_memory_of_the_pool(config: WorkerConfig, tmp_path: Path) -> None:
    smaller = write_random_checkpoint(tmp_path / "smaller", **{**SIZES, "num_layers": 1})
    drafting = replace(config, speculation="draft", draft_path=str(smaller))
    sized = replace(config, num_kv_blocks=0, kv_memory_bytes=2**20)
    plain, with_draft = choose_backend(sized), choose_backend(replace(drafting, num_kv_blocks=0, kv_memory_bytes=2**20))
    draft = DecoderConfig.from_folder(smaller)
    draft_bytes = draft.kv_layout(1, config.block_size, "bfloat16", "").block_bytes
    assert plain.layout.num_blocks == 2**20 // plain.layout.block_bytes
    assert with_draft.layout.num_blocks == 2**20 // (plain.layout.block_bytes + draft_bytes)
    assert with_draft.draft_cost is not None
    assert plain.draft_cost is None
    [executor] = with_draft.build_executors(PoolMemory.create(with_draft.layout)).executors
    assert isinstance(executor, ModelExecutor)
    assert isinstance(executor._drafter, DraftModel)


def test_a_quantised_draft_model_is_counted_as_it_is_held(config: WorkerConfig, tmp_path: Path) -> None:
    folder, plain = write_quantised(tmp_path, "llama", "gptq")
    target = DecoderConfig.from_folder(plain)
    target = replace(target, shape=replace(target.shape, num_layers=9))
    drafting = replace(config, model_path=str(plain), speculation="draft", draft_path=str(folder))
    drafts = [read_draft(with_precision(drafting, quantization=each), target) for each in ("auto", "none", "int8")]
    held = [(draft.precision.quantization, draft.cost.weight_bytes) for draft in drafts if draft is not None]
    assert held == [("auto", weights_held(DecoderConfig.from_folder(folder).shape, "bfloat16", "auto"))] * 3


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_layers": 2}, r"parameters and the model \d+: name a smaller one"),
        (
            {"vocab_size": 520},
            "has (520 tokens, the model 512|another tokenizer than the model): name one with the same vocabulary",
        ),
        (None, "cannot be used: cannot read .*config.json"),
    ],
)
def test_a_draft_model_that_cannot_guess_is_refused(
    config: WorkerConfig, tmp_path: Path, changes: dict[str, int] | None, said: str
) -> None:
    if changes is not None:
        write_random_checkpoint(tmp_path / "draft", **{**SIZES, **changes})
    drafting = replace(config, speculation="draft", draft_path=str(tmp_path / "draft"))
    with pytest.raises(ValueError, match=rf"^mixed\.speculation: the draft model in .*{said}") as caught:
        choose_backend(drafting)
    assert "\n" not in str(caught.value)


def test_a_draft_model_of_another_tokenizer_is_refused(config: WorkerConfig, tmp_path: Path) -> None:
    smaller = write_random_checkpoint(tmp_path / "smaller", **{**SIZES, "num_layers": 1})
    (smaller / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    drafting = replace(config, speculation="draft", draft_path=str(smaller))
    with pytest.raises(ValueError, match="has another tokenizer than the model: name one with the same vocabulary"):
        choose_backend(drafting)


@pytest.mark.parametrize(
    ("changes", "said"), [({"emulate": "cpu"}, "an emulated device"), ({"pipeline_parallel": 2}, "pipeline_parallel")]
)
def test_a_draft_model_runs_on_real_workers_of_one_stage(
    config: WorkerConfig, changes: dict[str, Any], said: str
) -> None:
    drafting = replace(config, speculation="draft", draft_path="draft", **changes)
    with pytest.raises(ValueError, match=rf"mixed\.speculation has a draft model, which does not run with {said}"):
        choose_backend(drafting)
