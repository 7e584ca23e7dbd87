from __future__ import annotations

import pytest

from pdserve.contracts.transports import choose_transport, expected_transport


@pytest.mark.parametrize(
    ("ours", "theirs", "is_same_host", "chosen"),
    [
        ("auto", "auto", True, "memfd"),
        ("auto", "auto", False, "tcp"),
        ("auto", "tcp", True, "tcp"),
        ("tcp", "auto", True, "tcp"),
        ("memfd", "auto", True, "memfd"),
        ("memfd", "memfd", True, "memfd"),
    ],
)
def test_choice_of_transport(ours: str, theirs: str, is_same_host: bool, chosen: str) -> None:
    assert choose_transport(ours, theirs, is_same_host=is_same_host)[0] == chosen


@pytest.mark.parametrize(
    ("ours", "theirs", "is_same_host", "devices", "chosen", "reason"),
    [
        ("auto", "auto", False, ("nccl A", "nccl B"), "nccl", "both pools are on GPUs"),
        ("auto", "auto", True, ("nccl A", "nccl B"), "nccl", "both pools are on GPUs"),
        ("auto", "nccl", True, ("nccl A", "nccl B"), "nccl", "as configured"),
        ("auto", "tcp", True, ("nccl A", "nccl B"), "tcp", "as configured"),
        ("auto", "auto", True, ("nccl A", "nccl A"), "memfd", "it is on this host, and both pools are on one GPU"),
        ("auto", "auto", False, ("nccl A", ""), "tcp", "it is on another host, and a pool is not on a GPU"),
        ("auto", "auto", False, ("nccl A", "gloo 1"), "tcp", "it is on another host, and the pools are reached in"),
        ("auto", "auto", False, ("", ""), "tcp", "it is on another host"),
        ("auto", "auto", True, ("cuda_ipc", "cuda_ipc"), "cuda_ipc", "both pools are on GPUs"),
        (
            "auto",
            "auto",
            False,
            ("cuda_ipc", "cuda_ipc"),
            "tcp",
            "it is on another host, and CUDA IPC",
        ),
        ("auto", "auto", True, ("cuda_ipc", "nccl A"), "memfd", "it is on this host, and the pools are reached in"),
        ("auto", "auto", True, ("cuda_ipc", ""), "memfd", "it is on this host, and a pool is not on a GPU"),
        ("auto", "cuda_ipc", True, ("cuda_ipc", "cuda_ipc"), "cuda_ipc", "as configured"),
    ],
)
def test_choice_between_devices_has_a_reason(
    ours: str, theirs: str, is_same_host: bool, devices: tuple[str, str], chosen: str, reason: str
) -> None:
    transport, why = choose_transport(ours, theirs, is_same_host=is_same_host, devices=devices)
    assert transport == chosen
    assert why.startswith(reason)


def test_a_direct_transport_is_refused_where_a_pool_is_out_of_reach() -> None:
    for transport, devices, reason in (
        ("nccl", ("nccl A", ""), "a pool is not on a GPU"),
        ("nccl", ("nccl A", "nccl A"), "both pools are on one GPU"),
        ("nccl", ("cuda_ipc", "cuda_ipc"), "the pools are reached by cuda_ipc"),
        ("cuda_ipc", ("nccl A", "nccl B"), "the pools are reached by nccl"),
    ):
        with pytest.raises(
            ValueError, match=f"{transport} is impossible: {reason}.*; set kv_transfer.transport to auto"
        ):
            choose_transport(transport, "auto", is_same_host=True, devices=devices)


@pytest.mark.parametrize(
    ("ours", "theirs", "is_same_host", "reason"),
    [
        ("memfd", "tcp", True, "alike"),
        ("auto", "memfd", False, "one host"),
        ("memfd", "auto", False, "one host"),
        ("auto", "carrier pigeon", True, "unknown"),
    ],
)
def test_impossible_transports_are_refused(ours: str, theirs: str, is_same_host: bool, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        choose_transport(ours, theirs, is_same_host=is_same_host)


@pytest.mark.parametrize(
    ("setting", "near", "far"),
    [("auto", "memfd", "tcp"), ("tcp", "tcp", "tcp"), ("nccl", "nccl", "nccl"), ("cuda_ipc", "cuda_ipc", "tcp")],
)
def test_workers_on_gpus_of_their_own(setting: str, near: str, far: str) -> None:
    for is_same_host, expected in ((True, near), (False, far)):
        assert expected_transport(setting, is_same_host=is_same_host, are_on_gpus=True)[0] == expected


def test_what_needs_gpus_is_refused_without() -> None:
    with pytest.raises(ValueError, match="nccl is impossible: a pool is not on a GPU"):
        expected_transport("nccl", is_same_host=True, are_on_gpus=False)
