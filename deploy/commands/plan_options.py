"""Options that the planner's commands share: names, help and meaning.

Imports no planner module before a value is used, so that ``--help`` is instant. An invalid name or number is bad
usage (`ConfigError`); an error of the model or the fleet is a failure (`DeployError`).
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer

from pdserve.contracts.deployment import DeploymentConfig, ModelConfig, SloConfig
from pdserve.contracts.errors import ConfigError, DeployError
from pdserve.deploy.config import check_deployment, find_dtype, override
from pdserve.kv_transfer.host_limits import usable_cores

if TYPE_CHECKING:
    from rich.console import Console

    from pdserve.model.cost.hardware import Hardware
    from pdserve.planner.layout import PlannedModel
    from pdserve.planner.workload.traffic import Traffic

WHAT, GPUS, ANSWER = "What to serve", "GPUs", "Answer"
"""Groups of options in the help."""

GpuOption = Annotated[
    str,
    typer.Option(
        metavar="KIND", help="GPU of every worker, such as h100-sxm; an unknown name lists all.", rich_help_panel=GPUS
    ),
]
DecodeGpuOption = Annotated[
    str, typer.Option(metavar="KIND", help="GPU of decode workers. Default: --gpu.", rich_help_panel=GPUS)
]
HardwareFileOption = Annotated[
    Path | None, typer.Option(help="Device file (YAML) from pdserve profile, for --gpu.", rich_help_panel=GPUS)
]
SettingsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Any key of a deployment file, such as decode.replicas=3 or model.quantization=fp8; repeatable.",
        rich_help_panel=GPUS,
    ),
]
TrafficOption = Annotated[
    str,
    typer.Option(
        metavar="NAME|FILE|P/A",
        help="chat, code, summarisation, agent; a trace; or tokens of each prompt and answer, such as 1000/200.",
        rich_help_panel=WHAT,
    ),
]
# Names of earlier versions, for which there are --set and --traffic; they end with the next version.
DtypeOption = Annotated[str | None, typer.Option(hidden=True)]
KvDtypeOption = Annotated[str | None, typer.Option(hidden=True)]
QuantizationOption = Annotated[str | None, typer.Option(hidden=True)]
MaxModelLenOption = Annotated[int | None, typer.Option(min=0, hidden=True)]
AttainmentOption = Annotated[float | None, typer.Option(hidden=True)]
PolicyOption = Annotated[str | None, typer.Option(hidden=True)]
WorkloadOption = Annotated[str, typer.Option(hidden=True)]
TokensOption = Annotated[int | None, typer.Option(min=1, hidden=True)]
TtftOption = Annotated[
    float | None, typer.Option(help="TTFT objective, seconds. Default: the workload's.", rich_help_panel=WHAT)
]
TpotOption = Annotated[
    float | None, typer.Option(help="TPOT objective, seconds. Default: the workload's.", rich_help_panel=WHAT)
]
BurstinessOption = Annotated[
    float | None,
    typer.Option(
        min=1e-3,
        help="Shape of the gamma distribution of gaps: 1 is Poisson, less is bursty. Default: the workload's.",
        rich_help_panel=WHAT,
    ),
]
MaxTokensOption = Annotated[
    int,
    typer.Option(
        min=0,
        help="Limit that clients set on answers, tokens; 0: the exact length of each, as benchmarks send it.",
        rich_help_panel=WHAT,
    ),
]
LenientOption = Annotated[
    bool, typer.Option("--lenient", help="Skip and count malformed lines of a trace.", rich_help_panel=WHAT)
]
TimeUnitOption = Annotated[
    Literal["auto", "s", "ms"],
    typer.Option("--trace-time-unit", help="Unit of a Mooncake trace's times.", rich_help_panel=WHAT),
]
SessionsOption = Annotated[
    bool,
    typer.Option(
        "--sessions",
        help="Requests of a trace that go on from earlier ones, by their hash_ids, wait for the answers.",
        rich_help_panel=WHAT,
    ),
]
SeedOption = Annotated[int, typer.Option(min=0, help="Seed of the random numbers.", rich_help_panel=ANSWER)]

TRAFFIC_REMEDY = (
    "name one kind of traffic, such as --traffic chat, --traffic FILE, or --traffic 1000/200 for prompts of 1,000 and "
    "answers of 200 tokens"
)
_FILE_WIDTH = 160
_LINE_S = 5.0
"""Between two lines of progress."""


@contextmanager
def usage() -> Iterator[None]:
    """Turn a ValueError inside into bad usage."""
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from error


@contextmanager
def failure() -> Iterator[None]:
    """Turn a ValueError inside into a failure."""
    try:
        yield
    except ValueError as error:
        raise DeployError(str(error)) from error


@contextmanager
def shown_progress(*, is_brief: bool = False) -> Iterator[Callable[[float, str], None]]:
    """Takes a fraction and an activity; shows a bar on the terminal, or elsewhere a line every few seconds: at once, or
    of work that is usually brief only if it takes longer."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    terminal = Console(stderr=True)
    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=terminal, transient=True, disable=not terminal.is_terminal) as progress:
        task = progress.add_task("starting", total=1.0)
        lines = _Lines(terminal, _LINE_S if is_brief else 0.0)

        def report(fraction: float, text: str) -> None:
            progress.update(task, completed=fraction, description=text)
            if not terminal.is_terminal:
                lines.show(fraction, text)

        yield report


