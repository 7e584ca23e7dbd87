"""Load generators reach the HTTPS of this machine, whose certificate is for other names, and verify all others."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from pdserve.deploy.commands.bench_load import _max_model_len
from pdserve.loadgen.client import StreamClient, StreamedAnswer
from pdserve.loadgen.server_tls import server_tls
from tests.proto.test_tls import certificates


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"max_model_len": 77}]}).encode())

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n')

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    files = certificates(tmp_path_factory.mktemp("host") / "tls")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.certificate, files.key)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"https://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_the_cluster_of_this_machine_is_reached(url: str) -> None:
    assert _max_model_len(url) == 77

    async def one() -> StreamedAnswer:
        client, answer = StreamClient(url), StreamedAnswer()
        await client.complete(b"{}", answer, 10)
        client.close()
        return answer

    assert asyncio.run(one()).status == 200


def test_others_are_verified() -> None:
    other, ours = server_tls("https://10.0.0.1:8000"), server_tls("https://127.0.0.1:8000")
    assert other
    assert ours
    assert (other.verify_mode, other.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert ours.verify_mode == ssl.CERT_NONE
    assert server_tls("http://10.0.0.1:8000") is None


@pytest.mark.parametrize(
    ("url", "own"),
    [("https://127.0.0.1:1", True), ("https://[::1]:1/v1", True), ("https://localhost", True), ("https://a.b", False)],
)
def test_this_machine_is_known(url: str, own: bool) -> None:
    context = server_tls(url)
    assert context
    assert (context.verify_mode == ssl.CERT_NONE) is own
