from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from pdserve.contracts.kv_layout import KV_LAYOUT_VERSION
from pdserve.kv_transfer import handshake
from pdserve.proto.v1 import kv_pb2, worker_pb2
from tests.kv_transfer.peer import LAYOUT


@pytest.mark.parametrize("dtype", ["float32", "int8", "float8_e4m3fn"])
def test_layouts_that_differ_in_size_only_are_compatible(dtype: str) -> None:
    ours = replace(LAYOUT, dtype=dtype)
    theirs = replace(ours, num_blocks=7)
    assert handshake.check_layout(handshake.layout_message(theirs), ours) == theirs


def test_quantised_layouts_of_the_same_size_are_told_apart() -> None:
    int8, float8 = (replace(LAYOUT, dtype=dtype) for dtype in ("int8", "float8_e4m3fn"))
    assert int8.block_bytes == float8.block_bytes
    with pytest.raises(ValueError, match="dtype"):
        handshake.check_layout(handshake.layout_message(int8), float8)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", KV_LAYOUT_VERSION + 1),
        ("model_hash", "another"),
        ("dtype", "bfloat16"),
        ("dtype", "int8"),
        ("dtype", "float8_e4m3fn"),
        ("dtype", "int3"),
        ("num_kv_heads", 4),
        ("num_layers", 2),
        ("block_size", 16),
        ("head_dim", 16),
        ("num_blocks", 0),
    ],
)
def test_a_different_layout_is_refused_by_name(field: str, value: int | str) -> None:
    message = handshake.layout_message(LAYOUT)
    setattr(message, field, value)
    with pytest.raises(ValueError, match=field):
        handshake.check_layout(message, LAYOUT)


def _grant() -> kv_pb2.Grant:
    first = kv_pb2.FirstToken(token=5)
    return kv_pb2.Grant(
        first_index=3, block_ids=[63, 0], generations=[1, 2], final=True, num_tokens=17, first_token=first
    )


@pytest.mark.parametrize("num_tokens", [17, 20])
def test_a_grant_that_follows_is_accepted(num_tokens: int) -> None:
    grant = _grant()
    grant.num_tokens = num_tokens
    handshake.check_grant(grant, first_index=3, layout=LAYOUT)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda grant: setattr(grant, "first_index", 4), "starts at block 4"),
        (lambda grant: grant.generations.append(3), "3 generations"),
        (lambda grant: grant.block_ids.__setitem__(1, 64), "block 64"),
        (lambda grant: setattr(grant, "num_tokens", 16), "16 tokens"),
        (lambda grant: grant.ClearField("first_token"), "first token"),
        (lambda grant: setattr(grant, "num_tokens", 21), "21 tokens"),
        (lambda grant: (grant.block_ids.extend([1] * 60), grant.generations.extend([1] * 60)), "65 blocks"),
    ],
)
def test_a_malformed_grant_is_refused(change: Callable[[kv_pb2.Grant], None], reason: str) -> None:
    grant = _grant()
    change(grant)
    with pytest.raises(ValueError, match=reason):
        handshake.check_grant(grant, first_index=3, layout=LAYOUT)


def test_a_request_that_ended_needs_no_blocks() -> None:
    grant = kv_pb2.Grant(final=True, first_token=kv_pb2.FirstToken(finish=worker_pb2.FINISH_REASON_STOP))
    grant.num_tokens = 100
    handshake.check_grant(grant, first_index=0, layout=LAYOUT)
    assert handshake.ends_request(grant)
    assert not handshake.ends_request(_grant())


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
    assert handshake.choose_transport(ours, theirs, is_same_host=is_same_host)[0] == chosen


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
    transport, why = handshake.choose_transport(ours, theirs, is_same_host=is_same_host, devices=devices)
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
            handshake.choose_transport(transport, "auto", is_same_host=True, devices=devices)


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
        handshake.choose_transport(ours, theirs, is_same_host=is_same_host)
