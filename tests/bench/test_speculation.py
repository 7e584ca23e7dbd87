from __future__ import annotations

from pathlib import Path

from pdserve.bench.speculation import Server, measure, requests_of
from pdserve.contracts.worker_config import WorkerConfig, WorkerRole
from pdserve.model.weights.demo_model import DEMO_MODEL, DRAFT_MODEL
from pdserve.router.text.tokenizer import ChatTokenizer


def test_drafters_are_compared_over_equal_answers() -> None:
    tokenizer = ChatTokenizer.from_folder(Path(DEMO_MODEL))
    servers = {
        drafter: Server(
            WorkerConfig(
                worker_id="mixed-0",
                role=WorkerRole.MIXED,
                model_path=str(DEMO_MODEL),
                max_model_len=512,
                num_kv_blocks=256,
                speculation=drafter,
                draft_path=str(DRAFT_MODEL),
                device="cpu",
            )
        )
        for drafter in ("none", "draft")
    }
    requests = requests_of("copy", 2, servers["none"].vocab_size, tokenizer)
    figures = measure(servers, requests, 2, 1)
    assert figures["none"]["tokens_per_row"] == 1.0
    assert figures["none"]["clock"] == 1.0
    assert figures["draft"]["guesses"] >= figures["draft"]["right"]
    assert figures["draft"]["clock"] > 0
