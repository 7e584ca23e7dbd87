"""Folders as people have them: each is served as transformers reads it, or refused with the reason.

A case is a file of ``checkpoints/``:

- ``about``: what is odd in the folder.
- ``files``: contents by name, over those of a plain folder. An object for ``config.json`` or ``tokenizer.json`` changes
  the plain one, where null removes a key; null for a file leaves it out.
- ``weights``: options of the random model that transformers writes, and whose logits are compared; ``files`` change
  what it wrote. ``renamed``: prefixes of tensors' names by the prefixes that transformers writes; ``beside``: shapes of
  further tensors.
- ``instead``: ``files`` of the folder that transformers is asked about, where it reads the odd one wrongly.
- ``refused``, ``said``: pattern of the error, or of the warning, at start.
- ``prompt_with_tools``, ``sampling``: what is right, beside what transformers says.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
)

from pdserve.contracts.deployment import DeploymentConfig, ModelConfig
from pdserve.contracts.errors import DeployError
from pdserve.deploy.checks.model import check_model, model_rows, precision_words
from pdserve.deploy.launch import Launch
from pdserve.model.config.decoder_config import DecoderConfig
from pdserve.model.config.sampling_defaults import sampling_defaults
from pdserve.model.decoder.rope import inverse_frequencies
from pdserve.router.text.tokenizer import ChatTokenizer
from tests.model.decoder.test_decoder import TABLE, TOKENS, PagedDecoder
from tests.router.edge_server import running_edge
from tests.router.small_tokenizers import BOS, EOS, byte_level_tokenizer

CASES = sorted((Path(__file__).parent / "checkpoints").glob("*.json"))
PLAIN_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 112,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "initializer_range": 0.2,
}  # fmt: skip
PLAIN_TEMPLATE = "{{ bos_token }}{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
PLAIN_FILES: dict[str, Any] = {
    "config.json": {},
    "tokenizer.json": {},
    "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS},
    "chat_template.jinja": PLAIN_TEMPLATE,
}
TEXTS = [
    "Größe of the router",
    f"a {EOS} b",
    f"{BOS}a",
    "  two  spaces decode code",
    "time to first token " * 40,
    "<|later|> x",
]
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "What is the time?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Größe? 🙂"}],
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")


def write_files(folder: Path, files: Mapping[str, Any]) -> None:
    """Write a folder without weights."""
    bases = {"config.json": PLAIN_CONFIG, "tokenizer.json": json.loads(byte_level_tokenizer().to_str())}
    if (folder / "config.json").exists():
        bases["config.json"] = json.loads((folder / "config.json").read_text())
    for name, content in {**PLAIN_FILES, **files}.items():
        if content is None:
            continue
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        if name in bases:
            content = {key: value for key, value in {**bases[name], **content}.items() if value is not None}
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")


def write_case(folder: Path, case: Mapping[str, Any]) -> Path:
    folder.mkdir(parents=True)
    write_files(folder, case.get("files", {}))
    return folder


def write_weights(folder: Path, case: Mapping[str, Any], tokens: list[int]) -> torch.Tensor:
    """Write a folder with weights; return the logits of ``tokens`` that transformers computes from them."""
    torch.manual_seed(7)
    config = AutoConfig.for_model(**case["weights"])
    kind = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    model = kind.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn_like(parameter)
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    model.save_pretrained(folder)
    write_files(folder, case.get("files", {}))
    tensors = load_file(folder / "model.safetensors")
    for old, new in case.get("renamed", {}).items():
        tensors = {new + name.removeprefix(old) if name.startswith(old) else name: tensors[name] for name in tensors}
    tensors |= {name: torch.ones(shape) for name, shape in case.get("beside", {}).items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return logits


def read_case(path: Path) -> dict[str, Any]:
    case: dict[str, Any] = json.loads(path.read_text())
    assert case["about"]
    return case


def served_tokens(tokenizer: ChatTokenizer, text: str, add_special_tokens: bool) -> list[int]:
    return asyncio.run(tokenizer.encode(text, add_special_tokens=add_special_tokens))


def as_cases(**wanted: bool) -> pytest.MarkDecorator:
    """Every case whose file says, or does not say, the keys of ``wanted``."""
    cases = [path for path in CASES if all((key in read_case(path)) is has for key, has in wanted.items())]
    return pytest.mark.parametrize("case", [pytest.param(path, id=path.stem) for path in cases])


@as_cases(refused=False, weights=False)
def test_the_tokenizer_is_that_of_transformers(case: Path, tmp_path: Path) -> None:
    content = read_case(case)
    folder = write_case(tmp_path / "served", content)
    asked = write_case(tmp_path / "asked", {"files": content.get("instead", content.get("files", {}))})
    ours, theirs = ChatTokenizer.from_folder(folder), AutoTokenizer.from_pretrained(asked)
    for text in TEXTS:
        for add_special_tokens in (True, False):
            expected = theirs(text, add_special_tokens=add_special_tokens)["input_ids"]
            assert served_tokens(ours, text, add_special_tokens) == expected, text
    for messages in CHATS:
        assert (ours.template is None) == (theirs.chat_template is None)
        if theirs.chat_template is not None:
            expected = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            assert ours.chat_text(messages) == expected
            assert asyncio.run(ours.encode_chat(expected)) == theirs(expected, add_special_tokens=False)["input_ids"]
    if "prompt_with_tools" in content:
        expected = theirs.apply_chat_template(CHATS[0], tools=TOOLS, add_generation_prompt=True, tokenize=False)
        assert ours.chat_text(CHATS[0], tools=TOOLS) == expected == content["prompt_with_tools"]


@pytest.mark.filterwarnings("ignore")
@as_cases(refused=False, weights=False)
def test_the_model_is_configured_as_in_transformers(case: Path, tmp_path: Path) -> None:
    content = read_case(case)
    config = DecoderConfig.from_folder(write_case(tmp_path / "served", content))
    asked = write_case(tmp_path / "asked", {"files": content.get("instead", content.get("files", {}))})
    theirs = AutoConfig.from_pretrained(asked).get_text_config()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(theirs)
    with torch.device("cpu"):
        (rotary,) = [type(m)(theirs) for name, m in model.named_modules() if name.split(".")[-1] == "rotary_emb"]
    types = getattr(theirs, "layer_types", None) or ["full_attention"] * theirs.num_hidden_layers
    for layer, layer_type in zip(config.layers, types, strict=True):
        prefix = f"{layer_type}_" if hasattr(rotary, f"{layer_type}_inv_freq") else ""
        frequencies = inverse_frequencies(layer.rope, config.shape.head_dim)
        torch.testing.assert_close(frequencies, getattr(rotary, f"{prefix}inv_freq"), rtol=1e-6, atol=0)
        assert layer.rope.attention_factor == pytest.approx(getattr(rotary, f"{prefix}attention_scaling"))
    # Where config.json has none, the default of transformers' class need not be a token of this tokenizer.
    ends = [
        json.loads((asked / "config.json").read_text()).get("eos_token_id"),
        AutoTokenizer.from_pretrained(asked).eos_token_id,
    ]
    if (asked / "generation_config.json").exists():
        ends.append(GenerationConfig.from_pretrained(asked).eos_token_id)
    ids = {each for end in ends if end is not None for each in (end if isinstance(end, list) else [end])}
    expected = ids & {*range(config.shape.vocab_size)}
    assert set(config.eos_token_ids) == expected
    assert len(config.eos_token_ids) == len(expected)


@pytest.mark.filterwarnings("ignore")
@as_cases(refused=False, weights=True)
def test_the_logits_are_those_of_transformers(case: Path, tmp_path: Path) -> None:
    content = read_case(case)
    expected = write_weights(tmp_path, content, TOKENS)
    logits = PagedDecoder(tmp_path, torch.float32).logits((TOKENS, 0, TABLE))
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()
    warning = check_model(Launch(config=DeploymentConfig(model=ModelConfig(path=str(tmp_path), dtype="float32"))))
    assert re.fullmatch(content.get("said", ""), warning), warning


@as_cases(sampling=True)
def test_requests_that_do_not_say_are_sampled_as_the_checkpoint_recommends(case: Path, tmp_path: Path) -> None:
    content = read_case(case)
    folder = write_case(tmp_path / "served", content)
    defaults, theirs = sampling_defaults(folder), GenerationConfig.from_pretrained(folder)
    assert defaults == content["sampling"]
    assert defaults == {name: value for name in SAMPLING if (value := getattr(theirs, name)) is not None}
    said = dict(model_rows(ModelConfig(path=str(folder)))).get("sampling", "")
    assert all(f"{name} {value:g}" in said for name, value in defaults.items())
    assert "sampling" not in dict(model_rows(ModelConfig(path=str(folder), generation_config="none")))
    with running_edge(defaults=defaults) as edge:
        for url, field in (("chat/completions", "messages"), ("responses", "input")):
            body = {field: [{"role": "user", "content": "a"}], "top_p": 0.25}
            answer = httpx.post(f"{edge.url}/v1/{url}", json=body).json()
            sampling = edge.generator.last.sampling
            assert answer.get("temperature", sampling.temperature) == sampling.temperature
            assert sampling.top_p == 0.25, "the request says"
            for name, value in {**defaults, "top_p": 0.25}.items():
                assert getattr(sampling, "max_tokens" if name == "max_new_tokens" else name) == value, name


def test_the_banner_lists_the_tokens_that_end_answers(tmp_path: Path) -> None:
    folder = write_case(tmp_path / "served", {"files": {"config.json": {"eos_token_id": [7, 5]}}})
    rows = dict(model_rows(ModelConfig(path=str(folder))))
    assert rows["answers end"] == "with tokens 7, 5, 1"


def test_the_banner_says_how_the_weights_are_quantised(tmp_path: Path) -> None:
    scheme = {"quant_method": "awq", "bits": 4, "version": "gemm"}
    for name, config, expected in (
        ("plain", {}, "bfloat16"),
        ("quantised", {"quantization_config": scheme}, "int4 weights (AWQ), activations in bfloat16"),
    ):
        folder = write_case(tmp_path / name, {"files": {"config.json": config}})
        assert precision_words(ModelConfig(path=str(folder), dtype="bfloat16")) == expected


@pytest.mark.parametrize("case", ["tools_in_an_unknown_form", "plain"])
def test_tools_in_an_unknown_form_are_said_at_start(case: str, tmp_path: Path) -> None:
    folder = write_case(tmp_path / "served", read_case(Path(__file__).parent / "checkpoints" / f"{case}.json"))
    named = {"auto": case != "plain", "hermes": False}
    for tool_format, is_said in named.items():
        model = ModelConfig(path=str(folder), tool_format=tool_format, dtype="float32")
        warning = check_model(Launch(config=DeploymentConfig(model=model), emulate="h100-sxm"))
        assert ("set model.tool_format if it is one of" in warning) is is_said, warning


@as_cases(refused=True)
def test_what_cannot_be_honoured_is_refused_at_start(case: Path, tmp_path: Path) -> None:
    content = read_case(case)
    folder, emulate = tmp_path / "served", "h100-sxm"
    if "weights" in content:
        write_weights(folder, content, TOKENS)
        emulate = ""
    else:
        write_case(folder, content)
    launch = Launch(config=DeploymentConfig(model=ModelConfig(path=str(folder), dtype="float32")), emulate=emulate)
    with pytest.raises(DeployError, match=content["refused"]) as raised:
        check_model(launch)
    assert re.search(r"[;.] \w+", str(raised.value)), "no remedy"
