"""``pdserve simulate``, mostly in this process: options, deployment files, and messages for mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from pdserve.contracts.deployment import POLICIES
from pdserve.contracts.errors import ConfigError
from pdserve.contracts.worker_config import WorkerRole
from pdserve.deploy.cli import run
from pdserve.deploy.commands import plan_options
from pdserve.deploy.config import parse_deployment
from pdserve.model.weights.demo_model import DEMO_MODEL, DRAFT_MODEL
from tests.patience import HANG_S
from tests.planner.test_planned_model import written

BASE = ("simulate", "--gpu", "h100-sxm", "--requests", "50")
SHORT = ("--traffic", "200/5")


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(written(tmp_path / "Llama-3-8B"))


def simulated(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run([*BASE, *arguments, "--json", "-"]) == 0, capsys.readouterr().err
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_help_and_refusals_load_no_engine() -> None:
    code = """
import sys
from pdserve.deploy.cli import run
assert run(["simulate", "--help"]) == 0
assert run(["simulate", "--gpu", "h100-sxm", "--rate", "-1", "--workload", "chat"]) == 2
assert run(["simulate", "--gpu", "h100-sxm", "--rate", "1", "--workload", "chat", "--model", "/absent"]) == 1
print("LOADED", *{"torch", "ray", "transformers", "fastapi", "httpx", "numpy"} & sys.modules.keys())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S, check=True)
    assert done.stdout.splitlines()[-1].strip() in ("LOADED", "LOADED numpy")


def test_the_default_is_a_worker_for_each_phase(capsys: pytest.CaptureFixture[str], model: str) -> None:
    result = simulated(capsys, "--model", model, "--rate", "5", *SHORT)
    assert result["layout"]["text"] == "1 x P(TP1) + 1 x D(TP1)"
    assert result["model"]["dtype"] == "bfloat16"
    assert result["steady_state"]["num_requests"] == 50


def test_the_assumed_share_of_right_guesses_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    usual = ("--model", str(DEMO_MODEL), "--rate", "0.1", "--traffic", "20/40", "--gpu", "cpu")
    guessing = ("--set", "decode.speculation=ngram", "--right-guesses", "0.75")
    result = simulated(capsys, *usual, *guessing)
    assert "Assumes that 75 % of guesses are right: decode workers compute" in str(result["notes"])
    none = simulated(capsys, *usual)
    assert "guesses" not in str(none["notes"])
    assert result["median_tpot_ms"] < 0.6 * none["median_tpot_ms"]


def test_guesses_that_no_worker_makes_are_refused(capsys: pytest.CaptureFixture[str], model: str) -> None:
    usual = [*BASE, "--model", model, "--rate", "1", *SHORT]
    assert run([*usual, "--right-guesses", "0.5"]) == 2
    assert "no workers guess; add --set decode.speculation=ngram" in " ".join(capsys.readouterr().err.split())
    assert run([*usual, "--set", f"decode.speculation={{draft: {DRAFT_MODEL}}}"]) == 2
    assert "has a draft model, which guesses on CPUs only so far" in " ".join(capsys.readouterr().err.split())


def test_settings_are_those_of_a_deployment_file_and_of_the_earlier_options(
    capsys: pytest.CaptureFixture[str], model: str
) -> None:
    usual = ("--model", model, "--rate", "20")
    keys = ["decode.replicas=2", "prefill.tensor_parallel=2", "model.dtype=float16", "router.policy=least-time"]
    keys += ["slo.ttft_seconds=0.5", "slo.attainment=0.8"]
    new = simulated(capsys, *usual, "--traffic", "200/5", *(part for key in keys for part in ("--set", key)))
    lengths = ("--input-tokens", "200", "--output-tokens", "5")
    named = ("--decode", "2", "--prefill-tp", "2", "--dtype", "float16", "--policy", "least-time")
    old = simulated(capsys, *usual, *lengths, *named, "--ttft", "0.5", "--attainment", "0.8")
    assert {**new, "elapsed_s": 0} == {**old, "elapsed_s": 0}
    assert new["layout"]["text"] == "1 x P(TP2) + 2 x D(TP1)"
    assert new["slo"]["attainment"] == 0.8


def test_clients_may_set_a_limit(capsys: pytest.CaptureFixture[str], model: str) -> None:
    result = simulated(capsys, "--model", model, "--rate", "5", *SHORT, "--max-tokens", "400")
    assert result["traffic"].endswith("; clients limit answers to 400 tokens")
    assert result["total_output_tokens"] == 50 * 5


