from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.bench.scripted_server import Script, scripted_server, token_events
from tests.deploy.clusters import pdserve


def answer_in_full(body: dict[str, Any]) -> Script:
    return Script(events=token_events(body["max_tokens"]))


def test_serve_sends_what_was_asked_for_and_reports() -> None:
    lengths = ("--input-tokens", "7", "--output-tokens", "3")
    with scripted_server(answer_in_full) as server:
        run = pdserve(
            "bench", "serve", "--url", f"{server.url}/v1/", "--rate", "50", "--requests", "6", *lengths, "--json"
        )
        shown = pdserve("bench", "serve", "--url", server.url, "--rate", "50", "--requests", "2", *lengths)
    report = json.loads(run.stdout)
    assert report["num_finished"] == 6
    assert report["output_tokens"] == 18
    assert [len(body["prompt"]) for body in server.bodies] == [7] * 8
    assert "2 finished, 0 rejected, 0 failed" in shown.stdout


def test_lengths_of_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrived_s,prompt_tokens,output_tokens\n0.0,5,2\n0.1,6,3\n")
    with scripted_server(answer_in_full) as server:
        run = pdserve("bench", "serve", "--url", server.url, "--trace", str(trace), "--requests", "2", "--rate", "20")
    assert "2 finished" in run.stdout, run.stderr
    assert sorted((len(body["prompt"]), body["max_tokens"]) for body in server.bodies) == [(5, 2), (6, 3)]


@pytest.mark.parametrize(("ttft", "share"), [("10", 1.0), ("0.000001", 0.0)])
def test_objectives_are_those_asked_for(ttft: str, share: float) -> None:
    with scripted_server(answer_in_full) as server:
        run = pdserve(
            "bench", "serve", "--url", server.url, "--requests", "2", "--rate", "20", "--ttft", ttft, "--json"
        )
    assert json.loads(run.stdout)["attainment"]["ttft"] == share


def test_nothing_finished_is_a_failure() -> None:
    with scripted_server(lambda _: Script(status=500, refusal=b"broken")) as server:
        run = pdserve("bench", "serve", "--url", server.url, "--requests", "2", "--rate", "20")
    assert run.returncode == 1
    assert "failed 2 x: broken" in run.stdout


def test_kernels_are_compiled_where_there_is_no_gpu() -> None:
    run = pdserve("bench", "kernels", "--compile-only", "--only", "gates bfloat16", "--json")
    assert run.returncode == 0, run.stderr
    kernels = json.loads(run.stdout)["kernels"]
    assert len(kernels) == 3
    assert all(kernel["fits"] for kernel in kernels)


def test_kernels_are_measured_on_a_gpu_only() -> None:
    run = pdserve("bench", "kernels", CUDA_VISIBLE_DEVICES="")
    assert run.returncode == 1
    assert run.stderr == "pdserve: no GPU here: --compile-only compiles the kernels without one\n"
