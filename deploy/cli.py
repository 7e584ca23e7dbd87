"""The command line: ``pdserve up``, ``check``, ``down``, ``scale``, ``drain``, ``restart``, ``key``, ``chat``,
``status``, ``top``, ``dashboards``, ``plan``, ``simulate``, ``profile``, ``bench``.

Turns every error into one line with the remedy. Each command imports its heavy modules when it runs, so that ``--help``
is instant and a client needs neither Ray nor an engine. Exit codes: 0 success, 1 failure, 2 bad usage.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from pdserve.contracts.deployment import DeploymentConfig, ModelConfig
from pdserve.contracts.errors import ConfigError, DeployError
from pdserve.deploy.cluster.folder import api_key, find_cluster, running_clusters
from pdserve.deploy.commands import bench as bench_commands
from pdserve.deploy.commands.plan import plan
from pdserve.deploy.commands.simulate import simulate
from pdserve.deploy.config import (
    check_deployment,
    find_dtype,
    names_pools,
    override,
    read_deployment,
    read_profile,
    read_settings,
    with_settings,
)
from pdserve.deploy.other_servers import remedy

if TYPE_CHECKING:
    from pdserve.deploy.launch import Launch

app = typer.Typer(
    help="Serve a language model from separate pools of prefill and decode workers.",
    epilog="Example: pdserve up --model ./Llama-3.2-1B-Instruct, then in another terminal: pdserve chat",
    add_completion=False,
    context_settings={"help_option_names": ["--help", "-h"]},
    pretty_exceptions_enable=False,
)
app.add_typer(bench_commands.app, name="bench")

_UsageError: Any = typer.BadParameter.__mro__[1]
"""click's class for bad usage: from click itself, or from the copy inside newer versions of typer."""


def main() -> None:
    """Entry point of ``pdserve``."""
    open_standard_streams()
    sys.exit(run(sys.argv[1:]))


def open_standard_streams() -> None:
    """Open those that the caller has closed (``<&-``), or else a pool's file gets such a number, which children take
    for their standard input."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def run(arguments: list[str]) -> int:
    """Run one command; returns the exit status."""
    try:
        result = app(arguments or ["--help"], prog_name="pdserve", standalone_mode=False)
    except _UsageError as error:
        command = error.ctx.command_path if error.ctx else "pdserve"
        said = error.format_message()
        instead = remedy(command, said) or _quoted(arguments)
        return _fail(2, f"{said}{instead and f'; {instead}'} (see {command} --help)")
    except ConfigError as error:
        split = _quoted(arguments)
        return _fail(2, f"{error}{split and f'; {split}'}")
    except DeployError as error:
        return _fail(1, str(error))
    except (typer.Abort, KeyboardInterrupt):
        return 1
    return result if isinstance(result, int) else 0


def _quoted(arguments: list[str]) -> str:
    """Remedy for a value of ``--set`` that a shell may have split at its spaces; empty if no words follow one, or a
    deployment file does."""
    for index, argument in enumerate(arguments):
        setting, *rest = arguments[index + 1 :] or [""]
        words = [*itertools.takewhile(lambda word: not word.startswith("-"), rest)]
        if argument == "--set" and words and Path(words[0]).suffix not in (".yaml", ".yml"):
            return f"shells split at spaces: quote what belongs together, --set '{' '.join([setting, *words])}'"
    return ""


def _fail(status: int, message: str) -> int:
    typer.echo(f"pdserve: {' '.join(message.split())}", err=True)
    return status


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"pdserve {version('pdserve')}")
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Show the version."""


