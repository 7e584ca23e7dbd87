"""``pdserve plan --live`` against an admin port that answers like a router's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from math import inf
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import pytest

from pdserve.contracts.codec import to_plain
from pdserve.contracts.deployment import SloConfig
from pdserve.contracts.precision import Precision
from pdserve.contracts.worker_config import WorkerRole
from pdserve.deploy.cli import run
from pdserve.deploy.cluster.folder import ClusterNote
from pdserve.deploy.commands import plan_live
from pdserve.model.weights.random_checkpoint import write_random_checkpoint
from pdserve.planner.layout import Layout
from pdserve.planner.search.goodput import Trial
from tests.planner.live.test_live import Router
from tests.planner.live.test_running import SLOW, status, status_of
from tests.planner.stand_ins import a_pool
from tests.planner.test_planned_model import written
from tests.router.test_main import RouterProcess, running_router
from tests.workers import WorkerProcess, emulated_config

COLOCATED = [status_of("mixed-0", "mixed"), status_of("mixed-1", "mixed")]


@contextmanager
def admin_port(document: dict[str, object], num_requests: int = 40) -> Iterator[str]:
    """Serve ``document`` as the status, and metrics that count ``num_requests`` more requests at each read."""
    router = Router()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/status":
                body = json.dumps(document)
            else:
                body = router.text
                for _ in range(num_requests):
                    router.serve(1000, 3)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body.encode())

        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates of short runs are too high, but of all layouts."""
    monkeypatch.setattr(Trial, "most_rate", inf)


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(written(tmp_path / "Llama-3-8B"))


def serving(model: str, *workers: dict[str, object]) -> dict[str, object]:
    """Status of a router that serves the model in this folder."""
    return status(*(workers or COLOCATED), model={"path": model, "name": "mine"})


def live(url: str, *arguments: str) -> int:
    return run(["plan", "--live", url, "--window", "0.2", "--requests", "100", "--jobs", "1", *arguments])


def test_the_running_placement_is_compared_with_the_best(capsys: pytest.CaptureFixture[str], model: str) -> None:
    with admin_port({**serving(model), "policy": "least-time"}) as url:
        assert live(url, "--json", "-") == 0
    proposal = json.loads(capsys.readouterr().out)
    assert proposal["plan"]["policy"] == "least-time", "that of the cluster"
    assert proposal["running"]["layout"]["text"] == "2 x M(TP1)"
    assert proposal["plan"]["fleet"][0]["devices_per_node"] == 2
    assert proposal["plan"]["mean_prompt_tokens"] == pytest.approx(1000, rel=0.05)
    assert proposal["running"]["rate"] > 0
    observed, asked, running, *_, advice = proposal["text"]
    assert "prompts of 1,000 tokens and answers of 3 on average" in observed
    assert asked == "Planned for Llama-3-8B bfloat16, a TTFT of 250 ms and a TPOT of 20 ms for 80 % of requests."
    assert running.startswith("Running: 2 x M(TP1), goodput ")
    assert advice.startswith("Change the placement" if proposal["is_proposed"] else "Keep the placement")


def test_a_running_cluster_is_planned_for_by_its_address_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Real processes with emulated GPUs, and a model large enough to keep them busy."""
    folder = large(write_random_checkpoint(tmp_path / "large"))
    held = {
        "precision": Precision(dtype="bfloat16"),
        "time_scale": 1.0,
        "num_kv_blocks": 0,
        "max_model_len": 2048,
        "max_batch_tokens": 2048,
    }
    slo = SloConfig(ttft_seconds=0.4, tpot_seconds=0.03, attainment=0.8)
    of_router = {
        "dtype": "bfloat16",
        "hardware": "h100-sxm",
        "mixed": {"replicas": 1, "tensor_parallel": 2},
        "prefill": {"replicas": 0},
        "decode": {"replicas": 0},
    }
    with (
        WorkerProcess(emulated_config(folder, WorkerRole.MIXED, tensor_parallel=2, **held)) as worker,
        running_router(folder, slo=asdict(slo), **of_router) as router,
    ):
        router.put_targets(worker)
        router.wait_until_ready()
        is_over = Event()
        client = Thread(target=ask, args=(router, is_over))
        client.start()
        try:
            command = ["plan", "--live", router.admin_url, "--window", "1", "--requests", "100", "--jobs", "1"]
            assert run([*command, "--json", "-"]) == 0
            shown = httpx.get(f"{router.admin_url}/metrics").text
        finally:
            is_over.set()
            client.join()
    proposal = json.loads(capsys.readouterr().out)
    assert f'pdserve_plan_goodput{{placement="running"}} {proposal["running"]["rate"]}' in shown
    assert proposal["running"]["layout"]["text"] == "1 x M(TP2)"
    assert proposal["running"]["rate"] > 0
    plan = proposal["plan"]
    assert plan["slo"] == asdict(slo)
    assert (plan["model"]["name"], plan["model"]["dtype"], plan["model"]["max_model_len"]) == (
        "large",
        "bfloat16",
        2048,
    )
    assert [(supply["hardware"], supply["devices_per_node"]) for supply in plan["fleet"]] == [("h100-sxm", 2)]
    assert proposal["text"][1] == (
        "Planned for large bfloat16, a TTFT of 400 ms and a TPOT of 30 ms for 80 % of requests."
    )


def large(checkpoint: Path) -> Path:
    """The same tokenizer with a shape like Llama-3-8B's; emulation needs no weights."""
    file = checkpoint / "config.json"
    shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    file.write_text(json.dumps({**json.loads(file.read_text()), **shape, **heads}))
    return checkpoint


