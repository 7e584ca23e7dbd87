"""``pdserve simulate``: performance of a placement under a workload, without a GPU.

Reads options and a deployment file and builds the layout; `pdserve.planner.simulate.simulated_run` does the work.
Imports no planner module before the options are checked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from pdserve.contracts.deployment import DeploymentConfig, ModelConfig, PhaseConfig
from pdserve.contracts.errors import ConfigError
from pdserve.contracts.worker_config import WorkerRole
from pdserve.deploy.commands import plan_options as options
from pdserve.deploy.config import (
    check_deployment,
    override,
    read_deployment,
    read_profile,
    with_settings,
)
from pdserve.engine.scheduling.speculation import DRAFT_SHARE, NGRAM_SHARE
from pdserve.model.weights.demo_model import DEMO_MODEL
from pdserve.planner import wording

if TYPE_CHECKING:
    from pdserve.planner.layout import Layout, PlannedModel
    from pdserve.planner.simulate.simulated_run import Run, RunResult
    from pdserve.planner.workload.traffic import Traffic

DEFAULT_REQUESTS = 3000
_SHARED_NOTE = "Workers share GPUs: their memory is divided, but each step is timed as if it had the GPU to itself."
Degree = Annotated[int | None, typer.Option(min=1, hidden=True)]


def simulate(
    gpu: options.GpuOption,
    file: Annotated[Path | None, typer.Argument(help="Deployment file (YAML), such as from pdserve plan.")] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="Model folder, or a config.json; weights are not needed.", rich_help_panel=options.WHAT),
    ] = None,
    colocated: Annotated[
        bool, typer.Option("--colocated", help="Use workers for both phases.", rich_help_panel=options.GPUS)
    ] = False,
    settings: options.SettingsOption = None,
    replicas: Degree = None,
    tensor_parallel: Degree = None,
    pipeline_parallel: Degree = None,
    prefill: Degree = None,
    prefill_tp: Degree = None,
    prefill_pp: Degree = None,
    decode: Degree = None,
    decode_tp: Degree = None,
    decode_pp: Degree = None,
    max_batch_tokens: Degree = None,
    max_batch_size: Degree = None,
    gpus_per_node: Annotated[
        int | None,
        typer.Option(
            min=1, help="GPUs per host. Default: all on one host, up to its size.", rich_help_panel=options.GPUS
        ),
    ] = None,
    decode_gpu: options.DecodeGpuOption = "",
    hardware_file: options.HardwareFileOption = None,
    dtype: options.DtypeOption = None,
    kv_dtype: options.KvDtypeOption = None,
    quantization: options.QuantizationOption = None,
    max_model_len: options.MaxModelLenOption = None,
    traffic: options.TrafficOption = "",
    rate: Annotated[
        float | None, typer.Option(help="Requests per second. Default: as in the trace.", rich_help_panel=options.WHAT)
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            min=1, help="Concurrent sessions (closed loop), in place of --rate.", rich_help_panel=options.WHAT
        ),
    ] = None,
    workload: options.WorkloadOption = "",
    trace: options.WorkloadOption = "",
    input_tokens: options.TokensOption = None,
    output_tokens: options.TokensOption = None,
    burstiness: options.BurstinessOption = None,
    max_tokens: options.MaxTokensOption = 0,
    lenient: options.LenientOption = False,
    time_unit: options.TimeUnitOption = "auto",
    sessions: options.SessionsOption = False,
    requests: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Requests to simulate. Default: {DEFAULT_REQUESTS}, or the whole trace.",
            rich_help_panel=options.ANSWER,
        ),
    ] = None,
    ttft: options.TtftOption = None,
    tpot: options.TpotOption = None,
    attainment: options.AttainmentOption = None,
    policy: options.PolicyOption = None,
    right_guesses: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Share of guesses that are right, of workers with speculation. Default: what they expect at first.",
            rich_help_panel=options.WHAT,
        ),
    ] = None,
    seed: options.SeedOption = 0,
    json: Annotated[
        Path | None,
        typer.Option(help="JSON file to write; -: standard output, without tables.", rich_help_panel=options.ANSWER),
    ] = None,
) -> int:
    """Predict latencies, attainment and throughput of a placement under load, without a GPU."""
    options.check_writable(json)
    config = with_settings(_deployment(file, is_colocated=colocated), settings or ())
    path = str(model) if model is not None else None
    if file is not None and not (path or config.model.path):
        path = str(DEMO_MODEL)
    config = override(
        config,
        "model",
        path=path,
        dtype=dtype,
        kv_dtype=kv_dtype,
        quantization=quantization,
        max_model_len=max_model_len,
    )
    for phase, workers in (
        ("prefill", _Workers(prefill, prefill_tp, prefill_pp)),
        ("decode", _Workers(decode, decode_tp, decode_pp)),
        ("mixed", _Workers(replicas, tensor_parallel, pipeline_parallel)),
    ):
        config = _with_workers(config, phase, workers)
        config = override(config, phase, max_batch_tokens=max_batch_tokens, max_batch_size=max_batch_size)
    config = override(config, "router", policy=policy)
    check_deployment(config, use="simulate")
    named = options.named_traffic(traffic, {"--workload": workload, "--trace": trace}, input_tokens, output_tokens)
    if not named:
        raise ConfigError(options.TRAFFIC_REMEDY)
    if concurrency is not None and rate is not None:
        raise ConfigError("--rate and --concurrency exclude each other: a closed loop has the rate that comes about")
    if rate is not None and not 0 < rate < float("inf"):
        raise ConfigError(f"--rate is {rate}; write requests per second, a number above 0")

    from pdserve.planner.simulate.simulated_run import Run

    planned = options.planned_model(config.model, config.kv_transfer.transport)
    described = options.traffic(
        named,
        model=config.model,
        max_model_len=planned.max_model_len,
        lenient=lenient,
        time_unit=time_unit,
        sessions=sessions,
        burstiness=burstiness,
        max_tokens=max_tokens,
    )
    usual = DeploymentConfig(slo=config.slo if file is not None else described.usual_slo)
    num_requests = requests or described.max_requests or DEFAULT_REQUESTS
    run = Run(
        model=planned,
        layout=_with_guesses(
            _layout(config, planned, _Devices(gpu, decode_gpu, hardware_file, gpus_per_node or 0)),
            config,
            right_guesses,
        ),
        traffic=described,
        slo=options.objectives(with_settings(usual, settings or ()).slo, options.Objectives(ttft, tpot, attainment)),
        num_requests=num_requests,
        rate=0.0 if concurrency else _rate(rate, described, num_requests, seed),
        concurrency=concurrency or 0,
        max_in_flight=config.router.max_queued_requests,
        policy=config.router.policy,
        seed=seed,
    )
    return _report(run, json)


class _Workers(NamedTuple):
    """Options for the workers of one kind."""

    replicas: int | None
    tensor_parallel: int | None
    pipeline_parallel: int | None


class _Devices(NamedTuple):
    gpu: str
    decode_gpu: str
    hardware_file: Path | None
    gpus_per_node: int


def _deployment(file: Path | None, *, is_colocated: bool) -> DeploymentConfig:
    """Deployment before options change it: the file's, or one worker of each phase."""
    config = read_deployment(file, use="simulate") if file else DeploymentConfig(model=ModelConfig(dtype="bfloat16"))
    if is_colocated and not config.mixed.replicas:
        none = PhaseConfig(replicas=0)
        config = dataclasses.replace(config, prefill=none, decode=none, mixed=PhaseConfig())
    return config


