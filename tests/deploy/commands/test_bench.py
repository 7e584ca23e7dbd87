from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from typer.testing import CliRunner, Result

from pdserve.contracts.deployment import ModelConfig
from pdserve.contracts.errors import DeployError
from pdserve.deploy.commands import bench, bench_load, plan_options
from pdserve.loadgen import load
from tests.deploy.clusters import pdserve
from tests.loadgen.scripted_server import Script, scripted_server, token_events


def here(*arguments: str) -> Result:
    """What a command of ``pdserve bench`` says, run by this process."""
    return CliRunner().invoke(bench.app, arguments)


def answer_in_full(body: dict[str, Any]) -> Script:
    return Script(events=token_events(body["max_tokens"]))


def test_serve_takes_vllms_options_and_writes_its_keys(tmp_path: Path) -> None:
    lengths = ("--random-input-len", "7", "--random-output-len", "3", "--request-rate", "50")
    saved = ("--num-prompts", "6", "--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json")
    with scripted_server(answer_in_full) as server:
        run = here("serve", "--base-url", f"{server.url}/v1/", *lengths, *saved, "--json")
        shown = here("serve", "--url", server.url, *lengths, "--requests", "2")
    result = json.loads(run.stdout)
    assert (result["completed"], result["total_output_tokens"], result["total_input_tokens"]) == (6, 18, 42)
    assert {"mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_itl_ms"} <= result.keys()
    assert (result["request_rate"], result["burstiness"], result["max_concurrency"]) == (50, 1, None)
    assert json.loads((tmp_path / "result.json").read_text()) == result
    assert [len(body["prompt"]) for body in server.bodies] == [7] * 8
    assert shown.stdout.startswith("============ Serving Benchmark Result ============\n")
    assert "Successful requests:                     2\n" in shown.stdout


def test_lengths_of_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrived_s,prompt_tokens,output_tokens\n0.0,5,2\n0.1,6,3\n")
    options = ("--dataset-path", str(trace), "--num-prompts", "2", "--request-rate", "inf", "--max-concurrency", "1")
    with scripted_server(answer_in_full) as server:
        run = here("serve", "--url", server.url, *options, "--percentile-metrics", "e2el")
    assert "Maximum request concurrency:             1" in run.stdout, run.stderr
    assert "P99 E2EL (ms)" in run.stdout
    assert sorted((len(body["prompt"]), body["max_tokens"]) for body in server.bodies) == [(5, 2), (6, 3)]


def test_sessions_are_those_of_a_trace() -> None:
    with pytest.raises(ValueError, match="--sessions joins the requests of a trace: add its --dataset-path"):
        bench_load.workload_of("chat", None, (1, 1, 0.0), sessions=True)


def test_requests_of_a_trace_may_be_turns_of_sessions(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 0, "input_length": 20, "output_length": 3, "block_size": 10, "hash_ids": [1, 2]},
        {"timestamp": 10, "input_length": 30, "output_length": 3, "block_size": 10, "hash_ids": [1, 2, 3]},
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    for has_sessions in (False, True):
        first, *others = bench_load.workload_of("", trace, (1, 1, 0.0), sessions=has_sessions).draw(2).conversations
        assert (first.follow_up is not None) is (not others) is has_sessions


@pytest.mark.parametrize(("ttft_ms", "share"), [("10000", 1.0), ("0.001", 0.0)])
def test_objectives_are_those_asked_for(ttft_ms: str, share: float) -> None:
    options = ("--num-prompts", "2", "--request-rate", "20", "--goodput", f"ttft:{ttft_ms}", "tpot:1000", "--json")
    with scripted_server(answer_in_full) as server:
        run = here("serve", "--url", server.url, *options)
    result = json.loads(run.stdout)
    assert result["goodput_ms"] == {"ttft": float(ttft_ms), "tpot": 1000.0}
    assert result["attainment"]["ttft"] == share
    assert (result["request_goodput"] > 0) == bool(share)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--goodput", "ttft:fast"), "such as ttft:250 tpot:50"),
        (("tpot:50",), "unexpected argument 'tpot:50'"),
        (("--percentile-metrics", "tbt"), "use some of ttft, tpot, itl, e2el"),
        (("--metric-percentiles", "p99"), "numbers from 0 to 100"),
        (("--dataset-name", "sharegpt"), "add --dataset-path"),
        (("--dataset-name", "chat", "--dataset-path", "x.csv"), "exclude each other"),
    ],
)
def test_mistakes_are_named_before_anything_is_sent(options: tuple[str, ...], message: str) -> None:
    run = CliRunner().invoke(bench.app, ["serve", "--url", "http://127.0.0.1:9", *options], terminal_width=300)
    assert run.exit_code == 2
    assert message in " ".join(run.output.replace("│", " ").split())


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_burstiness_is_the_shape_of_the_gaps_of_loads_and_of_simulations(burstiness: float) -> None:
    simulated = plan_options.traffic((10, 5), model=ModelConfig(), max_model_len=100, burstiness=burstiness)
    for workload in (bench_load.workload_of("random", None, (10, 5, 0.0), burstiness), simulated.workload):
        sample = workload.draw(20_000, seed=1)
        gaps_s = np.diff([request.arrived_s for request in sample.at_rate(2.0)])
        assert gaps_s.mean() == pytest.approx(0.5, rel=0.05)
        assert (gaps_s.mean() / gaps_s.std()) ** 2 == pytest.approx(burstiness, rel=0.1)


