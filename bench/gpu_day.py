"""The first half hour on a GPU, in order: does it run, is it right, is it fast.

    scripts/gpu_day [--out FOLDER] [--minutes N] [--only PART ...] [--dry-run]

Each part is a command of this repository with a time limit of its own, and its output is in ``FOLDER/PART.log``. After
each part ``gpu_day.json`` and the page ``gpu_day.md`` are written anew, so that what was found survives a lack of time.
The status is 1 if a part failed, ran out of time, or missed a threshold. Parts for which too little time is left are
left out, and the page says so. ``--dry-run`` runs the same on a CPU, small, without thresholds.

Needs torch, Triton, safetensors, grpcio, tokenizers and pytest, but neither Ray, FastAPI nor a network, and 16 GB for
weights in ``TMPDIR``. The thresholds are for one H100: a share of the speed that the same run measures, so that they
mean something on others, too. Has not run on a GPU yet.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from pdserve.bench.script import commit

_ROOT = Path(__file__).resolve().parents[1]
_PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", "-o", "filterwarnings=")
_LEAST_S = 20.0
"""A part is not begun with less time."""
_MACHINE = """
import importlib, json, shutil, subprocess, sys
import torch, triton
for name in ("safetensors", "tokenizers", "grpc", "numpy", "pytest", "pdserve.proto.v1.kv_pb2"):
    importlib.import_module(name)
print("torch", torch.__version__, "triton", triton.__version__, "cuda", torch.version.cuda)
if shutil.which("nvidia-smi"):
    subprocess.run(["nvidia-smi", "-q", "-d", "MEMORY,CLOCK,POWER"])
if "--dry-run" not in sys.argv:
    print(torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0), torch.cuda.mem_get_info(0))
    x = torch.ones(1 << 20, device="cuda")
    assert float((x + x).sum()) == 2 << 20
"""


@dataclass(frozen=True)
class Check:
    """A measured number with its threshold."""

    what: str
    value: float
    least: float | None = None
    most: float | None = None

    @property
    def is_passed(self) -> bool:
        is_enough = self.least is None or self.value >= self.least
        return is_enough and (self.most is None or self.value <= self.most)

    def __str__(self) -> str:
        wanted = f">= {self.least:g}" if self.least is not None else f"<= {self.most:g}"
        return f"{'ok  ' if self.is_passed else 'MISS'} {self.what}: {self.value:.4g} ({wanted})"


@dataclass(frozen=True)
class Part:
    """A command of Python."""

    name: str
    question: str
    limit_s: float
    arguments: tuple[str, ...]
    """``{out}`` stands for the folder of results."""
    dry_arguments: tuple[str, ...]
    checks: Callable[[Path], list[Check]] = lambda out: []
    """Of the results in a folder."""
    is_needed: bool = False
    """No other part can run if it fails."""


@dataclass(frozen=True)
class Outcome:
    """Of a part."""

    name: str
    verdict: str
    """``passed``, ``failed``, ``out of time`` or ``left out``."""
    seconds: float = 0.0
    checks: tuple[Check, ...] = ()

    @property
    def is_good(self) -> bool:
        return self.verdict == "passed" and all(check.is_passed for check in self.checks)


def _documents(out: Path, words: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(out.glob(f"*_{words}_*.json"))]


def model_checks(out: Path) -> list[Check]:
    """Of `pdserve.bench.gpu_model`: its goals, and that the host is not what a step waits for."""
    checks = []
    for document in _documents(out, "gpu_model"):
        checks += [
            Check("torch's large copy, GB/s", document["torch_copy_gbytes_per_s"], least=2900),
            Check("torch's large product, TFLOP/s", document["torch_matmul_tflops"], least=700),
            Check("failures", len(document["failures"]), most=0),
        ]
        for row in document["rows"]:
            name = f"{row['phase']} {row['num_rows']} x {row['context_tokens']}"
            least = {"decode": 0.85 if row["num_rows"] > 1 else 0.8, "prefill": 0.7}.get(row["phase"])
            if least is not None:
                checks.append(Check(f"{name}, share of the limit", row["limit_share"], least=least))
            if row["phase"] != "handoff" and row["host_s"] is not None and row["device_s"]:
                checks.append(Check(f"{name}, host by device time", row["host_s"] / row["device_s"], most=1))
    return checks


def kernel_checks(out: Path) -> list[Check]:
    """Of `pdserve.bench.kernels`."""
    return [Check("kernels that failed", len(each["failures"]), most=0) for each in _documents(out, "kernels")]


def _on_gpu(name: str, limit_s: float, *files: str) -> Part:
    """Files of `tests.gpu`, each in a process of its own; the dry run rehearses the first in Triton's interpreter."""
    names = [f"test_{file}" for file in files]
    question = f"Right results: {', '.join(files).replace('_', ' ')}?"
    chosen = ("tests/gpu/test_on_gpu.py", "-k", f"shapes_of_serving and ({' or '.join(names)})")
    return Part(name, question, limit_s, (*_PYTEST, *chosen), (*_PYTEST, f"tests/gpu/{names[0]}.py"))


