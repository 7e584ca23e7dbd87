"""What is found wrong with a model before anything starts, each with its remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdserve.contracts.deployment import DeploymentConfig, ModelConfig, PhaseConfig
from pdserve.contracts.errors import DeployError
from pdserve.deploy import memory
from pdserve.deploy.launch import Launch
from pdserve.deploy.model_check import check_model
from pdserve.model.random_checkpoint import write_random_checkpoint

LAUNCH = Launch()
EMULATED = Launch(emulate="h100-sxm")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_checkpoint(tmp_path_factory.mktemp("model"), num_layers=1)


@pytest.fixture
def checkpoint(whole: Path, tmp_path: Path) -> Path:
    """A checkpoint whose files may be replaced."""
    for file in whole.iterdir():
        (tmp_path / file.name).symlink_to(file)
    return tmp_path


def replace(file: Path, content: str | bytes) -> None:
    file.unlink(missing_ok=True)
    file.write_bytes(content.encode() if isinstance(content, str) else content)


def refusal(launch: Launch, folder: Path) -> str:
    with pytest.raises(DeployError) as caught:
        check_model(launch, folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_whole_checkpoint_passes(whole: Path) -> None:
    assert check_model(LAUNCH, whole) == []
    assert check_model(EMULATED, whole) == []


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    assert f"no model folder at {tmp_path / 'absent'}; give --model" in refusal(LAUNCH, tmp_path / "absent")


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
        ("tokenizer_config.json", "[]", "tokenizer_config.json holds no JSON object; download it again"),
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
    replace(checkpoint / file, content)
    assert said in refusal(LAUNCH, checkpoint)


def test_a_truncated_file_is_named(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    replace(file, file.read_bytes()[:-1])
    assert f"{file} has" in refusal(LAUNCH, checkpoint)


def test_pickles_are_refused_with_how_to_convert_them(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    replace(checkpoint / "pytorch_model.bin", b"pickle")
    assert "pytorch_model.bin are pickles" in refusal(LAUNCH, checkpoint)


def test_without_a_chat_template_it_is_served_and_the_user_told(checkpoint: Path) -> None:
    (checkpoint / "chat_template.jinja").unlink()
    replace(checkpoint / "tokenizer_config.json", "{}")
    [note] = check_model(LAUNCH, checkpoint)
    assert "/v1/chat/completions is refused" in note
    assert "chat_template.jinja" in note


def test_emulation_needs_no_weights_but_room_for_them(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    assert check_model(EMULATED, checkpoint) == []
    config = json.loads((checkpoint / "config.json").read_text())
    replace(checkpoint / "config.json", json.dumps({**config, "intermediate_size": 10**9}))
    assert "emulate a larger GPU or serve a smaller model" in refusal(EMULATED, checkpoint)


@pytest.mark.parametrize("launch_emulate", ["", "h100-sxm"])
def test_a_length_beyond_the_model_is_refused(whole: Path, launch_emulate: str) -> None:
    config = DeploymentConfig(model=ModelConfig(max_model_len=100_000))
    assert "max_model_len 100000" in refusal(Launch(config=config, emulate=launch_emulate), whole)


@pytest.mark.parametrize("launch_emulate", ["", "h100-sxm"])
def test_a_pool_that_holds_no_sequence_is_refused(whole: Path, launch_emulate: str) -> None:
    config = DeploymentConfig(decode=PhaseConfig(kv_memory="1KiB"))
    said = refusal(Launch(config=config, emulate=launch_emulate), whole)
    assert "decode-0: the KV pool of 0 blocks does not hold one sequence" in said
    assert "raise kv_memory to" in said


def test_what_does_not_fit_into_memory_is_refused(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 2**20)
    assert "2 workers need" in refusal(LAUNCH, whole)