def test_a_terminal_hears_what_it_waits_for(
    capsys: pytest.CaptureFixture[str], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [*BASE, "--model", model, "--rate", "5", *SHORT, "--json", "-"]
    assert run(command) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert run(command) == 0
    captured = capsys.readouterr()
    assert "simulating 50 requests" in captured.err
    assert json.loads(captured.out)["steady_state"]["num_requests"] == 50


def test_a_slow_run_says_how_far_it_is(
    capsys: pytest.CaptureFixture[str], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_options, "_LINE_S", 0.0)
    assert run([*BASE, "--model", model, "--rate", "5", *SHORT, "--json", "-"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line[:4] for line in lines[::4]] == ["  0%", " 20%", " 44%", " 68%", " 92%"]
    assert {line.partition(": ")[2] for line in lines} == {"simulating 50 requests"}


def test_options_describe_workers(capsys: pytest.CaptureFixture[str], model: str) -> None:
    load = ("--model", model, "--rate", "5", *SHORT)
    workers = ("--prefill", "2", "--prefill-tp", "2", "--decode-pp", "2", "--decode-gpu", "h200")
    layout = simulated(capsys, *load, *workers, "--max-batch-tokens", "512", "--gpus-per-node", "4")["layout"]
    assert layout["text"] == "2 x P(TP2) + 1 x D(TP1 PP2)"
    assert (layout["prefill"]["hardware"], layout["decode"]["hardware"]) == ("h100-sxm", "h200")
    assert (layout["prefill"]["max_batch_tokens"], layout["num_hosts"]) == (512, 2)
    assert (layout["prefill"]["hosts"], layout["decode"]["hosts"]) == ([[0], [0]], [[1]])
    layout = simulated(capsys, *load, "--colocated", "--replicas", "2", "--tensor-parallel", "4")["layout"]
    assert layout["text"] == "2 x M(TP4)"


def test_a_closed_loop_has_no_rate(capsys: pytest.CaptureFixture[str], model: str) -> None:
    result = simulated(capsys, "--model", model, "--concurrency", "4", *SHORT)
    assert result["concurrency"] == 4
    assert result["steady_state"]["rate"] > 10


def test_a_deployment_file_is_simulated_and_options_change_it(capsys: pytest.CaptureFixture[str], model: str) -> None:
    file = Path(model).parent / "deployment.yaml"
    file.write_text(
        f"model: {{path: {Path(model).name}, max_model_len: 1024}}\n"
        "slo: {ttft_seconds: 0.5, tpot_seconds: 0.03}\n"
        "prefill: {replicas: 2, tensor_parallel: 2}\n"
        "decode: {kv_memory: 1GiB}\n"
    )
    result = simulated(capsys, str(file), "--rate", "5", *SHORT, "--decode", "3", "--tpot", "0.04")
    assert result["layout"]["text"] == "2 x P(TP2) + 3 x D(TP1)"
    assert {"ttft_seconds": 0.5, "tpot_seconds": 0.04, "attainment": 0.9}.items() <= result["slo"].items()
    assert (result["model"]["dtype"], result["model"]["max_model_len"]) == ("float32", 1024)


def test_a_trace_is_replayed_whole_at_its_own_times(capsys: pytest.CaptureFixture[str], model: str) -> None:
    file = Path(model).parent / "calls.csv"
    file.write_text("arrived_s,prompt_tokens,output_tokens\n" + "".join(f"{i * 0.5},300,10\n" for i in range(40)))
    command = ["simulate", "--gpu", "h100", "--model", model, "--trace", str(file), "--json", "-"]
    assert run(command) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["steady_state"]["num_requests"], result["steady_state"]["rate"]) == (40, 2.0)
    assert run([*command, "--rate", "4"]) == 0
    assert json.loads(capsys.readouterr().out)["steady_state"]["rate"] == 4.0
    assert run([*command, "--sessions"]) != 0
    assert "has no blocks" in capsys.readouterr().err
    for traffic in ("chat", "300/10"):
        assert run([*command[:5], "--traffic", traffic, "--rate", "4", "--sessions"]) != 0
        assert "--sessions joins the requests of a trace" in capsys.readouterr().err


def test_tables_are_for_people_and_files_for_programs(capsys: pytest.CaptureFixture[str], model: str) -> None:
    file = Path(model) / "result.json"
    assert run([*BASE, "--model", model, "--rate", "5", *SHORT, "--json", str(file)]) == 0
    assert "Both objectives are met by 100 % of requests" in capsys.readouterr().out
    assert json.loads(file.read_text())["traffic"].startswith("fixed lengths")


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--gpu", "h1000", "--rate", "1"], 2, "unknown hardware 'h1000'; use one of h100"),
        (["--gpu", "h100", "--decode-gpu", "A10000", "--rate", "1"], 2, "unknown hardware 'A10000'; use one of a10"),
        (["--gpu", "h100", "--rate", "1", "--workload", "chta"], 2, "no preset 'chta': use chat"),
        (["--gpu", "h100", "--rate", "1", "--workload", "code", *SHORT], 2, "name one kind of traffic"),
        (["--gpu", "h100"], 2, "no rate is named: give --rate"),
        (["--gpu", "h100", "--rate", "1", "--set", "decode.replica=2"], 2, "in decode; did you mean 'replicas'?"),
        (["--gpu", "h100", "--rate", "1", "--set", "decode=2"], 2, "--set: decode holds 2 (int); write keys"),
        (["--gpu", "h100", "--rate", "1", "--set", "decode.replicas=two"], 2, "write a whole number"),
        (["--gpu", "h100", "--rate", "0"], 2, "--rate is 0.0; write requests per second"),
        (["--gpu", "h100", "--rate", "nan"], 2, "--rate is nan; write requests per second"),
        (["--gpu", "h100", "--rate", "1", "--concurrency", "1"], 2, "--rate and --concurrency exclude each other"),
        (["--gpu", "h100", "--rate", "1", "--ttft", "0"], 2, "slo.ttft_seconds is 0.0; write a number above 0"),
        (["--gpu", "h100", "--rate", "1", "--dtype", "fp8"], 2, "model.dtype is 'fp8'; write one of auto, float32"),
        (["--gpu", "h100", "--rate", "1", "--attainment", "90"], 2, "slo.attainment is 90.0; write a share"),
        (["--gpu", "h100", "--rate", "1", "--tensor-parallel", "2"], 2, "are of colocated workers: add --colocated"),
        (["--gpu", "h100", "--rate", "1", "--colocated", "--decode", "2"], 2, "there are no decode workers"),
        (["--gpu", "h100", "--rate", "1", "--prefill-tp", "3"], 1, "tensor_parallel 3 does not divide 32 heads"),
        (["--gpu", "h100", "--rate", "1", "--hardware-file", "/absent"], 2, "cannot read /absent: No such file"),
        (["--gpu", "h100", "--rate", "1", "--burstiness", "-1"], 2, "Input should be greater than or equal to 0.001"),
        (
            ["--gpu", "h100", "--rate", "1", "--max-model-len", "100"],
            2,
            "exceed max_model_len 100: raise it with --set model.max_model_len=",
        ),
        (["/absent.yaml", "--gpu", "h100", "--rate", "1"], 2, "cannot read /absent.yaml: No such file"),
        (["--gpu", "h100", "--rate", "1", "--model", "/absent"], 1, "no model at /absent; give --model a folder"),
        (
            ["--gpu", "h100", "--rate", "1", "--json", "/absent/x.json"],
            2,
            "/absent/x.json has no folder: name another file",
        ),
        (["--rate", "1"], 2, "Missing option '--gpu'"),
    ],
)
def test_a_mistake_gets_one_line_and_its_exit_code(
    capsys: pytest.CaptureFixture[str], model: str, arguments: list[str], status: int, said: str
) -> None:
    traffic = () if "--workload" in arguments and "--traffic" not in arguments else SHORT
    assert run(["simulate", "--model", model, "--requests", "5", *traffic, *arguments]) == status
    error = capsys.readouterr().err
    assert said in error
    assert error.startswith("pdserve: ")
    assert error.count("\n") == 1


