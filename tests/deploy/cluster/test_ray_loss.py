"""A lost cluster is served while something runs, and starts anew once Ray can be joined."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pdserve.contracts.errors import DeployError
from pdserve.deploy.cluster import ray_loss
from pdserve.deploy.cluster.ray_loss import OUTLIVE_S, RayLoss


class Ray:
    num_probes = 0

    def start_probe(self, log_path: Path) -> subprocess.Popen[bytes]:
        """The first fails, the second succeeds."""
        self.num_probes += 1
        probe = subprocess.Popen(["false" if self.num_probes == 1 else "true"])
        probe.wait()
        return probe


class Router:
    admin_url = ""


@pytest.mark.parametrize("never_ends", [False, True])
def test_it_is_over_when_nothing_runs_and_ray_answers(monkeypatch: pytest.MonkeyPatch, never_ends: bool) -> None:
    now_s, ray = 0.0, Ray()

    def status(url: str) -> dict[str, list[dict[str, bool]]]:
        if 4 < now_s < 8:
            raise DeployError("the router restarts")
        return {"workers": [{"up": False}, {"up": now_s < 10 or never_ends}]}

    monkeypatch.setattr(ray_loss, "fetch_status", status)
    loss = RayLoss(ray, Path(), now_s)  # type: ignore[arg-type]
    while not loss.is_over(now_s, Router()):  # type: ignore[arg-type]
        now_s += 2
    assert ray.num_probes == 2
    assert now_s == pytest.approx((OUTLIVE_S if never_ends else 10) + 6, abs=4)
