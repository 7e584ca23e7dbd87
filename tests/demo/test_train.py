from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from pdserve.demo import tokenizer as words
from pdserve.demo import train
from pdserve.demo.train import IGNORED, LAST_SHARE, Size, Training, draw_rows, number_features
from pdserve.model.config.decoder_config import DecoderConfig
from pdserve.model.weights.files import check_weights

TINY = Size("tiny", 32, 64, 2, 2, 1, 100, 0)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return words.write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(train, "TOKENS_PER_STEP", 512)
    monkeypatch.setattr(train, "WARMUP_STEPS", 1)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def weights(training: Training, folder: Path) -> dict[str, torch.Tensor]:
    training.save(folder)
    return dict(load_file(folder / "state.safetensors"))


def test_only_answers_are_targets(tokenizer: Tokenizer) -> None:
    rows = draw_rows(tokenizer, 7, 8, 64)
    assert rows.tokens.shape == rows.targets.shape == (8, 64)
    for tokens, targets in zip(rows.tokens.tolist(), rows.targets.tolist(), strict=True):
        in_answer = False
        for position, (token, target) in enumerate(zip(tokens, targets, strict=True)):
            in_answer = tokenizer.id_to_token(token) == words.ASSISTANT or (
                in_answer and tokenizer.id_to_token(token) != words.END
            )
            assert (target != IGNORED) == in_answer
            if in_answer and position < 63:
                assert target == tokens[position + 1]


def test_no_two_numbers_have_the_same_features() -> None:
    features = number_features()
    assert len(set(map(tuple, features.tolist()))) == len(words.NUMBERS)


def test_the_loss_falls(tokenizer: Tokenizer) -> None:
    training = Training(TINY, tokenizer, 1)
    losses = [training.train_step() for _ in range(16)]
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])


def test_a_resumed_run_gives_what_it_would_have_given_with_any_number_of_threads(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    whole = Training(TINY, tokenizer, 1)
    for _ in range(4):
        whole.train_step()
    begun = Training(TINY, tokenizer, 2)
    for _ in range(2):
        begun.train_step()
    begun.save(tmp_path / "begun")
    resumed = Training(TINY, tokenizer, 2)
    resumed.resume(tmp_path / "begun")
    assert resumed.step == 2
    for _ in range(2):
        resumed.train_step()
    expected, got = weights(whole, tmp_path / "whole"), weights(resumed, tmp_path / "resumed")
    assert expected.keys() == got.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, got[name]), name


def test_the_checkpoint_is_the_trained_model(tokenizer: Tokenizer, tmp_path: Path) -> None:
    training = Training(TINY, tokenizer, 1)
    training.train_step()
    training.write_checkpoint(tmp_path)
    config = DecoderConfig.from_folder(tmp_path)
    check_weights(tmp_path, config.shape)
    assert config.eos_token_ids == (tokenizer.token_to_id(words.END),)
    model = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.tensor([tokenizer.encode("What is 17 + 25?").ids])
    with torch.no_grad():
        table = training.embedding.table()
        hidden = training.model.model(inputs_embeds=table[tokens]).last_hidden_state
        torch.testing.assert_close(model(tokens).logits, hidden @ table.T, atol=2e-2, rtol=2e-2)


def test_training_writes_its_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    size = TINY._replace(num_steps=2)
    train.train(size, tmp_path / "out", tmp_path / "state", num_threads=1, console=Console(stderr=True))
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert "tiny: step 2 of 2, loss " in capsys.readouterr().err


def test_the_learning_rate_falls_to_nothing_twice(tokenizer: Tokenizer) -> None:
    training = Training(TINY._replace(num_last_steps=10), tokenizer, 1)

    def warmth(step: int) -> float:
        training.step = step
        return training._warmth()

    assert warmth(100) == LAST_SHARE
    assert warmth(99) < warmth(98) < LAST_SHARE
    assert [warmth(step) for step in (105, 109)] == pytest.approx([LAST_SHARE / 2, LAST_SHARE / 10])