_File = Annotated[Path | None, typer.Argument(help="Deployment file (YAML); options override it.")]
_Model = Annotated[Path | None, typer.Option(help="Model folder. Default: the demo model.")]
_Port = Annotated[int | None, typer.Option(help="Port to listen on; 0: a free one.")]
_Prefill = Annotated[int | None, typer.Option(help="Number of prefill workers.")]
_Decode = Annotated[int | None, typer.Option(help="Number of decode workers.")]
_Mixed = Annotated[int | None, typer.Option(help="Number of workers for both phases.")]
_Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Any key of a deployment file, such as decode.max_batch_size=64; repeatable."
    ),
]
_RayAddress = Annotated[
    str,
    typer.Option(envvar="RAY_ADDRESS", metavar="HOST:PORT", help="Existing Ray cluster; auto: the one of this host."),
]
_Emulate = Annotated[str, typer.Option(metavar="GPU", help="GPU to emulate (timing only), such as h100-sxm.")]
_Hosts = Annotated[int, typer.Option(min=1, help="Hosts of the Ray cluster to wait for.")]


@app.command(epilog="Example: pdserve up deployment.yaml --model ./Llama-3.2-1B-Instruct --set decode.replicas=2")
def up(
    file: _File = None,
    model: _Model = None,
    emulate: _Emulate = "",
    time_scale: Annotated[float, typer.Option(min=1e-3, help="Real seconds per emulated second.")] = 1.0,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: _Port = None,
    prefill: _Prefill = None,
    decode: _Decode = None,
    mixed: _Mixed = None,
    settings: _Settings = None,
    ray_address: _RayAddress = "",
    hosts: _Hosts = 1,
    drain_timeout: Annotated[float, typer.Option(min=0, help="Seconds for running requests on exit.")] = 30.0,
    log_format: Annotated[str | None, typer.Option(help="Of the router's log: text, or json.")] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return once it serves in the background; logs to pdserve.log.")
    ] = False,
) -> int:
    """Start a cluster and serve until Ctrl-C, or until pdserve down."""
    from pdserve.deploy.cluster.supervisor import Supervisor
    from pdserve.deploy.commands.progress import Progress

    if detach:
        from pdserve.deploy.commands.detach import start_detached

        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what it starts ends, too
        return start_detached([each for each in sys.argv[1:] if each != "--detach"], Console())
    if time_scale != 1 and not emulate:
        raise ConfigError("--time-scale scales emulated durations: add --emulate GPU, or leave it out")
    config = read_deployment(file, use="emulate" if emulate else "serve") if file else DeploymentConfig()
    config = override(config, "router", host=host, port=port, log_format=log_format)
    replicas = {"prefill": prefill, "decode": decode, "mixed": mixed}
    launch = _launch(file, config, model, replicas, ray_address, hosts, emulate, settings or ())
    launch = replace(launch, time_scale=time_scale, drain_timeout_s=drain_timeout)
    return Supervisor(launch, Progress(Console())).run()


def _launch(
    file: Path | None,
    config: DeploymentConfig,
    model: Path | None,
    replicas: Mapping[str, int | None],
    ray_address: str,
    num_hosts: int,
    emulate: str = "",
    settings: Sequence[str] = (),
) -> Launch:
    from pdserve.deploy.checks.preflight import demo_model_folder
    from pdserve.deploy.cluster.host_facts import slow_dtype_reason
    from pdserve.deploy.cluster.ray_cluster import current_ray_address
    from pdserve.deploy.cluster.resources import installed_gpu, num_gpus
    from pdserve.deploy.launch import Launch

    if num_hosts > 1 and not ray_address:
        raise ConfigError("--hosts waits for hosts of an existing Ray cluster: add --ray-address, or leave it out")
    config = override(with_settings(config, settings), "model", path=str(model) if model else None)
    for section, num in replicas.items():
        config = override(config, section, replicas=num)
    check_deployment(config, use="emulate" if emulate else "serve")
    if not config.model.path:
        config = override(config, "model", path=str(demo_model_folder()))
    if ray_address == "auto" and not (ray_address := current_ray_address()):
        raise DeployError("no Ray runs on this host; start it with ray start, or give --ray-address HOST:PORT")
    launch = Launch(
        config=config,
        devices=read_profile(config),
        emulate=emulate,
        gpu=installed_gpu(),
        num_gpus=num_gpus(),
        ray_address=ray_address,
        num_hosts=num_hosts,
    )
    is_on_cpus = not (emulate or ray_address or any(map(launch.is_on_gpu, launch.roles)))  # as far as is known
    served, why = find_dtype(config.model, slow_dtype_reason if is_on_cpus else lambda dtype: "")
    launch = replace(launch, config=replace(config, model=served), dtype_reason=why)
    is_named = any(num is not None for num in replicas.values()) or (file is not None and names_pools(file))
    is_named |= any(key.partition(".")[0] in replicas for key in read_settings(settings))
    return launch.fitted(is_layout_named=is_named) if launch.num_gpus and not ray_address else launch


