"""Ray actors of both phases in a local Ray: one handoff and their life cycle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdserve.contracts.codec import from_plain, to_plain
from pdserve.contracts.request import GenerationRequest, SamplingParams
from pdserve.contracts.worker_config import WorkerConfig, WorkerEndpoint, WorkerRole
from pdserve.engine.worker.process import WorkerActor
from pdserve.model.weights.random_checkpoint import write_random_checkpoint
from tests.expected_tokens import expected_tokens
from tests.private_ray import joined_ray
from tests.workers import RouterClient, emulated_config, hand_off, wait_until


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    with joined_ray():
        yield


def start_actor(config: WorkerConfig) -> tuple[Any, RouterClient]:
    import ray

    actor = ray.remote(WorkerActor).options(num_cpus=0, max_concurrency=2).remote(to_plain(config))
    (started,) = ray.get(actor.start.remote())
    endpoint = from_plain(WorkerEndpoint, started, "the endpoint")
    assert ray.get(actor.ping.remote()) == endpoint.epoch
    assert (endpoint.worker_id, endpoint.role) == (config.worker_id, config.role)
    return actor, RouterClient(endpoint.address, token=config.cluster_token)


# Files and sockets that Ray itself leaves open are not ours to close.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_handoff_between_two_actors_and_their_end(local_ray: None, tmp_path: Path) -> None:
    import ray

    model = write_random_checkpoint(tmp_path, hidden_size=32, intermediate_size=64, num_layers=2)
    prefill_actor, prefill = start_actor(emulated_config(model, WorkerRole.PREFILL))
    decode_actor, decode = start_actor(emulated_config(model, WorkerRole.DECODE))
    prompt = tuple(range(3, 103))
    sampling = SamplingParams(temperature=0, max_tokens=10)
    request = GenerationRequest(request_id=1, prompt_tokens=prompt, sampling=sampling)
    assert hand_off(prefill, decode, request) == expected_tokens(prompt, 10, 512, eos_token_ids=(2,))
    prefill.wait_until_free()

    assert ray.get(prefill_actor.drain.remote(30.0))
    ray.get(prefill_actor.stop.remote())
    with pytest.raises(ray.exceptions.RayTaskError, match="does not turn"):
        ray.get(prefill_actor.ping.remote())
    prefill.close()

    ray.kill(decode_actor)
    wait_until(lambda: decode.error is not None, "the end of the killed actor's stream")
    decode.close()
