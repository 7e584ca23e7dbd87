"""``pdserve bench serve`` and ``sweep``: load a running server at one rate, or at several to find its goodput."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from pdserve.contracts.deployment import SloConfig
from pdserve.contracts.errors import DeployError
from pdserve.deploy.cluster.folder import NEEDS_KEY, admin_headers, api_key, find_cluster, running_clusters
from pdserve.deploy.commands.plan_options import BurstinessOption, SessionsOption, TimeUnitOption

if TYPE_CHECKING:
    from pdserve.loadgen import load
    from pdserve.planner.workload.requests import SimulatedRequest
    from pdserve.planner.workload.trace_lines import TimeUnit
    from pdserve.planner.workload.workload import Workload

_FILE_DATASETS = ("sharegpt", "mooncake", "azure", "burstgpt", "plain", "custom")
_AT_ONCE = 1e9
"""Requests per second that stand for an infinite rate."""
_MAX_COMPARED = 3


UrlOption = Annotated[
    str, typer.Option("--base-url", "--url", help="Address of the API; by default that of the cluster that runs here.")
]
DatasetOption = Annotated[
    str,
    typer.Option(
        "--dataset-name",
        "--workload",
        metavar="NAME",
        help="random, a preset such as chat or code, or the format of --dataset-path.",
    ),
]
DatasetPathOption = Annotated[
    Path | None,
    typer.Option(
        "--dataset-path", "--trace", help="Lengths and arrivals: ShareGPT, Mooncake, Azure, BurstGPT, or plain."
    ),
]
InputLenOption = Annotated[
    int, typer.Option("--random-input-len", "--input-tokens", min=1, help="Prompt tokens, if random.")
]
OutputLenOption = Annotated[
    int, typer.Option("--random-output-len", "--output-tokens", min=1, help="Output tokens, if random.")
]
RangeRatioOption = Annotated[
    float, typer.Option("--random-range-ratio", min=0.0, max=0.99, help="Lengths vary by this share, up and down.")
]
ConcurrencyOption = Annotated[int | None, typer.Option(min=1, help="Requests in flight at once.")]
GoodputOption = Annotated[
    list[str] | None, typer.Option(metavar="METRIC:MS ...", help="Objectives, such as ttft:250 tpot:50; also e2el.")
]
MaxModelLenOption = Annotated[int, typer.Option(min=0, help="Shorten requests to this; 0 asks the server.")]
SeedOption = Annotated[int, typer.Option(min=0, help="Seed of lengths and arrivals.")]
VocabOption = Annotated[int, typer.Option(min=1, help="Prompts are random token ids below this.")]
TimeScaleOption = Annotated[float, typer.Option(min=1e-3, help="Time scale of an emulated cluster; divides all times.")]
MoreObjectives = Annotated[list[str] | None, typer.Argument(hidden=True)]


def serve(
    url: UrlOption = "",
    dataset_name: DatasetOption = "",
    dataset_path: DatasetPathOption = None,
    input_len: InputLenOption = 256,
    output_len: OutputLenOption = 128,
    range_ratio: RangeRatioOption = 0.0,
    num_prompts: Annotated[int, typer.Option("--num-prompts", "--requests", min=1, help="Number of requests.")] = 100,
    request_rate: Annotated[
        float, typer.Option("--request-rate", "--rate", min=1e-6, help="Requests per second; inf sends all at once.")
    ] = 1.0,
    burstiness: BurstinessOption = None,
    time_unit: TimeUnitOption = "auto",
    sessions: SessionsOption = False,
    max_concurrency: ConcurrencyOption = None,
    goodput: GoodputOption = None,
    percentile_metrics: Annotated[str, typer.Option(help="Latencies to report, of ttft,tpot,itl,e2el.")] = (
        "ttft,tpot,itl"
    ),
    metric_percentiles: Annotated[str, typer.Option(help="Percentiles to report.")] = "50,90,99",
    max_model_len: MaxModelLenOption = 0,
    seed: SeedOption = 0,
    vocab_size: VocabOption = 256,
    time_scale: TimeScaleOption = 1.0,
    save_result: Annotated[bool, typer.Option("--save-result", help="Write the JSON to a file.")] = False,
    result_dir: Annotated[Path, typer.Option(exists=True, file_okay=False, help="Folder of that file.")] = Path(),
    result_filename: Annotated[str, typer.Option(help="Its name; by default by rate and time.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    more_objectives: MoreObjectives = None,
) -> int:
    """Send requests on schedule, without waiting for earlier ones; show latencies and goodput.

    Options, figures and JSON keys are those of `vllm bench serve`.
    """
    from pdserve.loadgen import figures

    started = datetime.now(UTC)
    with _usage():
        objectives = _objectives(goodput, more_objectives)
        metrics = figures.parse_metrics(percentile_metrics)
        percentiles = figures.parse_percentiles(metric_percentiles)
        lengths = (input_len, output_len, range_ratio)
        traffic = workload_of(dataset_name, dataset_path, lengths, burstiness, time_unit, sessions)
        target = _Target(url, traffic, num_prompts, seed, max_model_len, vocab_size, time_scale, max_concurrency)
    measured = target.load(request_rate)
    if not objectives:
        usual = traffic.slo or SloConfig()
        objectives = {"ttft": 1e3 * usual.ttft_seconds, "tpot": 1e3 * usual.tpot_seconds}
    result = {
        "date": started.strftime("%Y%m%d-%H%M%S"),
        "request_rate": request_rate if isfinite(request_rate) else "inf",
        "burstiness": burstiness or 1.0,
        "max_concurrency": max_concurrency,
        **figures.serving_result(measured, objectives, metrics, percentiles),
    }
    if save_result or result_filename:
        name = result_filename or f"pdserve-{request_rate:g}qps-{result['date']}.json"
        (result_dir / name).write_text(json.dumps(result) + "\n")
    lines = figures.result_lines(result, metrics, percentiles)
    typer.echo(json.dumps(result) if as_json else "\n".join(lines))
    if result["problems"]:
        raise DeployError(f"these figures do not count: {'; '.join(result['problems'])}")
    return 0 if result["completed"] else 1


def sweep(
    url: UrlOption = "",
    dataset_name: DatasetOption = "",
    dataset_path: DatasetPathOption = None,
    input_len: InputLenOption = 256,
    output_len: OutputLenOption = 128,
    range_ratio: RangeRatioOption = 0.0,
    num_prompts: Annotated[int, typer.Option("--num-prompts", "--requests", min=10, help="Requests per rate.")] = 500,
    request_rates: Annotated[
        str, typer.Option(metavar="RATE,RATE,...", help="Requests per second; by default the goodput is searched.")
    ] = "",
    start_rate: Annotated[float, typer.Option(min=1e-6, help="First rate of the search.")] = 1.0,
    tolerance: Annotated[
        float, typer.Option(min=0.005, max=1.0, help="Share by which the rates around the goodput may differ.")
    ] = 0.05,
    burstiness: BurstinessOption = None,
    time_unit: TimeUnitOption = "auto",
    sessions: SessionsOption = False,
    max_concurrency: ConcurrencyOption = None,
    goodput: GoodputOption = None,
    attainment: Annotated[float, typer.Option(min=0.01, max=0.9999, help="Share that should meet both.")] = 0.9,
    max_model_len: MaxModelLenOption = 0,
    seed: SeedOption = 0,
    vocab_size: VocabOption = 256,
    time_scale: TimeScaleOption = 1.0,
    label: Annotated[str, typer.Option(help="Name of this server in tables and charts.")] = "pdserve",
    compare: Annotated[
        list[Path] | None,
        typer.Option(exists=True, dir_okay=False, help="JSON of an earlier sweep, drawn beside it; up to 3."),
    ] = None,
    result_dir: Annotated[Path, typer.Option(exists=True, file_okay=False, help="Folder of the files.")] = Path(),
    result_filename: Annotated[
        str, typer.Option(help="Their name without an ending; by default by label and time.")
    ] = "",
    more_objectives: MoreObjectives = None,
) -> int:
    """Measure a server at several rates and find its goodput: the highest rate at which enough requests meet both
    objectives. Writes JSON, CSV, and a page with charts.
    """
    from pdserve.contracts.codec import from_json, to_json
    from pdserve.deploy.commands.plan_options import check_writable
    from pdserve.loadgen.page import sweep_cells, sweep_html
    from pdserve.loadgen.sweep import Sweep, Sweeper, SweepPoint, sweep_csv
    from pdserve.planner.report.page import check_drawing

    started = datetime.now(UTC)
    default_name = re.sub(r"[^\w.-]+", "-", f"pdserve-sweep-{label}-{started.strftime('%Y%m%d-%H%M%S')}")
    files = [result_dir / f"{result_filename or default_name}{ending}" for ending in (".json", ".csv", ".html")]
    check_writable(*files)
    with _usage():
        check_drawing("a sweep's page")
        rates = _rates(request_rates)
        earlier = [from_json(Sweep, path.read_text(), str(path)) for path in compare or ()]
        if len(earlier) > _MAX_COMPARED:
            raise ValueError(f"--compare draws {_MAX_COMPARED} sweeps, not {len(earlier)}")
        objectives = _objectives(goodput, more_objectives)
        if "e2el" in objectives:
            raise ValueError("--goodput e2el: a sweep judges ttft and tpot; leave it out")
        lengths = (input_len, output_len, range_ratio)
        traffic = workload_of(dataset_name, dataset_path, lengths, burstiness, time_unit, sessions)
        target = _Target(url, traffic, num_prompts, seed, max_model_len, vocab_size, time_scale, max_concurrency)
    usual = traffic.slo or SloConfig()
    slo = SloConfig(
        ttft_seconds=objectives.get("ttft", 1e3 * usual.ttft_seconds) / 1e3,
        tpot_seconds=objectives.get("tpot", 1e3 * usual.tpot_seconds) / 1e3,
        attainment=attainment,
    )

    def report(point: SweepPoint) -> None:
        rate, share, interval, good, *_, tokens, state = sweep_cells(point)
        typer.echo(f"{rate:>8}/s  {share:>7} ({interval})  {good:>6} good/s  {tokens:>7} tokens/s  {state}".rstrip())

    sweeper = Sweeper(target.load, slo, phases=target.phases_s, report=report)
    interruption: BaseException | None = None
    try:
        if rates:
            sweeper.rates(rates)
        else:
            sweeper.search(start_rate, tolerance)
    except (DeployError, KeyboardInterrupt) as error:
        if not sweeper.num_points:
            raise
        interruption = error
    found = sweeper.result(label, target.address, started.isoformat(timespec="seconds"), traffic.name)
    texts = (to_json(found) + "\n", sweep_csv(found), sweep_html([found, *earlier]))
    for file, text in zip(files, texts, strict=True):
        file.write_text(text)
    typer.echo(f"Goodput, requests/s: {found.verdict}")
    typer.echo(f"Written: {', '.join(map(str, files))}")
    if interruption is not None:
        raise interruption
    if sweeper.problems:
        raise DeployError(f"these figures do not count: {'; '.join(sweeper.problems)}")
    return 0 if found.goodput else 1


class _Target:
    """A server and the requests to send to it."""

    def __init__(
        self,
        url: str,
        traffic: Workload,
        num_prompts: int,
        seed: int,
        max_model_len: int,
        vocab_size: int,
        time_scale: float,
        max_concurrency: int | None,
    ) -> None:
        """``url``: empty for the cluster that runs here; ``max_model_len``: 0 asks the server.

        Raises:
            ValueError: fewer requests in the trace.
            DeployError: the server does not answer, or no cluster runs here.
        """
        self.address = (url or find_cluster().url).rstrip("/").removesuffix("/v1")
        max_model_len = max_model_len or _max_model_len(self.address)
        self._sample = traffic.draw(num_prompts, seed, max_model_len=max_model_len)
        if any(self._sample.clamped):
            typer.echo(f"To fit into {max_model_len} tokens: {self._sample.clamped}.", err=True)
        self._vocab_size, self._time_scale, self._max_concurrency = vocab_size, time_scale, max_concurrency

    def load(self, rate: float) -> load.Measurement:
        """Send all requests at ``rate``, with bars on a terminal.

        Raises:
            DeployError: the server does not answer.
        """
        from pdserve.loadgen.load import measure_load

        requests = self._sample.at_rate(min(rate, _AT_ONCE))
        try:
            with _bars(requests) as shown:
                return measure_load(
                    self.address,
                    requests,
                    vocab_size=self._vocab_size,
                    time_scale=self._time_scale,
                    max_concurrency=self._max_concurrency,
                    api_key=api_key(),
                    progress=shown,
                )
        except OSError as error:
            raise DeployError(f"{self.address} does not answer: {error}") from error

    def phases_s(self) -> dict[str, float]:
        """Seconds that requests spent in each phase; empty unless the server is a cluster of this user and host."""
        import httpx
        from prometheus_client.parser import text_string_to_metric_families

        from pdserve.contracts.metrics import PHASE_SECONDS

        notes = [note for note in running_clusters() if note.url == self.address]
        seconds: dict[str, float] = defaultdict(float)
        for url in (url for note in notes for url in (note.admin_url, *note.other_admin_urls)):
            try:
                text = httpx.get(f"{url}/metrics", headers=admin_headers(url), trust_env=False).text
            except httpx.HTTPError:
                return {}
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    if sample.name == f"{PHASE_SECONDS.name}_sum":
                        seconds[sample.labels["phase"]] += sample.value / self._time_scale
        return dict(seconds)


@contextmanager
def _usage() -> Iterator[None]:
    """Turns ValueError into bad usage."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


