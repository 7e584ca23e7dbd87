"""What one router of several admits."""

from __future__ import annotations

import pytest

from pdserve.contracts.request import SamplingParams
from pdserve.router.metrics import RouterMetrics
from pdserve.router.replicas import Replicas
from pdserve.router.requests.admission import Admission
from pdserve.router.requests.request import GenerationError, RequestSpec
from pdserve.router.requests.settings import DispatchSettings


def status(admission: Admission, num_choices: int) -> int:
    try:
        admission.check(num_choices)
    except GenerationError as error:
        return error.status
    return 200


@pytest.mark.parametrize("num_routers", [1, 4])
def test_a_request_for_more_than_a_routers_share_is_taken_alone(num_routers: int) -> None:
    admission = Admission(DispatchSettings(max_in_flight=8), Replicas(num_routers), RouterMetrics())
    assert [status(admission, num) for num in (2, 8, 9)] == [200, 200, 400]
    spec = RequestSpec(prompt_tokens=(1,), sampling=SamplingParams(), arrived_s=1.0, num_choices=1)
    admission.accepted(spec)
    assert [status(admission, num) for num in (1, 8, 9)] == [200, 429, 400]
    admission.ended(spec, 1.0)
    assert status(admission, 8) == 200
