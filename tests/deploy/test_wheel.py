"""The wheel, installed where nothing of the checkout can be imported: it has every file, and serves."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import httpx
import pytest

from tests.deploy.clusters import UpProcess
from tests.patience import HANG_S

ROOT = Path(__file__).parents[2]
DOCKERFILE = "deploy/ray/Dockerfile"  # it copies a checkout
WITHOUT_CHECKOUT = {**os.environ, "PYTHONPATH": ""}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, because a build writes into its sources, and takes what an earlier one has left there."""
    folder = tmp_path_factory.mktemp("wheel")
    left_out = shutil.ignore_patterns(".*", "__pycache__", "build", "*.egg-info", "tests")
    shutil.copytree(ROOT, folder / "source", symlinks=True, ignore=left_out)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--wheel-dir", folder, folder / "source"], check=True, timeout=HANG_S)
    (path,) = folder.glob("*.whl")
    return path


def test_it_has_every_file_of_the_packages(wheel: Path) -> None:
    rooms = [path for path in (ROOT / "pdserve").iterdir() if path.is_dir() and path.name != "__pycache__"]
    files = {path.relative_to(ROOT) for room in rooms for path in room.resolve().rglob("*") if path.is_file()}
    wanted = {str(path) for path in files if path.suffix != ".md" and "__pycache__" not in path.parts} - {DOCKERFILE}
    assert len(wanted) > 400
    with zipfile.ZipFile(wheel) as archive:
        assert {f"pdserve/{path}" for path in wanted} - set(archive.namelist()) == set()
        assert {name.split("/")[0] for name in archive.namelist()} == {"pdserve", wheel.name[:13] + ".dist-info"}


def test_it_serves_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True, timeout=HANG_S)
    python = str(environment / "bin/python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, wheel], env=WITHOUT_CHECKOUT, check=True, timeout=HANG_S)
    # Dependencies come from here. A path file names a folder, and those of that folder, such as an editable install's,
    # are not read.
    (site_packages,) = environment.glob("lib/*/site-packages")
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    find = [python, "-c", "import pdserve.router; print(pdserve.router.__file__)"]
    found = subprocess.run(find, cwd=tmp_path, env=WITHOUT_CHECKOUT, capture_output=True, text=True, check=True).stdout
    assert found.strip() == str(site_packages / "pdserve/router/__init__.py")

    program = (str(environment / "bin/pdserve"),)
    up = UpProcess(tmp_path / "log", program=program, folder=tmp_path, PYTHONPATH="")
    try:
        command = up.wait_ready()
        answer = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=HANG_S, check=True).stdout
        assert json.loads(answer)["usage"]["completion_tokens"] > 0
        page = httpx.get(up.banner("API").removesuffix("v1"), trust_env=False)
        assert page.is_success
        assert "<html" in page.text
    finally:
        assert up.stop() == 0, up.lines
