"""``pdserve bench``: benchmarks of a running server (`pdserve.deploy.commands.bench_load`), of the engine
(`pdserve.deploy.commands.bench_engine`), of KV transfer, and of the kernels on this machine's GPU.

Benchmarks of the project itself are modules of `pdserve.bench`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from pdserve.contracts.errors import DeployError
from pdserve.deploy.commands.bench_engine import engine
from pdserve.deploy.commands.bench_load import serve, sweep

app = typer.Typer(help="Measure a running server, the engine, KV transfer, or the kernels.")


@app.callback()
def group() -> None:
    """Measure a running server, the engine, KV transfer, or the kernels."""


app.command(epilog="Example: pdserve bench serve --request-rate 4 --num-prompts 500 --dataset-name chat")(serve)
app.command(epilog="Example: pdserve bench sweep --dataset-name chat --goodput ttft:250 tpot:50")(sweep)
app.command(epilog="Example: pdserve bench engine --model ./Llama-3.2-1B-Instruct --report engine.html")(engine)


@app.command(epilog="Example: pdserve bench kernels --only decode_attention --quick")
def kernels(
    only: Annotated[str, typer.Option(metavar="NAME", help="Part of the names of the kernels to measure.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Measure few shapes per kernel.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds over a kernel and its peers.")] = 3,
    compile_only: Annotated[
        bool, typer.Option("--compile-only", help="Compile without a GPU and show registers, spills, shared memory.")
    ] = False,
    capability: Annotated[
        int, typer.Option(metavar="N", help="GPU to compile for: 80, 86, 89, 90 (Hopper), 100 or 120.")
    ] = 90,
    folder: Annotated[
        Path, typer.Option(exists=True, file_okay=False, help="Folder for the dated file of results.")
    ] = Path(),
    hardware: Annotated[str, typer.Option(help="Name of the GPU, such as h100-sxm, if it is not recognised.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Measure every kernel against its limit and its peers, or compile them without a GPU."""
    from importlib.util import find_spec

    if find_spec("triton") is None:
        raise DeployError("the kernels of a GPU need Triton, which is not installed: pip install triton, on Linux")
    from pdserve.bench.kernels.report import NoGpuError
    from pdserve.bench.kernels.run import run

    try:
        return run(
            typer.echo,
            only=only,
            quick=quick,
            num_rounds=rounds,
            compile_only=compile_only,
            capability=capability,
            as_json=as_json,
            folder=folder,
            hardware=hardware,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except NoGpuError as error:
        raise DeployError(str(error)) from error


@app.command(epilog="Example: pdserve bench transfer --blocks 1,64 --rounds 10")
def transfer(
    blocks: Annotated[str, typer.Option(help="Numbers of blocks to pull; 256 are a prompt of 4,096 tokens.")] = (
        "1,16,64,256"
    ),
    rounds: Annotated[int, typer.Option(min=1, help="Rounds over all cases, of which the fastest counts.")] = 5,
    tls: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="Encrypt, with the files of make-certificates.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Pull KV between two transfer processes of this host, beside a bare copy and a socket."""
    from pdserve.bench.transfer import result_lines, run, tls_files

    try:
        counts = [int(count) for count in blocks.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{blocks!r} is not a list of numbers, such as 1,64", param_hint="--blocks") from error
    if min(counts) < 1:
        raise typer.BadParameter("a pull has at least 1 block", param_hint="--blocks")
    result = run(counts, rounds, tls_files(tls) if tls else None)
    typer.echo(json.dumps(result) if as_json else "\n".join(result_lines(result)))
    return 0
