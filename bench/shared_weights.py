"""Workers of one host that share weights: memory of one and of three, and how soon they are ready.

    python -m pdserve.bench.shared_weights [--json FILE]

Starts four workers of a model with the sizes of Qwen2.5-0.5B in bfloat16 and random weights, one after the other, kills
the one that packed the weights, and starts a fifth. Memory is the proportional set size (PSS) of all processes of the
workers, in which each of n processes counts an n-th of what they share. Ready is a worker that has printed its address;
beside it, the time to import torch in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from pdserve.bench.script import publish, script_parser
from pdserve.bench.shapes import QWEN2_05B_CONFIG
from pdserve.contracts.codec import to_json
from pdserve.contracts.precision import Precision
from pdserve.contracts.worker_config import WorkerConfig, WorkerRole
from pdserve.model.config.decoder_config import DecoderConfig
from pdserve.model.weights.random_checkpoint import write_random_weights, write_tokenizer

CONFIG = {**QWEN2_05B_CONFIG, "eos_token_id": 2}
"""Of the sizes of Qwen/Qwen2.5-0.5B, too; the end of sequence is that of the tokenizer."""
_KV_BYTES = 2**26


def write_model(folder: Path) -> Path:
    write_tokenizer(folder, 512)
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    write_random_weights(folder / "model.safetensors", DecoderConfig.from_folder(folder).shape, "bfloat16")
    return folder


@contextmanager
def worker(folder: Path, number: int) -> Iterator[tuple[psutil.Process, float]]:
    """A worker that is ready, and the seconds that it took."""
    config = WorkerConfig(
        worker_id=f"decode-{number}",
        role=WorkerRole.DECODE,
        model_path=str(folder),
        precision=Precision(dtype="bfloat16"),
        max_model_len=1024,
        kv_memory_bytes=_KV_BYTES,
    )
    began_s = time.monotonic()
    command = [sys.executable, "-m", "pdserve.engine.worker.process", "--config", to_json(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise RuntimeError(f"worker {number} ended before it was ready")
            yield psutil.Process(process.pid), time.monotonic() - began_s
        finally:
            process.kill()


def pss_bytes(workers: Sequence[psutil.Process]) -> int:
    processes = [process for each in workers for process in (each, *each.children(recursive=True))]
    return sum(process.memory_full_info().pss for process in processes)


def main() -> None:
    parser = script_parser(__doc__)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = write_model(Path(scratch))
        workers, ready_s, pss = [], [], []
        for number in range(4):
            process, took_s = stack.enter_context(worker(folder, number))
            workers.append(process)
            ready_s.append(round(took_s, 2))
            pss.append(pss_bytes(workers))
        workers[0].kill()
        workers[0].wait()
        _, took_s = stack.enter_context(worker(folder, 4))
        began_s = time.monotonic()
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
        imported_s = time.monotonic() - began_s
    publish(
        {
            "ready_s": ready_s,
            "ready_after_kill_s": round(took_s, 2),
            "import_torch_s": round(imported_s, 2),
            "pss_mib": [round(each / 2**20) for each in pss],
            "three_over_one": round(pss[2] / pss[0], 3),
        },
        arguments.json,
    )


if __name__ == "__main__":
    main()