def test_a_model_that_does_not_fit_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    large = str(written(tmp_path / "large", num_hidden_layers=200))
    assert run([*BASE, "--model", large, "--rate", "1", *SHORT]) == 1
    why = "decode: the weights of large in bfloat16 do not fit 90% of 1 x h100-sxm; the smallest worker for"
    error = capsys.readouterr().err
    assert why in error
    assert "2 x h100-sxm: --set decode.tensor_parallel=2, or use --set model.quantization=int8 or int4" in error
    int8 = ["--set", "model.quantization=int8", "--set", "decode.gpu_memory_utilization=0.4"]
    assert run([*BASE, "--model", large, "--rate", "1", *SHORT, *int8]) == 1
    error = capsys.readouterr().err
    assert "the weights of large in int8 do not fit" in error
    assert "raise decode.gpu_memory_utilization or kv_memory, or use --set model.quantization=int4\n" in error


def test_without_a_model_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*BASE, "--rate", "1", *SHORT]) == 2
    assert "no model is named; give --model a folder with a config.json" in capsys.readouterr().err


SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_hidden_layers": 4}


@st.composite
def deployments(draw: st.DrawFn) -> dict[str, Any]:
    """Deployments that `pdserve check` accepts: any pools, degrees, shares of GPUs, tiers and policies."""

    def phase(name: str) -> dict[str, Any]:
        values: dict[str, Any] = {
            "replicas": draw(st.integers(0, 2)),
            "tensor_parallel": draw(st.sampled_from((1, 2))),
            "pipeline_parallel": draw(st.sampled_from((1, 2))),
            "device": draw(st.sampled_from(("auto", "cuda"))),
            "gpu_memory_utilization": draw(st.sampled_from((0.2, 0.45, 0.5, 0.9, 1.0))),
            "kv_memory": draw(st.sampled_from(("auto", "64MiB"))),
            "max_batch_tokens": draw(st.sampled_from((16, 2048))),
            "max_batch_size": draw(st.sampled_from((1, 256))),
        }
        return values if name == "prefill" else {**values, "swap_memory": draw(st.sampled_from(("auto", 0, "1GiB")))}

    slo: dict[str, Any] = {"ttft_seconds": draw(st.sampled_from((0.001, 0.25)))}
    if draw(st.booleans()):
        tier = {"ttft_seconds": 1.0, "tpot_seconds": 0.1, "when_hopeless": "refuse"}
        slo |= {"when_hopeless": draw(st.sampled_from(("last", "refuse"))), "tiers": {"batch": tier}}
    document = {
        "model": {
            "path": "small",
            "dtype": "bfloat16",
            "kv_dtype": draw(st.sampled_from(("auto", "int8"))),
            "quantization": draw(st.sampled_from(("none", "int8"))),
            "max_model_len": 1024,
            "block_size": draw(st.sampled_from((1, 16, 100))),
        },
        "slo": slo,
        "router": {"policy": draw(st.sampled_from(POLICIES)), "replicas": draw(st.sampled_from((1, 2)))},
        **{name: phase(name) for name in ("prefill", "decode", "mixed")},
    }
    try:
        parse_deployment(document)
    except ConfigError:
        assume(False)
    return document


