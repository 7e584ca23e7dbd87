"""What `ray start` itself cannot be told on its command line; it loads `trim` through ``RAY_START_HOOK``.

Runs inside the `ray start` process, before any of Ray's processes exists. Imports nothing of ours.
"""

from __future__ import annotations

from typing import Any

_UNBINDABLE_HOST = "0.0.0.1"


def trim(ray_params: Any, head: bool) -> None:
    """Leave out two servers that nothing here uses.

    The Ray Client server would listen on a fixed port, and the API server (which runs even without a dashboard, and
    which the start waits two seconds for) on another; both would collide between clusters. The API server has no
    switch, but the start goes on without it when its address cannot be bound.
    """
    ray_params.ray_client_server_port = None
    ray_params.dashboard_host = _UNBINDABLE_HOST
