"""Commands and options of vLLM and SGLang, and what `pdserve` has instead. The command line names it in its error."""

from __future__ import annotations

import re

KEYS = {
    "prefill.tensor_parallel and decode.tensor_parallel": ("tensor-parallel-size", "tp", "tp-size"),
    "prefill.pipeline_parallel and decode.pipeline_parallel": ("pipeline-parallel-size", "pp", "pp-size"),
    "prefill.expert_parallel and decode.expert_parallel": (
        "enable-expert-parallel",
        "expert-parallel-size",
        "ep-size",
        "ep",
    ),
    "prefill.gpu_memory_utilization and decode.gpu_memory_utilization": (
        "gpu-memory-utilization",
        "mem-fraction-static",
    ),
    "prefill.max_batch_tokens": ("max-num-batched-tokens", "chunked-prefill-size"),
    "decode.max_batch_size": ("max-num-seqs", "max-running-requests"),
    "decode.speculation": ("speculative-config", "speculative-algorithm", "num-speculative-tokens"),
    "model.max_model_len": ("max-model-len", "context-length"),
    "model.block_size": ("block-size", "page-size"),
    "model.served_name": ("served-model-name",),
    "model.dtype": ("dtype",),
    "model.kv_dtype": ("kv-cache-dtype",),
    "model.tool_format": ("tool-call-parser",),
    "model.generation_config": ("generation-config",),
    "kv_transfer.transport": ("kv-transfer-config", "disaggregation-transfer-backend"),
    "router.keys_file": ("api-key",),
    "router.cors_origins": ("allowed-origins",),
    "router.tls_certificate": ("ssl-certfile",),
    "router.tls_key": ("ssl-keyfile",),
}  # fmt: skip
_UP = {
    "--model-path": "give --model FOLDER",
    "--quantization": "leave it out: a quantised checkpoint is served as it is; model.quantization in a deployment "
    "file rounds another one to int8 or int4",
    "--disaggregation-mode": "leave it out: one command starts both pools, of --prefill and --decode workers",
    "--data-parallel-size": "give --prefill, --decode or --mixed workers, of which the router chooses one per request",
    "--load-format": "leave it out: weights are read from safetensors",
    "--reasoning-parser": "leave it out: the chat template shows how the model reasons",
    "--enable-auto-tool-choice": "leave it out: tools are on where the chat template reads them",
    "--trust-remote-code": "leave it out: no code of a checkpoint is run",
    **{f"--{name}": f"set {keys} in a deployment file" for keys, names in KEYS.items() for name in names},
}
_INSTEAD = {
    "pdserve": {"serve": "run pdserve up --model FOLDER"},
    "pdserve up": _UP,
    "pdserve check": _UP,
    "pdserve plan": {
        "--tensor-parallel": "leave it out: the plan chooses it; pdserve simulate takes --set decode.tensor_parallel=2"
    },
    "pdserve bench serve": {
        **dict.fromkeys(("--host", "--port"), "give --base-url http://HOST:PORT"),
        **dict.fromkeys(("--backend", "--endpoint"), "leave it out: token ids go to /v1/completions"),
        **dict.fromkeys(("--model", "--tokenizer"), "leave it out: the server has one model"),
    },
}  # fmt: skip


def remedy(command: str, message: str) -> str:
    """What to write instead of the unknown name in click's ``message`` on ``command``; empty if nothing is known."""
    unknown = re.match(r"No such (?:option: |command ')(-*[\w-]+)", message)
    return _INSTEAD.get(command, {}).get(unknown[1].replace("_", "-"), "") if unknown else ""