def _with_workers(config: DeploymentConfig, phase: str, workers: _Workers) -> DeploymentConfig:
    """``config`` changed by the options for the workers of one phase.

    Raises:
        ConfigError: the deployment has no workers of this phase, so the options would change nothing.
    """
    if not getattr(config, phase).replicas and any(value is not None for value in workers):
        remedy = (
            "--replicas, --tensor-parallel and --pipeline-parallel are of colocated workers: add --colocated, or use "
            "--set decode.replicas=2, --set prefill.tensor_parallel=2 and the like"
            if phase == "mixed"
            else f"there are no {phase} workers to give options of: leave out --colocated"
        )
        raise ConfigError(remedy)
    return override(config, phase, **workers._asdict())


def _rate(rate: float | None, traffic: Traffic, num_requests: int, seed: int) -> float:
    if rate is not None:
        return rate
    with options.failure():
        found = traffic.recorded_rate(num_requests, seed)
    if found is None:
        raise ConfigError("no rate is named: give --rate in requests per second, or --concurrency for a closed loop")
    return found


def _layout(config: DeploymentConfig, planned: PlannedModel, devices: _Devices) -> Layout:
    from pdserve.planner.report.deployment_file import DevicePool, layout_of

    added = {**read_profile(config), **options.added_hardware(devices.hardware_file)}
    usual = options.device(devices.gpu, added)
    decode = options.device(devices.decode_gpu, added) if devices.decode_gpu else usual
    pools = {
        role: DevicePool(decode if role is WorkerRole.DECODE else usual, config.phase(role).kv_memory_bytes)
        for role in WorkerRole
    }
    with options.failure():
        return layout_of(config, planned, pools, devices_per_host=devices.gpus_per_node)


