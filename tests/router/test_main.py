"""Router process: startup and its errors, a request over HTTP, drain, and exit with its parent."""

from __future__ import annotations

import json
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import psutil
import pytest

from pdserve.contracts.codec import from_json, from_plain, to_json, to_plain
from pdserve.contracts.deployment import DeploymentConfig, ModelConfig, PhaseConfig, RouterConfig
from pdserve.contracts.worker_config import WorkerRole
from pdserve.model.cost.hardware import hardware
from pdserve.model.weights.random_checkpoint import write_random_checkpoint
from pdserve.router.main import build_cost_models
from pdserve.router.process_config import RouterProcessConfig
from tests.patience import HANG_S
from tests.proto.test_tls import certificates
from tests.workers import WorkerProcess, emulated_config, wait_until

TOKEN = "secret"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@dataclass
class RouterProcess:
    process: subprocess.Popen[str]
    url: str
    admin_url: str

    def complete(self, num_tokens: int, **fields: object) -> httpx.Response:
        body = {"model": "tiny", "prompt": [7, 8, 9], "max_tokens": num_tokens, "temperature": 0, **fields}
        return httpx.post(f"{self.url}/v1/completions", json={"ignore_eos": True, **body}, timeout=HANG_S, verify=False)

    def put_targets(self, *workers: WorkerProcess) -> None:
        targets = [to_plain(worker.endpoint) for worker in workers]
        httpx.put(f"{self.admin_url}/workers", json=targets).raise_for_status()

    def wait_until_ready(self) -> None:
        wait_until(lambda: httpx.get(f"{self.url}/health", verify=False).status_code == 200, "a ready router")


