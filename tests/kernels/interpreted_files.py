"""Runs test files in Triton's interpreter, each in a process of its own, because a wild pointer there ends the process.

The conftest starts it with ``TRITON_INTERPRET=1``: the interpreter is chosen by the environment as kernels are
imported. Files run in forks, which find imported what all of them need.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

_PLUGINS = ("-p", "pytest_timeout", "-p", "no:cacheprovider")
_ENVIRONMENT = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


class Run(NamedTuple):
    """What became of a file."""

    exit_code: int
    """0 where all of its tests passed, negative where a signal ended them."""
    output: str


class InterpretedFiles:
    """The process that forks, as the tests' own session sees it."""

    def __init__(self, root: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.kernels.interpreted_files"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=root,
            env={**os.environ, **_ENVIRONMENT},
        )

    def run(self, path: Path) -> Run:
        """Run the tests of a file, up to the first that fails."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with tempfile.NamedTemporaryFile(mode="r") as output:
            stdin.write(json.dumps([str(path), output.name]) + "\n")
            stdin.flush()
            answer = stdout.readline()
            assert answer, "the process that runs interpreted files has ended"
            return Run(int(answer), output.read())

    def close(self) -> None:
        self._process.communicate()


def main() -> None:
    # Both import a great deal when they are called first.
    torch.testing.assert_close(torch.zeros(1), torch.zeros(1))
    torch.use_deterministic_algorithms(False)
    for line in sys.stdin:
        path, output = json.loads(line)
        child = os.fork()
        if child == 0:
            descriptor = os.open(output, os.O_WRONLY)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            code = pytest.main(["-q", "-x", *_PLUGINS, path])
            sys.stdout.flush()
            os._exit(code)
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