def _with_guesses(layout: Layout, config: DeploymentConfig, share_right: float | None) -> Layout:
    """``layout`` with what its workers guess.

    Args:
        share_right: of guesses; ``None``: as workers expect it of their first sequence.
    """
    from pdserve.planner.layout import Guesses

    pools: dict[str, Any] = {}
    for pool in layout.pools:
        phase = config.phase(pool.role)
        if phase.drafter == "none":
            continue
        if phase.draft_path and not pool.hardware.is_host:
            raise ConfigError(
                f"{pool.role.value}.speculation has a draft model, which guesses on CPUs only so far: simulate with "
                "--gpu cpu-16 or a device of pdserve profile, or use ngram or none"
            )
        draft, usual = None, NGRAM_SHARE
        if phase.draft_path:
            of_draft = dataclasses.replace(config.model, path=phase.draft_path, quantization="auto")
            draft, usual = options.planned_model(of_draft, config.kv_transfer.transport), DRAFT_SHARE
        guesses = Guesses(share_right=usual if share_right is None else share_right, draft=draft)
        pools[pool.role.value] = dataclasses.replace(pool, guesses=guesses)
    if share_right is not None and not pools:
        raise ConfigError("--right-guesses: no workers guess; add --set decode.speculation=ngram, or leave it out")
    return dataclasses.replace(layout, **pools)


def _notes(run: Run, result: RunResult) -> Iterator[str]:
    """What the workers guess, and what comes of it."""
    for pool, use in zip(run.layout.pools, result.attainment.pools, strict=True):
        if pool.guesses is not None:
            yield (
                f"Assumes that {wording.share(pool.guesses.share_right)} of guesses are right: {pool.role.value} "
                f"workers compute {use.tokens_per_step:.2f} tokens of an answer in a step."
            )


def _report(run: Run, json: Path | None) -> int:
    from pdserve.planner.extrapolation import extrapolations
    from pdserve.planner.report.run_tables import print_run, run_json
    from pdserve.planner.search.layouts import check_fits
    from pdserve.planner.simulate.simulated_run import carry_out

    with options.failure():
        words, notes = run.traffic.described()
        sample = run.traffic.draw(run.num_requests, run.seed)
        check_fits(run.layout, run.model, sample)
        with options.shown_progress(is_brief=True) as report:
            result = carry_out(run, report)
        notes = (*notes, *_notes(run, result), *extrapolations(run.model, run.layout, sample.longest()))
        if any(pool.workers_per_device > 1 for pool in run.layout.pools):
            notes = (*notes, _SHARED_NOTE)
    if json is None or str(json) != "-":
        print_run(result, options.console(), words, notes)
    if json is not None:
        options.write_json(json, run_json(result, words, notes))
    return 0
