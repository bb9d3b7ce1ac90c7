"""Text -> token ids, and token id -> the bytes that it stands for. Over `tokenizers`; reads tokenizer.json alone.

Joining bytes to characters is the detokenizer's work, chat templates are template.py's.
"""

import json
import re
import unicodedata
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from app.chat.files import bad_checkpoint, read_json
from app.errors import AppError

_FILE = "tokenizer.json"


class Tokenizer:
    """One model's vocabulary. Safe to use from several threads."""

    def __init__(self, folder: Path) -> None:
        """Read `folder`/tokenizer.json. Raises AppError where it is missing, broken, or of a kind we do not decode."""
        path = folder / _FILE
        if not path.is_file():
            raise AppError(
                500,
                "bad_checkpoint",
                f"The model folder {folder.name} has no {_FILE}.",
                hint="Download the model again, or add the file from the model's repository.",
            )
        spec = read_json(path)
        self._inner = _load(path)
        self._bytes_of = _byte_reader(spec.get("decoder"), path)
        added: list[dict[str, Any]] = spec.get("added_tokens") or []
        self._special: dict[int, str] = {entry["id"]: entry["content"] for entry in added if entry["special"]}
        self._literal: dict[int, bytes] = {entry["id"]: entry["content"].encode() for entry in added}
        self._id_of_special = {text: token_id for token_id, text in self._special.items()}
        self._id_of_added = {entry["content"]: entry["id"] for entry in added}
        self._unspellable = _unspellable_bytes(spec)
        self._is_composed = "NFC" in {step["type"] for step in _steps(spec.get("normalizer"), "normalizers")}
        self._longest_token = _longest_token(spec) if _keeps_length(spec) else None

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Ids of `text`; special tokens written in it are parsed.

        add_special_tokens   add what the model wants around a plain text (bos, ...), as its post-processor says. Off
                             for the output of a chat template, which writes them itself.
        Raises AppError (400) where a byte of the text has no symbol in the vocabulary and would be lost.
        """
        if self._unspellable:
            self._refuse_unspellable(text)
        # encode_batch releases the interpreter lock, encode does not: a long text must not stop every other request.
        encoding = self._inner.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        return tuple(encoding.ids)

    def fewest_tokens(self, text: str) -> int:
        """No encoding of `text` is shorter; found without tokenising, which takes seconds and GBs for a huge text.

        0 where this vocabulary lets one token stand for a text of any length (an unknown word, spaces around a mark).
        """
        if self._longest_token is None:
            return 0
        composed = unicodedata.normalize("NFC", text) if self._is_composed else text
        return -(-len(composed) // self._longest_token)

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 of a token, maybe a part of a character; b"" for an id beyond the vocabulary (padded embeddings)."""
        if token_id in self._literal:
            return self._literal[token_id]
        token = self._inner.id_to_token(token_id)
        return self._bytes_of(token) if token is not None else b""

    def is_special(self, token_id: int) -> bool:
        """Control tokens, which are no part of the answer's text."""
        return token_id in self._special

    def special_id(self, text: str) -> int | None:
        """The id of the control token that is written `text`."""
        return self._id_of_special.get(text)

    def added_id(self, text: str) -> int | None:
        """The id of the token that was added to the vocabulary as `text`, control token or not."""
        return self._id_of_added.get(text)

    def decode(self, token_ids: Iterable[int]) -> str:
        """The whole text, control tokens included."""
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", "replace")

    def _refuse_unspellable(self, text: str) -> None:
        normalizer = self._inner.normalizer
        normal = normalizer.normalize_str(text) if normalizer else text
        lost = self._unspellable.intersection(normal.encode())
        if lost:
            at, char = next((i, c) for i, c in enumerate(normal) if not lost.isdisjoint(c.encode()))
            raise AppError(
                400,
                "unspellable_text",
                f"This model's vocabulary cannot spell the character U+{ord(char):04X} at position {at} of the text.",
                hint="Remove it, or choose another model.",
            )


def _load(path: Path) -> Any:
    try:
        inner = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # `tokenizers` raises plain Exception
        raise bad_checkpoint(path, str(error)) from error
    # Some files keep the limits of their training run: a prompt would be cut, or filled up, without a word.
    inner.no_truncation()
    inner.no_padding()
    return inner


class _ByteLevel:
    """Vocabularies that write each byte as one printable character (GPT-2's table)."""

    def __init__(self) -> None:
        self._byte_of = {char: byte for byte, char in enumerate(byte_symbols())}

    def __call__(self, token: str) -> bytes:
        try:
            return bytes(map(self._byte_of.__getitem__, token))
        except KeyError:  # a token outside the table stands for itself
            return token.encode()