@contextmanager
def _bars(requests: Sequence[SimulatedRequest]) -> Iterator[Callable[[load.Progress], None]]:
    """Four bars: requests sent and done, prompt tokens prefilled, tokens decoded. Where prefill lags behind the
    requests sent, prompts queue; where decode lags behind prefill, answers do."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    turns = [turn for request in requests for turn in request.turns()]
    totals = {
        "sent": len(turns),
        "done": len(turns),
        "prefill": sum(turn.num_prompt_tokens for turn in turns),
        "decode": sum(turn.num_output_tokens for turn in turns),
    }
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:>8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks = [bars.add_task(name, total=total) for name, total in totals.items()]

        def show(reached: load.Progress) -> None:
            for task, value in zip(tasks, reached, strict=True):
                bars.update(task, completed=value)

        yield show


def _objectives(goodput: list[str] | None, more: list[str] | None) -> dict[str, float]:
    """Milliseconds by metric; ``more`` are the pairs after the first, as vLLM's option takes several values."""
    from pdserve.loadgen.figures import parse_objectives

    if more and not goodput:
        raise ValueError(f"unexpected argument {more[0]!r}")
    return parse_objectives([*(goodput or ()), *(more or ())])


def _rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in text.split(",")] if text else []
    except ValueError:
        rates = [-1.0]
    if not all(0 < rate < inf for rate in rates):
        raise ValueError(f"--request-rates {text!r}: write numbers above 0, such as 1,2,4")
    return rates


