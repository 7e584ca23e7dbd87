"""Commands and options of vLLM and SGLang: each error names what pdserve has instead."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from pdserve.contracts.deployment import DeploymentConfig
from pdserve.deploy.cli import run
from pdserve.deploy.other_servers import KEYS


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("serve meta-llama/Llama-3.1-8B", "run pdserve up --model FOLDER"),
        ("up --tensor-parallel-size 2", "set prefill.tensor_parallel and decode.tensor_parallel in a deployment file"),
        ("up --max-model-len=4096", "set model.max_model_len in a deployment file"),
        ("up --model-path x", "give --model FOLDER"),
        ("up --quantization awq", "leave it out: a quantised checkpoint is served as it is"),
        ("up --enable_expert_parallel", "set prefill.expert_parallel and decode.expert_parallel"),
        ("up --speculative-config {}", "set decode.speculation in a deployment file"),
        ("up --reasoning-parser openai_gptoss", "leave it out: the chat template shows how the model reasons"),
        ("up --tool-call-parser openai", "set model.tool_format in a deployment file"),
        ("check --quantization awq", "leave it out: a quantised checkpoint is served as it is"),
        ("plan --tensor-parallel 2", "leave it out: the plan chooses it"),
        ("bench serve --backend vllm", "leave it out"),
        ("bench serve --port 8000", "give --base-url http://HOST:PORT"),
    ],
)
def test_a_name_of_another_server_is_translated(arguments: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments.split()) == 2
    assert said in capsys.readouterr().err


def test_every_key_is_one_of_a_deployment_file() -> None:
    config = asdict(DeploymentConfig())
    for key in " and ".join(KEYS).split(" and "):
        section, name = key.split(".")
        assert name in config[section]
