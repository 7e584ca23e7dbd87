"""``pdserve plan``: the best placement for a workload on given GPUs, or the fewest GPUs for a rate.

Turns options into a question for `pdserve.deploy.commands.plan_answer`; with ``--live``, a running cluster provides the
question (`pdserve.deploy.commands.plan_live`).
"""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pdserve.contracts.deployment import DeploymentConfig, ModelConfig
from pdserve.contracts.errors import ConfigError
from pdserve.deploy.commands import plan_options as options
from pdserve.deploy.commands.plan_answer import Outputs, answer, show_worker
from pdserve.deploy.commands.plan_options import ModelOptions, Objectives
from pdserve.deploy.commands.ray_file import PROVIDERS, ray_cluster_path
from pdserve.deploy.config import check_deployment, override, read_settings, with_settings

if TYPE_CHECKING:
    from pdserve.planner.layout import PlannedModel
    from pdserve.planner.search.plan import Effort, Objective

DEFAULT_WORKLOAD = "chat"
MAX_NODES = 64
MAX_GPUS_PER_NODE = 72
MIN_REQUESTS = 100
"""With fewer requests, an objective can be met at any rate."""
_MIN_TRAFFIC_REQUESTS = 1000
"""Least number of requests from which the search judges a workload."""


_KEYS = (
    *(f"model.{name}" for name in ModelOptions._fields),
    *(f"slo.{name}" for name in Objectives._fields),
    "router.policy",
    "kv_transfer.transport",
)
"""Of a deployment file, which belong to a question."""


