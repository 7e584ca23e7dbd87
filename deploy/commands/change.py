"""``pdserve scale``, ``drain`` and ``restart``: changes to the workers of a running cluster of this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from pdserve.contracts.errors import ConfigError
from pdserve.contracts.worker_config import WorkerRole
from pdserve.deploy.cluster.control import send_command
from pdserve.deploy.cluster.folder import find_cluster


def change(admin_url: str, command: dict[str, Any]) -> int:
    """Send ``command`` and show what comes of it until its end. It goes on if this process ends first.

    Raises:
        DeployError: no cluster runs, or it refused the command.
    """
    for said in send_command(Path(find_cluster(admin_url).folder), command):
        typer.echo(said)
    return 0


def read_replicas(texts: Sequence[str]) -> dict[str, int]:
    """Numbers of workers by role, from texts such as ``decode=3``.

    Raises:
        ConfigError: a text is not of that form, or names a role again.
    """
    replicas: dict[str, int] = {}
    roles = {role.value for role in WorkerRole}
    for text in texts:
        role, _, number = text.partition("=")
        if role not in roles or not number.isdecimal():
            raise ConfigError(f"{text}: write a role and its number of workers, such as decode=3")
        if role in replicas:
            raise ConfigError(f"{text}: {role} has a number of workers already; write each role once")
        replicas[role] = int(number)
    return replicas
