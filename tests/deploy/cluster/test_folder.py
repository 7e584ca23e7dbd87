"""Running clusters are found, and the folders of dead ones removed."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

from pdserve.contracts.errors import DeployError
from pdserve.deploy.cluster import folder as folder_module
from pdserve.deploy.cluster.folder import (
    ClusterNote,
    admin_headers,
    cluster_folder,
    find_cluster,
    make_admin_token,
    running_clusters,
    write_note,
)
from pdserve.deploy.cluster.hosts import HostAgent
from tests.patience import HANG_S

NOTE = ClusterNote(pid=1, url="http://127.0.0.1:8000", admin_url="http://127.0.0.1:9000")


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tmp_path.chmod(0o700)
    monkeypatch.setattr(folder_module, "_root", lambda: tmp_path)
    monkeypatch.setattr(folder_module, "_TMP", tmp_path.parent)
    return tmp_path


def test_a_root_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    (tmp_path / "file").touch()
    monkeypatch.setattr(folder_module, "_PARENT", tmp_path / "file")
    said = r"cannot write to .*: Not a directory; make room and give yourself access"
    with pytest.raises(DeployError, match=said), cluster_folder():
        pass
    monkeypatch.setattr(folder_module, "_PARENT", tmp_path)
    root = tmp_path / f"pdserve-{os.getuid()}"
    root.touch()
    with pytest.raises(DeployError, match="is not a private folder of yours; remove it"), cluster_folder():
        pass
    root.unlink()
    root.mkdir()
    root.chmod(0o755)
    with pytest.raises(DeployError, match="is not a private folder of yours; remove it"), cluster_folder():
        pass


def test_a_cluster_is_found_while_it_runs() -> None:
    with pytest.raises(DeployError, match="no cluster of yours runs here; start one with pdserve up"):
        find_cluster()
    with cluster_folder() as folder:
        write_note(folder, NOTE)
        assert find_cluster() == NOTE
    assert running_clusters() == []
    assert not folder.exists()


def test_a_folder_that_is_gone_when_it_is_looked_at_hides_no_other(root: Path) -> None:
    (root / "gone").symlink_to("nowhere")
    with cluster_folder() as folder:
        write_note(folder, NOTE)
        assert running_clusters() == [NOTE]


def test_a_cluster_that_starts_is_found_by_those_that_can_wait_or_end_it() -> None:
    with cluster_folder() as folder:
        starting = ClusterNote(pid=7, folder=str(folder))
        write_note(folder, starting)
        assert find_cluster(may_start=True) == starting
        with pytest.raises(DeployError, match="your cluster is starting; try again when pdserve status"):
            find_cluster()
        with cluster_folder() as second:
            write_note(second, NOTE)
            assert find_cluster() == NOTE
            with pytest.raises(DeployError, match=r"2 clusters .* one that starts \(process 7\)"):
                find_cluster(may_start=True)


@pytest.mark.parametrize(
    ("given", "parent"), [("", "/tmp"), ("/var/tmp", "/var/tmp"), (f"/var/tmp/{'x' * 80}", "/tmp")]
)
def test_folders_are_in_the_temporary_folder_unless_it_is_too_deep_for_sockets(given: str, parent: str) -> None:
    environment = os.environ | {"TMPDIR": given}
    code = "from pdserve.deploy.cluster import folder; print(folder._PARENT)"
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=HANG_S, check=True
    )
    assert run.stdout.strip() == parent


def test_a_cluster_is_found_whatever_the_temporary_folder_is(
    root: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path_factory.mktemp("other")
    other.chmod(0o700)
    with cluster_folder() as folder:
        write_note(folder, NOTE)
        assert find_cluster() == NOTE, "once, though it is found in two ways"
        monkeypatch.setattr(folder_module, "_root", lambda: other)
        assert find_cluster() == NOTE
        links = root.parent / f"pdserve-{os.getuid()}"
        (links / "gone").symlink_to(root / "gone")
        assert find_cluster() == NOTE
        monkeypatch.setattr(folder_module, "_root", lambda: links)
        with cluster_folder() as second:
            assert {each.name for each in links.iterdir()} == {folder.name, second.name}
    assert not list(links.iterdir())


def test_a_link_to_what_others_could_have_made_is_removed_alone(
    root: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    foreign = tmp_path_factory.mktemp("foreign") / "folder"
    foreign.mkdir(mode=0o755)
    (foreign / "lock").touch()
    write_note(foreign, NOTE)
    (root / "link").symlink_to(foreign)
    with (foreign / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        assert running_clusters() == []
    with cluster_folder() as folder:
        assert list(root.iterdir()) == [folder]
    assert (foreign / "lock").exists()


def test_of_several_clusters_the_user_must_name_one() -> None:
    with cluster_folder() as first, cluster_folder() as second:
        write_note(first, NOTE)
        write_note(second, NOTE)
        with pytest.raises(DeployError, match=r"2 clusters run here; name one with --admin-url, .*: http"):
            find_cluster()


def test_what_a_cluster_has_elsewhere_goes_with_it(tmp_path_factory: pytest.TempPathFactory) -> None:
    tiers = tmp_path_factory.mktemp("tiers")
    (kept := tiers / "another").mkdir()
    with cluster_folder(elsewhere=[str(tiers), str(tiers / "absent")]) as folder:
        (mine := tiers / folder.name).mkdir()
        (mine / "decode-0.kv").touch()
        with cluster_folder(elsewhere=[str(tiers)]):
            assert [*mine.iterdir()] == [mine / "decode-0.kv"]
    assert [*tiers.iterdir()] == [kept]


def test_what_a_killed_supervisor_left_is_not_found_and_cleared_away(
    root: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tiers = tmp_path_factory.mktemp("tiers")
    code = f"""