def plan(
    model: Annotated[
        Path | None,
        typer.Option(help="Model folder, or a config.json; weights are not needed.", rich_help_panel=options.WHAT),
    ] = None,
    gpu: Annotated[
        str,
        typer.Option(
            metavar="KIND", help="GPU, such as h100-sxm; an unknown name lists all.", rich_help_panel=options.GPUS
        ),
    ] = "",
    nodes: Annotated[
        int, typer.Option(min=1, max=MAX_NODES, help="Number of hosts.", rich_help_panel=options.GPUS)
    ] = 1,
    gpus_per_node: Annotated[
        int, typer.Option(min=1, max=MAX_GPUS_PER_NODE, help="GPUs per host.", rich_help_panel=options.GPUS)
    ] = 8,
    decode_gpu: Annotated[
        str,
        typer.Option(
            metavar="KIND", help="Second kind of GPU; each phase may use either.", rich_help_panel=options.GPUS
        ),
    ] = "",
    decode_nodes: Annotated[
        int | None,
        typer.Option(
            min=1, max=MAX_NODES, help="Hosts with the second kind. Default: --nodes.", rich_help_panel=options.GPUS
        ),
    ] = None,
    kv_transport: Annotated[str, typer.Option(hidden=True)] = "auto",
    hardware_file: options.HardwareFileOption = None,
    price: Annotated[
        float | None,
        typer.Option(help="Price, dollars per GPU hour. Default: list price.", rich_help_panel=options.GPUS),
    ] = None,
    dtype: options.DtypeOption = None,
    kv_dtype: options.KvDtypeOption = None,
    quantization: options.QuantizationOption = None,
    max_model_len: options.MaxModelLenOption = None,
    traffic: options.TrafficOption = "",
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Key of model, slo, router.policy or kv_transfer.transport of a deployment file, such as "
            "model.quantization=fp8; repeatable.",
            rich_help_panel=options.WHAT,
        ),
    ] = None,
    workload: options.WorkloadOption = "",
    input_tokens: options.TokensOption = None,
    output_tokens: options.TokensOption = None,
    burstiness: options.BurstinessOption = None,
    max_tokens: options.MaxTokensOption = 0,
    lenient: options.LenientOption = False,
    time_unit: options.TimeUnitOption = "auto",
    sessions: options.SessionsOption = False,
    ttft: options.TtftOption = None,
    tpot: options.TpotOption = None,
    attainment: options.AttainmentOption = None,
    policy: options.PolicyOption = None,
    rate: Annotated[
        float | None,
        typer.Option(help="Requests per second to find the fewest GPUs for.", rich_help_panel=options.WHAT),
    ] = None,
    objective: Annotated[
        str,
        typer.Option(
            help="rate, rate-per-device, and with --rate fewest-devices or least-cost.", rich_help_panel=options.WHAT
        ),
    ] = "",
    output: Annotated[
        Path | None,
        typer.Option(help="Deployment file to write for the best placement.", rich_help_panel=options.ANSWER),
    ] = None,
    ray_cluster: Annotated[
        str,
        typer.Option(
            metavar="PROVIDER",
            help="local or aws: also write a file for ray up, beside --output.",
            rich_help_panel=options.ANSWER,
        ),
    ] = "",
    report: Annotated[Path | None, typer.Option(help="Report to write (HTML).", rich_help_panel=options.ANSWER)] = None,
    json: Annotated[
        Path | None,
        typer.Option(help="JSON file to write; -: standard output, without tables.", rich_help_panel=options.ANSWER),
    ] = None,
    top: Annotated[
        int,
        typer.Option(
            min=0,
            help="Layouts to show in a table, with the reasons; 0 shows the answer alone.",
            rich_help_panel=options.ANSWER,
        ),
    ] = 0,
    jobs: Annotated[
        int, typer.Option(min=0, help="Simulation processes; 0: one per core.", rich_help_panel=options.ANSWER)
    ] = 0,
    requests: Annotated[
        int | None,
        typer.Option(
            min=MIN_REQUESTS,
            help="Most requests of a run. Default: what a steady state takes, 20,000 at least.",
            rich_help_panel=options.ANSWER,
        ),
    ] = None,
    seed: options.SeedOption = 0,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="Show memory and times of a worker by part, without a search.",
            rich_help_panel=options.ANSWER,
        ),
    ] = False,
    live: Annotated[
        str,
        typer.Option(
            metavar="URL", help="Admin address of a running cluster to compare with.", rich_help_panel=options.ANSWER
        ),
    ] = "",
    window: Annotated[
        float, typer.Option(help="Time to watch the cluster, seconds.", rich_help_panel=options.ANSWER)
    ] = 60.0,
    hysteresis: Annotated[
        float,
        typer.Option(min=0, help="Least gain in goodput for a change, as a share.", rich_help_panel=options.ANSWER),
    ] = 0.1,
    apply: Annotated[
        bool,
        typer.Option(
            "--apply",
            help="With --live: compare other numbers of workers of each role, and change to the best.",
            rich_help_panel=options.ANSWER,
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Show what --apply would do.", rich_help_panel=options.ANSWER),
    ] = False,
) -> int:
    """Find the placement with the most goodput on given GPUs, or the fewest GPUs for a rate."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the search ends its processes and semaphores
    given = _given(settings or ())
    kv_transport, policy = given.get("kv_transfer.transport", kv_transport), given.get("router.policy", policy)
    model_options = ModelOptions(dtype, kv_dtype, quantization, max_model_len)
    model_options = model_options._replace(**_of_section(given, "model"))
    model_config = options.model_config(ModelConfig(path=str(model or ""), dtype="bfloat16"), model_options)
    named = options.named_traffic(traffic, {"--workload": workload}, input_tokens, output_tokens)
    is_given = named or rate or decode_gpu or price or objective or burstiness is not None or max_tokens or policy
    if live and (is_given or kv_transport != "auto"):
        raise ConfigError(
            f"traffic and GPUs are those of {live}: leave out --traffic, --burstiness, --max-tokens, --rate, "
            "--objective, --decode-gpu, --price, and --set of router.policy and kv_transfer.transport"
        )
    if (apply or dry_run) and not live:
        raise ConfigError("--apply and --dry-run change a running cluster: name it with --live, its admin address")
    if (apply or dry_run) and (output or gpu or hardware_file or model):
        raise ConfigError("--apply keeps workers as they are: leave out --output, --gpu, --hardware-file and --model")
    if price is not None and decode_gpu:
        raise ConfigError("--price is of one kind of GPU, and there are two: give their prices in a --hardware-file")
    for name, value in (("rate", rate), ("price", price), ("window", window)):
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"--{name} is {value}; write a number above 0")
    if explain and (output or report or live):
        raise ConfigError("--explain searches nothing: leave out --output, --report and --live")
    ray_file = _ray_file(ray_cluster, output, decode_gpu) if ray_cluster else None
    options.check_writable(output, ray_file, report, json)
    if report:
        from pdserve.planner.report.page import check_drawing

        with options.usage():
            check_drawing()
    objectives = Objectives(ttft, tpot, attainment)._replace(**_of_section(given, "slo"))
    outputs = Outputs(output, ray_cluster, report, json, num_rows=top, num_processes=jobs, model=model)
    if live:
        from pdserve.deploy.commands.plan_live import Watch, plan_live

        watch = Watch(live, window, hysteresis, gpu, hardware_file, applies=apply and not dry_run, previews=dry_run)
        return plan_live(watch, model_options, objectives, _effort(requests, seed), outputs)
    if not gpu:
        raise ConfigError("no GPU is named; give --gpu, such as --gpu h100-sxm")
    added = options.added_hardware(hardware_file)
    kinds = [(options.device(gpu, added), nodes)]
    if decode_gpu:
        kinds.append((options.device(decode_gpu, added), decode_nodes or nodes))
        if kinds[0][0].name == kinds[1][0].name:
            raise ConfigError(
                f"--decode-gpu is {kinds[0][0].name}, as --gpu is: leave it out, and count all in --nodes"
            )
    config = override(override(DeploymentConfig(), "kv_transfer", transport=kv_transport), "router", policy=policy)
    check_deployment(config, use="simulate")
    planned = options.planned_model(model_config, kv_transport)
    planned, notes = _bounded(planned, has_length=bool(model_config.max_model_len))

    from pdserve.planner.search.plan import Question, Supply

    described = options.traffic(
        named or DEFAULT_WORKLOAD,
        max_model_len=planned.max_model_len,
        model=model_config,
        lenient=lenient,
        time_unit=time_unit,
        sessions=sessions,
        burstiness=burstiness,
        max_tokens=max_tokens,
    ).with_at_least(_MIN_TRAFFIC_REQUESTS)
    described = dataclasses.replace(described, notes=(*described.notes, *notes))
    question = Question(
        model=planned,
        slo=options.objectives(described.usual_slo, objectives),
        fleet=tuple(
            Supply(hardware=kind, num_nodes=count, devices_per_node=gpus_per_node, dollars_per_hour=price)
            for kind, count in kinds
        ),
        objective=_objective(objective, rate),
        rate=rate or 0.0,
        policy=config.router.policy,
        effort=dataclasses.replace(_effort(requests, seed), most_requests=described.max_requests),
    )
    return show_worker(question, described, outputs) if explain else answer(question, described, outputs)


def _bounded(model: PlannedModel, *, has_length: bool) -> tuple[PlannedModel, tuple[str, ...]]:
    """The model with the usual limit on a sequence unless the user names one; a note if its own is higher."""
    from pdserve.planner.planned_model import MAX_DEFAULT_LENGTH

    own = model.max_model_len
    if has_length or own <= MAX_DEFAULT_LENGTH:
        return model, ()
    note = (
        f"Planned for sequences of up to {MAX_DEFAULT_LENGTH:,} tokens, to which a deployment file of --output limits "
        f"pdserve up; the model's own limit is {own:,}: --set model.max_model_len={own} plans for them."
    )
    return dataclasses.replace(model, max_model_len=MAX_DEFAULT_LENGTH), (note,)


def _given(settings: Sequence[str]) -> dict[str, Any]:
    """Values of ``--set`` by key, each of which belongs to a question."""
    check_deployment(with_settings(DeploymentConfig(), settings), use="simulate")
    given = read_settings(settings)
    for key in given:
        if key not in _KEYS:
            raise ConfigError(
                f"--set {key}: the plan answers it, or does not depend on it; plan takes {', '.join(_KEYS)}"
            )
    return given


def _of_section(given: Mapping[str, Any], section: str) -> dict[str, Any]:
    return {key.partition(".")[2]: value for key, value in given.items() if key.startswith(f"{section}.")}


def _ray_file(provider: str, output: Path | None, decode_gpu: str) -> Path:
    if provider not in PROVIDERS:
        raise ConfigError(f"--ray-cluster is {provider!r}; write {' or '.join(PROVIDERS)}")
    if output is None:
        raise ConfigError("--ray-cluster writes a file beside the deployment file: add --output")
    if decode_gpu:
        raise ConfigError("--ray-cluster writes hosts of one kind: leave out --decode-gpu")
    return ray_cluster_path(output, provider)


def _effort(num_requests: int | None, seed: int) -> Effort:
    from pdserve.planner.search.plan import Effort

    most = Effort().screen_requests
    screen_requests = most if num_requests is None else min(num_requests, most)
    return Effort(final_requests=num_requests, screen_requests=screen_requests, seed=seed)


def _objective(name: str, rate: float | None) -> Objective:
    """Objective of that name; by default the fewest GPUs with a rate, else the most goodput."""
    from pdserve.planner.search.plan import Objective

    name = name or (Objective.RATE if rate is None else Objective.FEWEST_DEVICES).value
    found = {objective.value: objective for objective in Objective}.get(name)
    if found is None:
        raise ConfigError(f"--objective is {name!r}; write one of {', '.join(each.value for each in Objective)}")
    if found.has_rate != (rate is not None):
        problem = "needs a rate: add --rate" if found.has_rate else "takes no rate: leave out --rate"
        raise ConfigError(f"--objective {name} {problem}")
    return found
