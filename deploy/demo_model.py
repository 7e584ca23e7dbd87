"""The checkpoint that is served when none is named: small, random, written once into the user's cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from pdserve.deploy.errors import DeployError
from pdserve.deploy.processes import last_line, start_tied

_VERSION = 1  # raise it when the checkpoint's files change


class DemoModel:
    """The folder ``pdserve-demo`` in the cache, and the process that writes it where it is missing."""

    def __init__(self, log_path: Path) -> None:
        """Start writing if there is something to write; returns at once.

        Raises:
            DeployError: the cache cannot be written.
        """
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        self.folder = cache / "pdserve" / str(_VERSION) / "pdserve-demo"
        self._log_path = log_path
        self._process: subprocess.Popen[bytes] | None = None
        if self.is_written:
            return
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            self._draft = Path(tempfile.mkdtemp(dir=self.folder.parent))
        except OSError as error:
            raise DeployError(
                f"cannot write the demo model to {self.folder.parent}: {error.strerror}; "
                "set XDG_CACHE_HOME to another folder, or name a model with --model"
            ) from error
        command = [sys.executable, "-m", "pdserve.model.random_checkpoint", str(self._draft)]
        self._process = start_tied(command, env=os.environ, log_path=log_path)

    @property
    def is_written(self) -> bool:
        return (self.folder / "config.json").is_file()

    def check_written(self) -> bool:
        """Whether the folder is there; does not wait.

        Raises:
            DeployError: it could not be written.
        """
        if self._process is None:
            return True
        code = self._process.poll()
        if code is None:
            return False
        if code:
            raise DeployError(f"could not write the demo model: {last_line(self._log_path)}; name one with --model")
        try:
            self._draft.rename(self.folder)
        except OSError:  # another cluster was faster
            shutil.rmtree(self._draft)
        self._process = None
        return True

    def close(self) -> None:
        """Give up writing, if it still goes on."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            shutil.rmtree(self._draft)
            self._process = None
