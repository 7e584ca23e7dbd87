"""``pdserve bench engine``: the four figures of an engine on this machine, beside what the cost model predicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from pdserve.contracts.deployment import DeploymentConfig, ModelConfig
from pdserve.contracts.errors import ConfigError, DeployError
from pdserve.deploy.commands.bench_load import DatasetOption, DatasetPathOption, workload_of
from pdserve.deploy.config import check_deployment, find_dtype
from pdserve.kv_transfer.host_limits import usable_cores
from pdserve.model.weights.demo_model import DEMO_MODEL

if TYPE_CHECKING:
    from pdserve.model.cost.hardware import Hardware


def engine(
    model: Annotated[Path, typer.Option(help="Model folder, or a config.json (random weights).")] = DEMO_MODEL,
    dtype: Annotated[str, typer.Option(help="Weights and activations: auto, float32, bfloat16 or float16.")] = "auto",
    quantization: Annotated[str, typer.Option(help="Layer weights: auto, none, int8 or int4.")] = "auto",
    cores: Annotated[int, typer.Option(min=0, help="Cores to compute on; 0: all.")] = 0,
    prompts: Annotated[str, typer.Option(help="Prompt lengths, tokens.")] = "64,256,1024",
    batches: Annotated[str, typer.Option(help="Requests at once; the last ones are the full batch.")] = "1,8,32",
    output_tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 32,
    dataset_name: DatasetOption = "chat",
    dataset_path: DatasetPathOption = None,
    requests: Annotated[int, typer.Option("--num-prompts", "--requests", min=1, help="Requests of the trace.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of a case, of which the median counts.")] = 3,
    budget: Annotated[float, typer.Option(min=1, help="Time for all cases but the trace, seconds.")] = 120.0,
    hardware_file: Annotated[Path | None, typer.Option(help="From pdserve profile, to predict with it.")] = None,
    report: Annotated[Path | None, typer.Option(help="HTML page with charts to write.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Measure throughput, TTFT, TPOT and requests/s of the engine in this process, without a cluster."""
    from pdserve.bench.engine import COLUMNS, Question, engine_html, measure_engine
    from pdserve.deploy.cluster.host_facts import slow_dtype_reason
    from pdserve.deploy.commands.profile import profiled_model, progress_bar, restored_affinity
    from pdserve.planner.report.page import check_drawing

    try:
        if report is not None:
            check_drawing()
        lengths, counts = _numbers(prompts, "--prompts"), _numbers(batches, "--batches")
        name = "" if dataset_path else dataset_name
        trace = workload_of(name, dataset_path, (lengths[-1], output_tokens, 0.0))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    own = usable_cores()
    if cores > len(own):
        raise DeployError(f"--cores {cores}: this machine has {len(own)} usable cores; ask for fewer")
    used = own[: cores or len(own)]
    config = ModelConfig(path=str(model), dtype=dtype, quantization=quantization)
    check_deployment(DeploymentConfig(model=config))
    served, _ = find_dtype(config, slow_dtype_reason)
    profiled = profiled_model(served, used)
    question = Question(lengths, counts, output_tokens, trace, requests, rounds, budget)
    console = Console(stderr=as_json)
    with restored_affinity(), progress_bar(console) as bar:
        task = bar.add_task(profiled.name, total=1.0, step="")
        try:
            answer = measure_engine(
                profiled,
                _hardware(hardware_file, len(used)),
                question,
                lambda share, step: bar.update(task, completed=share, step=step[:60]),
            )
        except (ValueError, OSError) as error:
            raise DeployError(" ".join(str(error).split())) from error
    title = f"{profiled.name}, {profiled.precision.dtype}, on {len(used)} cores"
    if report is not None:
        try:
            report.write_text(engine_html(title, answer), "utf-8")
        except OSError as error:
            raise DeployError(f"cannot write {report}: {error.strerror}; name another file") from error
    if as_json:
        figures = [each._asdict() for each in answer.figures]
        typer.echo(json.dumps({"model": title, "figures": figures, "left_out": answer.left_out}))
        return 0
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if index else "left")
    for figure in answer.figures:
        table.add_row(*figure.cells())
    console.print(table)
    for case in answer.left_out:
        console.print(f"[yellow]left out: {case}[/]")
    if hardware_file is None:
        console.print(
            "Predicted for a usual CPU; for this one, run pdserve profile and give its file to --hardware-file."
        )
    return 0


def _numbers(text: str, option: str) -> tuple[int, ...]:
    try:
        numbers = tuple(sorted({int(each) for each in text.split(",")}))
    except ValueError:
        numbers = ()
    if not numbers or numbers[0] < 1:
        raise ValueError(f"{option} {text!r} is not a list of numbers above 0, such as 1,64")
    return numbers


def _hardware(path: Path | None, num_cores: int) -> Hardware:
    """The CPU as a file of `pdserve profile` has it, or a usual one."""
    from pdserve.model.cost.hardware import hardware
    from pdserve.planner.hardware_file import read_hardware_file

    if path is None:
        return hardware("cpu", num_cores=num_cores)
    try:
        devices = read_hardware_file(path)
    except (ConfigError, OSError) as error:
        raise DeployError(f"--hardware-file: {error}") from error
    if (found := devices.get(f"cpu-{num_cores}")) is None:
        raise DeployError(f"{path} has no cpu-{num_cores}: run pdserve profile with --cores {num_cores}")
    return found
