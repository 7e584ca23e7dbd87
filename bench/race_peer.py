"""The peer's half of `pdserve.bench.race`: vLLM's offline engine, driven over standard input.

Runs under the interpreter of vLLM's virtual environment, so it imports nothing of pdserve. Each JSON line in is one
burst, each JSON line out its time; the first line out gives the engine's start time. Every prompt is new token ids, and
prefix caching is off.
"""

from __future__ import annotations

import argparse
import json
import sys
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-model-len", type=int, default=1024)
    arguments = parser.parse_args()
    started_s = time.perf_counter()
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found, unused-ignore]

    engine = LLM(
        arguments.model,
        skip_tokenizer_init=True,
        dtype=arguments.dtype,
        max_model_len=arguments.max_model_len,
        enable_prefix_caching=False,
    )
    say({"ready_s": time.perf_counter() - started_s})
    for line in sys.stdin:
        burst = json.loads(line)
        prompts = [{"prompt_token_ids": tokens} for tokens in burst["prompts"]]
        sampling = SamplingParams(temperature=0, max_tokens=burst["max_tokens"], ignore_eos=True, detokenize=False)
        started_s = time.perf_counter()
        answers = engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - started_s
        say({"seconds": seconds, "num_tokens": sum(len(answer.outputs[0].token_ids) for answer in answers)})


def say(message: dict[str, float]) -> None:
    sys.stdout.write(f"RACE {json.dumps(message)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
