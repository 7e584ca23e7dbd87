"""``pdserve up`` serves, restarts processes that die, and leaves nothing behind. Emulated workers, all else real."""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file, save_file

from pdserve.contracts.codec import from_plain
from pdserve.contracts.deployment import SloConfig
from pdserve.deploy.cluster.folder import running_clusters
from pdserve.model.weights.demo_model import DEMO_MODEL
from tests.deploy.clusters import UpProcess, pdserve, running_up, wait_for
from tests.patience import HANG_S

ARGUMENTS = ("--emulate", "h100-sxm", "--prefill", "1", "--decode", "1")
DEPLOYMENT = "{model: {dtype: bfloat16}, slo: {attainment: 0.8}, decode: {tensor_parallel: 2}}"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpProcess]:
    with running_up(tmp_path_factory.mktemp("up"), DEPLOYMENT, *ARGUMENTS) as up:
        yield up
    assert up.process.pid not in [note.pid for note in running_clusters()]


def test_the_last_line_of_the_banner_is_a_command_that_works(cluster: UpProcess) -> None:
    command = cluster.wait_ready()
    assert cluster.lines[-1] == command
    run = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=HANG_S, check=True)
    assert json.loads(run.stdout)["usage"]["completion_tokens"] > 0
    assert "tokens of KV cache" in cluster.banner("prefill")
    assert "tokens of KV cache" in cluster.banner("decode")
    assert "with tokens 2" in cluster.banner("answers")


def test_chat_streams_and_shows_the_speed(cluster: UpProcess) -> None:
    run = pdserve("chat", "--url", cluster.banner("API"), "--max-tokens", "8", "Hello")
    assert run.returncode == 0, run.stderr
    assert "TTFT " in run.stdout
    assert "8 tokens" in run.stdout


def test_ctrl_c_stops_the_answer_here_and_in_the_cluster(cluster: UpProcess, tmp_path: Path) -> None:
    log_path = tmp_path / "chat"
    command = ["chat", "--url", cluster.banner("API"), "--max-tokens", "4000", "Hello"]
    with log_path.open("w") as log:
        chat = subprocess.Popen([sys.executable, "-u", "-m", "pdserve.deploy.cli", *command], stdout=log, stderr=log)
    wait_for(lambda: log_path.stat().st_size > 20, "the beginning of the answer")
    chat.send_signal(signal.SIGINT)
    assert chat.wait(HANG_S) == 0
    assert log_path.read_text().endswith("(stopped)\n")
    wait_for(lambda: cluster.status()["in_flight"] == 0, "the request to end")
    assert cluster.status()["outcomes"]["cancelled"] == 1


def test_status_shows_every_worker(cluster: UpProcess) -> None:
    run = pdserve("status", "--admin-url", cluster.admin_url)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("ready: 0 in flight")
    assert "prefill-0" in run.stdout
    assert "decode-0" in run.stdout


def test_top_draws_the_cluster(cluster: UpProcess) -> None:
    shown = pdserve("top", "--admin-url", cluster.admin_url, "--refreshes", "2", "--interval", "0.1").stdout
    assert "ready: 0 in flight, 0 queued" in shown
    assert "within both" in shown
    assert {"prefill-0", "decode-0"} <= set(shown.split())


def test_the_router_says_what_the_deployment_does(cluster: UpProcess) -> None:
    status = cluster.status()
    workers = {worker["role"]: (worker["tensor_parallel"], worker["dtype"]) for worker in status["workers"]}
    assert workers == {"prefill": (1, "bfloat16"), "decode": (2, "bfloat16")}
    assert from_plain(SloConfig, status["slo"], "status") == SloConfig(attainment=0.8)
    assert (Path(status["model"]["path"]) / "config.json").is_file()
    assert status["devices"]["decode"]["name"] == "h100-sxm"


def test_nothing_but_the_api_listens_beyond_loopback(cluster: UpProcess) -> None:
    addresses = [
        connection.laddr.ip
        for process in [cluster.process, *cluster.members("")]
        for connection in process.net_connections("tcp")
        if connection.status == "LISTEN"
    ]
    assert len(addresses) > 4
    assert {address.removeprefix("::ffff:") for address in addresses} == {"127.0.0.1"}


def test_no_secret_is_on_a_command_line(cluster: UpProcess) -> None:
    for process in cluster.members(""):
        assert "token" not in " ".join(process.cmdline()).replace("cluster_token", "")


