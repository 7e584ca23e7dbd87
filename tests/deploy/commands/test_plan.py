"""``pdserve plan``, mostly in this process: a small plan, its files, and messages for mistakes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import yaml

from pdserve.deploy.cli import run
from pdserve.deploy.cluster.processes import is_alive
from pdserve.deploy.config import read_deployment
from tests.deploy.clusters import wait_for
from tests.patience import HANG_S
from tests.planner.test_planned_model import written

SMALL = ("--gpus-per-node", "2", "--requests", "400", "--jobs", "1")
SMALLEST = ("--gpus-per-node", "1", "--requests", "100", "--jobs", "1")
SHORT = ("--traffic", "1000/3")


class Planned(NamedTuple):
    folder: Path
    printed: str
    plan: dict[str, Any]


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Planned:
    """A plan for two GPUs and short requests, with every file that can be requested."""
    folder = tmp_path_factory.mktemp("plan")
    model = written(folder / "Llama-3-8B")
    command = [sys.executable, "-m", "pdserve.deploy.cli", "plan", "--model", str(model / "config.json")]
    command += ["--gpu", "h100", *SMALL, *SHORT, "--price", "3", "--top", "2", "--ray-cluster", "aws"]
    for option, name in (("--output", "deployment.yaml"), ("--report", "plan.html"), ("--json", "plan.json")):
        command += [option, str(folder / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr
    first, *_ = done.stderr.splitlines()
    assert first.startswith("  0% after 0 s: loading the screener"), "progress where there is no terminal"
    return Planned(folder, done.stdout, json.loads((folder / "plan.json").read_text()))


def test_ray_up_starts_the_planned_hosts(planned: Planned) -> None:
    cluster = yaml.safe_load((planned.folder / "deployment.ray-aws.yaml").read_text())
    assert cluster["max_workers"] == 1
    assert cluster["available_node_types"]["worker"]["resources"]["GPU"] == 2
    assert cluster["file_mounts"]["~/pdserve/deployment.yaml"] == str(planned.folder / "deployment.yaml")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--ray-cluster", "gcp", "--output", "x.yaml"), "--ray-cluster is 'gcp'; write local or aws"),
        (("--ray-cluster", "aws"), "beside the deployment file: add --output"),
        (("--ray-cluster", "aws", "--output", "x.yaml", "--decode-gpu", "l4"), "one kind: leave out --decode-gpu"),
    ],
)
def test_hosts_that_cannot_be_written_are_refused(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], said: str
) -> None:
    assert run(["plan", "--model", "/absent", "--gpu", "h100", *options]) == 2
    assert said in capsys.readouterr().err


def test_help_and_refusals_load_no_engine() -> None:
    code = """
import sys
from pdserve.deploy.cli import run
assert run(["plan", "--help"]) == 0
assert run(["plan", "--gpu", "h1000", "--model", "/absent"]) == 2
assert run(["plan", "--gpu", "h100", "--model", "/absent"]) == 1
print("LOADED", *{"torch", "ray", "transformers", "fastapi", "httpx"} & sys.modules.keys())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S, check=True)
    assert done.stdout.splitlines()[-1].strip() == "LOADED"


def test_a_plan_that_is_terminated_ends_its_processes_and_says_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pdserve.deploy.cli", "plan", "--model", str(written(tmp_path / "model"))]
    process = psutil.Popen([*command, "--gpu", "h100", "--jobs", "2"], stderr=subprocess.PIPE, text=True)
    children = wait_for(lambda: (all_of := process.children())[2:] and all_of, "two processes and their tracker")
    process.terminate()
    _, said = process.communicate(timeout=HANG_S)
    # 130 by newer versions of typer; Python's own end if it comes within `exec`, as of an import that makes dataclasses
    assert process.returncode in (1, 130, -signal.SIGINT)
    assert all("%" in line for line in said.splitlines()), said
    wait_for(lambda: not any(map(is_alive, children)), "their end")


