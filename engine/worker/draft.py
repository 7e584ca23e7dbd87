"""The draft model of a worker: whether it can guess for the model served, and what memory it needs.

Read by `pdserve.engine.worker.backend`, and by the checks before a start. Never imports torch.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from pdserve.contracts.precision import Precision
from pdserve.contracts.worker_config import WorkerConfig
from pdserve.model.config.decoder_config import DecoderConfig
from pdserve.model.config.tokenizer_config import read_json
from pdserve.model.cost.cost_model import CostModel
from pdserve.model.cost.hardware import hardware
from pdserve.model.weights.files import check_weights


class Draft(NamedTuple):
    folder: Path
    config: DecoderConfig
    precision: Precision
    """The worker's, but a checkpoint that is quantised is computed as it is."""
    cost: CostModel
    """On this host's CPU."""


def read_draft(config: WorkerConfig, target: DecoderConfig) -> Draft | None:
    """Return the worker's draft model, if it has one.

    Raises:
        ValueError: its folder holds no model, or one with other tokens or more parameters than the ``target``, or the
            worker is emulated or a pipeline.
    """
    if config.speculation != "draft":
        return None
    folder, key = Path(config.draft_path), f"{config.role.value}.speculation"
    if config.emulate or config.pipeline_parallel > 1:
        where = "an emulated device" if config.emulate else "pipeline_parallel above 1"
        raise ValueError(f"{key} has a draft model, which does not run with {where}: set it to ngram or none")
    try:
        model = DecoderConfig.from_folder(folder)
        check_weights(folder, model.shape)
        tokens, targets = _vocabulary(folder), _vocabulary(Path(config.model_path))
    except ValueError as error:
        raise ValueError(f"{key}: the draft model in {folder} cannot be used: {error}") from error
    size, of_target = model.shape.vocab_size, target.shape.vocab_size
    if tokens != targets or size > of_target:
        different = f"{size} tokens, the model {of_target}" if size > of_target else "another tokenizer than the model"
        raise ValueError(f"{key}: the draft model in {folder} has {different}: name one with the same vocabulary")
    if model.shape.num_parameters >= target.shape.num_parameters:
        raise ValueError(
            f"{key}: the draft model in {folder} has {model.shape.num_parameters} parameters and the model "
            f"{target.shape.num_parameters}: name a smaller one"
        )
    model = model.at_length(min(model.max_context_length, target.max_context_length))
    precision = config.precision if model.shape.scheme is None else replace(config.precision, quantization="auto")
    return Draft(folder, model, precision, CostModel(model.shape, hardware("cpu"), precision))


def _vocabulary(folder: Path) -> tuple[object, list[tuple[object, object]]]:
    """Tokens of the tokenizer in ``folder``, and those added to it."""
    tokenizer = read_json(folder / "tokenizer.json")
    added = [(token.get("id"), token.get("content")) for token in tokenizer.get("added_tokens") or ()]
    return (tokenizer.get("model") or {}).get("vocab"), added
