"""The perplexity tool: its number is that of transformers' own loss, whatever the chunks and windows."""

import json
import math
from pathlib import Path

import pytest
import torch

from engine import perplexity
from engine.config import EngineConfig
from engine.loading import load_runner
from engine.runner import ModelRunner
from tests.checkpoints import tiny_checkpoint


def _load(folder: Path, **options: int) -> ModelRunner:
    config = EngineConfig(model=str(folder), device="cpu", kv_gb=0.01, **options)
    return load_runner(config, lambda stage, fraction: None)


def _tokens(count: int) -> tuple[int, ...]:
    return tuple(torch.randint(3, 259, (count,), generator=torch.Generator().manual_seed(0)).tolist())


@torch.inference_mode()
def _surprise_of_transformers(model: torch.nn.Module, piece: tuple[int, ...]) -> float:
    ids = torch.tensor([piece])
    return model(ids, labels=ids).loss.item() * (len(piece) - 1)


@pytest.mark.parametrize("budget", [512, 48, 7])
@pytest.mark.parametrize("window", [200, 150, 199])
def test_perplexity_is_that_of_transformers_loss(tmp_path: Path, window: int, budget: int) -> None:
    model = tiny_checkpoint(tmp_path, "llama")
    tokens = _tokens(200)  # windows of 199 leave one token over, which predicts nothing
    pieces = [tokens[start : start + window] for start in range(0, 200, window)]
    surprise = sum(_surprise_of_transformers(model, piece) for piece in pieces if len(piece) > 1)
    expected = math.exp(surprise / sum(len(piece) - 1 for piece in pieces))
    ours = perplexity.perplexity(_load(tmp_path, max_num_batched_tokens=budget), tokens, window)
    assert ours == pytest.approx(expected, rel=1e-5)  # fp32 sums in another order


def test_logits_of_a_long_prompt_never_exist_at_once(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "llama")
    chunks = [len(logits) for logits in _load(tmp_path).logits_of_all(_tokens(250))]
    assert sum(chunks) == 250
    assert max(chunks) == 128


def _write_tokenizer(folder: Path, vocabulary: dict[str, int]) -> None:
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "?"}
    spec = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(spec))


@pytest.fixture
def two_models(tmp_path: Path) -> tuple[Path, Path]:
    folders = tmp_path / "dense", tmp_path / "gptq"
    for folder in folders:
        tiny_checkpoint(folder, "llama", folder.name)
        _write_tokenizer(folder, {"?": 3, "tide": 4, "mill": 5})
    (tmp_path / "text.txt").write_text("tide mill tide tide mill")
    return folders


def test_tool_prints_each_model_beside_the_first_and_ends_with_json(
    two_models: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    dense, gptq = map(str, two_models)
    text = str(two_models[0].parent / "text.txt")
    assert perplexity.main(["--text", text, "--device", "cpu", "--model", dense, gptq]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    assert result["tokens"] == 5
    assert list(result["perplexity"]) == [dense, gptq]
    assert result["perplexity"][dense] == pytest.approx(perplexity.perplexity(_load(two_models[0]), (4, 5, 4, 4, 5)))
    assert [float(line.split()[-1]) for line in table] == pytest.approx(
        [1.0, result["perplexity"][gptq] / result["perplexity"][dense]], abs=1e-4
    )


def test_models_that_split_the_text_otherwise_are_refused_together(two_models: tuple[Path, Path]) -> None:
    dense, gptq = two_models
    _write_tokenizer(gptq, {"?": 3, "tide": 4, "mill": 6})
    with pytest.raises(SystemExit, match="splits this text into other tokens"):
        perplexity.main(["--text", str(dense.parent / "text.txt"), "--model", str(dense), str(gptq)])
