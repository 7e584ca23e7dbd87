"""Named kinds of traffic, each with its usual objectives.

Called by the CLI and the benchmarks. Lengths are distributions; no trace is shipped. `preset` lists their means, and
`pdserve.planner.workload.workload.Workload.source` cites the origin of each.
"""

from __future__ import annotations

from difflib import get_close_matches

from pdserve.contracts.deployment import SloConfig
from pdserve.planner.workload.conversations import Conversations, SystemPrompts, Turns
from pdserve.planner.workload.lengths import LogNormalLengths, QuantileLengths
from pdserve.planner.workload.workload import Workload

_SHARES = (0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 0.999, 1)

_AZURE_CHAT = QuantileLengths(
    shares=_SHARES,
    num_prompt_tokens=(2, 29, 181, 207, 387, 403, 703, 1020, 1071, 1130, 1315, 2734, 4083, 4142, 6179, 14050),
    num_output_tokens=(7, 16, 41, 54, 77, 91, 103, 129, 177, 384, 400, 424, 451, 601, 954, 1000),
    correlation=0.01,
)
_AZURE_CODE = QuantileLengths(
    shares=_SHARES,
    num_prompt_tokens=(3, 17, 75, 147, 386, 770, 1075, 1469, 1909, 2433, 3192, 5188, 7303, 7436, 7437, 7437),
    num_output_tokens=(6, 6, 6, 7, 8, 9, 11, 13, 16, 20, 29, 55, 90, 251, 825, 1899),
    correlation=-0.02,
)
_ARXIV = QuantileLengths(
    shares=_SHARES,
    num_prompt_tokens=(1, 73, 749, 1242, 1802, 2150, 2453, 2730, 2996, 3249, 3490, 3702, 3813, 3933, 4012, 4054),
    num_output_tokens=(5, 36, 60, 78, 104, 125, 145, 167, 192, 222, 268, 372, 736, 3271, 3844, 4056),
    correlation=-0.21,
)
_SHAREGPT = QuantileLengths(
    shares=_SHARES,
    num_prompt_tokens=(2, 10, 25, 89, 244, 379, 518, 685, 858, 1044, 1277, 1546, 1723, 1922, 2005, 2031),
    num_output_tokens=(1, 2, 6, 9, 15, 22, 36, 78, 159, 258, 350, 512, 648, 969, 1191, 1809),
    correlation=-0.1,
    max_total_tokens=2047,
)
_HUMANEVAL = LogNormalLengths(
    mean_prompt_tokens=171.3, mean_output_tokens=98.2, prompt_variation=0.5, output_variation=0.7
)
_LONGBENCH = QuantileLengths(
    shares=(0, 0.1, 0.5, 0.9, 1),
    num_prompt_tokens=(700, 1550, 1850, 1900, 1990),
    num_output_tokens=(1, 20, 86, 205, 450),
    max_total_tokens=2047,
)
_AGENT = Conversations(
    lengths=LogNormalLengths(
        mean_prompt_tokens=780, mean_output_tokens=180, prompt_variation=1.5, output_variation=1.0
    ),
    system_prompts=SystemPrompts(num_prompts=8, num_tokens=4000, zipf_exponent=1.0),
    turns=Turns(mean_turns=5.0, mean_think_s=3.0),
)

_PRESETS = (
    Workload(
        name="chat",
        contents=Conversations(lengths=_AZURE_CHAT),
        slo=SloConfig(ttft_seconds=0.25, tpot_seconds=0.1),
        source="Lengths: quantiles of Azure's conversation trace of 2023 (AzurePublicDataset, CC BY 4.0). "
        "Objectives: DistServe (OSDI '24), table 1, chatbot on OPT-13B.",
    ),
    Workload(
        name="code",
        contents=Conversations(lengths=_AZURE_CODE),
        slo=SloConfig(ttft_seconds=0.45, tpot_seconds=0.04),
        source="Lengths: quantiles of Azure's code trace of 2023 (AzurePublicDataset, CC BY 4.0), without its bursts. "
        "Objectives: MLPerf Inference 5.0, Llama-2-70B interactive.",
    ),
    Workload(
        name="summarisation",
        contents=Conversations(lengths=_ARXIV),
        slo=SloConfig(ttft_seconds=15.0, tpot_seconds=0.15),
        source="Lengths: quantiles of arXiv summarisation with Llama-2's tokenizer (microsoft/vidur, MIT). "
        "Objectives: DistServe (OSDI '24), table 1, summarisation on OPT-66B.",
    ),
    Workload(
        name="agent",
        contents=_AGENT,
        slo=SloConfig(ttft_seconds=2.0, tpot_seconds=0.05),
        source="Made up: 8 system prompts of 4,000 tokens, 5 turns of tool output with 3 s between them, so that means "
        "come near those of Mooncake's tool and agent trace (FAST '25: 8,596 and 182 tokens). "
        "Objectives: the example of NVIDIA's AISimulate for that trace.",
    ),
    Workload(
        name="sharegpt-synthetic",
        contents=Conversations(lengths=_SHAREGPT),
        slo=SloConfig(ttft_seconds=0.2, tpot_seconds=0.1),
        source="Lengths: quantiles of the 1,593 different ShareGPT pairs that DistServe's authors published in their "
        "simulator's alignment data (LLMServe/DistServe at 20a1633, Apache-2.0). Their simulator draws its requests "
        "from ShareGPT itself, those under 2048 tokens in all. Objectives: the example of its README.",
    ),
    Workload(
        name="humaneval-synthetic",
        contents=Conversations(lengths=_HUMANEVAL),
        slo=SloConfig(ttft_seconds=0.125, tpot_seconds=0.2),
        source="Lengths: the means of DistServe (OSDI '24), figure 7; their spread is assumed. "
        "Objectives: its table 1, code completion on OPT-66B.",
    ),
    Workload(
        name="longbench-synthetic",
        contents=Conversations(lengths=_LONGBENCH),
        slo=SloConfig(ttft_seconds=15.0, tpot_seconds=0.15),
        source="Lengths: the means of DistServe (OSDI '24), figure 7, under 2048 tokens in all as there; their spread "
        "is assumed. Objectives: its table 1, summarisation on OPT-66B.",
    ),
)

PRESETS = {workload.name: workload for workload in _PRESETS}


def preset(name: str) -> Workload:
    """The workload of that name.

    Tokens are prompt and answer means.

    ===================  =============  ==============  ==========  =====================
    name                 mean tokens    of its source   cacheable   TTFT / TPOT
    ===================  =============  ==============  ==========  =====================
    chat                 1,153 / 214    1,155 / 211     0.00        0.25 s / 100 ms
    code                 2,076 / 31     2,048 / 28      0.00        0.45 s / 40 ms
    summarisation        2,581 / 294    2,588 / 291     0.00        15 s / 150 ms
    agent                8,648 / 180    8,596 / 182     0.91        2 s / 50 ms
    sharegpt-synthetic   760 / 177      761 / 187       0.00        0.2 s / 100 ms
    humaneval-synthetic  171 / 98       171.3 / 98.2    0.00        0.125 s / 200 ms
    longbench-synthetic  1,736 / 87     1,738.3 / 90.7  0.00        15 s / 150 ms
    ===================  =============  ==============  ==========  =====================

    Raises:
        ValueError: there is no such preset; the message suggests the nearest names.
    """
    workload = PRESETS.get(name)
    if workload is None:
        near = get_close_matches(name.lower(), PRESETS, n=2, cutoff=0.4) or PRESETS
        raise ValueError(f"no preset {name!r}: use {' or '.join(near)}, or the path of a trace")
    return workload
