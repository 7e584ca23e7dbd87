"""``pdserve bench``: benchmarks of a running server, and of the kernels on this machine's GPU.

Reads arguments and prints; a command imports what it needs when it runs. Benchmarks of the project itself are run as
modules of `pdserve.bench`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pdserve.planner.workload import Workload

app = typer.Typer(help="Measure a running server, or the kernels.")


@app.callback()
def group() -> None:
    """Measure a running server, or the kernels."""


@app.command(epilog="Example: pdserve bench serve --rate 4 --requests 500 --workload chat")
def serve(
    url: Annotated[str, typer.Option(help="Address of the API; by default that of the cluster that runs here.")] = "",
    rate: Annotated[float, typer.Option(min=1e-6, help="Requests per second.")] = 1.0,
    requests: Annotated[int, typer.Option(min=1, help="Number of requests.")] = 100,
    workload: Annotated[str, typer.Option(metavar="NAME", help="Kind of traffic, such as chat or code.")] = "",
    trace: Annotated[
        Path | None, typer.Option(help="Lengths and arrivals of a trace: Mooncake, Azure, BurstGPT, ShareGPT, plain.")
    ] = None,
    input_tokens: Annotated[
        int, typer.Option(min=1, help="Of each prompt, where no workload or trace is named.")
    ] = 256,
    output_tokens: Annotated[int, typer.Option(min=1, help="Of each answer, likewise.")] = 128,
    max_model_len: Annotated[int, typer.Option(min=0, help="Shorten requests to this; 0 asks the server.")] = 0,
    burstiness: Annotated[
        float, typer.Option(min=1e-3, help="Coefficient of variation of the times between requests; 1 is Poisson.")
    ] = 1.0,
    ttft: Annotated[
        float | None, typer.Option(min=1e-6, help="Objective for the time to first token, seconds.")
    ] = None,
    tpot: Annotated[float | None, typer.Option(min=1e-6, help="Objective for the time per output token.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of lengths and arrivals.")] = 0,
    vocab_size: Annotated[int, typer.Option(min=1, help="Prompts are random token ids below this.")] = 256,
    time_scale: Annotated[
        float, typer.Option(min=1e-3, help="As that of an emulated cluster; times are divided by it.")
    ] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Send requests on schedule, without waiting for earlier ones, and show latencies and goodput."""
    from rich.console import Console

    from pdserve.bench.load import measure_load
    from pdserve.bench.serving_report import ServingReport
    from pdserve.contracts.deployment import SloConfig
    from pdserve.contracts.errors import DeployError
    from pdserve.deploy.cluster.folder import find_cluster

    console = Console(stderr=True)
    try:
        traffic = _workload(workload, trace, input_tokens, output_tokens, burstiness)
        address = (url or find_cluster().url).rstrip("/").removesuffix("/v1")
        max_model_len = max_model_len or _max_model_len(address)
        sample = traffic.draw(requests, seed, max_model_len=max_model_len)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if any(sample.clamped):
        console.print(f"To fit into {max_model_len} tokens: {sample.clamped}.", highlight=False)
    try:
        with console.status("waiting for the first answers") as shown:
            measured = measure_load(
                address,
                sample.at_rate(rate),
                vocab_size=vocab_size,
                time_scale=time_scale,
                progress=lambda sent, done: shown.update(f"{sent} of {sample.num_requests} sent, {done} done"),
            )
    except OSError as error:
        raise DeployError(f"{address} does not answer: {error}") from error
    usual = traffic.slo or SloConfig()
    slo = SloConfig(ttft_seconds=ttft or usual.ttft_seconds, tpot_seconds=tpot or usual.tpot_seconds)
    report = ServingReport.of(measured, slo)
    typer.echo(json.dumps(report.as_dict()) if as_json else "\n".join(report.lines()))
    if report.problems:
        raise DeployError(f"these figures do not count: {'; '.join(report.problems)}")
    return 0 if report.num_finished else 1


@app.command(epilog="Example: pdserve bench kernels --only decode_attention --quick")
def kernels(
    only: Annotated[str, typer.Option(metavar="NAME", help="Kernels with this in their names.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="A few shapes of each kernel.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Times that a kernel and its peers take turns.")] = 3,
    compile_only: Annotated[
        bool, typer.Option("--compile-only", help="Compile for a Hopper GPU: registers, spills, shared memory.")
    ] = False,
    folder: Annotated[
        Path, typer.Option(exists=True, file_okay=False, help="Where the dated file of results goes.")
    ] = Path(),
    with_plot: Annotated[bool, typer.Option("--plot", help="Draw a picture beside it.")] = False,
    hardware: Annotated[str, typer.Option(help="Name of the GPU, such as h100-sxm, if it is not recognised.")] = "",
    skip_peer: Annotated[list[str] | None, typer.Option(metavar="PEER", help="Leave out, such as flashinfer.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Measure every kernel on this GPU against its limit and its peers; or compile them, which needs no GPU."""
    from importlib.util import find_spec

    from pdserve.contracts.errors import DeployError

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


def _workload(name: str, trace: Path | None, input_tokens: int, output_tokens: int, burstiness: float) -> Workload:
    """Workload of the options.

    Raises:
        ValueError: unknown preset, or a file that is not a trace.
        DeployError: the file cannot be read.
    """
    from dataclasses import replace

    from pdserve.contracts.errors import DeployError
    from pdserve.planner.arrivals import RandomGaps
    from pdserve.planner.conversations import Conversations
    from pdserve.planner.lengths import FixedLengths
    from pdserve.planner.presets import preset
    from pdserve.planner.trace_reading import read_trace
    from pdserve.planner.workload import Workload, trace_workload

    if name and trace is not None:
        raise ValueError("--workload and --trace exclude each other: leave one out")
    if trace is not None:
        try:
            return trace_workload(read_trace(trace))
        except OSError as error:
            raise DeployError(f"cannot read {trace}: {error.strerror}") from error
    gaps = RandomGaps(burstiness)
    if name:
        return replace(preset(name), arrivals=gaps)
    fixed = FixedLengths(input_tokens, output_tokens)
    return Workload(name="fixed", contents=Conversations(lengths=fixed), arrivals=gaps)


def _max_model_len(url: str) -> int:
    """Limit that the server reports for its first model; 0 if it reports none.

    Raises:
        DeployError: the server does not answer.
    """
    import httpx

    from pdserve.contracts.errors import DeployError

    try:
        models = httpx.get(f"{url}/v1/models", trust_env=False).json()["data"]
        return int(models[0].get("max_model_len") or 0)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise DeployError(f"{url} does not answer: {error}") from error
    except (ValueError, LookupError, TypeError):
        return 0
