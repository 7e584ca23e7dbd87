from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pdserve.bench.race import ANSWER_TOKENS, Server, burst, race, running_vllm, shares
from pdserve.model.config.shape import ModelShape


class _Completions(BaseHTTPRequestHandler):
    """Answers as long as asked for, and keeps the prompts."""

    prompts: list[tuple[int, int]]
    """Length, and tokens asked for."""
    longest = 1000

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "m"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.prompts.append((len(body["prompt"]), body["max_tokens"]))
        self._answer({"usage": {"completion_tokens": min(body["max_tokens"], self.longest)}})

    def _answer(self, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def running(handler: type[_Completions]) -> Iterator[Server]:
    handler.prompts = []
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield Server(f"http://127.0.0.1:{server.server_port}", os.getpid())
        finally:
            server.shutdown()


def test_a_case_is_a_burst_for_one_token_and_one_of_decode_steps() -> None:
    shown: list[str] = []
    found = race({"one": lambda: running(_Completions)}, [(256, 3)], 2, 100, shown.append)
    assert _Completions.prompts[4:] == 2 * [*3 * [(256, 1)], *3 * [(257, ANSWER_TOKENS)]]
    figures = found[256, 3]["one"]
    seconds = 3 * ANSWER_TOKENS / figures["tokens_per_s"]
    assert 0 < 3 * ANSWER_TOKENS / figures["decode_tokens_per_s"] < 1.5 * seconds
    assert figures["idle"] == 0
    assert len(shown) == 2


def test_an_answer_that_ends_early_is_an_error() -> None:
    class Short(_Completions):
        longest = 5

    with running(Short) as server, pytest.raises(AssertionError):
        burst(server.url, "m", [[1], [2]], 6)


def test_a_vllm_that_ends_is_an_error(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no kernels >&2\n")
    python.chmod(0o755)
    with pytest.raises(RuntimeError, match="no kernels"), running_vllm(str(python), [], tmp_path):
        pass


def test_shares_of_the_machine() -> None:
    shape = ModelShape(
        num_layers=2, hidden_size=64, intermediate_size=128, num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=100
    )
    weights = 2 * (2 * shape.layer_parameters + shape.table_parameters)
    figures = {"prefill_tokens_per_s": 1e9 / shape.layer_parameters, "decode_tokens_per_s": 8e9 / weights}
    peak = {"product_gflops": 8.0, "copy_gbytes": 4.0}
    assert shares(shape, figures, 4, peak) == pytest.approx({"of_product": 0.5, "of_copy": 0.5})