def test_the_best_layouts_are_ranked_with_reasons_and_a_verdict(planned: Planned) -> None:
    candidates, printed = planned.plan["candidates"], planned.printed
    assert {"prefill", "mixed"} <= {role for each in candidates for role in each["layout"]}
    assert candidates[0]["layout"]["num_devices"] <= 2
    assert candidates[0]["dollars_per_hour"] == 3 * candidates[0]["layout"]["num_devices"]
    lines = printed.splitlines()
    assert lines[0].startswith("fixed lengths: prompts of 1,000 tokens and answers of 3 on average, Poisson arrivals")
    assert [line[0] for line in lines if line[:3] in ("1  ", "2  ", "3  ")] == ["1", "2"]
    for said in ("Saturation: attainment halves", "If every step and transfer were 10 % slower", "Number 2, "):
        assert said in printed
    assert planned.plan["verdict"]["text"] in " ".join(printed.split())


def test_what_is_written_is_what_was_found(planned: Planned) -> None:
    best = planned.plan["candidates"][0]["layout"]
    path = planned.folder / "deployment.yaml"
    config = read_deployment(path, use="simulate")
    assert config.model.path == str(planned.folder / "Llama-3-8B")
    said = "for sequences of up to 8,192 tokens, .* own limit is 131,072: --set model.max_model_len=131072"
    assert re.search(said, planned.printed)
    assert config.model.max_model_len == 8192
    replicas = {role: getattr(config, role).replicas for role in ("prefill", "decode", "mixed")}
    assert replicas == {role: best.get(role, {}).get("replicas", 0) for role in replicas}
    html = (planned.folder / "plan.html").read_text()
    assert "Llama-3-8B on 2 x h100-sxm" in html
    assert html.count("<svg") >= 5
    assert len(html) < 300_000