@app.command(epilog="Example: pdserve check deployment.yaml --model ./Llama-3.2-1B-Instruct")
def check(
    file: _File = None,
    model: _Model = None,
    emulate: _Emulate = "",
    port: _Port = None,
    prefill: _Prefill = None,
    decode: _Decode = None,
    mixed: _Mixed = None,
    settings: _Settings = None,
    ray_address: _RayAddress = "",
    hosts: _Hosts = 1,
) -> int:
    """Check what pdserve up checks, and measure how KV moves between its workers; starts no cluster."""
    from pdserve.deploy.commands.check import check_cluster

    config = read_deployment(file, use="emulate" if emulate else "serve") if file else DeploymentConfig()
    config = override(config, "router", port=port)
    replicas = {"prefill": prefill, "decode": decode, "mixed": mixed}
    return check_cluster(_launch(file, config, model, replicas, ray_address, hosts, emulate, settings or ()), Console())


@app.command(epilog="Example: pdserve up --detach, and later: pdserve down")
def down(
    now: Annotated[bool, typer.Option("--now", help="Cut running requests off instead of finishing them.")] = False,
    admin_url: Annotated[str, typer.Option(help="Admin address. Default: the only cluster on this machine.")] = "",
) -> int:
    """End a cluster of yours that runs on this machine."""
    from pdserve.deploy.commands.detach import stop_cluster

    return stop_cluster(find_cluster(admin_url, may_start=True).pid, Console(), now=now)


_AdminUrl = Annotated[str, typer.Option(help="Admin address. Default: the only cluster on this machine.")]


@app.command(epilog="Example: pdserve scale decode=3 prefill=2")
def scale(
    replicas: Annotated[list[str], typer.Argument(metavar="ROLE=N...", help="Workers to have of each role.")],
    admin_url: _AdminUrl = "",
) -> int:
    """Change the number of workers of a running cluster; those that leave finish their requests."""
    from pdserve.deploy.commands.change import change, read_replicas

    return change(admin_url, {"scale": read_replicas(replicas)})


@app.command(epilog="Example: pdserve drain decode-1")
def drain(
    workers: Annotated[list[str], typer.Argument(help="Workers that shall leave, such as decode-1.")],
    admin_url: _AdminUrl = "",
) -> int:
    """Let workers finish their requests, and end them for good."""
    from pdserve.deploy.commands.change import change

    return change(admin_url, {"drain": workers})


@app.command(epilog="Example: pdserve restart")
def restart(
    workers: Annotated[list[str] | None, typer.Argument(help="Workers to start anew. Default: all.")] = None,
    admin_url: _AdminUrl = "",
) -> int:
    """Start workers anew, one after the other; each finishes its requests first."""
    from pdserve.deploy.commands.change import change

    return change(admin_url, {"restart": workers or []})


