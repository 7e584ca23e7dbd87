"""Folder of a running cluster: logs, Ray's files and the note from which `pdserve status` takes the addresses.

``$TMPDIR/pdserve-<uid>/<random>/``, readable by the user only; in ``/tmp`` without ``TMPDIR``, or if that is too long
for Ray's socket paths; a link from there is for commands with another ``TMPDIR``. The supervisor holds a lock on it
while the cluster runs; the next cluster removes folders without a lock. What the cluster has in folders of the same
name elsewhere, such as the files of KV tiers, goes with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pdserve.contracts.codec import from_json, to_json
from pdserve.contracts.errors import DeployError

_ROOT = f"pdserve-{os.getuid()}"
_LOCK = "lock"
_NOTE = "cluster.json"
_ELSEWHERE = "elsewhere.json"
_TMP = Path("/tmp")
_MAX_CHARS = 107 - len(f"/{_ROOT}/12345678/ray/r/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store")
"""The system allows paths of sockets 107 bytes."""
_PARENT = min(Path(os.environ.get("TMPDIR") or _TMP).absolute(), _TMP, key=lambda path: len(str(path)) > _MAX_CHARS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNote:
    """Addresses of a running cluster."""

    pid: int
    """Process id of the supervisor."""
    url: str = ""
    """Empty while the cluster starts."""
    admin_url: str = ""
    """That of the first router."""
    other_admin_urls: tuple[str, ...] = ()
    folder: str = ""
    admin_token_file: str = ""
    """File with the admin port's token, readable by the user only."""
    follows_load: bool = False
    """True if an autoscaler changes the numbers of workers."""
    is_ray_silent: bool = False
    """True while Ray does not answer the supervisor, which then restarts nothing."""
    down_since_s: Mapping[str, float] = field(default_factory=dict)
    """Workers that failed and are not back, by name, with the instant of this host's `time.monotonic`."""


@contextmanager
def cluster_folder(name: str = "", elsewhere: Iterable[str] = ()) -> Iterator[Path]:
    """A new folder, locked and kept until the context or the process ends.

    Args:
        name: of a folder that exists if another process has made it, which may still have it; empty chooses one.
        elsewhere: folders in which what bears this one's name is removed with it.

    Raises:
        DeployError: the folder cannot be made.
    """
    root = _root()
    try:
        with _locked(root):  # nobody looks for stale folders between the making of ours and its lock
            for folder in root.iterdir():
                if folder.name != name:
                    _clear(folder)
            path = root / name if name else Path(tempfile.mkdtemp(dir=root, prefix=""))
            path.mkdir(mode=0o700, exist_ok=True)
            lock = (path / _LOCK).open("w")
            fcntl.flock(lock, fcntl.LOCK_SH)
            others = [str(Path(each).absolute()) for each in elsewhere]
            (path / _ELSEWHERE).write_text(json.dumps(others))
            _link(path)
    except OSError as error:
        raise _unusable(root, error) from error
    with lock:
        try:
            yield path
        finally:
            _remove(path, others)


def _clear(entry: Path) -> None:
    """Remove a folder, or what a link names, if its cluster was killed. A link to what is not the user's is removed
    alone: its target may be gone, and another user's file in its place."""
    folder = entry.resolve()
    if entry.is_symlink() and not _is_ours(folder):
        entry.unlink()
    elif _is_stale(folder):
        others: list[str] = []
        with contextlib.suppress(OSError, ValueError):  # it had just been made
            others = json.loads((folder / _ELSEWHERE).read_text())
        _remove(folder, others)


