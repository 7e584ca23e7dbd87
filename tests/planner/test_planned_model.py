from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdserve.contracts.precision import Precision
from pdserve.contracts.worker_config import WorkerRole
from pdserve.model.cost.hardware import hardware
from pdserve.model.weights.bytes import weight_bytes
from pdserve.planner.layout import Pool
from pdserve.planner.planned_model import read_planned_model
from tests.model.published_configs import GPT_OSS_20B, GPT_OSS_120B

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}


def written(folder: Path, **changes: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return folder


def test_a_folder_and_its_file_are_the_same_model(tmp_path: Path) -> None:
    folder = written(tmp_path / "Llama-3-8B")
    model = read_planned_model(folder, precision=Precision(dtype="float16"))
    assert model == read_planned_model(folder / "config.json", precision=Precision(dtype="float16"))
    assert (model.name, model.precision.dtype, model.shape.num_kv_heads) == ("Llama-3-8B", "float16", 8)


def test_a_file_of_another_name_is_called_by_it(tmp_path: Path) -> None:
    (written(tmp_path / "models") / "config.json").rename(tmp_path / "opt-13b.json")
    assert read_planned_model(tmp_path / "opt-13b.json").name == "opt-13b"


@pytest.mark.parametrize(
    ("changes", "asked", "planned"),
    [
        ({}, 0, 131072),
        ({}, 65536, 65536),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 0, 262144),
        ({"rope_scaling": {"type": "not known", "factor": 2.0}}, 0, 131072),
        ({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {**CONFIG, "head_dim": 128}}, 0, 131072),
    ],
)
def test_the_length_is_what_is_asked_or_that_of_a_cluster(
    tmp_path: Path, changes: dict[str, object], asked: int, planned: int
) -> None:
    folder = written(tmp_path / "model", **changes)
    assert read_planned_model(folder, max_model_len=asked).max_model_len == planned


def test_what_is_no_model_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    with pytest.raises(ValueError, match=r"first hf download Qwen/Qwen2\.5-0\.5B --local-dir Qwen2\.5-0\.5B"):
        read_planned_model(Path("Qwen/Qwen2.5-0.5B"))
    with pytest.raises(ValueError, match=f"no model at {folder}; give --model a folder with a config.json"):
        read_planned_model(folder)
    written(folder, num_hidden_layers=-1)
    with pytest.raises(ValueError, match=r"config.json: .*num_hidden_layers must be a positive integer, not -1"):
        read_planned_model(folder)
    for text, problem in (("{", "cannot read"), ("[]", "is not a JSON object"), ("[" * 100_000, "cannot read")):
        (folder / "config.json").write_text(text)
        with pytest.raises(ValueError, match=problem):
            read_planned_model(folder)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"architectures": ["MambaForCausalLM"]}, r"\['MambaForCausalLM'\] are not known; plan for one of Deep"),
        ({"architectures": [], "model_type": "mamba"}, "model_type mamba is not known; plan for one of Deep"),
        ({"quantization_config": ["fp8"]}, r"quantization_config must be an object, not \['fp8'\]; download it again"),
        (
            {"quantization_config": {"quant_method": "hqq"}},
            r"quant_method is 'hqq', .*; or plan with --set model.quantization",
        ),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 3}},
            r"bits is 3, .*; or plan with --set model.quant",
        ),
        ({"num_key_value_heads": 5}, "num_key_value_heads 5 does not divide num_attention_heads 32"),
    ],
)
def test_what_would_be_planned_as_another_model_is_refused(
    tmp_path: Path, changes: dict[str, object], problem: str
) -> None:
    with pytest.raises(ValueError, match=f"config.json: .*{problem}"):
        read_planned_model(written(tmp_path / "model", **changes))


def test_quantised_checkpoints_are_planned_as_they_are_served(tmp_path: Path) -> None:
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
    model = read_planned_model(written(tmp_path / "model", quantization_config=awq))
    assert (model.precision.quantization, model.unserved) == ("auto", "")
    assert model.held_name == "model bfloat16 int4"
    plain = read_planned_model(written(tmp_path / "plain"))
    layers = [weight_bytes(each.shape, "bfloat16", "auto").layers for each in (model, plain)]
    assert layers[0] / layers[1] == (0.5 + 5 / 128) / 2


@pytest.mark.parametrize(
    ("config", "held"), [(GPT_OSS_20B, 13_761_264_768), (GPT_OSS_120B, 65_248_815_744)], ids=["20b", "120b"]
)
def test_gpt_oss_is_planned_as_it_is_served(tmp_path: Path, config: dict[str, Any], held: int) -> None:
    """As many bytes as its index of files says."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = read_planned_model(tmp_path)
    assert (model.precision.quantization, model.unserved, model.held_name[-4:]) == ("auto", "", "e2m1")
    pool = Pool(role=WorkerRole.DECODE, replicas=1, hardware=hardware("h100"), tensor_parallel=2)
    assert pool.cost(model).weight_bytes == held
    with pytest.raises(ValueError, match=r"2880 inputs of the experts within groups of 32 .* or expert_parallel true"):
        replace(pool, tensor_parallel=4).cost(model)
    replace(pool, tensor_parallel=4, expert_parallel=True).cost(model)


def test_what_cannot_be_served_is_told(tmp_path: Path) -> None:
    assert read_planned_model(written(tmp_path / "model")).unserved == ""
    phi = read_planned_model(written(tmp_path / "phi", architectures=["Phi3ForCausalLM"]))
    assert phi.unserved == "['Phi3ForCausalLM'] cannot be served yet"


@pytest.mark.parametrize(
    ("method", "reason"), [("fp8", "model.quantization is int8, and the checkpoint has e4m3"), ("hqq", "'hqq'")]
)
def test_quantised_weights_are_planned_as_asked_and_not_served(tmp_path: Path, method: str, reason: str) -> None:
    folder = written(tmp_path / "model", quantization_config={"quant_method": method})
    model = read_planned_model(folder, precision=Precision(quantization="int8"))
    assert (model.precision.quantization, model.shape.scheme) == ("int8", None)
    assert reason in model.unserved


def test_the_language_model_of_a_multimodal_one_is_planned_as_asked_too(tmp_path: Path) -> None:
    text = {**CONFIG, "quantization_config": {"quant_method": "hqq"}}
    folder = written(tmp_path / "model", architectures=["Mistral3ForConditionalGeneration"], text_config=text)
    with pytest.raises(ValueError, match=r"'hqq', .*; or plan with --set model.quantization"):
        read_planned_model(folder)
    model = read_planned_model(folder, precision=Precision(quantization="int4"))
    assert model.shape.scheme is None
    assert "'hqq'" in model.unserved


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [("gemma3_text", "Gemma3ForCausalLM"), ("mixtral", "MixtralForCausalLM"), ("gemma", "GemmaForCausalLM")],
)
def test_a_model_type_names_the_architecture_of_a_config_without(tmp_path: Path, kind: str, architecture: str) -> None:
    named = read_planned_model(written(tmp_path / "named", architectures=[architecture], model_type=kind))
    bare = read_planned_model(written(tmp_path / "bare", architectures=None, model_type=kind))
    assert bare.shape == named.shape
    assert bare.unserved == "a config.json without architectures cannot be served yet"
