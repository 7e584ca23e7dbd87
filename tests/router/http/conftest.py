"""What tests of the API share."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.router.edge_server import EdgeServer


@pytest.fixture
def client(server: EdgeServer) -> Iterator[openai.OpenAI]:
    """OpenAI's client of a module's ``server``."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