@app.command(epilog="Example: pdserve profile --model ./Llama-3.2-1B-Instruct --dtype bfloat16 --cores 2 --cores 1")
def profile(
    model: Annotated[Path, typer.Option(help="Model folder, or a config.json (random weights).")],
    dtype: Annotated[str, typer.Option(help="Weights and activations: auto, float32, bfloat16 or float16.")] = "auto",
    kv_dtype: Annotated[str, typer.Option(help="KV cache: auto, int8 or float8_e4m3fn.")] = "auto",
    quantization: Annotated[str, typer.Option(help="Layer weights: auto, none, int8 or int4.")] = "auto",
    max_model_len: Annotated[int, typer.Option(min=0, help="Longest sequence, tokens; 0: the model's limit.")] = 0,
    cores: Annotated[list[int] | None, typer.Option(min=1, help="Cores per worker; repeatable.")] = None,
    output: Annotated[Path, typer.Option(help="Hardware file to write; keeps other devices.")] = Path("hardware.yaml"),
    json_output: Annotated[Path | None, typer.Option("--json", help="File for all measured steps (JSON).")] = None,
    budget: Annotated[float, typer.Option(min=1, help="Measurement time, seconds.")] = 120.0,
) -> int:
    """Measure this machine with a model and fit the cost model to it, for placement and planning."""
    from pdserve.deploy.commands.profile import ProfileRequest, run_profile

    config = ModelConfig(
        path=str(model), dtype=dtype, kv_dtype=kv_dtype, quantization=quantization, max_model_len=max_model_len
    )
    check_deployment(DeploymentConfig(model=config))
    request = ProfileRequest(
        model=config,
        num_cores=tuple(dict.fromkeys(cores or ())),
        output=output,
        json_output=json_output,
        budget_s=budget,
    )
    return run_profile(request, Console())


@app.command(epilog='Example: pdserve chat "Why is decode memory-bound?"')
def chat(
    message: Annotated[str, typer.Argument(help="Message to send. Default: start a conversation.")] = "",
    url: Annotated[str, typer.Option(help="API address. Default: the cluster on this machine.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens per answer.")] = 512,
    temperature: Annotated[
        float, typer.Option(min=0, max=2, help="Sampling temperature; 0: the most likely token.")
    ] = 0.0,
) -> int:
    """Chat with the served model; Ctrl-C stops an answer, Ctrl-D ends the conversation."""
    from pdserve.deploy.commands.chat import Conversation, converse

    conversation = Conversation(
        url or find_cluster().url,
        max_tokens=max_tokens,
        temperature=temperature,
        console=Console(),
        api_key=api_key(),
    )
    return converse(conversation, message)


