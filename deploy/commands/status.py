"""``pdserve status``: the routers' view of a cluster as a table."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from pdserve.contracts.deployment import DEFAULT_TIER
from pdserve.contracts.errors import DeployError
from pdserve.deploy.cluster.folder import admin_headers, running_clusters

_TIMEOUT_S = 5.0


def show_status(
    admin_url: str,
    console: Console,
    *,
    is_ray_silent: bool = False,
    down_since_s: Mapping[str, float] | None = None,
    as_json: bool = False,
) -> int:
    """Print the status; returns 0 if the cluster serves, else 1.

    Args:
        down_since_s: as the cluster's note has it; routers do not know workers that the supervisor starts again.
        as_json: print what the router reports, with ``is_ray_silent`` and ``down_s``, for scripts.

    Raises:
        DeployError: no router answers at ``admin_url``.
    """
    status = fetch_status(admin_url)
    listed = {worker["worker_id"] for worker in status["workers"]}
    gone = {name: since_s for name, since_s in (down_since_s or {}).items() if name not in listed}
    down_s = {name: time.monotonic() - since_s for name, since_s in gone.items()}
    if as_json:
        console.print_json(data={**status, "is_ray_silent": is_ray_silent, "down_s": down_s})
        return 0 if status["ready"] and not status["draining"] else 1
    state = "draining" if status["draining"] else "ready" if status["ready"] else "not ready"
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in status["outcomes"].items() if count)
    console.print(
        f"{state}: {status['in_flight']} in flight, {status['queued']} queued, {status['accepted']} accepted"
        + (f" ({outcomes})" if outcomes else "")
        + (f" by {len(status['routers'])} routers" if len(status["routers"]) > 1 else ""),
        highlight=False,
    )
    if is_ray_silent:
        console.print("Ray does not answer: requests are served, nothing is restarted until it does")
    table = worker_table(status["workers"])
    console.print(table)
    for name, seconds in down_s.items():  # not in the table, whose columns would not fit a terminal
        console.print(f"{name} has been down for {seconds:.0f} s, and is being restarted", highlight=False)
    for worker in status["workers"]:
        if failure := worker["load"]["tier_failure"]:
            console.print(f"The KV tier of {worker['worker_id']} is off until it is restarted: {failure}")
    return 0 if state == "ready" else 1


def fetch_status(admin_url: str, option: str = "--admin-url") -> dict[str, Any]:
    """Fetch the status of a router, as `fetch`, with the requests of its replicas."""
    status = fetch(admin_url, "status", option)
    for url in other_routers(status):
        with suppress(DeployError):  # it is being restarted
            other = fetch(url, "status", option)
            for name in ("in_flight", "queued", "accepted"):
                status[name] += other[name]
            for outcome, count in other["outcomes"].items():
                status["outcomes"][outcome] += count
            status["ready"] = status["ready"] and other["ready"]
            status["draining"] = status["draining"] or other["draining"]
    return status


def running_tiers() -> list[str]:
    """Tiers of the user's clusters that run here; empty if none does."""
    tiers: dict[str, None] = {}
    for note in running_clusters():
        with suppress(DeployError):
            tiers |= dict.fromkeys([DEFAULT_TIER, *fetch(note.admin_url, "status")["slo"]["tiers"]])
    return [*tiers]


def other_routers(status: dict[str, Any]) -> list[str]:
    """Admin addresses of the replicas of the router that reported ``status``."""
    return [f"http://{address}" for address in status["routers"][1:]]


def fetch(admin_url: str, path: str, option: str = "--admin-url") -> dict[str, Any]:
    """Fetch what a router's admin port has at ``path``.

    Args:
        option: name of the option that set the address, for messages.

    Raises:
        DeployError: no answer, or not a router's.
    """
    try:
        url, headers = f"{admin_url.rstrip('/')}/{path}", admin_headers(admin_url)
        answer = httpx.get(url, headers=headers, timeout=_TIMEOUT_S, trust_env=False)
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            raise DeployError(f"{admin_url} refuses the admin token; set PDSERVE_ADMIN_TOKEN to that of its cluster")
        found: dict[str, Any] = answer.raise_for_status().json()
        found["workers"]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        reason = str(error).partition("\n")[0]  # httpx adds a link to what the status means
        raise DeployError(
            f"no pdserve router answers at {admin_url}: {reason}; check {option}, the admin address"
        ) from error
    return found


def worker_table(workers: list[dict[str, Any]]) -> Table:
    """One row per worker."""
    table = Table(box=None, pad_edge=False)
    for name in ("worker", "role", "state", "run", "wait", "park", "KV used", "preempt", "address"):
        table.add_column(name, no_wrap=True)
    for worker in workers:
        load, total = worker["load"], num_blocks(worker)
        table.add_row(
            worker["worker_id"],
            worker["role"],
            "down" if not worker["up"] else "draining" if load["draining"] else "up",
            *(str(load[name]) for name in ("num_running", "num_waiting", "num_parked")),
            f"{load['num_blocks_referenced'] / total:.0%}" if total else "-",
            str(load["num_preemptions"]),
            worker["address"],
        )
    return table


def num_blocks(worker: dict[str, Any]) -> int:
    """KV blocks of a worker's pool, from its entry in the status."""
    return sum(int(worker["load"][f"num_blocks_{use}"]) for use in ("free", "cached", "referenced"))