class _Lines:
    """Progress as lines, the first one after ``quiet_s`` and others `_LINE_S` apart at least."""

    def __init__(self, console: Console, quiet_s: float) -> None:
        self._console = console
        self._began_s = time.monotonic()
        self._due_s = self._began_s + quiet_s

    def show(self, fraction: float, text: str) -> None:
        now_s = time.monotonic()
        if now_s >= self._due_s:
            self._due_s = now_s + _LINE_S
            line = f"{fraction:4.0%} after {now_s - self._began_s:.0f} s: {text}"
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)


def planned_model(config: ModelConfig, transport: str) -> PlannedModel:
    """Planned model of a checked deployment, whose ``kv_transfer.transport`` is given."""
    if not config.path:
        raise ConfigError("no model is named; give --model a folder with a config.json, or the file itself")
    from pdserve.planner.planned_model import read_planned_model

    config, _ = find_dtype(config)
    with failure():
        found = read_planned_model(
            Path(config.path),
            precision=config.precision,
            max_model_len=config.max_model_len,
            block_size=config.block_size,
        )
    return dataclasses.replace(found, transport=transport)


def added_hardware(file: Path | None) -> Mapping[str, Hardware]:
    """Devices of a user's hardware file; none without a file."""
    if file is None:
        return {}
    from pdserve.planner.hardware_file import read_hardware_file

    with usage():
        return read_hardware_file(file)


def device(name: str, added: Mapping[str, Hardware]) -> Hardware:
    from pdserve.model.cost.hardware import hardware

    with usage():
        return hardware(name, added=added)


def named_traffic(
    traffic: str, others: Mapping[str, str], input_tokens: int | None, output_tokens: int | None
) -> str | tuple[int, int]:
    """The only traffic given: a preset or a file, or the tokens of a prompt and of an answer; empty if there is none.

    Args:
        others: earlier names of ``--traffic``, with their values.
    """
    if (input_tokens is None) != (output_tokens is None):
        raise ConfigError("--input-tokens and --output-tokens need each other: give --traffic 1000/200")
    lengths = None if input_tokens is None or output_tokens is None else (input_tokens, output_tokens)
    names = [name for name in (traffic, *others.values()) if name]
    if len(names) + (lengths is not None) > 1:
        raise ConfigError(f"--traffic, {', '.join(others)} and --input-tokens exclude each other: {TRAFFIC_REMEDY}")
    name = lengths or next(iter(names), "")
    if not isinstance(name, str) or Path(name).exists() or not (match := re.fullmatch(r"(\w*)/(\w*)", name)):
        return name
    if not all(part.isdecimal() and int(part) for part in match.groups()):
        raise ConfigError(f"--traffic is {name!r}, and there is no such file: {TRAFFIC_REMEDY}")
    return int(match[1]), int(match[2])