@app.command(epilog="Example: pdserve key team-a --keys-file keys.jsonl --max-in-flight 16")
def key(
    tenant: Annotated[str, typer.Argument(help="Name of the key's owner; tenants share no prefix cache.")],
    keys_file: Annotated[Path, typer.Option(help="File of keys (router.keys_file); made if absent.")],
    max_in_flight: Annotated[int, typer.Option(min=0, help="Unfinished answers at once; 0: no limit.")] = 0,
    max_n: Annotated[int, typer.Option(min=0, help="Answers to one prompt; 0: no limit.")] = 0,
    max_tokens: Annotated[int, typer.Option(min=0, help="Tokens of one answer; 0: no limit.")] = 0,
    requests_per_minute: Annotated[int, typer.Option(min=0, help="0: no limit.")] = 0,
    tokens_per_minute: Annotated[int, typer.Option(min=0, help="Of prompts and answers; 0: no limit.")] = 0,
    grammars_per_minute: Annotated[int, typer.Option(min=0, help="New schemas, patterns, ...; 0: no limit.")] = 0,
    tier: Annotated[
        list[str] | None, typer.Option(help="Tier of slo.tiers that it may ask for, the usual one first. Repeatable.")
    ] = None,
) -> int:
    """Make an API key and print it, once; the file has only its hash. Remove its line to revoke it."""
    from pdserve.deploy.commands.status import running_tiers
    from pdserve.router.http.keys import add_key

    known = running_tiers() if tier else ()
    for each in tier or ():
        if known and each not in known:
            remedy = f"remove its line from {keys_file} unless it is for another cluster, whose routers know the tier"
            typer.echo(f"warning: the tier {each!r} is none of those here ({', '.join(known)}); {remedy}", err=True)
    try:
        made = add_key(
            keys_file,
            tenant,
            max_in_flight=max_in_flight,
            max_n=max_n,
            max_tokens=max_tokens,
            requests_per_minute=requests_per_minute,
            tokens_per_minute=tokens_per_minute,
            grammars_per_minute=grammars_per_minute,
            tiers=tuple(tier or ()),
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    typer.echo(made)
    return 0


@app.command(epilog="Example: pdserve status --admin-url http://127.0.0.1:9000")
def status(
    admin_url: Annotated[str, typer.Option(help="Admin address. Default: the cluster on this machine.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print all that the router reports as JSON.")] = False,
) -> int:
    """Show the workers of a running cluster and their load."""
    from pdserve.deploy.commands.status import show_status

    note = None if admin_url else find_cluster(may_start=True)
    if note and not note.url:
        typer.echo('{"ready": false, "starting": true}' if as_json else f"starting: process {note.pid}, {note.folder}")
        return 1
    is_silent = note is not None and note.is_ray_silent
    down_since_s = {} if note is None else note.down_since_s
    url = note.admin_url if note else admin_url
    return show_status(url, Console(), is_ray_silent=is_silent, down_since_s=down_since_s, as_json=as_json)


@app.command(epilog="Example: pdserve top --interval 2")
def top(
    admin_url: Annotated[str, typer.Option(help="Admin address. Default: the cluster on this machine.")] = "",
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two pictures.")] = 1.0,
    refreshes: Annotated[int, typer.Option(min=0, help="Pictures to draw; 0: until Ctrl-C.")] = 0,
) -> int:
    """Watch rates, latencies against the objectives, and the workers of a running cluster."""
    from pdserve.deploy.commands.top import show_top

    url = admin_url or find_cluster().admin_url
    return show_top(url, Console(), interval_s=interval, num_refreshes=refreshes)


@app.command(epilog="Example: pdserve dashboards --out observe && prometheus --config.file observe/prometheus.yml")
def dashboards(
    out: Annotated[Path, typer.Option(help="Folder to write to.")] = Path("observe"),
    admin_url: Annotated[str, typer.Option(help="Admin address. Default: the cluster on this machine.")] = "",
    token_file: Annotated[str, typer.Option(help="File with the admin token, as Prometheus finds it.")] = "",
    prometheus_url: Annotated[
        str, typer.Option(help="Address of Prometheus, as Grafana finds it.")
    ] = "http://127.0.0.1:9090",
) -> int:
    """Write configuration, alerts and dashboards for Prometheus and Grafana."""
    from pdserve.deploy.observe.files import write_files

    here = {note.admin_url: note.admin_token_file for note in running_clusters()}
    admin_url = admin_url.rstrip("/") or find_cluster().admin_url
    token_file = token_file or here.get(admin_url, "")
    for option, url in (("--admin-url", admin_url), ("--prometheus-url", prometheus_url)):
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{option} is {url!r}; write http:// or https:// before the host")
    try:
        prometheus_file, provisioning = write_files(out, admin_url, token_file, prometheus_url)
    except OSError as error:
        raise DeployError(f"cannot write to {out}: {error.strerror}; give another folder with --out") from error
    typer.echo(f"prometheus --config.file {prometheus_file}")
    typer.echo(f"GF_PATHS_PROVISIONING={provisioning} grafana server --homepath /usr/share/grafana")
    return 0


app.command(epilog="Example: pdserve plan --model ./Llama-3.1-8B --gpu h100-sxm --nodes 2 --traffic chat")(plan)
app.command(epilog="Example: pdserve simulate --model ./Llama-3.1-8B --gpu h100-sxm --traffic chat --rate 4")(simulate)


if __name__ == "__main__":
    main()
