"""Memory and times of one worker, part by part, to explain a prediction.

`pdserve plan --explain` and the report show the lines. All figures are those of `pdserve.model.cost.cost_model`, which
has the formulas and their sources.
"""

from __future__ import annotations

from typing import NamedTuple

from pdserve.model.cost.cost_model import StepParts, chosen_transport, num_experts_touched
from pdserve.planner import wording
from pdserve.planner.layout import PlannedModel, Pool

_PARTS = ("linear layers", "output projection", "attention", "all-reduces", "sends between stages", "overhead")
"""Names of `StepParts`."""


class Explanation(NamedTuple):
    """One line of the explanation."""

    name: str
    result: float
    unit: str
    parts: str = ""
    """What the result is made of."""


def explain(
    model: PlannedModel, pool: Pool, *, prompt_tokens: int = 1024, context_tokens: int = 1024, batch_size: int = 32
) -> list[Explanation]:
    """Memory and times of one worker of ``pool``.

    Args:
        prompt_tokens: length of a prompt that is prefilled in one step, and whose KV is transferred.
        context_tokens: context of each decoding sequence.
        batch_size: sequences that decode together.

    Raises:
        ValueError: the model does not divide by the pool's degrees, or the hardware has no figure for its dtype.
    """
    cost, device = pool.cost(model), pool.hardware
    memory = cost.rank_memory(
        pool.memory_fraction, max_batch_tokens=pool.max_batch_tokens, max_batch_size=pool.max_batch_size
    )
    of_kv = (
        f"{wording.share(pool.memory_fraction)} of {wording.size(device.memory_bytes)}, less "
        f"{wording.size(memory.weight_bytes)} of weights, {wording.size(memory.activation_bytes)} of activations and a "
        f"reserve of {wording.size(memory.reserve_bytes)}"
    )
    most_in_kv = pool.kv_blocks(model, cost) // -(-context_tokens // model.block_size)
    lines = [
        Explanation("parameters", model.shape.num_parameters, ""),
        Explanation("weights", cost.weight_bytes, "bytes"),
        Explanation("KV of a token", cost.kv_bytes_per_token, "bytes"),
        Explanation("KV of the fullest rank", memory.kv_bytes, "bytes", of_kv),
        Explanation("tokens of KV", memory.kv_bytes / cost.rank_kv_bytes_per_token, "tokens"),
        Explanation(
            f"largest batch at {context_tokens} tokens",
            min(most_in_kv, pool.max_batch_size),
            "sequences",
            f"the lesser of {most_in_kv:,}, which KV holds, and the limit of {pool.max_batch_size:,}",
        ),
        _step(f"prefill of a prompt of {prompt_tokens} tokens", cost.parts([(prompt_tokens, 0)])),
        _step(
            f"decode of {batch_size} sequences of {context_tokens} tokens",
            cost.parts([(1, context_tokens)] * batch_size),
        ),
    ]
    if num_experts := model.shape.num_experts:
        num_touched = num_experts_touched(batch_size, num_experts, model.shape.experts_per_token)
        of_experts = f"{num_touched:.3g} of {num_experts} experts in each layer that has some, if all are as likely"
        name = f"weights read in decode of {batch_size} sequences"
        lines.append(Explanation(name, cost.read_bytes(batch_size), "bytes", of_experts))
    for same_host, where in ((True, "within a host"), (False, "between hosts")):
        seconds = cost.pull_s(prompt_tokens, same_host=same_host)
        transport = chosen_transport(model.transport, same_host=same_host)
        lines.append(Explanation(f"pull of {prompt_tokens} tokens {where}", 1e3 * seconds, "ms", f"by {transport}"))
    if device.price_per_hour_usd is not None:
        lines.append(Explanation("price of a worker", pool.devices_per_worker * device.price_per_hour_usd, "USD/h"))
    return lines


def _step(name: str, parts: StepParts) -> Explanation:
    shown = [f"{what} {wording.seconds(seconds)}" for what, seconds in zip(_PARTS, parts, strict=True) if seconds]
    return Explanation(name, 1e3 * sum(parts), "ms", ", ".join(shown))
