"""``pdserve check``: the checks of ``pdserve up``, and how KV moves between its workers. Starts no cluster.

The transport of each kind of link is chosen as the workers choose it (`pdserve.kv_transfer.handshake`), and measured
between two transfer processes of this host. Links between hosts are not measured: no worker is there yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from pdserve.contracts.errors import DeployError
from pdserve.contracts.kv_layout import KvLayout, resolve_kv_dtype
from pdserve.contracts.transports import expected_transport
from pdserve.contracts.worker_config import DIRECT_TRANSPORTS, WorkerRole
from pdserve.deploy.checks.model import check_model
from pdserve.deploy.checks.preflight import check_launch, core_warning, gpu_warning, kernel_warning
from pdserve.deploy.launch import Launch
from pdserve.model.config.decoder_config import DecoderConfig
from pdserve.model.cost.cost_model import CostModel
from pdserve.model.cost.hardware import hardware

PROMPT_TOKENS = 4096
MAX_PROMPT_BYTES = 128 << 20
"""KV of the longest prompt that is moved; two pools of this size are made."""
ROUNDS = 5


class Links(NamedTuple):
    """Links whose transport is chosen for one reason."""

    pairs: tuple[str, ...]
    """Roles of source and target, such as ``prefill to decode``."""
    is_same_host: bool
    transport: str
    reason: str


def check_cluster(launch: Launch, console: Console) -> int:
    """Print warnings, a line for each kind of link, and that `pdserve up` would start.

    Raises:
        DeployError: ``pdserve up`` would not start; the text has the remedy.
    """
    check_launch(launch)
    cores, kernels, gpus = core_warning(launch), kernel_warning(launch), gpu_warning(launch)
    for name, warning in (("cores", cores), ("kernels", kernels), ("GPUs", gpus), ("model", check_model(launch))):
        if warning:
            console.print(f"[yellow]{name}[/] {warning}", highlight=False, soft_wrap=True)
    _show_links(launch, find_links(launch), console)
    if not launch.ray_address:  # whose hosts are not checked
        console.print(f"pdserve up would start here{gpus and ' if Ray finds GPUs'}")
    return 0


def _show_links(launch: Launch, links: Sequence[Links], console: Console) -> None:
    if not links:
        console.print("no KV moves: one worker serves both phases")
        return
    layout = _prompt_layout(launch)
    seconds = _measure(launch, layout, sorted({each.transport for each in links} - {*DIRECT_TRANSPORTS}))
    settings = launch.config.model
    shape = DecoderConfig.from_folder(Path(settings.path)).shape
    num_tokens, mebibytes = layout.num_blocks * layout.block_size, layout.pool_bytes / 2**20
    console.print(f"KV of {num_tokens:,} tokens, {mebibytes:.1f} MiB:", highlight=False)
    for each in links:
        figures = "not measured"
        if taken_s := seconds.get(each.transport):
            figures = f"{1e3 * taken_s:.1f} ms, {layout.pool_bytes / taken_s / 1e9:.1f} GB/s"
            if not each.is_same_host:
                figures = f"not measured; over loopback {figures}"
            cost = CostModel(shape, hardware("cpu"), settings.precision, transport=each.transport)
            predicted_s = cost.pull_s(num_tokens, same_host=each.is_same_host)
            figures += f"; predicted {1e3 * predicted_s:.1f} ms"
        line = f"  {', '.join(each.pairs)}: [cyan]{each.transport}[/] ({each.reason}), {figures}"
        console.print(line, highlight=False, soft_wrap=True)


def find_links(launch: Launch) -> list[Links]:
    """Links between the workers of a launch.

    Raises:
        DeployError: there is no transport.
    """
    num = {role: launch.config.phase(role).replicas for role in WorkerRole}
    pairs: dict[tuple[bool, str, str], list[str]] = {}
    for is_same_host in (True, False) if launch.ray_address else (True,):
        for source, target in product((WorkerRole.PREFILL, WorkerRole.MIXED), (WorkerRole.DECODE, WorkerRole.MIXED)):
            if num[source] and num[target] and (source is not target or num[source] > 1):
                choice = is_same_host, *_choose(launch, source, target, is_same_host)
                pairs.setdefault(choice, []).append(f"{source.value} to {target.value}")
    return [Links(tuple(names), *choice) for choice, names in pairs.items()]


def _choose(launch: Launch, source: WorkerRole, target: WorkerRole, is_same_host: bool) -> tuple[str, str]:
    setting = launch.config.kv_transfer.transport
    are_on_gpus = [launch.is_on_gpu(role) for role in (source, target)]
    on_gpus = all(are_on_gpus) or bool(launch.ray_address)
    try:
        transport, reason = expected_transport(setting, is_same_host=is_same_host, are_on_gpus=on_gpus)
    except ValueError as error:
        raise DeployError(str(error)) from error
    staged = [role.value for role, is_on_gpu in zip((source, target), are_on_gpus, strict=True) if is_on_gpu]
    if staged and transport not in DIRECT_TRANSPORTS:
        reason += f"; copies between GPU and host for {' and '.join(dict.fromkeys(staged))} come on top"
    return transport, reason


def _prompt_layout(launch: Launch) -> KvLayout:
    """A pool for the longest prompt to be moved. The model has been checked before."""
    settings = launch.config.model
    model = DecoderConfig.from_folder(Path(settings.path))
    dtype = resolve_kv_dtype(settings.precision.kv_dtype, settings.precision.dtype)
    block_bytes = model.kv_layout(1, settings.block_size, dtype, "check").block_bytes
    tokens = min(PROMPT_TOKENS, model.limits(settings.max_model_len).max_model_len)
    num_blocks = max(1, min(tokens // settings.block_size, MAX_PROMPT_BYTES // block_bytes))
    return model.kv_layout(num_blocks, settings.block_size, dtype, "check")


def _measure(launch: Launch, layout: KvLayout, transports: Sequence[str]) -> dict[str, float]:
    from pdserve.bench.transfer import pull_seconds

    try:
        return pull_seconds(layout, transports, ROUNDS, launch.config.security.tls)
    except (OSError, RuntimeError, ValueError) as error:
        raise DeployError(f"KV does not move between two transfer processes of this host: {error}") from error
