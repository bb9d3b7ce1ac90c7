"""Reads a llama GGUF into what a Hugging Face checkpoint holds: names, row order, config and tokenizer.

Only what the embedded model needs: the llama architecture, a byte-level BPE of the `smollm` kind, and tensors in F32,
F16, Q8_0 or Q4_1. Anything else is a ValueError that names it. Who fetches and who writes is embedded's business.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.models.embedded.pack4 import Codes

BLOCK = 32  # weights that share one scale and minimum in Q4_1

_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LLAMA_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "head_dim": "rope.dimension_count",
    "vocab_size": "vocab_size",
}


class Q4Matrix(NamedTuple):
    """W[n, k] = codes[n, k] * scales[n, k // 32] + minimums[n, k // 32], exactly as the file has it.

    codes [N, K] 0 to 15; scales, minimums fp16 [N, K / 32]
    """

    codes: Codes
    scales: NDArray[np.float16]
    minimums: NDArray[np.float16]

    def dense(self) -> NDArray[np.float32]:
        """[N, K]"""
        groups = self.codes.reshape(*self.scales.shape, BLOCK).astype(np.float32)
        weights = groups * self.scales[..., None].astype(np.float32) + self.minimums[..., None].astype(np.float32)
        return weights.reshape(self.codes.shape)


Tensor = Q4Matrix | NDArray[np.float16]


class GgufSource:
    """One open GGUF. Every method copies what it gives, so that the file may be deleted afterwards."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader  # pulls requests and tqdm: only a conversion pays for it

        self._reader = GGUFReader(path)
        architecture = self._value("general.architecture")
        if architecture != "llama":
            raise ValueError(f"{path.name}: architecture is {architecture!r}; only 'llama' can be converted")

    @property
    def num_tensors(self) -> int:
        return len(self._reader.tensors)

    def config(self) -> dict[str, Any]:
        """config.json of a LlamaForCausalLM."""
        values = {name: self._value(f"llama.{key}") for name, key in _LLAMA_KEYS.items()}
        # A float32 in the file: 1e-5 is kept there as 9.999999747378752e-06. Six digits are what was meant.
        for name in ("rms_norm_eps", "rope_theta"):
            values[name] = float(f"{values[name]:.6g}")
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in self._reader.tensors),
            "torch_dtype": "float16",
            "bos_token_id": self._value("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._value("tokenizer.ggml.eos_token_id"),
            "pad_token_id": self._value("tokenizer.ggml.padding_token_id"),
            **values,
        }

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each tensor under its Hugging Face name: Q4_1 matrices as they are, all others in fp16."""
        heads = {
            "attn_q": self._value("llama.attention.head_count"),
            "attn_k": self._value("llama.attention.head_count_kv"),
        }
        for tensor in self._reader.tensors:
            part = tensor.name.split(".")[-2]
            yield _hugging_face_name(tensor.name), _in_rotate_half_order(_read(tensor), heads.get(part))

    def tokenizer(self) -> str:
        """The text of tokenizer.json."""
        return build_tokenizer_json(
            tokens=self._value("tokenizer.ggml.tokens"),
            merges=self._value("tokenizer.ggml.merges"),
            special_ids=self._special_ids(),
            kind=self._value("tokenizer.ggml.pre"),
        )

    def tokenizer_config(self) -> dict[str, Any]:
        tokens = self._value("tokenizer.ggml.tokens")
        named = {
            name: tokens[self._value(f"tokenizer.ggml.{key}_token_id")]
            for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
        }
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": self._value("llama.context_length"),
            "add_bos_token": False,
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "chat_template": self._value("tokenizer.chat_template"),
            "additional_special_tokens": [tokens[token_id] for token_id in self._special_ids()],
            **{f"{name}_token": token for name, token in named.items()},
        }

    def _special_ids(self) -> list[int]:
        control = 3  # gguf's TokenType.CONTROL
        return [index for index, kind in enumerate(self._value("tokenizer.ggml.token_type")) if kind == control]

    def _value(self, key: str) -> Any:
        field = self._reader.get_field(key)
        if field is None:
            raise ValueError(f"the GGUF has no {key!r}; it cannot be converted")
        return field.contents()


def build_tokenizer_json(*, tokens: list[str], merges: list[str], special_ids: list[int], kind: str) -> str:
    """A byte-level BPE as Hugging Face's tokenizer.json.

    Not every byte need have a symbol (SmolLM2 lacks 21 of 256: six control characters, the first bytes of the
    unassigned planes 4 to 11, and bytes that UTF-8 never uses). BPE would drop such a character without a word, so a
    normaliser puts U+FFFD, the replacement character, in its place: the model sees that something stood there.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    if kind != "smollm":
        raise ValueError(f"pre-tokenizer kind is {kind!r}; only 'smollm' can be converted")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    missing = _unwritable_characters(vocabulary)
    if missing:
        tokenizer.normalizer = normalizers.Replace(Regex(f"[{missing}]"), "\ufffd")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(tokens[index], special=True, normalized=False) for index in special_ids])
    return tokenizer.to_str(pretty=False)


