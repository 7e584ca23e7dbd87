"""The transfer process's report of a pull, as the scheduler receives it."""

from __future__ import annotations

import pytest

from pdserve.contracts.step import ModelLimits
from pdserve.engine.orders import pull_result
from pdserve.proto.v1 import transfer_pb2

LIMITS = ModelLimits(max_model_len=64, vocab_size=100)


@pytest.mark.parametrize("stage", ["connect", "refused", "grant", "copy", "verify", "aborted", "deadline"])
def test_a_refusal_of_the_source_is_a_stage_not_a_word(stage: str) -> None:
    done = transfer_pb2.PullDone(pull_id=3, failure_stage=stage, message="refused: says the message")
    result = pull_result(done, LIMITS)
    assert result.failure
    assert result.is_refused is (stage == "refused")
