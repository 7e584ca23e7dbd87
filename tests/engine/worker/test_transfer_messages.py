"""Messages of the transfer process as a step loop sees them."""

from __future__ import annotations

import pytest

from pdserve.contracts.step import ModelLimits
from pdserve.engine.scheduling.interface import PullResult
from pdserve.engine.worker.transfer_messages import message_from_proto
from pdserve.kv_transfer.transports import REFUSED
from pdserve.proto.v1 import transfer_pb2

LIMITS = ModelLimits(max_model_len=256, vocab_size=512)


@pytest.mark.parametrize("stage", ["connect", "refused", "grant", "copy", "verify", "aborted", "deadline"])
def test_a_refusal_of_the_source_is_a_stage_not_a_word(stage: str) -> None:
    done = transfer_pb2.PullDone(pull_id=3, failure_stage=stage, message="refused: says the message")
    ended = message_from_proto(transfer_pb2.TransferToEngine(pull_done=done), LIMITS)
    assert isinstance(ended, PullResult)
    assert ended.failure
    assert (ended.failure_stage == REFUSED) is (stage == "refused")
