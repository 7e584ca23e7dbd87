"""Deployment files: the values read, and the one-line message of each mistake."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from pdserve.contracts.codec import from_json, to_json
from pdserve.contracts.deployment import DeploymentConfig, KvTierConfig, parse_bytes
from pdserve.contracts.errors import ConfigError
from pdserve.contracts.worker_config import WorkerConfig, WorkerRole
from pdserve.deploy.config import (
    parse_deployment,
    read_deployment,
    read_profile,
)
from pdserve.model.cost.hardware import hardware
from pdserve.planner.hardware_file import write_hardware_file

EXAMPLE = """
model: {path: ./model, dtype: bfloat16, kv_dtype: int8, quantization: int4, max_model_len: 8192, block_size: 16}
slo: {ttft_seconds: 0.25, tpot_seconds: 0.05, attainment: 0.9}
prefill: {replicas: 1, tensor_parallel: 1, pipeline_parallel: 1, kv_memory: auto, max_batch_tokens: 8192, resources: {}}
decode:  {replicas: 1, tensor_parallel: 1, pipeline_parallel: 1, kv_memory: auto, max_batch_size: 256, resources: {}}
mixed:   {replicas: 0}          # colocated workers: both phases, chunked prefill beside decode
kv_transfer: {transport: auto}
router: {host: 127.0.0.1, port: 8000, admin_port: 0, replicas: 1}
"""


def test_a_full_file_is_read_as_written(tmp_path: Path) -> None:
    path = tmp_path / "deployment.yaml"
    path.write_text(EXAMPLE)
    config = read_deployment(path)
    assert (config.model.dtype, config.model.kv_dtype) == ("bfloat16", "int8")
    assert config.model.quantization == "int4"
    assert config.model.max_model_len == 8192
    assert Path(config.model.path) == tmp_path / "model"
    assert config.prefill.max_batch_tokens == 8192
    assert config.decode.max_batch_size == 256
    assert config.mixed.replicas == 0


def test_a_profile_is_read_from_beside_the_file(tmp_path: Path) -> None:
    path = tmp_path / "deployment.yaml"
    path.write_text("model: {profile: hardware.yaml}")
    config = read_deployment(path)
    with pytest.raises(ConfigError, match=r"model\.profile: cannot read .*hardware\.yaml"):
        read_profile(config)
    write_hardware_file(tmp_path / "hardware.yaml", [hardware("h100")])
    assert read_profile(config) == {"h100-sxm": hardware("h100")}
    assert read_profile(DeploymentConfig()) == {}


def test_every_file_is_found_from_the_deployment_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cluster"
    folder.mkdir()
    monkeypatch.setenv("SCRATCH", "/scratch")
    (folder / "deployment.yaml").write_text(
        "model: {path: model, profile: sub/hardware.yaml}\n"
        "router: {keys_file: keys, tls_certificate: c.pem, tls_key: $SCRATCH/k.pem, request_log: log,\n"
        "  admin_token_file: token}\n"
        "security: {tls: {ca: ca.pem, certificate: h.pem, key: h.key}}\n"
        "decode: {speculation: {draft: small}, kv_tier: {path: tiers, size: 1GiB}}\n"
    )
    monkeypatch.chdir(tmp_path)
    config = read_deployment(Path("cluster/deployment.yaml"))
    router, tls = config.router, config.security.tls
    assert tls
    assert (config.model.path, config.model.profile) == (str(folder / "model"), str(folder / "sub/hardware.yaml"))
    files = (router.keys_file, router.tls_certificate, router.request_log, router.admin_token_file)
    assert files == tuple(str(folder / name) for name in ("keys", "c.pem", "log", "token"))
    assert router.tls_key == "/scratch/k.pem"
    assert (config.decode.draft_path, config.mixed.draft_path) == (str(folder / "small"), "")
    assert config.decode.kv_tier == KvTierConfig(path=str(folder / "tiers"), size="1GiB")
    assert (tls.ca, tls.certificate, tls.key) == tuple(str(folder / name) for name in ("ca.pem", "h.pem", "h.key"))


@pytest.mark.parametrize("number", ["1e-2", "1E-2", "+1.0e-2", ".1e-1", "0.01", "1.e-2"])
def test_numbers_are_written_as_people_do(tmp_path: Path, number: str) -> None:
    path = tmp_path / "deployment.yaml"
    path.write_text(f"slo: {{tpot_seconds: {number}}}")
    assert read_deployment(path).slo.tpot_seconds == 0.01


def test_nothing_written_is_every_default(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("")
    assert read_deployment(path) == DeploymentConfig()
    assert parse_deployment({"mixed": {}}) == DeploymentConfig()


def test_json_may_be_indented_by_tabs(tmp_path: Path) -> None:
    path = tmp_path / "deployment.json"
    path.write_text('{\n\t"decode": {\n\t\t"replicas": 2\n\t}\n}\n')
    assert read_deployment(path).decode.replicas == 2


def test_json_is_yaml_and_whole_numbers_are_numbers() -> None:
    config = parse_deployment(yaml.safe_load('{"slo": {"ttft_seconds": 2}, "prefill": {"kv_memory": "8GiB"}}'))
    assert config.slo.ttft_seconds == 2.0
    assert isinstance(config.slo.ttft_seconds, float)
    assert config.prefill.kv_memory == "8GiB"


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ("modle: {}", "unknown key 'modle' in the deployment file; did you mean 'model'?"),
        ("prefill: {replica: 2}", "unknown key 'replica' in prefill; did you mean 'replicas'?"),
        ("router: {prot: 1}", "did you mean 'port'?"),
        ("slo: {ttft: 1}", "did you mean 'ttft_seconds'?"),
        ("prefill: {replicas: two}", "prefill.replicas is 'two' (str); write a whole number from 0 to 64"),
        ("prefill: {replicas: true}", "prefill.replicas is True (bool); write a whole number from 0 to 64"),
        ("decode: {lend_cores: 1}", "decode.lend_cores is 1 (int); write true or false"),
        ("prefill: {replicas: 1.5}", "prefill.replicas is 1.5 (float); write a whole number from 0 to 64"),
        ("model: {path: 3}", "model.path is 3 (int); write text"),
        ("model: {path: }", "model.path is empty; write text"),
        ("slo: {ttft_seconds: soon}", "slo.ttft_seconds is 'soon' (str); write a number"),
        ("slo: {tpot_seconds: 0}", "slo.tpot_seconds is 0.0; write a number above 0"),
        ("slo: {tpot_seconds: .nan}", "slo.tpot_seconds is nan; write a number above 0"),
        ("slo: {tiers: {fast: {ttft_seconds: 0.1}}}", "slo.tiers.fast lacks tpot_seconds; write it"),
        ("slo: {tpot_seconds: 0.05, max_gap_seconds: 0.04}", "slo: max_gap_seconds is below tpot_seconds"),
        ("slo: {tiers: {fast: {ttft_seconds: 0.1, tpot_seconds: 0}}}", "slo.tiers.fast.tpot_seconds is 0.0; write"),
        ("slo: {tiers: {auto: {ttft_seconds: 1, tpot_seconds: 1}}}", "slo: tiers has 'auto'; name tiers with"),
        ("slo: {weight: 0, when_hopeless: refuse}", "slo: a weight of 0 makes every request hopeless; raise it"),
        ("slo: {weight: -1}", "slo.weight is -1.0; write 0 or a number above it"),
        ("slo: {when_hopeless: drop}", "slo.when_hopeless is 'drop'; write one of last, refuse"),
        ("slo: {attainment: 90}", "slo.attainment is 90.0; write a share above 0 and up to 1: 0.9 for 90 %"),
        ("model: {dtype: int4}", "model.dtype is 'int4'; write one of auto, float32, bfloat16, float16"),
        ("model: {kv_dtype: fp8}", "model.kv_dtype is 'fp8'; write one of auto, int8, float8_e4m3fn"),
        ("model: {quantization: awq}", "model.quantization is 'awq'; write one of auto, none, int8, int4, fp8"),
        (
            "model: {quantization: fp8}",
            "model.quantization is fp8, to which pdserve rounds no weights when it serves; use auto",
        ),
        ("decode: {device: gpu}", "decode.device is 'gpu'; write one of auto, cpu, cuda"),
        (
            "decode: {gpu_memory_utilization: 90}",
            "decode.gpu_memory_utilization is 90.0; write a share above 0 and up to 1: 0.9 for 90 %",
        ),
        ("model: {block_size: 0}", "model.block_size is 0; write a whole number from 1"),
        ("decode: {replicas: -1}", "decode.replicas is -1; write a whole number from 0"),
        ("router: {replicas: 2, admin_port: 65535}", "from there on; write at most 65534, or 0 for any free ones"),
        ("router: {replicas: 0}", "router.replicas is 0; write a whole number from 1 to 64"),
        ("router: {cors_origins: [chat.example.com]}", "router.cors_origins has 'chat.example.com'; write origins as"),
        ("router: {cors_origins: ['https://a.example/chat']}", "router.cors_origins has 'https://a.example/chat'"),
        ("router: {port: 70000}", "router.port is 70000; write a whole number from 0 to 65535"),
        ("router: {host: ''}", "router.host is empty; write 127.0.0.1"),
        (
            "kv_transfer: {transport: rdma}",
            "kv_transfer.transport is 'rdma'; write one of auto, memfd, tcp, nccl, cuda",
        ),
        ("decode: {kv_memory: 8GB}", "decode.kv_memory is '8GB'; write auto, or bytes with a unit, such as 512MiB"),
        ("decode: {swap_memory: some}", "decode.swap_memory is 'some'; write auto, 0, or bytes with a unit"),
        ("decode: {swap_memory: -1}", "decode.swap_memory is -1; write auto, 0, or bytes with a unit"),
        ("decode: {swap_memory: [1]}", "decode.swap_memory is [1] (list); write auto, 0, or bytes with a unit"),
        ("prefill: {swap_memory: 1GiB}", "prefill workers preempt nothing: leave it out"),
        ("prefill: {kv_tier: {path: /tmp}}", "prefill.kv_tier"),
        (
            "prefill: {kv_tier: {path: '', size: 1GiB}}",
            "path is empty; name a folder for the files, or leave out kv_tier",
        ),
        ("prefill: {kv_tier: {path: x, size: auto}}", "prefill.kv_tier.size is 'auto'; write bytes with a unit"),
        ("prefill: {kv_tier: {path: x, size: 1GiB, device: cuda}}", "prefill.kv_tier"),
        (
            "mixed: {kv_tier: {path: x, size: 1GiB}, device: cuda}",
            "mixed.kv_tier is set; there is one on CPUs only so far",
        ),
        ("decode: {kv_tier: {path: x, size: 1GiB}, pipeline_parallel: 2}", "with pipeline_parallel 1: leave it out"),
        ("decode: {speculation: eagle}", "decode.speculation is 'eagle'; write none, ngram, or {draft: FOLDER}"),
        ("decode: {speculation: {eagle: x}}", "write none, ngram, or {draft: FOLDER}"),
        ("decode: {speculation: {draft: ''}}", "write none, ngram, or {draft: FOLDER}"),
        ("prefill: {speculation: {draft: x}}", "prefill.speculation is draft; prefill workers decode nothing"),
        ("decode: {speculation: {draft: x}, pipeline_parallel: 2}", "a draft model, which needs pipeline_parallel 1"),
        ("mixed: {batching: batched}", "mixed.batching is 'batched'; write continuous, static, or the seconds to wait"),
        ("mixed: {batching: -1}", "write continuous, static, or the seconds to wait"),
        ("decode: {batching: static}", "decode.batching is static; batches are for mixed workers: leave it out"),
        ("prefill: {speculation: ngram}", "prefill.speculation is ngram; prefill workers decode nothing: leave it out"),
        (
            "mixed: {speculation: {draft: x}, device: cuda}",
            "which guesses on CPUs only so far; use ngram or none",
        ),
        ("decode: {replicas: 0}", "decode.replicas is 0; give both at least 1, or mixed.replicas"),
        ("decode: {replicas: 0}\nmixed: {replicas: 1}", "hand off to decode workers; set prefill.replicas to 0"),
        ("decode: {resources: {host_a: 0}}", "decode.resources.host_a is 0.0; write a number above 0"),
        ("decode: {resources: [host_a]}", "decode.resources is ['host_a'] (list); write keys and values"),
        ("ports: 20099-20000", "ports is '20099-20000'; write a range of ports such as 20000-20099, or empty"),
        ("ports: '20000'", "ports is '20000'; write a range of ports"),
        ("ports: 0-5", "ports is '0-5'; write a range of ports"),
        ("prefill: 2", "prefill holds 2 (int); write keys and values"),
        ("[prefill]", "the deployment file holds ['prefill'] (list)"),
    ],
)
def test_each_mistake_gets_one_line_that_names_it(document: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_deployment(yaml.safe_load(document))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("model: {path: a}\nmodel: {path: b}\n", "key 'model' is written twice"),
        ("model: {path: [}\n", "is not valid YAML"),
        ("\n\nprefil: {}\n", "bad.yaml:3: unknown key 'prefil' in the deployment file; did you mean 'prefill'?"),
        ("decode:\n  swap_memory: x\n", "bad.yaml:2: decode.swap_memory is 'x'; write"),
        ("? [model]\n: {path: a}\n", "is not valid YAML: a key is not text"),
        ("[" * 5000, "nested too deeply"),
        ("decode: {max_batch_size: " + "9" * 5000 + "}\n", "is not valid YAML: Exceeds the limit"),
        ("slo: {ttft_seconds: " + "9" * 400 + "}\n", "slo.ttft_seconds is larger than"),
        ("decode: {kv_memory: " + "9" * 400 + "GiB}\n", "write auto, or bytes with a unit"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        read_deployment(path)
    assert str(path) in str(caught.value)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*absent.yaml: No such file"):
        read_deployment(tmp_path / "absent.yaml")


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("512MiB", 512 * 2**20), ("8GiB", 8 * 2**30), ("1.5 GiB", 3 * 2**29), ("4096", 4096), ("64KiB", 65536)],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "8GB", "0", "1..5GiB", "8 GiB 3"])
def test_what_is_not_a_size(text: str) -> None:
    with pytest.raises(ConfigError, match="such as 512MiB or 8GiB"):
        parse_bytes(text)


def test_the_example_in_the_readme_is_valid() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (block,) = re.findall(r"```yaml\n(.*?)```", readme, re.DOTALL)
    assert parse_deployment(yaml.safe_load(block)).decode.replicas == 2


@pytest.mark.parametrize(
    ("written", "num_bytes"), [("auto", None), ("0", 0), ("'0'", 0), ("1GiB", 2**30), ("4096", 4096)]
)
def test_swap_memory_is_automatic_none_or_a_size(written: str, num_bytes: int | None) -> None:
    config = parse_deployment(yaml.safe_load(f"decode: {{swap_memory: {written}}}"))
    assert config.decode.swap_memory_bytes == num_bytes


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (
            {"prefill": {"min_replicas": 2}},
            "prefill.min_replicas is 2, and prefill.max_replicas is not given: give both",
        ),
        (
            {"decode": {"replicas": 5, "max_replicas": 4}},
            "decode.replicas is 5; write a number from decode.min_replicas, 1, to decode.max_replicas, 4",
        ),
        (
            {"prefill": {"replicas": 1, "min_replicas": 2, "max_replicas": 4}},
            "prefill.replicas is 1; write a number from",
        ),
        (
            {"decode": {"min_replicas": 5, "max_replicas": 4}},
            "decode.min_replicas is 5, above decode.max_replicas, 4: lower it, or raise that",
        ),
        (
            {"mixed": {"replicas": 1, "max_replicas": 2}},
            "mixed.max_replicas is 2, and there are mixed workers; the load",
        ),
        (
            {"mixed": {"replicas": 1}, "decode": {"max_replicas": 2}},
            "decode.max_replicas is 2, and there are mixed workers",
        ),
    ],
)
def test_bounds_of_workers_that_follow_the_load_fit(document: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_deployment(document)
    assert said in str(caught.value)


@pytest.mark.parametrize("batching", ["static", 0.5, 1])
def test_batches_are_static_or_wait_for_some_seconds(batching: str | float) -> None:
    assert parse_deployment({"mixed": {"batching": batching}}).mixed.batching == batching
    config = WorkerConfig(worker_id="mixed-0", role=WorkerRole.MIXED, model_path="x", batching=batching)
    assert from_json(WorkerConfig, to_json(config), "worker") == config