import os
from pathlib import Path
from pdserve.deploy.cluster import folder
folder._root = lambda: Path({str(root)!r})
folder._MAX_CHARS = 4096
with folder.cluster_folder(elsewhere=[{str(tiers)!r}]) as path:
    (Path({str(tiers)!r}) / path.name).mkdir()
    folder.write_note(path, folder.ClusterNote(pid=os.getpid(), url="u", admin_url="a"))
    os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", code], timeout=HANG_S, check=False)
    (left,) = root.iterdir()
    assert [*tiers.iterdir()] == [tiers / left.name]
    assert running_clusters() == []
    with cluster_folder() as folder:
        assert list(root.iterdir()) == [folder]
        assert left != folder
    assert [*tiers.iterdir()] == []


def test_no_other_cluster_looks_for_stale_folders_while_one_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_module, "_PARENT", tmp_path)
    lock, seen = fcntl.flock, []

    def spied(file: IO[str] | int, operation: int) -> None:
        lock(file, operation)
        if not isinstance(file, int):  # the lock of the new folder; its parent's is a descriptor
            parent = os.open(Path(file.name).parents[1], os.O_RDONLY)
            with pytest.raises(BlockingIOError):
                lock(parent, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(parent)
            seen.append(file.name)

    monkeypatch.setattr(fcntl, "flock", spied)
    with cluster_folder() as path:
        assert seen == [str(path / "lock")]


def test_the_admin_token_is_made_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "token"
    token = make_admin_token(path)
    assert len(token) == 64
    assert path.stat().st_mode & 0o777 == 0o600
    assert make_admin_token(path) == token
    path.chmod(0o644)
    with pytest.raises(DeployError, match="readable by you only"):
        make_admin_token(path)
    with pytest.raises(DeployError, match=r"No such file or directory; set router\.admin_token_file"):
        make_admin_token(tmp_path / "absent" / "token")


def test_commands_send_the_token_of_the_cluster_that_they_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster_folder() as running:
        path = running / "token"
        make_admin_token(path)
        write_note(running, dataclasses.replace(NOTE, admin_token_file=str(path)))
        assert admin_headers(f"{NOTE.admin_url}/") == {"Authorization": f"Bearer {path.read_text()}"}
        assert admin_headers("http://127.0.0.1:1") == {}
        monkeypatch.setenv("PDSERVE_ADMIN_TOKEN", "another")
        assert admin_headers("http://127.0.0.1:1") == {"Authorization": "Bearer another"}


def test_the_agent_of_a_host_holds_a_folder_until_the_cluster_ends(
    root: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tiers = tmp_path_factory.mktemp("tiers")
    agent = HostAgent("a-1", [str(tiers)])
    (tiers / "a-1").mkdir()
    with cluster_folder():
        assert Path(agent.folder()).is_dir()
    agent.clear()
    assert [*tiers.iterdir(), *root.iterdir()] == []


def test_a_named_folder_is_taken_over_and_kept_while_one_process_has_it() -> None:
    with cluster_folder("a-1") as first:
        (first / "cores").touch()
    with cluster_folder("a-1") as first, cluster_folder("a-1") as second:
        assert first == second
        (first / "cores").touch()
        with cluster_folder():
            assert (first / "cores").exists()
