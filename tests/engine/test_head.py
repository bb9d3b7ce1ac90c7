"""A head held in 8 bits: when it is, what it takes, and how little it moves the answers."""

from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.forecast import quantizes_head
from engine.loading import load_runner
from engine.quant.linear import DenseLinear, W8Linear
from engine.runner import ModelRunner
from tests.checkpoints import tiny_checkpoint

ESSAY = Path(__file__).parents[1] / "data" / "essay.txt"


def _load(folder: Path, head: str) -> ModelRunner:
    config = EngineConfig(model=str(folder), device="cpu", kv_gb=0.2, quantize_lm_head=head)
    return load_runner(config, lambda stage, fraction: None)


def _kl(exact: torch.Tensor, close: torch.Tensor) -> torch.Tensor:
    """[tokens] of log-probabilities [tokens, vocab]."""
    return (exact.exp() * (exact - close)).sum(-1)


@torch.inference_mode()
def _logprobs(runner: ModelRunner, token_ids: tuple[int, ...]) -> torch.Tensor:
    return torch.cat([logits.double().log_softmax(-1) for logits in runner.logits_of_all(token_ids)])


@pytest.mark.parametrize("family", ["llama", "llama3"])
def test_a_head_in_8_bits_is_one_and_keeps_the_table_of_the_inputs(tmp_path: Path, family: str) -> None:
    """llama's head is its embedding, llama3's is its own."""
    tiny_checkpoint(tmp_path, family, "gptq")
    plain, small = _load(tmp_path, "off"), _load(tmp_path, "on")
    assert isinstance(plain._decoder.head, DenseLinear) and isinstance(small._decoder.head, W8Linear)
    assert torch.equal(plain._decoder.embedding, small._decoder.embedding)
    held = small._decoder.head.num_bytes
    dense = 0 if plain._decoder.head.weight is plain._decoder.embedding else plain._decoder.head.num_bytes
    assert small.memory.weights_bytes - plain.memory.weights_bytes == held - dense
    tokens = tuple(range(3, 60))
    kl = _kl(_logprobs(plain, tokens), _logprobs(small, tokens))
    assert 0 < float(kl.max()) < 1e-3


@pytest.mark.parametrize(
    ("asked", "kind", "is_quantized", "dtype", "expected"),
    [
        ("auto", "cuda", True, "float16", True),
        ("auto", "cuda", False, "float16", False),
        ("auto", "cuda", True, "float32", False),
        ("auto", "cpu", True, "float32", False),
        ("off", "cuda", True, "float16", False),
        ("on", "cpu", False, "float32", True),
    ],
)
def test_a_head_is_in_8_bits_with_4_bit_models_on_a_card_or_where_asked(
    asked: str, kind: str, is_quantized: bool, dtype: str, expected: bool
) -> None:
    config = EngineConfig(model="m", quantize_lm_head=asked)
    assert quantizes_head(config, kind, dtype, is_quantized=is_quantized) is expected


@pytest.mark.slow
def test_the_embedded_models_answers_hardly_move(embedded_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Mean KL over the essay's first 1,024 tokens."""
    from tokenizers import Tokenizer

    from app.models.embedded.forms import Form

    folder = embedded_home / "models" / Form.LOSSLESS
    tokens = tuple(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(ESSAY.read_text()).ids[:1024])
    exact, close = (_logprobs(_load(folder, head), tokens) for head in ("off", "on"))
    kl, same = _kl(exact, close), (exact.argmax(-1) == close.argmax(-1)).double().mean()
    with capsys.disabled():
        print(
            f"\nint8 head: KL mean {float(kl.mean()):.2e}, largest {float(kl.max()):.2e}, same first {float(same):.2%}"
        )
    assert float(kl.mean()) < 1e-3