def start_router(checkpoint: Path, *arguments: str, **fields: object) -> subprocess.Popen[str]:
    """``fields``: of the section of the model or the router, a section of its own, or of the process."""
    process: dict[str, object] = {"cluster_token": TOKEN}
    model: dict[str, object] = {"path": str(checkpoint), "served_name": "tiny", "dtype": "float32"}
    sections: dict[str, dict[str, object]] = {"model": {**model, "generation_config": "none"}, "router": {"port": 0}}
    sections |= {role: fields.pop(role) for role in ("prefill", "decode", "mixed", "slo") if role in fields}  # type: ignore[misc]
    for name, value in fields.items():
        is_of_model, is_of_router = hasattr(ModelConfig(), name), hasattr(RouterConfig(), name)
        (sections["model"] if is_of_model else sections["router"] if is_of_router else process)[name] = value
    config = from_plain(RouterProcessConfig, {**process, "deployment": sections}, "the configuration")
    return subprocess.Popen(
        [sys.executable, "-m", "pdserve.router", "--config", to_json(config), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextmanager
def running_router(checkpoint: Path, **fields: object) -> Iterator[RouterProcess]:
    process = start_router(checkpoint, "--die-with-parent", **fields)
    assert process.stdout is not None
    try:
        where = json.loads(process.stdout.readline())
        yield RouterProcess(
            process,
            f"http://{where['host']}:{where['port']}",
            f"http://{where['admin_host']}:{where['admin_port']}",
        )
    finally:
        process.kill()
        process.communicate()


def test_a_certificate_makes_the_api_speak_https(checkpoint: Path, tmp_path: Path) -> None:
    tls = certificates(tmp_path)
    with running_router(checkpoint, tls_certificate=tls.certificate, tls_key=tls.key) as router:
        context = ssl.create_default_context(cafile=tls.ca)
        context.check_hostname = False
        url = router.url.replace("http:", "https:")
        assert httpx.get(f"{url}/live", verify=context).status_code == 200
        cookie = httpx.post(f"{url}/page/session", verify=context).headers["set-cookie"]
        assert "secure" in cookie.lower()
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{router.url}/live")
        assert httpx.get(f"{router.admin_url}/status").status_code == 200


@pytest.fixture(scope="module")
def worker(checkpoint: Path) -> Iterator[WorkerProcess]:
    """Mixed worker that takes a few milliseconds per token."""
    with WorkerProcess(emulated_config(checkpoint, WorkerRole.MIXED, time_scale=10.0)) as process:
        yield process


def test_serves_drains_and_exits(checkpoint: Path, worker: WorkerProcess) -> None:
    with running_router(checkpoint) as router:
        assert httpx.get(f"{router.url}/live").status_code == 200
        assert httpx.get(f"{router.url}/health").status_code == 503
        router.put_targets(worker)
        router.wait_until_ready()
        answer = router.complete(5)
        assert answer.json()["usage"]["completion_tokens"] == 5, answer.text
        metrics = httpx.get(f"{router.admin_url}/metrics").text
        assert 'pdserve_request_outcomes_total{outcome="finished"} 2.0\n' in metrics
        assert 'pdserve_requests_total{code="200",route="/v1/completions"} 1.0\n' in metrics
        assert "pdserve_ttft_seconds_count 1.0\n" in metrics
        assert "pdserve_request_prompt_tokens_count 1.0\n" in metrics
        assert "pdserve_request_output_tokens_sum 5.0\n" in metrics

        running: list[httpx.Response] = []
        client = threading.Thread(target=lambda: running.append(router.complete(200)))
        client.start()
        wait_until(
            lambda: httpx.get(f"{router.admin_url}/status", verify=False).json()["in_flight"] == 1,
            "a request in flight",
        )
        assert httpx.post(f"{router.admin_url}/drain").json()["draining"]
        refused = router.complete(1)
        assert refused.status_code == 503
        assert "draining" in refused.text
        router.process.send_signal(signal.SIGTERM)
        client.join()
        assert running[0].json()["usage"]["completion_tokens"] == 200
        assert router.process.wait(HANG_S) == 0


@pytest.mark.parametrize(("generation_config", "num_tokens"), [("auto", 3), ("none", 16)])
def test_the_checkpoints_sampling_is_that_of_requests_that_do_not_say(
    checkpoint: Path, worker: WorkerProcess, tmp_path: Path, generation_config: str, num_tokens: int
) -> None:
    for file in checkpoint.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 2, "max_new_tokens": 3}')
    with running_router(tmp_path, generation_config=generation_config) as router:
        router.put_targets(worker)
        router.wait_until_ready()
        answer = router.complete(8)
        assert answer.json()["usage"]["completion_tokens"] == 8, "the request says"
        answer = router.complete(8, max_tokens=None)
        assert answer.json()["usage"]["completion_tokens"] == num_tokens


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_drain_is_bounded(checkpoint: Path, worker: WorkerProcess, number: signal.Signals) -> None:
    with running_router(checkpoint, drain_timeout_s=0.3) as router:
        router.put_targets(worker)
        router.wait_until_ready()
        running: list[httpx.Response] = []
        client = threading.Thread(target=lambda: running.append(router.complete(500)))
        client.start()
        wait_until(
            lambda: httpx.get(f"{router.admin_url}/status", verify=False).json()["in_flight"] == 1,
            "a request in flight",
        )
        router.process.send_signal(number)
        assert router.process.wait(HANG_S) == 0
        client.join()
        assert running[0].status_code == 503
        assert "stopped before" in running[0].text


def test_a_taken_port_is_named_with_the_remedy(checkpoint: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for key in ("port", "admin_port"):
            process = start_router(checkpoint, **{key: port})
            output, errors = process.communicate(timeout=HANG_S)
            assert process.returncode == 1
            assert output == ""
            assert len(errors.splitlines()) == 1
            assert str(port) in errors
            assert f"router.{key}" in errors


@pytest.mark.parametrize(("fields", "named"), [({"path": "/nowhere"}, "/nowhere"), ({"hardware": "abacus"}, "abacus")])
def test_what_cannot_be_used_is_named(checkpoint: Path, fields: dict[str, str], named: str) -> None:
    model = {"path": fields.pop("path", str(checkpoint)), "dtype": "float32"}
    config = {"deployment": {"model": model, "router": {"port": 0}}, **fields}
    command = [sys.executable, "-m", "pdserve.router", "--config", "-"]
    result = subprocess.run(command, input=json.dumps(config) + "\n", capture_output=True, text=True, timeout=HANG_S)
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1
    assert named in result.stderr


def test_each_role_is_predicted_by_its_own_devices(checkpoint: Path) -> None:
    slow = replace(hardware("cpu"), step_overhead_s=5.0)
    config = RouterProcessConfig(
        deployment=DeploymentConfig(
            model=ModelConfig(path=str(checkpoint), dtype="float32"),
            prefill=PhaseConfig(pipeline_parallel=2),
            decode=PhaseConfig(tensor_parallel=2),
        ),
        cores_per_rank=2,
        devices={WorkerRole.DECODE: slow},
    )
    costs = build_cost_models(config)
    assert costs[WorkerRole.DECODE].decode_s(1, 1) > 5.0
    assert costs[WorkerRole.PREFILL].hardware == hardware("cpu", num_cores=2)
    assert [costs[role].tensor_parallel for role in (WorkerRole.PREFILL, WorkerRole.DECODE)] == [1, 2]
    assert [costs[role].pipeline_parallel for role in (WorkerRole.PREFILL, WorkerRole.DECODE)] == [2, 1]
    unused = replace(config.deployment, mixed=PhaseConfig(replicas=0, tensor_parallel=7))
    assert build_cost_models(replace(config, deployment=unused))[WorkerRole.MIXED].tensor_parallel == 1


def test_the_configuration_survives_json_and_unknown_keys_do_not() -> None:
    config = RouterProcessConfig(deployment=DeploymentConfig(router=RouterConfig(port=1)), cluster_token="t")
    assert from_json(RouterProcessConfig, to_json(config), "it") == config
    for text, named in (
        ('{"deployment": {"router": {"prot": 1}}}', "prot"),
        ('{"deployment": {"slo": {"ttft": 1}}}', "ttft"),
        ('{"served_name": "s"}', "served_name"),
        ("[]", "keys and values"),
        ("{", "JSON"),
    ):
        with pytest.raises(ValueError, match=named):
            from_json(RouterProcessConfig, text, "it")


PARENT = """
import subprocess, sys, time
command = [sys.executable, "-m", "pdserve.router", "--die-with-parent", "--config", sys.argv[1]]
child = subprocess.Popen(command, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_dies_with_its_parent(checkpoint: Path) -> None:
    model = ModelConfig(path=str(checkpoint), dtype="float32")
    config = RouterProcessConfig(deployment=DeploymentConfig(model=model, router=RouterConfig(port=0)))
    command = [sys.executable, "-c", PARENT, to_json(config)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert parent.stdout is not None
    router = psutil.Process(int(parent.stdout.readline()))
    assert is_alive(router)
    parent.kill()
    parent.communicate()
    wait_until(lambda: not is_alive(router), "the end of the router", 10)