class _Pieces:
    """SentencePiece vocabularies: a mark for the space, and maybe `<0x0A>` for a byte.

    Their decoders strip the first space of a text. An answer continues a prompt, so here it stays.
    """

    def __init__(self, replaced: Mapping[str, str], byte_fallback: bool) -> None:
        self._replaced = replaced
        self._byte_of = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)} if byte_fallback else {}

    def __call__(self, token: str) -> bytes:
        if token in self._byte_of:
            return self._byte_of[token]
        for mark, text in self._replaced.items():
            token = token.replace(mark, text)
        return token.encode()


def _byte_reader(decoder: Mapping[str, Any] | None, path: Path) -> _ByteLevel | _Pieces:
    steps = _steps(decoder, "decoders")
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return _ByteLevel()
    if kinds and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        replaced = {step["pattern"]["String"]: step["content"] for step in steps if step["type"] == "Replace"}
        replaced |= {step["replacement"]: " " for step in steps if step["type"] == "Metaspace"}
        return _Pieces(replaced, "ByteFallback" in kinds)
    raise AppError(
        501,
        "unsupported_model",
        f"{path.parent.name}/{_FILE} has the decoder {json.dumps(sorted(kinds))}.",
        hint="Fireside reads ByteLevel, Metaspace and ByteFallback decoders.",
    )


def _steps(part: Mapping[str, Any] | None, plural: str) -> list[Mapping[str, Any]]:
    """A part of tokenizer.json as its sequence of steps."""
    if part is None:
        return []
    return list(part[plural]) if part["type"] == "Sequence" else [part]


def _unspellable_bytes(spec: Mapping[str, Any]) -> frozenset[int]:
    """Bytes for which a byte-level BPE has neither a symbol nor an unknown token: `tokenizers` would drop them."""
    model = spec["model"]
    is_byte_level = any(step["type"] == "ByteLevel" for step in _steps(spec.get("pre_tokenizer"), "pretokenizers"))
    if model.get("type") != "BPE" or not is_byte_level or model.get("unk_token") is not None:
        return frozenset()
    return frozenset(byte for byte, symbol in enumerate(byte_symbols()) if symbol not in model["vocab"])


def _keeps_length(spec: Mapping[str, Any]) -> bool:
    """Whether a token stands for no more characters of a (composed) text than it is written with."""
    model = spec["model"]
    is_bpe = model.get("type") == "BPE"  # other kinds make one unknown token of a word of any length
    fuses = model.get("fuse_unk") and model.get("unk_token") is not None
    spells_bytes = model.get("byte_fallback") and all(f"<0x{byte:02X}>" in model["vocab"] for byte in range(256))
    return (
        is_bpe
        and (not fuses or bool(spells_bytes))
        and not any(token["lstrip"] or token["rstrip"] for token in spec.get("added_tokens") or ())
        and all(map(_shortens_nothing, _steps(spec.get("normalizer"), "normalizers")))
        and all(map(_drops_nothing, _steps(spec.get("pre_tokenizer"), "pretokenizers")))
        and spec.get("truncation") is None
    )


def _shortens_nothing(normalizer: Mapping[str, Any]) -> bool:
    if normalizer["type"] != "Replace":
        return normalizer["type"] in {"NFC", "Prepend"}
    pattern, content = normalizer["pattern"], normalizer["content"]
    if "String" in pattern:
        return len(content) >= len(pattern["String"])
    return bool(content) and re.fullmatch(r"\[[^\[\]]+\]", pattern["Regex"]) is not None  # one character


def _drops_nothing(pre_tokenizer: Mapping[str, Any]) -> bool:
    is_known = pre_tokenizer["type"] in {"ByteLevel", "Metaspace", "Digits", "Punctuation", "Split"}
    return is_known and pre_tokenizer.get("behavior") != "Removed"


def _longest_token(spec: Mapping[str, Any]) -> int:
    """Characters of the longest token as it is written; a byte-level one is written with one for each byte."""
    added = (token["content"] for token in spec.get("added_tokens") or ())
    return max(map(len, (*spec["model"]["vocab"], *added)), default=1)


def byte_symbols() -> list[str]:
    """GPT-2's table: symbol of each byte 0..255. Printable ones stand for themselves, the others follow from U+0100."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte) if byte in plain else chr(next(spare)) for byte in range(256)]
