"""``pdserve bench``: benchmarks of a running server, and of the kernels on this machine's GPU.

Benchmarks of the project itself are modules of `pdserve.bench`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from pdserve.contracts.deployment import SloConfig
from pdserve.contracts.errors import DeployError
from pdserve.deploy.cluster.folder import api_key, find_cluster

if TYPE_CHECKING:
    from pdserve.planner.workload.workload import Workload

_FILE_DATASETS = ("sharegpt", "mooncake", "azure", "burstgpt", "plain", "custom")
_AT_ONCE = 1e9
"""Requests per second that stand for an infinite rate."""

app = typer.Typer(help="Measure a running server, or the kernels.")


@app.callback()
def group() -> None:
    """Measure a running server, or the kernels."""


@app.command(epilog="Example: pdserve bench serve --request-rate 4 --num-prompts 500 --dataset-name chat")
def serve(
    url: Annotated[
        str,
        typer.Option("--base-url", "--url", help="Address of the API; by default that of the cluster that runs here."),
    ] = "",
    dataset_name: Annotated[
        str,
        typer.Option(
            "--dataset-name",
            "--workload",
            metavar="NAME",
            help="random, a preset such as chat or code, or the format of --dataset-path.",
        ),
    ] = "",
    dataset_path: Annotated[
        Path | None,
        typer.Option(
            "--dataset-path", "--trace", help="Lengths and arrivals: ShareGPT, Mooncake, Azure, BurstGPT, or plain."
        ),
    ] = None,
    input_len: Annotated[
        int, typer.Option("--random-input-len", "--input-tokens", min=1, help="Prompt tokens, if random.")
    ] = 256,
    output_len: Annotated[
        int, typer.Option("--random-output-len", "--output-tokens", min=1, help="Output tokens, if random.")
    ] = 128,
    range_ratio: Annotated[
        float,
        typer.Option("--random-range-ratio", min=0.0, max=0.99, help="Lengths vary by this share, up and down."),
    ] = 0.0,
    num_prompts: Annotated[int, typer.Option("--num-prompts", "--requests", min=1, help="Number of requests.")] = 100,
    request_rate: Annotated[
        float, typer.Option("--request-rate", "--rate", min=1e-6, help="Requests per second; inf sends all at once.")
    ] = 1.0,
    burstiness: Annotated[
        float,
        typer.Option(min=1e-3, help="Shape of the gamma distribution of gaps: 1 is Poisson, less is bursty."),
    ] = 1.0,
    max_concurrency: Annotated[int | None, typer.Option(min=1, help="Requests in flight at once.")] = None,
    goodput: Annotated[
        list[str] | None,
        typer.Option(metavar="METRIC:MS ...", help="Objectives, such as ttft:250 tpot:50; also e2el."),
    ] = None,
    percentile_metrics: Annotated[str, typer.Option(help="Latencies to report, of ttft,tpot,itl,e2el.")] = (
        "ttft,tpot,itl"
    ),
    metric_percentiles: Annotated[str, typer.Option(help="Percentiles to report.")] = "50,90,99",
    max_model_len: Annotated[int, typer.Option(min=0, help="Shorten requests to this; 0 asks the server.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of lengths and arrivals.")] = 0,
    vocab_size: Annotated[int, typer.Option(min=1, help="Prompts are random token ids below this.")] = 256,
    time_scale: Annotated[
        float, typer.Option(min=1e-3, help="Time scale of an emulated cluster; divides all times.")
    ] = 1.0,
    save_result: Annotated[bool, typer.Option("--save-result", help="Write the JSON to a file.")] = False,
    result_dir: Annotated[Path, typer.Option(exists=True, file_okay=False, help="Folder of that file.")] = Path(),
    result_filename: Annotated[str, typer.Option(help="Its name; by default by rate and time.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    more_objectives: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
) -> int:
    """Send requests on schedule, without waiting for earlier ones; show latencies and goodput.

    Options, figures and JSON keys are those of `vllm bench serve`.
    """
    from pdserve.bench import serving_report
    from pdserve.bench.load import measure_load

    console = Console(stderr=True)
    started = datetime.now(UTC)
    try:
        if more_objectives and not goodput:
            raise ValueError(f"unexpected argument {more_objectives[0]!r}")
        objectives = serving_report.parse_objectives([*(goodput or ()), *(more_objectives or ())])
        metrics = serving_report.parse_metrics(percentile_metrics)
        percentiles = serving_report.parse_percentiles(metric_percentiles)
        traffic = _workload(dataset_name, dataset_path, (input_len, output_len, range_ratio), burstiness)
        address = (url or find_cluster().url).rstrip("/").removesuffix("/v1")
        max_model_len = max_model_len or _max_model_len(address)
        sample = traffic.draw(num_prompts, seed, max_model_len=max_model_len)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if any(sample.clamped):
        console.print(f"To fit into {max_model_len} tokens: {sample.clamped}.", highlight=False)
    try:
        with console.status("waiting for the first answers") as shown:
            measured = measure_load(
                address,
                sample.at_rate(min(request_rate, _AT_ONCE)),
                vocab_size=vocab_size,
                time_scale=time_scale,
                max_concurrency=max_concurrency,
                api_key=api_key(),
                progress=lambda sent, done: shown.update(f"{sent} of {sample.num_requests} sent, {done} done"),
            )
    except OSError as error:
        raise DeployError(f"{address} does not answer: {error}") from error
    if not objectives:
        usual = traffic.slo or SloConfig()
        objectives = {"ttft": 1e3 * usual.ttft_seconds, "tpot": 1e3 * usual.tpot_seconds}
    result = {
        "date": started.strftime("%Y%m%d-%H%M%S"),
        "request_rate": request_rate if isfinite(request_rate) else "inf",
        "burstiness": burstiness,
        "max_concurrency": max_concurrency,
        **serving_report.serving_result(measured, objectives, metrics, percentiles),
    }
    if save_result or result_filename:
        name = result_filename or f"pdserve-{request_rate:g}qps-{result['date']}.json"
        (result_dir / name).write_text(json.dumps(result) + "\n")
    lines = serving_report.result_lines(result, metrics, percentiles)
    typer.echo(json.dumps(result) if as_json else "\n".join(lines))
    if result["problems"]:
        raise DeployError(f"these figures do not count: {'; '.join(result['problems'])}")
    return 0 if result["completed"] else 1


@app.command(epilog="Example: pdserve bench kernels --only decode_attention --quick")
def kernels(
    only: Annotated[str, typer.Option(metavar="NAME", help="Part of the names of the kernels to measure.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Measure few shapes per kernel.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds over a kernel and its peers.")] = 3,
    compile_only: Annotated[
        bool, typer.Option("--compile-only", help="Compile for a Hopper GPU and show registers, spills, shared memory.")
    ] = False,
    folder: Annotated[
        Path, typer.Option(exists=True, file_okay=False, help="Folder for the dated file of results.")
    ] = Path(),
    with_plot: Annotated[bool, typer.Option("--plot", help="Draw a picture beside it.")] = False,
    hardware: Annotated[str, typer.Option(help="Name of the GPU, such as h100-sxm, if it is not recognised.")] = "",
    skip_peer: Annotated[list[str] | None, typer.Option(metavar="PEER", help="Leave out, such as flashinfer.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Measure every kernel against its limit and its peers, or compile them without a GPU."""
    from importlib.util import find_spec

    if find_spec("triton") is None:
        raise DeployError("the kernels of a GPU need Triton, which is not installed: pip install triton, on Linux")
    from pdserve.bench.kernels.report import NoGpuError
    from pdserve.bench.kernels.run import Settings, run

    settings = Settings(
        only=only,
        quick=quick,
        num_rounds=rounds,
        compile_only=compile_only,
        as_json=as_json,
        folder=folder,
        with_plot=with_plot,
        hardware=hardware,
        skipped_peers=tuple(skip_peer or ()),
    )
    try:
        return run(settings, typer.echo)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except NoGpuError as error:
        raise DeployError(str(error)) from error