def test_the_deployment_that_was_written_can_be_simulated(planned: Planned, capsys: pytest.CaptureFixture[str]) -> None:
    best = planned.plan["candidates"][0]
    command = ["simulate", str(planned.folder / "deployment.yaml"), "--gpu", "h100", *SHORT, "--requests", "100"]
    assert run([*command, "--rate", str(best["rate"] * 0.5), "--json", "-"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["layout"]["text"] == best["layout"]["text"]
    assert result["steady_state"]["share"] > 0.9


def test_a_worker_is_explained_without_a_search(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = written(tmp_path / "Llama-3-8B")
    command = ["plan", "--model", str(model), "--gpu", "h100", "--decode-gpu", "l4", *SHORT, "--explain"]
    assert run(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].rstrip() == "Llama-3-8B on h100-sxm, TP1"
    assert "Llama-3-8B on l4, TP1" in [line.rstrip() for line in lines]
    assert "KV of a token: 131,072 bytes (131 kB)" in lines
    assert run([*command, "--kv-transport", "cuda_ipc", "--json", "-"]) == 0
    explained = json.loads(capsys.readouterr().out)
    parts = {each["name"]: each["parts"] for each in explained["h100-sxm, TP1"]}
    assert parts.keys() >= {"weights", "tokens of KV"}
    pulls = [made_of for name, made_of in parts.items() if name.startswith("pull of ")]
    assert pulls == ["by cuda_ipc", "by tcp"]


def test_a_deployment_that_cannot_be_served_yet_is_said_to_be(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = written(tmp_path / "deep", num_hidden_layers=64, hidden_size=8192)
    file = tmp_path / "deployment.yaml"
    command = ["plan", "--model", str(model), "--gpu", "h100", *SMALLEST, *SHORT, "--ttft", "1", "--rate", "1"]
    command += ["--quantization", "fp8", "--output", str(file)]
    assert run(command) == 0
    said = capsys.readouterr().out
    assert f"{file} cannot be started yet: fp8 weights cannot be computed with yet" in said
    assert read_deployment(file, use="simulate").mixed.replicas == 1


def test_a_config_of_another_name_can_be_simulated_from_the_deployment(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = (written(tmp_path / "folder") / "config.json").rename(tmp_path / "llama.json")
    file = tmp_path / "deployment.yaml"
    command = ["plan", "--model", str(config), "--gpu", "h100", *SMALLEST, *SHORT]
    assert run([*command, "--attainment", "1", "--output", str(file)]) == 0, capsys.readouterr().err
    assert read_deployment(file).model.path == str(config)
    simulated = ["simulate", str(file), "--gpu", "h100", *SHORT, "--requests", "20", "--rate", "1"]
    assert run(simulated) == 0, capsys.readouterr().err


def test_a_rate_gets_the_fewest_gpus(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = written(tmp_path / "Llama-3-8B")
    assert run(["plan", "--model", str(model), "--gpu", "h100", *SMALLEST, *SHORT, "--rate", "5", "--json", "-"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["objective"], plan["rate"]) == ("fewest-devices", 5.0)
    assert plan["candidates"][0]["layout"]["text"] == "1 x M(TP1)"


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        ([], 2, "no GPU is named; give --gpu, such as --gpu h100-sxm"),
        (["--gpu", "h1000"], 2, "unknown hardware 'h1000'; use one of h100"),
        (["--gpu", "h100", "--decode-gpu", "l40"], 2, "unknown hardware 'l40'; use one of l40s"),
        (["--gpu", "h100", "--workload", "chta"], 2, "no preset 'chta': use chat"),
        (["--gpu", "h100", "--workload", "/absent.csv"], 2, "cannot read /absent.csv: No such file"),
        (["--gpu", "h100", "--workload", "chat", *SHORT], 2, "--traffic, --workload and --input-tokens exclude each"),
        (["--gpu", "h100", "--input-tokens", "5"], 2, "--input-tokens and --output-tokens need each other"),
        (
            ["--gpu", "h100", "--traffic", "chat", "--workload", "code"],
            2,
            "name one kind of traffic, such as",
        ),
        (["--gpu", "h100", "--traffic", "1000/0"], 2, "--traffic is '1000/0', and there is no such file: name one"),
        (["--gpu", "h100", "--traffic", "chta"], 2, "no preset 'chta': use chat"),
        (["--gpu", "h100", "--set", "decode.replicas=3"], 2, "--set decode.replicas: the plan answers it"),
        (
            ["--gpu", "h100", "--set", "model.kv_dtpe=int8"],
            2,
            "'kv_dtpe' in model; did you mean 'kv_dtype'",
        ),
        (["--gpu", "h100", "--set", "slo.ttft_seconds=0"], 2, "--set: slo.ttft_seconds is 0.0; write a number above 0"),
        (["--gpu", "h100", "--set", "slo"], 2, "--set is 'slo'; write a key and its value, such as --set decode"),
        (["--gpu", "h100", "--set", "slo.attainment={"], 2, "--set slo.attainment: '{' is not valid YAML"),
        (["--live", "http://127.0.0.1:9", "--set", "router.policy=least-time"], 2, "traffic and GPUs are those of"),
        (["--gpu", "h100", "--rate", "-5"], 2, "--rate is -5.0; write a number above 0"),
        (["--gpu", "h100", "--objective", "best"], 2, "--objective is 'best'; write one of rate, rate-per-device"),
        (["--gpu", "h100", "--objective", "least-cost"], 2, "--objective least-cost needs a rate: add --rate"),
        (["--gpu", "h100", "--objective", "rate", "--rate", "5"], 2, "--objective rate takes no rate"),
        (["--gpu", "h100", "--tpot", "0"], 2, "slo.tpot_seconds is 0.0; write a number above 0"),
        (["--gpu", "h100", "--kv-dtype", "fp4"], 2, "model.kv_dtype is 'fp4'; write one of auto, int8, float8_e4m3fn"),
        (["--gpu", "h100", "--nodes", "0"], 2, "--nodes"),
        (["--gpu", "h100", "--output", "/absent/x.yaml"], 2, "/absent/x.yaml has no folder: name another file"),
        (["--gpu", "h100", "--report", "/tmp"], 2, "/tmp is a folder: name another file"),
        (
            ["--gpu", "h100", "--report", "/proc/x.html"],
            2,
            "/proc/x.html cannot be written (No such file or directory)",
        ),
        (["--gpu", "h100", "--output", "x", "--json", "./x"], 2, "x is named for two outputs: name another file"),
        (["--gpu", "h100", "--model", "/absent"], 1, "no model at /absent; give --model a folder"),
        (["--gpu", "h100", "--max-model-len", "200", *SHORT], 2, "exceed max_model_len 200: raise it"),
        (["--gpu", "h100", *SMALLEST, *SHORT, "--rate", "1e6"], 1, "the fleet serves "),
        (["--gpu", "h100", *SMALLEST, *SHORT, "--tpot", "0.0001"], 1, "the best possible here is "),
        (["--live", "http://127.0.0.1:9"], 1, "no pdserve router answers at http://127.0.0.1:9"),
        (["--live", "nonsense"], 1, "check --live"),
        (["--gpu", "h100", "--nodes", "100000"], 2, "--nodes"),
        (["--gpu", "h100", "--price", "0"], 2, "--price is 0.0; write a number above 0"),
        (["--live", "http://127.0.0.1:9", "--window", "nan"], 2, "--window is nan; write a number above 0"),
        (["--gpu", "h100", "--policy", "fastest"], 2, "router.policy is 'fastest'; write one of goodput, least-time"),
        (["--gpu", "h100", "--kv-transport", "rdma"], 2, "kv_transfer.transport is 'rdma'; write one of auto"),
        (["--live", "http://127.0.0.1:9", "--explain"], 2, "--explain searches nothing"),
        (["--gpu", "h100", "--explain", "--output", "x"], 2, "--explain searches nothing: leave out --output"),
        (["--gpu", "h100", "--decode-gpu", "h100-sxm"], 2, "--decode-gpu is h100-sxm, as --gpu is: leave it out"),
        (
            ["--gpu", "h100", "--decode-gpu", "l4", "--price", "2"],
            2,
            "--price is of one kind of GPU, and there are two",
        ),
        (
            ["--live", "http://127.0.0.1:9", "--price", "2"],
            2,
            "traffic and GPUs are those of http://127.0.0.1:9",
        ),
        (
            ["--live", "http://127.0.0.1:9", "--policy", "goodput"],
            2,
            "traffic and GPUs are those of http://127.0.0.1:9",
        ),
        (
            ["--live", "http://127.0.0.1:9", "--workload", "chat"],
            2,
            "traffic and GPUs are those of http://127.0.0.1:9",
        ),
    ],
)
def test_a_mistake_gets_one_line_and_its_exit_code(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], status: int, said: str
) -> None:
    model = str(written(tmp_path / "Llama-3-8B"))
    assert run(["plan", "--model", model, *arguments]) == status
    *progress, error = capsys.readouterr().err.splitlines()
    assert said in error
    assert error.startswith("pdserve: ")
    assert all("% after" in line for line in progress)


def test_a_model_that_fits_nowhere_hears_of_what_would_hold_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    large = str(written(tmp_path / "large", num_hidden_layers=400))
    assert run(["plan", "--model", large, "--gpu", "l4", *SMALL, *SHORT]) == 1
    (error,) = capsys.readouterr().err.splitlines()  # before the screener is compiled
    assert "the smallest worker for both is TP" in error
    assert "add devices" in error


def test_a_malformed_line_of_a_trace_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = str(written(tmp_path / "Llama-3-8B"))
    trace = tmp_path / "calls.csv"
    trace.write_text("arrived_s,prompt_tokens,output_tokens\n0,100,5\n9,many,5\n")
    assert run(["plan", "--model", model, "--gpu", "h100", *SMALL, "--workload", str(trace)]) == 2
    error = capsys.readouterr().err
    assert f"{trace}:3: " in error
    assert "(--lenient)" in error


def test_what_lies_beyond_a_profile_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, file = written(tmp_path / "Llama-3-8B"), tmp_path / "hardware.yaml"
    file.write_text(
        "devices: {mine: {base: h100, measured: {date: 2026-11-21, model: tiny float32, step_tokens: [1, 512], "
        "batch_size: [1, 256], context_tokens: [0, 100000]}}}"
    )
    command = ["plan", "--model", str(model), "--gpu", "mine", "--hardware-file", str(file), *SMALLEST, *SHORT]
    assert run([*command, "--json", "-"]) == 0, capsys.readouterr().err
    notes = " ".join(json.loads(capsys.readouterr().out)["notes"])
    assert "mine was measured with tiny float32 and predicts Llama-3-8B bfloat16" in notes
    assert "mine was measured up to 512 new tokens a step, but up to" in notes
