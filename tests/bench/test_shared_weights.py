from __future__ import annotations

import mmap
import os

import psutil

from pdserve.bench.shared_weights import CONFIG, pss_bytes
from pdserve.model.config.shape import ModelShape


def test_sizes_are_those_of_the_published_model() -> None:
    assert ModelShape.from_hf_config(CONFIG).num_parameters == 494_032_768


def test_memory_of_this_process_grows_by_what_it_writes() -> None:
    this = [psutil.Process(os.getpid())]
    before = pss_bytes(this)
    with mmap.mmap(-1, 2**26) as memory:
        memory.write(b"1" * 2**26)
        assert pss_bytes(this) - before > 2**25