def _workload(name: str, path: Path | None, lengths: tuple[int, int, float], burstiness: float) -> Workload:
    """Workload of the options.

    Args:
        lengths: prompt tokens, output tokens and the share by which they vary, if random.
        burstiness: shape of the gamma distribution of the arrival gaps, as in vLLM.

    Raises:
        ValueError: unknown dataset, or a file that is not a trace.
        DeployError: the file cannot be read.
    """
    from pdserve.planner.workload.arrivals import RandomGaps
    from pdserve.planner.workload.conversations import Conversations
    from pdserve.planner.workload.lengths import FixedLengths, QuantileLengths
    from pdserve.planner.workload.presets import preset
    from pdserve.planner.workload.trace_reading import read_trace
    from pdserve.planner.workload.workload import Workload, trace_workload

    if path is not None:
        if name not in ("", *_FILE_DATASETS):
            raise ValueError(f"--dataset-name {name} and --dataset-path exclude each other: leave one out")
        try:
            return trace_workload(read_trace(path))
        except OSError as error:
            raise DeployError(f"cannot read {path}: {error.strerror}") from error
    if name in _FILE_DATASETS:
        raise ValueError(f"--dataset-name {name} needs its file: add --dataset-path")
    gaps = RandomGaps(burstiness**-0.5)
    if name not in ("", "random"):
        return replace(preset(name), arrivals=gaps)
    inputs, outputs, ratio = lengths
    if not ratio:
        return Workload(name="random", contents=Conversations(lengths=FixedLengths(inputs, outputs)), arrivals=gaps)
    lower, upper = 1 - ratio, 1 + ratio
    uniform = QuantileLengths(
        shares=(0.0, 1.0),
        num_prompt_tokens=(lower * inputs, upper * inputs),
        num_output_tokens=(lower * outputs, upper * outputs),
    )
    return Workload(name="random", contents=Conversations(lengths=uniform), arrivals=gaps)


def _max_model_len(url: str) -> int:
    """Limit that the server reports for its first model; 0 if it reports none.

    Raises:
        DeployError: the server does not answer.
    """
    import httpx

    try:
        headers = {"Authorization": f"Bearer {key}"} if (key := api_key()) else {}
        models = httpx.get(f"{url}/v1/models", headers=headers, trust_env=False).json()["data"]
        return int(models[0].get("max_model_len") or 0)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise DeployError(f"{url} does not answer: {error}") from error
    except (ValueError, LookupError, TypeError):
        return 0