def test_workers_come_and_go_while_requests_run(cluster: UpProcess) -> None:
    is_over = threading.Event()
    body = {"prompt": [5, 6, 7], "max_tokens": 300, "temperature": 0, "ignore_eos": True}

    def ask(client: httpx.Client) -> str:
        answer = client.post(f"{cluster.banner('API')}/completions", json=body)
        return str(answer.json()["choices"][0]["text"]) if answer.is_success else answer.text

    def ask_on() -> set[str]:
        with httpx.Client(trust_env=False, verify=False, timeout=HANG_S) as client:
            answers = set()
            while not is_over.is_set():
                answers.add(ask(client))
        return answers

    def workers() -> set[str]:
        return {worker["worker_id"] for worker in cluster.status()["workers"] if worker["up"]}

    def change(*arguments: str) -> str:
        run = pdserve(*arguments, "--admin-url", cluster.admin_url)
        return run.stderr if run.returncode else run.stdout

    with httpx.Client(trust_env=False, verify=False) as client, ThreadPoolExecutor() as threads:
        undisturbed = ask(client)
        answers = [threads.submit(ask_on) for _ in range(4)]
        try:
            assert "decode-1 is up at" in change("scale", "decode=2")
            assert workers() == {"prefill-0", "decode-0", "decode-1"}
            epochs = {worker["worker_id"]: worker["epoch"] for worker in cluster.status()["workers"]}
            assert "decode-0 is up at" in change("restart", "decode-0")
            now = {worker["worker_id"]: worker["epoch"] for worker in cluster.status()["workers"]}
            assert {name for name in epochs if epochs[name] != now.get(name)} <= {"decode-0"}
            assert change("drain", "decode-0").splitlines() == [
                "decode-0 finishes its requests",
                "decode-0 has left",
            ]
            wait_for(lambda: workers() == {"prefill-0", "decode-1"}, "decode-0 to leave")
        finally:
            is_over.set()
        assert {text for answer in answers for text in answer.result()} == {undisturbed}
    assert "no decode worker would be left" in change("drain", "decode-1")
    assert "there are prefill-0, decode-1" in change("restart", "decode-7")
    assert "leaves no prefill worker" in change("scale", "prefill=0")
    assert "this cluster has no mixed workers" in change("scale", "mixed=1")
    assert "such as decode=3" in change("scale", "decode")


def test_a_killed_worker_comes_back_under_a_new_epoch(cluster: UpProcess) -> None:
    epochs = {worker["worker_id"]: worker["epoch"] for worker in cluster.status()["workers"]}
    assert not down_workers(cluster)
    cluster.members("ray::decode")[0].kill()
    assert wait_for(lambda: down_workers(cluster), "word of the loss")[0].startswith("decode-")

    def replaced() -> bool:
        workers = cluster.status()["workers"]
        fresh = [worker for worker in workers if worker["up"] and worker["epoch"] != epochs[worker["worker_id"]]]
        return len(workers) == len(epochs) and len(fresh) == 1

    wait_for(replaced, "the worker's successor")
    wait_for(cluster.is_ready, "readiness")
    assert not down_workers(cluster)


def down_workers(cluster: UpProcess) -> list[str]:
    """Names of the workers that `pdserve status` shows as being restarted."""
    [note] = [note for note in running_clusters() if note.pid == cluster.process.pid]
    return [*note.down_since_s]


def test_a_killed_router_comes_back_at_its_address(cluster: UpProcess) -> None:
    (router,) = cluster.members("pdserve.router")
    router.kill()
    router.wait()
    wait_for(cluster.is_ready, "readiness at the same address")
    assert len(cluster.status()["workers"]) == 2


def test_a_dead_ray_is_replaced_with_its_workers(cluster: UpProcess) -> None:
    epochs = {worker["epoch"] for worker in cluster.status()["workers"]}
    (server,) = cluster.members("gcs_server")
    server.kill()

    def replaced() -> bool:
        epochs_now = {worker["epoch"] for worker in cluster.status()["workers"] if worker["up"]}
        return len(epochs_now) == 2 and not epochs_now & epochs

    wait_for(replaced, "both workers' successors")
    wait_for(cluster.is_ready, "readiness")


def test_a_killed_supervisor_takes_everything_with_it(tmp_path: Path) -> None:
    up = UpProcess(tmp_path / "log", *ARGUMENTS)
    up.wait_ready()
    assert len(up.members("")) > 6
    os.kill(up.process.pid, signal.SIGKILL)
    up.process.wait()
    wait_for(lambda: not up.leftovers(), "every process to end")
    assert up.process.pid not in [note.pid for note in running_clusters()]


def test_a_signal_while_starting_ends_it_cleanly_and_the_compiler_too(tmp_path: Path) -> None:
    up = UpProcess(tmp_path / "log", "--prefill", "1", "--decode", "1", XDG_CACHE_HOME=str(tmp_path))
    wait_for(lambda: up.members("ray_start") and up.members("cpu.build"), "Ray and the compiler to be starting")
    assert any("compiling CPU kernels (once for this machine)" in line for line in up.lines)
    assert [note.url for note in running_clusters() if note.pid == up.process.pid] == [""]
    assert up.stop(signal.SIGINT) == 0, up.lines
    assert up.leftovers() == []


def test_a_model_of_nan_is_one_line_that_says_so(tmp_path: Path) -> None:
    folder = shutil.copytree(DEMO_MODEL, tmp_path / "model")
    (file,) = folder.glob("*.safetensors")
    weights = load_file(file)
    save_file({name: weight * math.nan for name, weight in weights.items()}, file)
    run = pdserve("up", "--model", str(folder), "--port", "0", "--prefill", "0", "--decode", "0", "--mixed", "1")
    assert run.returncode == 1
    last = run.stderr.splitlines()[-1]
    assert last.startswith("pdserve: mixed-0 did not start: its process ended: RuntimeError: ")
    assert "logits that are not finite cannot be sampled: the highest is nan" in last
    assert "Traceback" not in run.stdout + run.stderr
