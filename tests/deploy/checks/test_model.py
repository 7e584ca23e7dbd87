"""Models that cannot be served, and workers that exceed memory, fail before anything starts."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save

from pdserve.contracts.deployment import DeploymentConfig, ModelConfig, PhaseConfig
from pdserve.contracts.errors import DeployError
from pdserve.contracts.precision import Precision
from pdserve.contracts.worker_config import WorkerConfig, WorkerRole
from pdserve.deploy.checks import model as model_checks
from pdserve.deploy.checks.model import PROCESS_BYTES, check_memory, check_model, worker_memory
from pdserve.deploy.launch import Launch
from pdserve.model.config.decoder_config import DecoderConfig
from pdserve.model.config.quantisation import Scheme
from pdserve.model.weights.bytes import weight_bytes
from pdserve.model.weights.files import layer_matrices
from pdserve.model.weights.random_checkpoint import write_random_checkpoint, write_tokenizer
from tests.model.quantised_checkpoints import FORMS, write_mxfp4

MODEL = ModelConfig(dtype="float32")
LAUNCH = Launch(config=DeploymentConfig(model=MODEL))
EMULATED = replace(LAUNCH, emulate="h100-sxm")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_checkpoint(tmp_path_factory.mktemp("model"), num_layers=1)


@pytest.fixture
def checkpoint(whole: Path, tmp_path: Path) -> Path:
    """A checkpoint whose files may be replaced."""
    for file in whole.iterdir():
        (tmp_path / file.name).symlink_to(file)
    return tmp_path


def overwrite(file: Path, content: str | bytes) -> None:
    file.unlink(missing_ok=True)
    file.write_bytes(content.encode() if isinstance(content, str) else content)


def checked(launch: Launch, folder: Path) -> str:
    model = replace(launch.config.model, path=str(folder))
    return check_model(replace(launch, config=replace(launch.config, model=model)))


def refusal(launch: Launch, folder: Path) -> str:
    with pytest.raises(DeployError) as caught:
        checked(launch, folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_whole_checkpoint_passes(whole: Path) -> None:
    assert checked(LAUNCH, whole) == ""
    assert checked(EMULATED, whole) == ""


def test_groups_of_a_quantised_checkpoint_are_checked(checkpoint: Path) -> None:
    """`pdserve up` would refuse them only once its workers start."""
    config, pack = FORMS["gptq"]
    tensors = load_file(checkpoint / "model.safetensors")
    for module in layer_matrices(DecoderConfig.from_folder(checkpoint).shape):
        _, parts = pack(tensors.pop(f"{module}.weight").float())
        tensors |= {f"{module}.{end}": tensor.contiguous() for end, tensor in parts.items()}
    values = json.loads((checkpoint / "config.json").read_text()) | {"quantization_config": config}
    overwrite(checkpoint / "config.json", json.dumps(values))
    overwrite(checkpoint / "model.safetensors", save(tensors))
    assert checked(LAUNCH, checkpoint) == ""
    name = "model.layers.0.mlp.down_proj.g_idx"
    tensors[name] = tensors[name].flip(0).contiguous()
    overwrite(checkpoint / "model.safetensors", save(tensors))
    assert f"model.safetensors: {name} has inputs in act-order" in refusal(LAUNCH, checkpoint)


def test_gpt_oss_passes_with_its_experts_in_mxfp4(tmp_path: Path) -> None:
    folder, _ = write_mxfp4(tmp_path, vocab_size=512)
    write_tokenizer(folder, 512)
    assert checked(replace(LAUNCH, config=replace(LAUNCH.config, model=replace(MODEL, dtype="bfloat16"))), folder) == ""


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    assert f"no model folder at {tmp_path / 'absent'}; give --model" in refusal(LAUNCH, tmp_path / "absent")


def test_gguf_is_named(tmp_path: Path) -> None:
    (tmp_path / "model-q4.gguf").touch()
    for path in (tmp_path, tmp_path / "model-q4.gguf"):
        assert f"{path} is in GGUF, which is not served; download" in refusal(LAUNCH, path)


def test_a_name_of_the_hub_is_told_from_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    download = "hf download meta-llama/Llama-3.1-8B --local-dir Llama-3.1-8B"
    assert refusal(LAUNCH, Path("meta-llama/Llama-3.1-8B")).endswith(download)
    assert "hf download" not in refusal(LAUNCH, Path("models/Llama-3.1-8B"))


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("config.json", "config.json"),
        ("tokenizer.json", "has no tokenizer.json; save the model's tokenizer there"),
        ("model.safetensors", "name a folder written by save_pretrained()"),
    ],
)
def test_a_missing_file_is_named(checkpoint: Path, missing: str, said: str) -> None:
    (checkpoint / missing).unlink()
    assert said in refusal(LAUNCH, checkpoint)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("config.json", "{", "config.json is not JSON"),
        ("config.json", '{"architectures": ["MambaForCausalLM"]}', "['MambaForCausalLM'] is not supported"),
        ("tokenizer.json", "{}", "tokenizer.json is not a tokenizer"),
        (
            "tokenizer.json",
            "version https://git-lfs.github.com/spec/v1\n",
            "json is a pointer of Git LFS; run git lfs pull",
        ),
        ("tokenizer_config.json", "[]", "tokenizer_config.json is not a JSON object; download it again"),
        ("tokenizer_config.json", '{"chat_template": 3}', "is not text; download it again"),
        ("chat_template.jinja", "{% for %}", "the chat template does not compile"),
        ("model.safetensors", b"", "is cut short; download it again"),
        (
            "model.safetensors",
            (2).to_bytes(8, "little") + b"{}",
            "weights do not match config.json: missing model.embed",
        ),
    ],
)
def test_a_broken_file_is_named(checkpoint: Path, file: str, content: str | bytes, said: str) -> None:
    if "chat_template" in str(content):
        (checkpoint / "chat_template.jinja").unlink()
    overwrite(checkpoint / file, content)
    assert said in refusal(LAUNCH, checkpoint)


def test_weights_of_another_name_are_named(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "model.fp16.safetensors")
    (checkpoint / "model.safetensors").symlink_to(checkpoint / "blob")
    said = "model.fp16.safetensors is there; model.safetensors is a link to nothing; name a folder"
    assert said in refusal(LAUNCH, checkpoint)


def test_a_folder_without_a_model_says_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "snapshots/0af1").mkdir(parents=True)
    (tmp_path / "snapshots/0af1/config.json").write_text("{}")
    assert f"no such file; name {tmp_path}/snapshots/0af1" in refusal(LAUNCH, tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "it has an adapter (LoRA): merge it into its base model" in refusal(LAUNCH, tmp_path)


def test_a_byte_order_mark_is_read_over(checkpoint: Path) -> None:
    overwrite(checkpoint / "config.json", b"\xef\xbb\xbf" + (checkpoint / "config.json").read_bytes())
    assert checked(LAUNCH, checkpoint) == ""


def test_a_truncated_file_is_named(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    overwrite(file, file.read_bytes()[:-1])
    assert f"{file} has" in refusal(LAUNCH, checkpoint)


def test_pickles_are_refused_with_how_to_convert_them(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    overwrite(checkpoint / "pytorch_model.bin", b"pickle")
    assert "pytorch_model.bin are pickles" in refusal(LAUNCH, checkpoint)


def test_without_a_chat_template_it_is_served_with_a_warning(checkpoint: Path) -> None:
    (checkpoint / "chat_template.jinja").unlink()
    overwrite(checkpoint / "tokenizer_config.json", "{}")
    note = checked(LAUNCH, checkpoint)
    assert "/v1/chat/completions is refused" in note
    assert "chat_template.jinja" in note


def test_emulation_needs_no_weights_but_room_for_them(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    assert checked(EMULATED, checkpoint) == ""
    config = json.loads((checkpoint / "config.json").read_text())
    overwrite(checkpoint / "config.json", json.dumps({**config, "intermediate_size": 10**9}))
    assert "emulate a larger GPU or serve a smaller model" in refusal(EMULATED, checkpoint)


@pytest.mark.parametrize("launch_emulate", ["", "h100-sxm"])
def test_a_length_beyond_the_model_is_refused(whole: Path, launch_emulate: str) -> None:
    config = DeploymentConfig(model=replace(MODEL, max_model_len=100_000))
    assert "max_model_len 100000" in refusal(Launch(config=config, emulate=launch_emulate), whole)


@pytest.mark.parametrize("launch_emulate", ["", "h100-sxm"])
def test_a_pool_that_holds_no_sequence_is_refused(whole: Path, launch_emulate: str) -> None:
    config = DeploymentConfig(model=MODEL, decode=PhaseConfig(kv_memory="1KiB"))
    said = refusal(Launch(config=config, emulate=launch_emulate), whole)
    assert "decode-0: the KV pool of 0 blocks does not hold one sequence" in said
    assert "raise kv_memory to" in said


@pytest.mark.parametrize("launch_emulate", ["", "h100-sxm"])
def test_degrees_that_do_not_divide_the_model_are_refused(whole: Path, launch_emulate: str) -> None:
    config = DeploymentConfig(model=MODEL, decode=PhaseConfig(pipeline_parallel=5))
    said = refusal(Launch(config=config, emulate=launch_emulate), whole)
    assert said.startswith("decode-0: pipeline_parallel 5 does not divide ")
    assert said.endswith("layers; use a divisor")


def test_what_does_not_fit_into_memory_is_refused(whole: Path) -> None:
    assert "2 workers need" in refusal(replace(LAUNCH, memory_bytes=2**20), whole)


MIB = 2**20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DecoderConfig:
    folder = write_random_checkpoint(
        tmp_path_factory.mktemp("model"), hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2
    )
    return DecoderConfig.from_folder(Path(folder))


def a_worker(role: WorkerRole = WorkerRole.DECODE, *, kv: int = 0, swap: int | None = None) -> WorkerConfig:
    return WorkerConfig(
        worker_id=f"{role.value}-0",
        role=role,
        model_path="",
        max_model_len=160,
        kv_memory_bytes=kv,
        swap_memory_bytes=swap,
    )


def test_a_worker_holds_weights_its_pool_and_its_swap_memory(model: DecoderConfig) -> None:
    block_bytes = 16 * 2 * 2 * 2 * 16 * 4
    assert worker_memory(a_worker(), model) == (weight_bytes(model.shape, "float32", "none").total, 10 * block_bytes, 0)
    memory = worker_memory(a_worker(kv=50 * MIB, swap=8 * MIB), model)
    assert (memory.kv, memory.swap) == (50 * MIB, 8 * MIB)
    assert worker_memory(replace(a_worker(kv=50 * MIB), device="cuda"), model) == (0, 50 * MIB, 0)


def test_a_worker_holds_its_draft_model_too(model: DecoderConfig, tmp_path: Path) -> None:
    draft = write_random_checkpoint(tmp_path / "draft", hidden_size=32, num_layers=1, num_heads=4, num_kv_heads=2)
    worker = replace(a_worker(), speculation="draft", draft_path=str(draft), model_path=str(draft))
    plain, memory, config = (
        worker_memory(a_worker(), model),
        worker_memory(worker, model),
        DecoderConfig.from_folder(draft),
    )
    assert memory.weights == plain.weights + weight_bytes(config.shape, "float32", "none").total
    assert memory.kv == plain.kv + 10 * 16 * 2 * 2 * 8 * 4


def test_a_draft_model_that_cannot_guess_is_refused(whole: Path) -> None:
    for draft, said in (("/nowhere", "cannot read /nowhere/config.json"), (str(whole), "name a smaller one")):
        decode = PhaseConfig(speculation={"draft": draft})
        launch = replace(LAUNCH, config=replace(LAUNCH.config, decode=decode))
        assert said in refusal(launch, whole)
        assert "decode-0: decode.speculation: the draft model in" in refusal(launch, whole)


@pytest.mark.parametrize(
    ("workers", "spare", "said"),
    [
        (
            [a_worker(), a_worker()],
            -1,
            "2 workers need .* use fewer workers, a smaller model, model.dtype bfloat16 or "
            "model.quantization int8 or int4",
        ),
        (
            [replace(a_worker(), precision=Precision(dtype="bfloat16", quantization="int8"))],
            -200 * MIB,
            "use fewer workers, a smaller model or model.quantization int4",
        ),
        ([a_worker()], 2**10, "1 worker needs .* lower model.max_model_len, or use fewer workers"),
        ([a_worker(kv=50 * MIB)], 50 * MIB - 1, "KV cache 50 MiB.* lower decode.kv_memory, or use fewer workers"),
        (
            [a_worker(WorkerRole.PREFILL, kv=MIB), a_worker(swap=3 * 2**30)],
            2**30,
            "swap 3.0 GiB.* 1.6 GiB is available; lower prefill.kv_memory or decode.swap_memory",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_setting_to_change(
    model: DecoderConfig, workers: list[WorkerConfig], spare: int, said: str
) -> None:
    fixed_bytes = weight_bytes(model.shape, "float32", "none").total + len(workers) * PROCESS_BYTES
    with pytest.raises(DeployError, match=said):
        check_memory(workers, model, fixed_bytes + spare)


def test_a_quantised_checkpoint_takes_its_own_memory_and_no_other_setting(model: DecoderConfig) -> None:
    scheme = Scheme(kind="int4", method="AWQ", group_inputs=32, has_zeros=True)
    quantised = replace(model, shape=replace(model.shape, scheme=scheme))
    matrices = model.shape.matrix_parameters
    saved = worker_memory(a_worker(), model).weights - worker_memory(a_worker(), quantised).weights
    assert saved == matrices * 4 - matrices // 2 - matrices // 32 * 5
    with pytest.raises(DeployError, match=r"use fewer workers, a smaller model or model\.dtype bfloat16$"):
        check_memory([a_worker()], quantised, 1)
    with pytest.raises(DeployError, match=r"decode-0: .*quantization is int4, and the checkpoint has int4"):
        check_memory([replace(a_worker(), precision=Precision(quantization="int4"))], quantised, 2**40)
    with pytest.raises(DeployError, match="decode-0: tensor_parallel 4 divides the 64 inputs of the heads within"):
        check_memory([replace(a_worker(), tensor_parallel=4)], quantised, 2**40)


def test_workers_share_weights_unless_they_hold_others_or_nothing_is_compiled(
    model: DecoderConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = [a_worker(), replace(a_worker(WorkerRole.PREFILL), worker_id="prefill-0")]
    needed = worker_memory(a_worker(), model)
    once = needed.weights + 2 * (needed.kv + PROCESS_BYTES)
    check_memory(workers, model, once)
    with pytest.raises(DeployError, match="2 workers need"):
        check_memory(workers, model, once - 1)
    others = [workers[0], replace(workers[1], tensor_parallel=2)]
    with pytest.raises(DeployError, match="2 workers need"):
        check_memory(others, model, once + needed.weights - 1)
    monkeypatch.setattr(model_checks, "has_compiler", lambda: False)
    with pytest.raises(DeployError, match="2 workers need"):
        check_memory(workers, model, once + needed.weights - 1)
    check_memory(workers, model, once + needed.weights)


def test_what_fits_passes(model: DecoderConfig) -> None:
    needed = worker_memory(a_worker(kv=50 * MIB, swap=MIB), model)
    check_memory([a_worker(kv=50 * MIB, swap=MIB)], model, sum(needed) + PROCESS_BYTES)


def test_a_size_that_is_no_use_names_the_worker(model: DecoderConfig) -> None:
    with pytest.raises(DeployError, match="decode-0: swap_memory of 1 bytes holds no KV block"):
        check_memory([a_worker(swap=1)], model, 2**30)


def test_files_that_cause_other_errors_are_one_line_too(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path, tools: object) -> None:
        raise KeyError("type")

    monkeypatch.setattr("pdserve.router.text.tokenizer.ChatTokenizer.from_folder", fail)
    assert re.fullmatch(r"the model in .* cannot be read: KeyError: 'type'", refusal(LAUNCH, whole))
