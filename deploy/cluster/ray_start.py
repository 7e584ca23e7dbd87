"""``ray start`` without what pdserve does not use: ``python -m pdserve.deploy.cluster.ray_start start --head ...``.

A program of its own: Ray's loads the commands of Ray Serve, of jobs and of the state API, too, which takes longer than
all that `ray start` needs.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

_OTHER_COMMANDS = ("ray.serve.scripts", "ray.dashboard.modules.job.cli", "ray.util.state.state_cli")
"""Modules without which Ray's command line goes on."""


def main() -> None:
    sys.modules.update(dict.fromkeys(_OTHER_COMMANDS))  # type: ignore[arg-type]  # None: their import fails
    os.environ["RAY_START_HOOK"] = "pdserve.deploy.cluster.ray_start.trim"
    importlib.import_module("ray.scripts.scripts").main()


def trim(ray_params: Any, head: bool) -> None:
    """Skip two servers that pdserve does not use. Ray loads it by ``RAY_START_HOOK`` inside `ray start`.

    The Ray Client server would listen on one fixed port and the API server on another, where two clusters would
    collide; the API server runs even without a dashboard, and `ray start` waits 2 s for it. The API server has no
    switch, but `ray start` goes on without it if its address cannot be bound.
    """
    ray_params.ray_client_server_port = None
    ray_params.dashboard_host = "0.0.0.1"


if __name__ == "__main__":
    main()
