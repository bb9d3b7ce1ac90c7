"""app.chat.tokenizer: ids in, ids out, bytes out; nothing of a text is lost."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from app.chat.tokenizer import Tokenizer
from app.errors import AppError
from tests.fakes import BOS, EOS, byte_model_folder, ids


def sentencepiece_folder(folder: Path) -> Path:
    """A tokenizer as Llama 2 and Mistral ship it: pieces with a space mark, bytes for the rest, bos in front."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "H", "i", "▁H", "Hi", "▁Hi"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = [("▁", "H"), ("H", "i"), ("▁H", "i")]
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(strip)
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    inner.add_special_tokens(["<s>", "</s>"])
    folder.mkdir()
    inner.save(str(folder / "tokenizer.json"))
    return folder


def test_special_tokens_in_a_text_are_parsed(tmp_path: Path) -> None:
    tokenizer = Tokenizer(byte_model_folder(tmp_path))
    assert tokenizer.encode("<|im_start|>é<|im_end|>", add_special_tokens=False) == (BOS, *ids("é"), EOS)


def test_bos_is_added_to_plain_text_and_not_to_a_templates_output(tmp_path: Path) -> None:
    tokenizer = Tokenizer(sentencepiece_folder(tmp_path / "m"))
    plain = tokenizer.encode("Hi", add_special_tokens=True)
    templated = tokenizer.encode("<s>Hi", add_special_tokens=False)
    assert plain[0] == 1 and plain.count(1) == 1
    assert templated[0] == 1 and templated.count(1) == 1


def test_pieces_become_bytes_with_the_space_that_continues_a_prompt(tmp_path: Path) -> None:
    tokenizer = Tokenizer(sentencepiece_folder(tmp_path / "m"))
    token_ids = tokenizer.encode("Hi é", add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, token_ids)).decode() == " Hi é"


def test_bytes_of_every_token_are_what_the_library_decodes(tmp_path: Path) -> None:
    folder = byte_model_folder(tmp_path, words=["<think>", "ne"])
    tokenizer, library = Tokenizer(folder), tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "a ne né <think> 日本 😀\n\t\x00<|im_end|>"
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(token_ids) == library.decode(token_ids, skip_special_tokens=False) == text


def test_an_id_beyond_the_vocabulary_is_no_text(tmp_path: Path) -> None:
    assert Tokenizer(byte_model_folder(tmp_path)).token_bytes(100_000) == b""


def test_a_byte_without_a_symbol_is_refused_with_its_place(tmp_path: Path) -> None:
    tokenizer = Tokenizer(byte_model_folder(tmp_path, left_out=[0x07, 0xF4]))
    assert tokenizer.encode("fine", add_special_tokens=False) == ids("fine")
    with pytest.raises(AppError, match=r"U\+0007 at position 3") as caught:
        tokenizer.encode("bel\x07", add_special_tokens=False)
    assert caught.value.status == 400


def test_a_byte_without_a_symbol_becomes_unk_where_the_model_has_one(tmp_path: Path) -> None:
    folder = byte_model_folder(tmp_path, left_out=[0x07])
    spec = json.loads((folder / "tokenizer.json").read_text())
    spec["model"]["vocab"]["<unk>"] = 400
    spec["model"]["unk_token"] = "<unk>"
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    assert Tokenizer(folder).encode("a\x07b", add_special_tokens=False) == (*ids("a"), 400, *ids("b"))


@pytest.mark.parametrize("text", ["", "Hi", "▁" * 40, " " * 40, "日本" * 9, "<s>" * 9, "HiHi Hi"])
def test_no_text_of_pieces_has_fewer_tokens_than_is_said_beforehand(tmp_path: Path, text: str) -> None:
    tokenizer = Tokenizer(sentencepiece_folder(tmp_path / "m"))
    assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))
    assert (tokenizer.fewest_tokens(text) > 0) == bool(text)


def test_characters_that_the_vocabulary_composes_count_as_one(tmp_path: Path) -> None:
    folder = byte_model_folder(tmp_path)
    spec = json.loads((folder / "tokenizer.json").read_text())
    spec["normalizer"] = {"type": "NFC"}
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    longest = len("<|fim_middle|>")
    assert Tokenizer(folder).fewest_tokens("e\u0301" * longest) == 1


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("model", {"unk_token": "!", "fuse_unk": True}),
        (None, {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}}),
        (None, {"normalizer": {"type": "Replace", "pattern": {"Regex": "[ab]+"}, "content": "a"}}),
        (None, {"normalizer": {"type": "Replace", "pattern": {"String": "aa"}, "content": "a"}}),
        (None, {"pre_tokenizer": {"type": "WhitespaceSplit"}}),
    ],
)
def test_nothing_is_said_beforehand_where_one_token_may_stand_for_any_length(
    tmp_path: Path, part: str | None, change: dict[str, Any]
) -> None:
    folder = byte_model_folder(tmp_path)
    spec = json.loads((folder / "tokenizer.json").read_text())
    (spec[part] if part else spec).update(change)
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    assert Tokenizer(folder).fewest_tokens("x" * 1000) == 0


def test_nothing_is_said_beforehand_where_a_mark_swallows_blanks(tmp_path: Path) -> None:
    folder = byte_model_folder(tmp_path)
    spec = json.loads((folder / "tokenizer.json").read_text())
    spec["added_tokens"][0]["rstrip"] = True
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    assert Tokenizer(folder).fewest_tokens("x" * 1000) == 0


def test_a_limit_in_the_file_neither_cuts_nor_fills_a_prompt(tmp_path: Path) -> None:
    folder = byte_model_folder(tmp_path)
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.enable_truncation(max_length=4)
    inner.enable_padding(length=64)
    inner.save(str(folder / "tokenizer.json"))
    assert Tokenizer(folder).encode("a long prompt", add_special_tokens=False) == ids("a long prompt")


def test_a_folder_without_tokenizer_json_is_named_with_the_next_step(tmp_path: Path) -> None:
    with pytest.raises(AppError, match=r"has no tokenizer\.json") as caught:
        Tokenizer(tmp_path)
    assert "Download" in caught.value.hint


def test_a_broken_file_and_an_unknown_decoder_are_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{not json")
    with pytest.raises(AppError, match=r"tokenizer\.json cannot be read"):
        Tokenizer(tmp_path)
    inner = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.decoder = decoders.WordPiece()
    inner.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(AppError, match="WordPiece"):
        Tokenizer(tmp_path)