def byte_symbols() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte, as byte-level BPE vocabularies write them."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + place) for place, byte in enumerate(others)}


def _unwritable_characters(vocabulary: dict[str, int]) -> str:
    """The inside of a regex class: every character whose UTF-8 form begins with a byte that has no symbol."""
    missing = [byte for byte, symbol in byte_symbols().items() if symbol not in vocabulary]
    if any(byte in missing for byte in (*range(0x80, 0xC0), *"\ufffd".encode())):
        raise ValueError("the vocabulary lacks a continuation byte of UTF-8; such a tokenizer cannot be converted")
    return "".join(_character_range(byte) for byte in sorted(missing))


def _character_range(first_byte: int) -> str:
    """The characters that start with this byte in UTF-8, as a part of a regex class; nothing if there are none."""
    if first_byte < 0x80:
        return f"\\x{{{first_byte:x}}}"
    if 0xC2 <= first_byte <= 0xDF:
        low, bits = (first_byte & 0x1F) << 6, 6
    elif 0xE0 <= first_byte <= 0xEF:
        low, bits = (first_byte & 0x0F) << 12, 12
    elif 0xF0 <= first_byte <= 0xF4:
        low, bits = (first_byte & 0x07) << 18, 18
    else:
        return ""  # never a first byte of UTF-8
    shortest = {6: 0x80, 12: 0x800, 18: 0x10000}[bits]
    return f"\\x{{{max(low, shortest):x}}}-\\x{{{min(low + (1 << bits) - 1, 0x10FFFF):x}}}"


def _hugging_face_name(name: str) -> str:
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if block and block[2] in _PARTS:
        return f"model.layers.{block[1]}.{_PARTS[block[2]]}.weight"
    part = name.removesuffix(".weight")
    if part not in _OUTSIDE:
        raise ValueError(f"the GGUF holds {name!r}, which has no place in a llama checkpoint")
    return f"{_OUTSIDE[part]}.weight"


def _read(tensor: Any) -> Tensor:
    kind = tensor.tensor_type.name
    if kind == "Q4_1":
        return _read_q4_1(tensor.data)
    if kind not in ("F32", "F16", "Q8_0"):
        raise ValueError(f"{tensor.name} is stored as {kind}; only F32, F16, Q8_0 and Q4_1 can be converted")
    from gguf import dequantize

    return dequantize(tensor.data, tensor.tensor_type).astype(np.float16)


def _read_q4_1(rows: NDArray[np.uint8]) -> Q4Matrix:
    """Blocks of 20 bytes: scale fp16, minimum fp16, 16 bytes whose low nibbles are weights 0-15, high ones 16-31."""
    blocks = np.ascontiguousarray(rows).reshape(len(rows), -1, 4 + BLOCK // 2)
    pairs = np.ascontiguousarray(blocks[..., :4]).view(np.float16)
    nibbles = blocks[..., 4:]
    codes = np.concatenate([nibbles & 15, nibbles >> 4], axis=2).reshape(len(rows), -1)
    return Q4Matrix(codes, pairs[..., 0].copy(), pairs[..., 1].copy())


def _in_rotate_half_order(tensor: Tensor, num_heads: int | None) -> Tensor:
    """Undo llama.cpp's row order of q and k, where the two halves of each rotary pair lie side by side."""
    if num_heads is None:
        return tensor
    if isinstance(tensor, Q4Matrix):
        return Q4Matrix(*(_halves_apart(part, num_heads) for part in tensor))
    return _halves_apart(tensor, num_heads)


def _halves_apart(rows: NDArray[Any], num_heads: int) -> NDArray[Any]:
    num_rows, width = rows.shape
    return rows.reshape(num_heads, num_rows // num_heads // 2, 2, width).swapaxes(1, 2).reshape(num_rows, width)