_MODEL = ("-m", "pdserve.bench.gpu_model", "--folder", "{out}")
_KERNELS = ("-m", "pdserve.bench.kernels", "--folder", "{out}")
PARTS = (
    Part("machine", "Is all here?", 60, ("-c", _MACHINE), ("-c", _MACHINE, "--dry-run"), is_needed=True),
    _on_gpu("kernels-right", 300, "norm_and_gate", "rope", "decode_attention", "prefill_attention", "sampling"),
    _on_gpu("products-right", 240, "products", "experts"),
    _on_gpu("executor-right", 300, "executor"),
    Part("model-speed", "Is a model fast?", 360, (*_MODEL, "--quick"), (*_MODEL, "--device", "cpu"), model_checks),
    _on_gpu("workers-right", 240, "workers"),
    Part(
        "kernels-speed", "Are kernels fast?", 300, (*_KERNELS, "--quick"),
        (*_KERNELS, "--compile-only", "--only", "gates bfloat16"), kernel_checks,
    ),
)  # fmt: skip
"""In the order in which they run: what the next ones need first."""


def run_part(part: Part, out: Path, limit_s: float, *, is_dry: bool) -> Outcome:
    """Run a part for ``limit_s`` at most; its whole group of processes ends with it."""
    given = part.dry_arguments if is_dry else part.arguments
    arguments = [argument.replace("{out}", str(out)) for argument in given]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(_ROOT)}
    environment.setdefault("TRITON_CACHE_DIR", str(out / "triton"))
    if "pytest" in arguments:
        environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        environment |= {"TRITON_INTERPRET": "1"} if is_dry else {}
    started_s = monotonic()
    with (out / f"{part.name}.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, *arguments], cwd=_ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            verdict = "passed" if process.wait(limit_s) == 0 else "failed"
        except subprocess.TimeoutExpired:
            verdict = "out of time"
        finally:
            _end_group(process)
    checks = () if is_dry else tuple(part.checks(out))
    return Outcome(part.name, verdict, monotonic() - started_s, checks)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):  # all of it has ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_all(
    parts: Sequence[Part], out: Path, seconds: float, *, is_dry: bool, echo: Callable[[str], None]
) -> list[Outcome]:
    """Run parts in turn, for ``seconds`` in all, and write what was found after each."""
    end_s = monotonic() + seconds
    outcomes: list[Outcome] = []
    is_lost = False
    for part in parts:
        left_s = end_s - monotonic()
        if is_lost or left_s < _LEAST_S:
            outcome = Outcome(part.name, "left out")
        else:
            outcome = run_part(part, out, min(part.limit_s, left_s), is_dry=is_dry)
        is_lost |= part.is_needed and outcome.verdict != "passed"
        outcomes.append(outcome)
        page = summary(parts, outcomes, is_dry=is_dry)
        (out / "gpu_day.md").write_text(page, encoding="utf-8")
        (out / "gpu_day.json").write_text(json.dumps(_document(outcomes, is_dry), indent=1) + "\n", encoding="utf-8")
        echo(f"{outcome.name}: {outcome.verdict}, {outcome.seconds:.0f} s")
    return outcomes


def _document(outcomes: Sequence[Outcome], is_dry: bool) -> Mapping[str, Any]:
    return {
        "commit": commit(),
        "python": platform.python_version(),
        "is_dry_run": is_dry,
        "parts": [{**asdict(outcome), "is_good": outcome.is_good} for outcome in outcomes],
    }


def summary(parts: Sequence[Part], outcomes: Sequence[Outcome], *, is_dry: bool) -> str:
    """The page: a line for each part, and one for each of its thresholds."""
    lines = [f"# GPU day of pdserve {commit()}{' (dry run on a CPU: no threshold applies)' * is_dry}", ""]
    for part, outcome in zip(parts, outcomes, strict=False):
        lines.append(f"- {part.question} {outcome.name}: **{outcome.verdict}**, {outcome.seconds:.0f} s")
        lines += [f"    - {check}" for check in outcome.checks]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(os.environ.get("OUT", "gpu_day"))
    parser.add_argument("--out", type=Path, default=default, help="folder of results; by default $OUT, or gpu_day")
    parser.add_argument("--minutes", type=float, default=30.0, help="for all parts")
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS], help="by default all")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, small, without thresholds")
    arguments = parser.parse_args()
    out: Path = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    chosen = [part for part in PARTS if arguments.only is None or part.name in arguments.only]
    outcomes = run_all(chosen, out, 60 * arguments.minutes, is_dry=arguments.dry_run, echo=print)
    sys.stdout.write((out / "gpu_day.md").read_text(encoding="utf-8"))
    return 0 if all(outcome.is_good for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
