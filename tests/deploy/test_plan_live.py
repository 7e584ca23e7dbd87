"""``pdserve plan --live`` against an admin port that says what a router would."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from pdserve.deploy.cli import run
from tests.planner.test_live import Router
from tests.planner.test_planned_model import written
from tests.planner.test_running import status_of

COLOCATED = [status_of("mixed-0", "mixed"), status_of("mixed-1", "mixed")]


@contextmanager
def admin_port(workers: list[dict[str, object]], num_requests: int = 40) -> Iterator[str]:
    """Serves so many requests between the first look at its metrics and the second."""
    router = Router()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/status":
                body = json.dumps({"ready": True, "workers": workers})
            else:
                body = router.text
                for _ in range(num_requests):
                    router.serve(1000, 3)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body.encode())

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


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(written(tmp_path / "Llama-3-8B"))


def live(url: str, model: str, *arguments: str) -> int:
    quick = ("--window", "0.2", "--requests", "100", "--jobs", "1", "--dtype", "bfloat16")
    return run(["plan", "--live", url, "--model", model, *quick, *arguments])


def test_the_running_placement_is_compared_with_the_best(capsys: pytest.CaptureFixture[str], model: str) -> None:
    with admin_port(COLOCATED) as url:
        assert live(url, model, "--json", "-") == 0
    proposal = json.loads(capsys.readouterr().out)
    assert proposal["running"]["layout"]["text"] == "2 x M(TP1)"
    assert proposal["plan"]["fleet"][0]["devices_per_node"] == 2
    assert proposal["plan"]["mean_prompt_tokens"] == pytest.approx(1000, rel=0.05)
    assert proposal["running"]["rate"] > 0
    observed, running, *_, advice = proposal["text"]
    assert "prompts of 1,000 tokens and answers of 3 on average" in observed
    assert running.startswith("Running: 2 x M(TP1), goodput ")
    assert advice.startswith("Change the placement" if proposal["is_proposed"] else "Keep the placement")


@pytest.mark.parametrize(
    ("workers", "num_requests", "said"),
    [
        (COLOCATED, 0, "no request came while the router was watched: watch it for longer"),
        ([], 40, "no worker of the cluster is up"),
        ([{"up": True}], 40, "this is no status of a pdserve router"),
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
    with admin_port(workers, num_requests) as url:
        assert live(url, model) == 1
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
