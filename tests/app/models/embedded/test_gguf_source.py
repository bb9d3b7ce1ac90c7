"""A GGUF's words into Hugging Face's: rows, tokenizer, refusals."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from app.models.embedded.gguf_source import GgufSource, Q4Matrix, build_tokenizer_json, byte_symbols
from tests.app.models.embedded import tiny_gguf


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[GgufSource, tiny_gguf.Weights]:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    weights = tiny_gguf.write_tiny_gguf(path)
    return GgufSource(path), weights


@pytest.fixture(scope="module")
def tokenizer(tiny: tuple[GgufSource, tiny_gguf.Weights]) -> Tokenizer:
    return Tokenizer.from_str(tiny[0].tokenizer())


def test_every_tensor_arrives_under_its_name_in_its_row_order_bit_for_bit(
    tiny: tuple[GgufSource, tiny_gguf.Weights],
) -> None:
    source, weights = tiny
    found = dict(source.tensors())
    assert found.keys() == weights.keys()
    for name, tensor in found.items():
        if isinstance(tensor, Q4Matrix):
            np.testing.assert_array_equal(tensor.dense(), weights[name], err_msg=name)
        else:
            np.testing.assert_array_equal(tensor, weights[name].astype(np.float16), err_msg=name)


def test_the_matrices_stay_in_four_bits(tiny: tuple[GgufSource, tiny_gguf.Weights]) -> None:
    matrices = [name for name, tensor in tiny[0].tensors() if isinstance(tensor, Q4Matrix)]
    assert len(matrices) == 7 * tiny_gguf.LAYERS


def test_config_is_a_llama_with_tied_embeddings(tiny: tuple[GgufSource, tiny_gguf.Weights]) -> None:
    config = tiny[0].config()
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"] is True
    assert (config["rms_norm_eps"], config["rope_theta"]) == (1e-5, 100000.0)
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (4, 2, 16)
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 2)


def test_text_comes_back_from_its_ids(tokenizer: Tokenizer) -> None:
    text = "the  héllo\n\t— 漢字 🙂 1234"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_merges_apply_but_never_across_digits(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode(" the").tokens == ["Ġthe"]
    assert tokenizer.encode("12").tokens == ["1", "2"]


def test_special_tokens_are_one_id_each_and_left_out_of_decoded_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>the<|im_end|>").ids
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids) == "the"
    assert tokenizer.encode("the").ids[0] not in (1, 2), "no bos is put in front"


@pytest.mark.parametrize("character", ["\x04", "\x1d", "\U00040000", "\U0007ffff", "\U00080000", "\U000bffff"])
def test_a_character_without_a_symbol_shows_as_the_replacement_character(tokenizer: Tokenizer, character: str) -> None:
    assert tokenizer.decode(tokenizer.encode(f"a{character}b").ids) == "a\ufffdb"


@pytest.mark.parametrize("character", ["\x03", "\x05", "\x7f", "\U0003ffff", "\U000c0000", "\U0010ffff"])
def test_the_neighbours_of_such_characters_are_kept(tokenizer: Tokenizer, character: str) -> None:
    assert tokenizer.decode(tokenizer.encode(f"a{character}b").ids) == f"a{character}b"


def test_a_vocabulary_that_cannot_write_the_replacement_is_refused() -> None:
    tokens = [symbol for byte, symbol in byte_symbols().items() if byte != 0xBD]
    with pytest.raises(ValueError, match="continuation byte"):
        build_tokenizer_json(tokens=tokens, merges=[], special_ids=[], kind="smollm")


def test_another_architecture_or_number_format_is_refused_by_name(tmp_path: Path) -> None:
    tiny_gguf.write_tiny_gguf(tmp_path / "other.gguf", architecture="qwen2")
    with pytest.raises(ValueError, match="qwen2"):
        GgufSource(tmp_path / "other.gguf")
    tiny_gguf.write_tiny_gguf(tmp_path / "q5.gguf", matrices="Q5_0")
    with pytest.raises(ValueError, match=r"blk\.0\.attn_q\.weight is stored as Q5_0"):
        list(GgufSource(tmp_path / "q5.gguf").tensors())