@given(document=deployments())
@example({"model": {"path": "small"}, "prefill": {"replicas": 0}, "mixed": {"replicas": 1}})
@example({"prefill": {"replicas": 0}, "decode": {"replicas": 0}, "mixed": {"replicas": 1}})
@example({"mixed": {"replicas": 1}})
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_accepted_can_be_simulated(tmp_path: Path, document: dict[str, Any]) -> None:
    written(tmp_path / "small", **SMALL)
    file, result = tmp_path / "deployment.json", tmp_path / "result.json"
    file.write_text(json.dumps(document))
    command = ("simulate", str(file), "--gpu", "h100", "--requests", "12", "--rate", "20", "--json", str(result))
    assert run([*command, "--input-tokens", "60", "--output-tokens", "5"]) == 0
    layout = json.loads(result.read_text())["layout"]
    assert {name for name in ("prefill", "decode", "mixed") if name in layout} == {
        role.value for role in WorkerRole if parse_deployment(document).phase(role).replicas
    }


def test_workers_that_share_a_gpu_share_its_memory(capsys: pytest.CaptureFixture[str], model: str) -> None:
    def of_share(share: float) -> tuple[int, float, list[str]]:
        file = Path(model).parent / "deployment.yaml"
        each = f"{{gpu_memory_utilization: {share}}}"
        file.write_text(f"model: {{path: {model}, dtype: bfloat16}}\nprefill: {each}\ndecode: {each}\n")
        result = simulated(capsys, str(file), "--rate", "5", *SHORT)
        return result["layout"]["num_devices"], result["steady_state"]["pools"][1]["kv_share"], result["notes"]

    num_devices, kv_share, notes = of_share(0.45)
    assert num_devices == 1
    assert notes[-1].startswith("Workers share GPUs: their memory is divided, but each step is timed as if")
    num_alone, kv_share_alone, notes_alone = of_share(0.9)
    assert num_alone == 2
    assert kv_share > 2 * kv_share_alone
    assert not notes_alone
