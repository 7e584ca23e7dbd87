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