def traffic(
    named: str | tuple[int, int],
    *,
    model: ModelConfig,
    max_model_len: int,
    lenient: bool = False,
    time_unit: Literal["auto", "s", "ms"] = "auto",
    sessions: bool = False,
    burstiness: float | None = None,
    max_tokens: int = 0,
) -> Traffic:
    """Traffic of the preset or trace of that name, or of prompts and answers of constant length.

    Args:
        model: as configured: its folder has the tokenizer of prompts that are given as text.
        max_model_len: limit of the model as it is planned.
    """
    from pdserve.planner.workload.presets import PRESETS
    from pdserve.planner.workload.traffic import fixed_traffic, named_traffic

    with usage():
        if sessions and (not isinstance(named, str) or named in PRESETS):
            raise ValueError("--sessions joins the requests of a trace: name its file with --traffic, or leave it out")
        if isinstance(named, str):
            folder = Path(model.path)
            tokenizer = (folder if folder.is_dir() else folder.parent) / "tokenizer.json"
            reading = {"lenient": lenient, "time_unit": time_unit, "tokenizer": tokenizer, "sessions": sessions}
            found = named_traffic(named, max_model_len=max_model_len, **reading)
            if not model.max_model_len:
                found.check_lengths()
        else:
            found = fixed_traffic(*named, max_model_len=max_model_len)
        found = found.limited(max_tokens)
        return found if burstiness is None else found.bursty(burstiness**-0.5)


class Objectives(NamedTuple):
    """Values of the options, with the field names of `SloConfig`; ``None`` keeps the default."""

    ttft_seconds: float | None
    tpot_seconds: float | None
    attainment: float | None


def objectives(usual: SloConfig, given: Objectives) -> SloConfig:
    """Objectives of the options, with ``usual`` as defaults."""
    return _overridden(DeploymentConfig(slo=usual), "slo", given).slo


class ModelOptions(NamedTuple):
    """Precision and length from the options, with the field names of `ModelConfig`; ``None`` keeps the default."""

    dtype: str | None
    kv_dtype: str | None
    quantization: str | None
    max_model_len: int | None


def model_config(usual: ModelConfig, given: ModelOptions) -> ModelConfig:
    """Model configuration of the options, with ``usual`` as defaults."""
    return _overridden(DeploymentConfig(model=usual), "model", given).model


def _overridden(usual: DeploymentConfig, section: str, given: Objectives | ModelOptions) -> DeploymentConfig:
    config = override(usual, section, **given._asdict())
    check_deployment(config, use="simulate")
    return config


def num_cores() -> int:
    """Cores that this process may use."""
    return len(usable_cores())


def console() -> Console:
    """Standard output, as wide as its terminal; a file or a pipe is wide enough for any table."""
    from rich.console import Console

    is_given = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if is_given else _FILE_WIDTH)


def check_writable(*paths: Path | None) -> None:
    """Raise `ConfigError` for a file that cannot be written, before anything long begins."""
    files = [path for path in paths if path is not None and str(path) != "-"]
    for path in files:
        folder = path.resolve().parent
        if [each.resolve() for each in files].count(path.resolve()) > 1:
            raise ConfigError(f"{path} is named for two outputs: name another file")
        if path.is_dir() or not folder.is_dir():
            raise ConfigError(f"{path} {'is a folder' if path.is_dir() else 'has no folder'}: name another file")
        try:
            path.open("ab").close() if path.exists() else TemporaryFile(dir=folder).close()
        except OSError as error:
            raise ConfigError(f"{path} cannot be written ({error.strerror}): name another file") from error


def write_text(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DeployError(f"cannot write {path}: {error.strerror}; name another file") from error


def write_json(path: Path, document: Mapping[str, object]) -> None:
    """Write a JSON file, or to standard output for ``-``."""
    text = json.dumps(document, allow_nan=False, indent=2)
    if str(path) == "-":
        typer.echo(text)
    else:
        write_text(path, f"{text}\n")