def workload_of(
    name: str,
    path: Path | None,
    lengths: tuple[int, int, float],
    burstiness: float | None = None,
    time_unit: TimeUnit = "auto",
    sessions: bool = False,
) -> Workload:
    """Workload of the options.

    Args:
        lengths: prompt tokens, output tokens and the share by which they vary, if random.
        burstiness: shape of the gamma distribution of the arrival gaps, as in vLLM; ``None`` keeps a trace's gaps.
        time_unit, sessions: of `read_trace`.

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
            trace = read_trace(path, time_unit=time_unit, sessions=sessions)
            return trace_workload(trace, arrivals=RandomGaps(burstiness**-0.5) if burstiness else None)
        except OSError as error:
            raise DeployError(f"cannot read {path}: {error.strerror}") from error
    if sessions:
        raise ValueError("--sessions joins the requests of a trace: add its --dataset-path, or leave it out")
    if name in _FILE_DATASETS:
        raise ValueError(f"--dataset-name {name} needs its file: add --dataset-path")
    gaps = RandomGaps((burstiness or 1.0) ** -0.5)
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
        DeployError: the server does not answer, or needs a key.
    """
    import httpx

    from pdserve.loadgen.server_tls import server_tls

    try:
        headers = {"Authorization": f"Bearer {key}"} if (key := api_key()) else {}
        verify = server_tls(url) or False
        answer = httpx.get(f"{url}/v1/models", headers=headers, trust_env=False, verify=verify)
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            raise DeployError(f"{url} {NEEDS_KEY}")
        return int(answer.json()["data"][0].get("max_model_len") or 0)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise DeployError(f"{url} does not answer: {error}") from error
    except (ValueError, LookupError, TypeError):
        return 0
