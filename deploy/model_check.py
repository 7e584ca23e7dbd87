"""Whether a model can be served as a deployment asks: its files, its limits, the memory that it takes.

Asked before anything starts. Reads what is small: the configuration, the tokenizer, the headers of the weights. Never
imports torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from pdserve.contracts.errors import DeployError
from pdserve.contracts.placement import WorkerConfig
from pdserve.deploy.cores import CoreSplit
from pdserve.deploy.launch import Launch, worker_configs
from pdserve.deploy.memory import check_memory
from pdserve.engine.backend import choose_backend
from pdserve.model.config import DecoderConfig
from pdserve.model.weight_files import check_weights
from pdserve.router.tokenizer import ChatTokenizer


def check_model(launch: Launch, folder: Path) -> list[str]:
    """Returns what its user should know of a model that can be served, a line each.

    Raises:
        DeployError: it cannot be served.
    """
    if not folder.is_dir():
        raise DeployError(
            f"no model folder at {folder}; give --model a folder with config.json, safetensors, tokenizer"
        )
    try:
        model = DecoderConfig.from_folder(folder)
        tokenizer = ChatTokenizer.from_folder(folder)
        model.limits(launch.config.model.max_model_len)
        if not launch.emulate:
            check_weights(folder, model.shape)
    except (ValueError, OSError) as error:
        raise DeployError(" ".join(str(error).split())) from error
    except Exception as error:  # the files are a user's: whatever they cause is one line
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        raise DeployError(f"the model in {folder} cannot be read: {cause}") from error
    configs = _worker_configs(launch, folder)
    if launch.emulate:
        _check_emulated(configs)
    else:
        check_memory(configs, model)
    return [] if tokenizer.has_chat_template else [NO_CHAT_TEMPLATE]


NO_CHAT_TEMPLATE = (
    "it has no chat template, so /v1/chat/completions is refused and /v1/completions serves; "
    "put a chat_template.jinja into its folder"
)


def _check_emulated(configs: Sequence[WorkerConfig]) -> None:
    """Whether the model and its KV fit into the GPU that is not here, as each worker will decide again."""
    for config in configs:
        try:
            choose_backend(config)
        except ValueError as error:
            raise DeployError(f"{config.worker_id}: {error}") from error


def _worker_configs(launch: Launch, folder: Path) -> list[WorkerConfig]:
    """What the workers will be told, but for their cores and secrets."""
    nowhere = CoreSplit(worker_cores=((),) * len(launch.roles), spare_cores=())
    if not launch.emulate:
        launch = dataclasses.replace(launch, devices={})
    return worker_configs(launch, folder, nowhere, (), "")
