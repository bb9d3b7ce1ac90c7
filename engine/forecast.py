"""What a load will take, told before a weight is read: from config.json and the headers of the files alone."""

import torch

from engine.graphs import graphs_bytes
from engine.memory import Parts
from engine.model.spec import ModelSpec
from engine.sampling.sampler import Sampler
from engine.weights.reader import CheckpointReader
from kernels.device import Device

_FP32_BYTES = 4
_LIBRARIES_BYTES = 42_000_000  # what cuBLAS works in on Hopper, and the attention's parts
_CODES = ("qweight", "weight_packed")
_SCALES = ("scales", "weight_scale")
_FOLDED_IN = ("qzeros", "weight_zero_point", "scaled_zeros", "g_idx", "weight_g_idx", "weight_shape", "inv_freq")


def forecast(
    spec: ModelSpec,
    reader: CheckpointReader,
    device: Device,
    dtype: torch.dtype,
    *,
    num_tokens: int,
    max_num_seqs: int,
    max_len: int,
    uses_graphs: bool,
    quantizes_head: bool,
) -> Parts:
    """num_tokens: of the largest step. quantizes_head: as `DecoderBuilder`."""
    weights = _weights_bytes(spec, reader, device, dtype, quantizes_head) + _angles_bytes(spec, max_len)
    return Parts(
        free_at_start=device.free_bytes(),
        weights=weights,
        workspace=workspace_bytes(spec, device, dtype, num_tokens, max_num_seqs, max_len),
        graphs=graphs_bytes(spec, max_num_seqs, dtype.itemsize) if uses_graphs else 0,
    )


def _weights_bytes(
    spec: ModelSpec, reader: CheckpointReader, device: Device, dtype: torch.dtype, quantizes_head: bool
) -> int:
    """As they will be held: codes as they are; a scale in fp32, on a CPU beside an offset; zeros within these."""
    words_a_scale = 1 if device.kind == "cuda" else 2
    total = 0
    for name in reader.names:
        part = name.rpartition(".")[2]
        shape, stored = reader.header(name)
        count = torch.Size(shape).numel()
        if part in _CODES:
            total += count * stored.itemsize
        elif part in _SCALES:
            total += count * words_a_scale * _FP32_BYTES
        elif part not in _FOLDED_IN and name != "lm_head.weight":
            total += count * (dtype.itemsize if device.kind == "cuda" else stored.itemsize)
    return total + _head_bytes(spec, reader, device, dtype, quantizes_head)


def _head_bytes(
    spec: ModelSpec, reader: CheckpointReader, device: Device, dtype: torch.dtype, quantizes_head: bool
) -> int:
    """Of a head that is not quantised in the files: in 8 bits; or in 16, where it may be the embedding itself."""
    if any(name.startswith("lm_head.") and name.endswith(_CODES) for name in reader.names):
        return 0
    if quantizes_head:
        return spec.vocab_size * (spec.hidden_size + _FP32_BYTES)
    if spec.tie_word_embeddings:
        return 0
    itemsize = dtype.itemsize if device.kind == "cuda" else reader.header("lm_head.weight")[1].itemsize
    return spec.vocab_size * spec.hidden_size * itemsize


def _angles_bytes(spec: ModelSpec, max_len: int) -> int:
    ropes = {layer.attention.rope for layer in spec.layers}
    return sum(max_len * rope.rotary_dim * _FP32_BYTES for rope in ropes)


def workspace_bytes(
    spec: ModelSpec, device: Device, dtype: torch.dtype, num_tokens: int, max_num_seqs: int, max_len: int
) -> int:
    """Of the largest step: so many tokens, after which every sequence samples with every sampling step on.

    On a card the layers' and the sampler's tensors are not there at once. Measured there: a feed-forward's two results
    beside three of the residual stream's size; of the logits, fp32, two copies more.
    """
    widest, kept = max(layer.ffn.widest for layer in spec.layers), Sampler.bytes_for(max_num_seqs, max_len)
    if device.kind == "cpu":
        layers = _FP32_BYTES * num_tokens * (widest + 4 * spec.hidden_size)
        return layers + 3 * 8 * max_num_seqs * spec.vocab_size + kept
    layers = dtype.itemsize * num_tokens * (widest + widest // 2 + 3 * spec.hidden_size) + _LIBRARIES_BYTES
    sampling = 3 * _FP32_BYTES * max_num_seqs * spec.vocab_size + dtype.itemsize * num_tokens * spec.hidden_size
    return max(layers, sampling) + kept
