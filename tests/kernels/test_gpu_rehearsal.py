"""The tests of `tests.gpu`, few and small, in Triton's interpreter: so that on a GPU it is not they that fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.on_gpu import FILES
from tests.kernels.interpreted_files import InterpretedFiles


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_rehearsed(path: Path, interpreted_files: InterpretedFiles) -> None:
    run = interpreted_files.run(path)
    assert run.exit_code == 0, run.output
