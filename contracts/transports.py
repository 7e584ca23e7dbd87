"""Which transport moves KV between two workers, for those that meet, checks before the start and the cost model."""

from __future__ import annotations

from pdserve.contracts.worker_config import DIRECT_TRANSPORTS, TRANSPORTS


def expected_transport(setting: str, *, is_same_host: bool, are_on_gpus: bool) -> tuple[str, str]:
    """Choose as two workers will that have this setting, each on a GPU of its own where both are on some.

    Raises:
        ValueError: as `choose_transport`.
    """
    devices = ("", "")
    if setting in DIRECT_TRANSPORTS and are_on_gpus:
        devices, setting = (f"{setting} 0", f"{setting} 1"), "auto"
    return choose_transport(setting, setting, is_same_host=is_same_host, devices=devices)


def choose_transport(
    ours: str, theirs: str, *, is_same_host: bool, devices: tuple[str, str] = ("", "")
) -> tuple[str, str]:
    """Choose the transport allowed by both sides' settings (``auto`` or one of `TRANSPORTS`); returns it and why.

    Args:
        devices: of the two pools (`pdserve.kv_transfer.transfer_client.TransferConfig.device`).

    Raises:
        ValueError: there is none.
    """
    required = {ours, theirs} - {"auto"}
    if not required <= set(TRANSPORTS):
        raise ValueError(f"unknown KV transport among {sorted(required)}: use auto, {' or '.join(TRANSPORTS)}")
    if len(required) > 1:
        raise ValueError(f"KV transport is {theirs} there and {ours} here: set kv_transfer.transport alike")
    if "memfd" in required and not is_same_host:
        raise ValueError("KV transport memfd needs both workers on one host: set kv_transfer.transport to auto or tcp")
    direct, why_not = _direct_transport(*devices, is_same_host)
    if required & {*DIRECT_TRANSPORTS} and (why_not or direct not in required):
        reason = why_not or f"the pools are reached by {direct}"
        raise ValueError(f"KV transport {required.pop()} is impossible: {reason}; set kv_transfer.transport to auto")
    if required:
        return required.pop(), "as configured"
    if not why_not:
        return direct, "both pools are on GPUs"
    transport, reason = ("memfd", "it is on this host") if is_same_host else ("tcp", "it is on another host")
    return transport, f"{reason}, and {why_not}" if any(devices) else reason


def _direct_transport(ours: str, theirs: str, is_same_host: bool) -> tuple[str, str]:
    """Transport between two devices, and why it is impossible; empty if it is not."""
    if not ours or not theirs:
        return "", "a pool is not on a GPU that others reach"
    (our_way, *our_ids), (their_way, *their_ids) = ours.split(), theirs.split()
    if our_way != their_way:
        return "", f"the pools are reached in different ways: {ours} and {theirs}"
    if our_way == "cuda_ipc":
        return "cuda_ipc", "" if is_same_host else "CUDA IPC reaches no other host"
    return "nccl", "both pools are on one GPU" if {*our_ids} & {*their_ids} else ""
