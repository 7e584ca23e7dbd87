"""The command line from outside: help, exit codes, and one line for every mistake."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pdserve.deploy.cli import run
from pdserve.deploy.cluster import folder as folder_module
from pdserve.deploy.cluster.folder import ClusterNote, cluster_folder, write_note
from pdserve.model.weights.random_checkpoint import write_random_checkpoint
from tests.deploy.clusters import pdserve
from tests.patience import HANG_S


def test_help_is_quick_and_loads_no_engine() -> None:
    code = "import sys, pdserve.deploy.cli; print(sorted({'torch', 'ray', 'transformers'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("command", ["up", "check", "chat", "status", "profile", "bench serve", "bench kernels"])
def test_every_command_has_help_with_an_example(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert run([*command.split(), "--help"]) == 0
    assert f"Example: pdserve {command}" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_without_a_command_there_is_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 0
    assert "Example: pdserve up" in capsys.readouterr().out


def test_version() -> None:
    run = pdserve("--version")
    assert run.returncode == 0
    assert run.stdout.startswith("pdserve 0.")


def test_exit_codes_of_a_process_are_those_of_its_command() -> None:
    done = pdserve("upp")
    assert done.returncode == 2
    assert done.stderr.startswith("pdserve: ")


def test_a_cluster_of_ray_that_does_not_answer_is_named() -> None:
    done = pdserve("up", "--ray-address", "127.0.0.1:9")
    assert done.returncode == 1
    assert done.stderr.startswith("pdserve: no Ray cluster answers at 127.0.0.1:9")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["upp"], 2, "upp"),
        (["up", "--modle", "x"], 2, "--modle"),
        (["up", "--port", "http"], 2, "--port"),
        (["up", "--prefill", "0"], 2, "prefill.replicas is 0"),
        (["up", "--time-scale", "2"], 2, "add --emulate GPU"),
        (["up", "--decode", "1000"], 2, "pdserve: decode.replicas is 1000; write a whole number from 0 to 64"),
        (["up", "/absent/deployment.yaml"], 2, "cannot read /absent/deployment.yaml"),
        (
            ["up", "--set", "slo.ttft_seconds=1", "/absent/a.yaml"],
            2,
            "cannot read /absent/a.yaml: No such file or directory\n",
        ),
        (["up", "--port", "0", "--model", "/absent"], 1, "no model folder at /absent; give --model a folder"),
        (
            ["up", "--ray-address", "ray://head"],
            1,
            "--ray-address: 'ray://head' is not an address of Ray; write HOST:PORT",
        ),
        (["check", "--port", "0", "--model", "/absent"], 1, "no model folder at /absent; give --model a folder"),
        (["chat", "--url", "http://127.0.0.1:9", "Hello"], 1, "no answer from http://127.0.0.1:9"),
        (["status", "--admin-url", "http://127.0.0.1:9"], 1, "no pdserve router answers at http://127.0.0.1:9"),
        (["bench"], 2, "Missing command"),
        (["bench", "serve", "--url", "http://127.0.0.1:9"], 1, "http://127.0.0.1:9 does not answer"),
        (["bench", "serve", "--url", "nonsense"], 1, "nonsense does not answer"),
        (["bench", "serve", "--workload", "chut"], 2, "use chat"),
        (["bench", "serve", "--workload", "chat", "--trace", "x"], 2, "exclude each other"),
        (["bench", "serve", "--trace", "/absent"], 1, "cannot read /absent"),
        (["bench", "kernels", "--folder", "/absent"], 2, "/absent"),
        (["status", "--admin-url", "nonsense"], 1, "no pdserve router answers at nonsense"),
        (["up", "--set", "decode.speculation={draft:", "/x}"], 2, "--set 'decode.speculation={draft: /x}'"),
        (
            ["up", "a.yaml", "--set", "kv_tier={path:", "/x,", "size:", "1}", "--port", "0"],
            2,
            "'kv_tier={path: /x, size: 1}'",
        ),
        (["simulate", "--set", "model.name=a", "b"], 2, "--set 'model.name=a b'"),
    ],
)
def test_a_mistake_gets_one_line_and_its_exit_code(
    arguments: list[str], status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == status
    error = capsys.readouterr().err
    assert error.startswith("pdserve: ")
    assert error.count("\n") == 1
    assert said in error


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run = pdserve("up", "--port", str(port))
    assert run.returncode == 1
    assert run.stderr.startswith(f"pdserve: cannot listen on 127.0.0.1:{port}: Address already in use by ")
    assert run.stderr.endswith(f" (process {os.getpid()}); choose another router.port, or --port 0\n")


def test_a_model_that_cannot_be_served_is_refused_before_anything_starts(tmp_path: Path) -> None:
    folder = write_random_checkpoint(tmp_path, num_layers=1)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    started_s = time.monotonic()
    run = pdserve("up", "--port", "0", "--model", str(folder))
    assert run.returncode == 1
    assert run.stderr.startswith(f"pdserve: {weights} has ")
    assert run.stderr.endswith("; download it again\n")
    assert run.stdout == "", "nothing was started"
    assert time.monotonic() - started_s < 30


def test_a_mistake_in_the_file_is_named_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "deployment.yaml"
    path.write_text("prefill: {replica: 2}\n")
    run = pdserve("up", str(path))
    assert run.returncode == 2
    assert run.stderr.startswith(f"pdserve: {path}:1: unknown key 'replica' in prefill; did you mean 'replicas'?")
    assert run.stderr.count("\n") == 1


def test_a_cluster_that_starts_is_shown_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(folder_module, "_root", lambda: tmp_path)
    monkeypatch.setattr(folder_module, "_TMP", tmp_path.parent)
    with subprocess.Popen(["sleep", "60"]) as starting, cluster_folder() as folder:
        write_note(folder, ClusterNote(pid=starting.pid, folder=str(folder)))
        assert run(["status"]) == 1
        assert capsys.readouterr().out == f"starting: process {starting.pid}, {folder}\n"
        assert run(["status", "--json"]) == 1
        assert json.loads(capsys.readouterr().out) == {"ready": False, "starting": True}
        for command in (["chat", "hello"], ["top"], ["scale", "decode=2"]):
            assert run(command) == 1
            assert "your cluster is starting; try again when" in capsys.readouterr().err
        assert run(["down"]) == 0
        assert starting.poll() is not None


def test_a_deployment_is_checked_for_emulation() -> None:
    found = pdserve("check", "--emulate", "h1000", "--port", "0")
    assert found.returncode == 1
    assert "--emulate: unknown hardware 'h1000'; use one of" in found.stderr


def test_closed_standard_streams_are_opened() -> None:
    """Or the first file that pdserve opens gets the number of one (``pdserve up <&-``)."""
    code = (
        "import os, subprocess; from pdserve.deploy.cli import open_standard_streams; "
        "os.close(0); os.close(2); open_standard_streams(); "
        "subprocess.run(['readlink', '/proc/self/fd/0', '/proc/self/fd/2'])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S, check=True)
    assert said.stdout.split() == ["/dev/null", "/dev/null"]