def test_a_trace_keeps_its_gaps_unless_a_burstiness_is_named(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    times_s = (0.0, 1.0, 4.0, 5.0)
    file.write_text("".join(f'{{"timestamp": {at}, "input_length": 9, "output_length": 5}}\n' for at in times_s))

    def gaps(burstiness: float | None) -> list[float]:
        workload = bench_load.workload_of("", file, (10, 5, 0.0), burstiness, "s")
        return list(np.diff([each.arrived_s for each in workload.draw(4).at_rate(0.6)]))

    assert gaps(None) == pytest.approx([1.0, 3.0, 1.0])
    assert gaps(1.0) != pytest.approx([1.0, 3.0, 1.0])


def test_random_lengths_vary_by_the_ratio() -> None:
    requests = bench_load.workload_of("", None, (100, 50, 0.2), 1.0).draw(2_000, seed=1).conversations
    inputs, outputs = zip(
        *((request.num_prompt_tokens, request.num_output_tokens) for request in requests), strict=True
    )
    assert (min(inputs), max(inputs)) == pytest.approx((80, 120), abs=1)
    assert (min(outputs), max(outputs)) == pytest.approx((40, 60), abs=1)
    assert np.mean(inputs) == pytest.approx(100, abs=1)


def test_nothing_finished_is_a_failure() -> None:
    with scripted_server(lambda _: Script(status=500, refusal=b"broken")) as server:
        run = pdserve("bench", "serve", "--url", server.url, "--requests", "2", "--rate", "20")
    assert run.returncode == 1
    assert "failed 2 x: broken" in run.stdout


def test_a_missing_key_is_named_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("httpx.get", lambda *_, **__: httpx.Response(401))
    result = CliRunner().invoke(bench.app, ["serve", "--url", "http://127.0.0.1:9"])
    assert isinstance(result.exception, DeployError)
    assert "needs a valid API key; set PDSERVE_API_KEY" in str(result.exception)


def test_kernels_are_compiled_where_there_is_no_gpu() -> None:
    run = pdserve("bench", "kernels", "--compile-only", "--only", "gates bfloat16", "--json")
    assert run.returncode == 0, run.stderr
    kernels = json.loads(run.stdout)["kernels"]
    assert len(kernels) == 4
    assert all(kernel["fits"] for kernel in kernels)


def test_kernels_are_measured_on_a_gpu_only() -> None:
    run = pdserve("bench", "kernels", CUDA_VISIBLE_DEVICES="")
    assert run.returncode == 1
    assert run.stderr == "pdserve: no GPU here: --compile-only compiles the kernels without one\n"


def test_a_sweep_writes_json_csv_and_a_page(tmp_path: Path) -> None:
    options = ("--num-prompts", "10", "--goodput", "ttft:5000", "tpot:5000", "--result-dir", str(tmp_path))
    with scripted_server(answer_in_full) as server:
        first = ("--request-rates", "40,50", "--label", "a", "--result-filename", "first")
        run = here("sweep", "--url", server.url, *options, *first)
        assert "Written: " in run.stdout, run.stderr  # on a busy machine with a complaint about the generator
        again = ("--request-rates", "50", "--label", "b/c", "--compare", str(tmp_path / "first.json"))
        compared = here("sweep", "--url", server.url, *options, *again)
    assert "Written: " in compared.stdout, compared.stderr
    assert "Goodput, requests/s: at least 50.0, not sure" in run.stdout
    assert [point["rate"] for point in json.loads((tmp_path / "first.json").read_text())["points"]] == [40, 50]
    assert len((tmp_path / "first.csv").read_text().splitlines()) == 3
    [page] = tmp_path.glob("pdserve-sweep-b-c-*.html")
    assert "<h1>Goodput of b/c, a</h1>" in page.read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--request-rates", "2,fast"), "such as 1,2,4"),
        (("--goodput", "e2el:50"), "a sweep judges ttft and tpot"),
    ],
)
def test_mistakes_of_a_sweep_are_named(options: tuple[str, ...], message: str) -> None:
    run = CliRunner().invoke(bench.app, ["sweep", "--url", "http://127.0.0.1:9", *options], terminal_width=300)
    assert run.exit_code == 2
    assert message in " ".join(run.output.replace("│", " ").split())


def test_a_sweep_that_is_cut_short_keeps_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = load.measure_load
    outcomes = iter((measure, _refused))
    monkeypatch.setattr(load, "measure_load", lambda *args, **options: next(outcomes)(*args, **options))
    options = ("--num-prompts", "10", "--request-rates", "40,50", "--goodput", "ttft:5000", "tpot:5000")
    with scripted_server(answer_in_full) as server:
        files = ("--result-dir", str(tmp_path), "--result-filename", "first")
        run = CliRunner().invoke(bench.app, ["sweep", "--url", server.url, *options, *files])
    assert isinstance(run.exception, DeployError)
    assert [point["rate"] for point in json.loads((tmp_path / "first.json").read_text())["points"]] == [40]


def _refused(*_: object, **__: object) -> load.Measurement:
    raise ConnectionRefusedError
