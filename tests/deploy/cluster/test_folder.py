"""Running clusters are found, and the folders of dead ones removed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.contracts.errors import DeployError
from pdserve.deploy.cluster import folder as cluster_folder
from pdserve.deploy.cluster.folder import ClusterFolder, ClusterNote, find_cluster, running_clusters

NOTE = ClusterNote(pid=1, url="http://127.0.0.1:8000", admin_url="http://127.0.0.1:9000", model="m")


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tmp_path.chmod(0o700)
    monkeypatch.setattr(cluster_folder, "_root", lambda: tmp_path)
    return tmp_path


def test_a_root_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    (tmp_path / "file").touch()
    monkeypatch.setattr(cluster_folder, "_PARENT", tmp_path / "file")
    with pytest.raises(DeployError, match=r"cannot write to .*: Not a directory; make room and give yourself access"):
        ClusterFolder()
    monkeypatch.setattr(cluster_folder, "_PARENT", tmp_path)
    (tmp_path / f"pdserve-{os.getuid()}").touch()
    with pytest.raises(DeployError, match="is not a private folder of yours; remove it"):
        ClusterFolder()


def test_a_cluster_is_found_while_it_runs() -> None:
    with pytest.raises(DeployError, match="no cluster of yours runs here; start one with pdserve up"):
        find_cluster()
    folder = ClusterFolder()
    folder.write_note(NOTE)
    assert find_cluster() == NOTE
    folder.close()
    folder.close()
    assert running_clusters() == []
    assert not folder.path.exists()


def test_of_several_clusters_the_user_must_name_one() -> None:
    folders = [ClusterFolder(), ClusterFolder()]
    for folder in folders:
        folder.write_note(NOTE)
    with pytest.raises(DeployError, match="2 clusters run here; give the address of one: http"):
        find_cluster()
    for folder in folders:
        folder.close()


def test_what_a_killed_supervisor_left_is_not_found_and_cleared_away(root: Path) -> None:
    code = f"""
import os
from pathlib import Path
from pdserve.deploy.cluster import folder as cluster_folder
cluster_folder._root = lambda: Path({str(root)!r})
folder = cluster_folder.ClusterFolder()
folder.write_note(cluster_folder.ClusterNote(pid=os.getpid(), url="u", admin_url="a", model="m"))
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    (left,) = root.iterdir()
    assert running_clusters() == []
    folder = ClusterFolder()
    assert list(root.iterdir()) == [folder.path]
    assert left != folder.path
    folder.close()
