"""Random weights of a spec: as wide as trained ones, and nought in the mean, so that no depth makes them overflow."""

import pytest
import torch

from engine.bench.shapes import dummy_checkpoint
from engine.weights.reader import CheckpointReader

MODULE = "model.layers.0.self_attn.k_proj"  # 4,096 inputs, 1,024 outputs in llama3.1-8b


def _reader(quant: str) -> CheckpointReader:
    return dummy_checkpoint("llama3.1-8b", quant).open_reader(torch.device("cpu"))


def _codes(words: torch.Tensor) -> torch.Tensor:
    return torch.stack([words >> 4 * place & 15 for place in range(8)])


def _weights(quant: str) -> torch.Tensor:
    """One module's numbers, in any order: [8 places of a word, ...]."""
    reader = _reader(quant)
    if quant == "none":
        return reader.get(f"{MODULE}.weight").float()
    codes, zeros = (_codes(reader.get(f"{MODULE}.{part}")) for part in ("qweight", "qzeros"))
    zero = zeros.float().mean() + (quant == "gptq")
    return (codes - zero) * reader.get(f"{MODULE}.scales").float()[0, 0]


@pytest.mark.parametrize("quant", ["gptq", "awq", "none"])
def test_a_product_is_as_large_as_what_goes_in_and_nothing_is_common_to_all_outputs(quant: str) -> None:
    weights = _weights(quant) * 4096**0.5
    assert abs(weights.mean()) < 0.003  # 4 million numbers: 6 deviations
    assert weights.std().item() == pytest.approx(1.0, rel=0.02)


def test_codes_of_symmetric_weights_are_uniform_but_that_8_takes_the_place_of_0() -> None:
    words = _reader("gptq").get(f"{MODULE}.qweight")
    shares = torch.bincount(_codes(words).flatten(), minlength=16) / (8 * words.numel())
    expected = torch.full((16,), 1 / 16)
    expected[0], expected[8] = 0.0, 1 / 8
    assert shares.tolist() == pytest.approx(expected.tolist(), abs=5e-4)