def ask(router: RouterProcess, is_over: Event) -> None:
    """Send one prompt after the other, all different."""
    for number in count():
        if is_over.is_set():
            return
        router.complete(3, prompt=[(number * 31 + 7 * place) % 100 + 1 for place in range(1000)])


def test_options_override_the_cluster_and_that_is_said(
    capsys: pytest.CaptureFixture[str], model: str, tmp_path: Path
) -> None:
    other = str(written(tmp_path / "wide", intermediate_size=20_000))
    asked = ("--gpu", "h200", "--dtype", "float16", "--kv-dtype", "auto", "--max-model-len", "4096", "--tpot", "0.03")
    with admin_port(serving(model)) as url:
        assert live(url, "--model", other, *asked, "--json", "-") == 0
    proposal = json.loads(capsys.readouterr().out)
    _, planned, *overrides, _, _, _ = proposal["text"][:-1]
    assert planned == "Planned for wide float16, a TTFT of 250 ms and a TPOT of 30 ms for 80 % of requests."
    assert overrides == [
        "--dtype float16 overrides bfloat16, which the cluster has.",
        "--max-model-len 4096 overrides 8192, which the cluster has.",
        "--tpot 0.03 overrides 0.02, which the cluster has.",
        "--gpu h200 overrides h100-sxm, which the cluster has.",
        f"--model names another model than the one in {model}, which the cluster serves.",
    ]
    assert proposal["plan"]["model"]["dtype"] == "float16"
    assert proposal["plan"]["fleet"][0]["hardware"] == "h200"


def test_devices_are_those_that_the_router_predicts_with(capsys: pytest.CaptureFixture[str], model: str) -> None:
    devices = {"mixed": to_plain(SLOW)}
    with admin_port({**serving(model), "devices": devices}) as url:
        assert live(url) == 1
    assert "even an idle cluster does not meet TTFT 250 ms and TPOT 20 ms" in capsys.readouterr().err


def test_a_model_that_is_elsewhere_is_asked_for(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with admin_port(serving(str(tmp_path / "gone"))) as url:
        assert live(url) == 1
    error = capsys.readouterr().err
    assert f"the cluster serves mine from {tmp_path / 'gone'}, which cannot be read on this machine; give" in error


@pytest.mark.parametrize(
    ("workers", "num_requests", "said"),
    [
        (COLOCATED, 0, "the router received no requests during the observation: observe for longer"),
        ([status_of("gone", "mixed", up=False)], 40, "no worker of the cluster is up"),
        ([{"up": True}], 40, "this is not the status of a pdserve router"),
        ([status_of("p", "prefill")], 40, "no decode worker is up"),
    ],
)
def test_what_cannot_be_compared_is_said(
    capsys: pytest.CaptureFixture[str],
    model: str,
    workers: list[dict[str, object]],
    num_requests: int,
    said: str,
) -> None:
    with admin_port(serving(model, *workers), num_requests) as url:
        assert live(url) == 1
    *_, error = capsys.readouterr().err.splitlines()  # after lines of progress
    assert said in error


class Supervisor:
    """Of the cluster behind an admin port: takes commands."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.commands: list[dict[str, Any]] = []
        monkeypatch.setattr("pdserve.deploy.commands.plan_live.find_cluster", lambda url: ClusterNote(pid=1))
        monkeypatch.setattr("pdserve.deploy.commands.plan_live.send_command", self._take)

    def _take(self, folder: Path, command: dict[str, Any]) -> Iterator[str]:
        self.commands.append(command)
        yield "a worker becomes another"


def test_a_dry_run_changes_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = Supervisor(monkeypatch)
    old = Layout(prefill=a_pool(WorkerRole.PREFILL, 3), decode=a_pool(WorkerRole.DECODE, 1))
    new = Layout(prefill=a_pool(WorkerRole.PREFILL, 1), decode=a_pool(WorkerRole.DECODE, 3))
    plan_live._apply(plan_live.Watch("a:1", 1.0, 0.1, "", None, previews=True), old, new, to_stderr=False)
    assert supervisor.commands == [{"preview": {"prefill": 1, "decode": 3}}]
    assert capsys.readouterr().out.endswith("What undoes it: pdserve scale prefill=3 decode=1 --admin-url a:1\n")


@pytest.mark.parametrize(
    ("workers", "options", "said"),
    [
        (COLOCATED, ("--apply", "--output", "new.yaml"), "--apply keeps workers as they are: leave out --output"),
        ([*COLOCATED, status_of("p", "prefill")], ("--apply",), "the cluster has prefill and mixed workers"),
        ([*COLOCATED, status_of("down", "mixed", up=False)], ("--apply",), "down is down; try again when"),
    ],
)
def test_what_cannot_be_applied_is_refused_before_the_search(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    workers: list[dict[str, object]],
    options: tuple[str, ...],
    said: str,
) -> None:
    document = serving(model, *workers)
    supervisor = Supervisor(monkeypatch)
    with admin_port(document) as url:
        assert live(url, *options) != 0
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not supervisor.commands


def test_numbers_that_follow_the_load_are_not_changed_beside_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    document = serving(model)
    supervisor = Supervisor(monkeypatch)
    note = ClusterNote(pid=1, follows_load=True)
    monkeypatch.setattr("pdserve.deploy.commands.plan_live.find_cluster", lambda url: note)
    with admin_port(document) as url:
        assert live(url, "--apply") == 1
        assert "follow its load (max_replicas), and would soon undo the change: leave out" in capsys.readouterr().err
    assert not supervisor.commands


def test_the_cluster_of_another_machine_is_not_changed(capsys: pytest.CaptureFixture[str], model: str) -> None:
    with admin_port(serving(model)) as url:
        assert live(url, "--dry-run") == 1
    assert f"no cluster of yours runs here at {url}" in capsys.readouterr().err