def _remove(folder: Path, elsewhere: Iterable[str]) -> None:
    for other in elsewhere:
        shutil.rmtree(Path(other) / folder.name, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # none, or the folder was there itself
        (_TMP / _ROOT / folder.name).unlink()


def _link(folder: Path) -> None:
    """Have a folder found from `_TMP`; without a place there, commands with the same ``TMPDIR`` find it."""
    with contextlib.suppress(OSError, DeployError):
        (_private(_TMP / _ROOT) / folder.name).symlink_to(folder)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def write_note(folder: Path, note: ClusterNote) -> None:
    """Publish the cluster's addresses to other commands.

    Raises:
        DeployError: there is no room, or the folder is gone.
    """
    draft = folder / f"{_NOTE}.new"
    try:
        draft.write_text(to_json(note))
        draft.replace(folder / _NOTE)
    except OSError as error:
        raise _unusable(folder, error) from error


def running_clusters() -> list[ClusterNote]:
    """Notes of the user's running clusters, those that start included, oldest first, also of those outside TMPDIR."""
    roots = {_root(), *filter(_is_private, [_TMP / _ROOT])}
    folders = filter(_is_ours, {each.resolve() for root in roots for each in root.iterdir()})
    notes = []
    for folder in folders:
        with contextlib.suppress(FileNotFoundError, ValueError):  # some end meanwhile
            note = from_json(ClusterNote, (folder / _NOTE).read_text(), _NOTE)
            if not _is_stale(folder):
                notes.append((folder.stat().st_ctime, note))
    return [note for _, note in sorted(notes, key=lambda entry: entry[0])]


def find_cluster(admin_url: str = "", *, may_start: bool = False) -> ClusterNote:
    """Find the user's running cluster, or the one at ``admin_url``.

    Args:
        may_start: one that does not serve yet will do.

    Raises:
        DeployError: no cluster runs, or several do.
    """
    found = [note for note in running_clusters() if admin_url.rstrip("/") in ("", note.admin_url)]
    notes = [note for note in found if note.url or may_start]
    if found and not notes:
        raise DeployError("your cluster is starting; try again when pdserve status shows that it is ready")
    if not notes and admin_url:
        raise DeployError(f"no cluster of yours runs here at {admin_url}; pdserve status finds it without the address")
    if not notes:
        raise DeployError("no cluster of yours runs here; start one with pdserve up, or give its address")
    if len(notes) > 1:
        addresses = ", ".join(
            f"{note.url} (admin {note.admin_url})" if note.url else f"one that starts (process {note.pid})"
            for note in notes
        )
        options = "--admin-url, or --url of chat, or --base-url of bench"
        raise DeployError(f"{len(notes)} clusters run here; name one with {options}: {addresses}")
    return notes[0]


def make_admin_token(path: Path) -> str:
    """The token in ``path``, which is made with a random one if it is absent.

    Raises:
        DeployError: the file cannot be read or made, is empty, or others may read it.
    """
    try:
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "w") as file:
                file.write(secrets.token_hex(32))
        token, mode = path.read_text().strip(), path.stat().st_mode
    except OSError as error:
        raise DeployError(f"cannot use {path}: {error.strerror}; set router.admin_token_file") from error
    if not token.isascii() or not token.isprintable() or not token or mode & 0o077:
        raise DeployError(f"{path} must hold one token in ASCII and be readable by you only; chmod 600, or remove it")
    return token


def admin_headers(admin_url: str) -> dict[str, str]:
    """Headers with the token of the user's cluster at ``admin_url``, or of ``PDSERVE_ADMIN_TOKEN`` for another's."""
    token = os.environ.get("PDSERVE_ADMIN_TOKEN", "")
    for note in running_clusters():
        if admin_url.rstrip("/") in (note.admin_url, *note.other_admin_urls) and note.admin_token_file:
            with contextlib.suppress(OSError):
                token = Path(note.admin_token_file).read_text().strip()
    return {"Authorization": f"Bearer {token}"} if token else {}


NEEDS_KEY = "needs a valid API key; set PDSERVE_API_KEY to one"
"""What commands say of a server that answers 401."""


def api_key() -> str:
    """Key that commands send to the API: ``PDSERVE_API_KEY``, because every user can read a command line."""
    return os.environ.get("PDSERVE_API_KEY", "").strip()


def _root() -> Path:
    return _private(_PARENT / _ROOT)


def _private(root: Path) -> Path:
    """The folder, made unless it exists."""
    try:
        with contextlib.suppress(FileExistsError):
            root.mkdir(mode=0o700)
    except OSError as error:
        raise _unusable(root, error) from error
    if not _is_private(root):
        raise DeployError(f"{root} is not a private folder of yours; remove it")
    return root


def _is_ours(folder: Path) -> bool:
    """Whether only this user can have made the folder."""
    return _is_private(folder.parent) and _is_private(folder)


def _is_private(root: Path) -> bool:
    with contextlib.suppress(OSError):
        status = root.lstat()
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
    return False


def _unusable(root: Path, error: OSError) -> DeployError:
    return DeployError(
        f"cannot write to {root}: {error.strerror}; make room and give yourself access to {root.parent}, or set TMPDIR"
    )


def _is_stale(folder: Path) -> bool:
    """True if the folder has a lock that no process holds."""
    try:
        with (folder / _LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (FileNotFoundError, BlockingIOError):  # being made or removed; or in use
        return False
    return True
