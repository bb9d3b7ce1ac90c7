"""What a load chooses where its config leaves a choice, and what it will take: from config.json and the headers of the
files alone, before a weight is read. Free of torch: the app forecasts a model that is not here yet in the same words.
"""

from bisect import bisect_left

from engine.config import EngineConfig
from engine.errors import BadRequest
from engine.memory import Machine, Parts, asked_context, batched_tokens
from engine.model.spec import ModelSpec, MoeSpec
from engine.quant.stated import Stated
from engine.weights.held import BYTES, Headers, weights_bytes

# Rows of captured steps.
GRAPH_ROWS: tuple[int, ...] = (*range(1, 17), 20, 24, 28, 32, 40, 48, 64, 96, 128, 160, 192, 224, 256)

# Memory of captured steps beyond their largest activations: what cuBLAS works in (32 MiB on Hopper, 8 elsewhere); and
# tensors below 1 MiB, for which the allocator keeps pieces of their own. The others it gets in pieces of 20 MiB.
_GRAPH_LIBRARY_BYTES, GRAPH_SMALL_BYTES, _GRAPH_PIECE_BYTES = 40 << 20, 8 << 20, 20 << 20

_FP32_BYTES = 4
_LIBRARIES_BYTES = 12_000_000  # what libraries work in, and the attention's parts


def compute_dtype(config: EngineConfig, spec: ModelSpec, kind: str) -> str:
    """fp32 on a CPU: 16-bit arithmetic is slower there without AVX-512 and less exact everywhere.

    Raises BadRequest for float16 where the model's activations do not fit it.
    """
    if config.dtype == "float16" and spec.overflows_float16:
        raise BadRequest(
            f"dtype is float16; activations of {spec.architecture} leave its range, and the answers would be noise. "
            "Use bfloat16, float32 or auto."
        )
    if config.dtype != "auto":
        return config.dtype
    if kind == "cpu":
        return "float32"
    return "bfloat16" if spec.dtype == "bfloat16" or spec.overflows_float16 else "float16"


def quantizes_head(config: EngineConfig, kind: str, dtype: str, *, is_quantized: bool) -> bool:
    """Whether the head is to be held in 8 bits. Of a model in 4 bits it is a quarter of what a token reads."""
    if config.quantize_lm_head != "auto":
        return config.quantize_lm_head == "on"
    return kind == "cuda" and is_quantized and dtype != "float32"


def can_be_captured(spec: ModelSpec, stated: Stated | None) -> bool:
    """As far as it can be told before the load: of experts, only those in 4 bits are computed without the host, which a
    graph cannot wait for.
    """
    return stated is not None or not any(isinstance(layer.ffn, MoeSpec) for layer in spec.layers)


def forecast(
    config: EngineConfig,
    spec: ModelSpec,
    headers: Headers,
    stated: Stated | None,
    device: Machine,
    dtype: str,
    *,
    uses_graphs: bool,
) -> Parts:
    """stated: of the quantisation; None for a dense checkpoint. dtype: of the arithmetic.

    Raises BadRequest for a context beyond the model's.
    """
    num_tokens, max_len = batched_tokens(config, device), asked_context(config, spec)
    head_in_8_bits = quantizes_head(config, device.kind, dtype, is_quantized=stated is not None)
    weights = weights_bytes(spec, headers, stated, device.kind, dtype, head_in_8_bits=head_in_8_bits)
    return Parts(
        free_at_start=device.free_bytes(),
        weights=weights + _angles_bytes(spec, max_len),
        workspace=workspace_bytes(spec, device.kind, dtype, num_tokens, config.max_num_seqs, max_len),
        graphs=graphs_bytes(spec, config.max_num_seqs, BYTES[dtype]) if uses_graphs else 0,
    )


def _angles_bytes(spec: ModelSpec, max_len: int) -> int:
    ropes = {layer.attention.rope for layer in spec.layers}
    return sum(max_len * rope.rotary_dim * _FP32_BYTES for rope in ropes)


def workspace_bytes(spec: ModelSpec, kind: str, dtype: str, num_tokens: int, max_num_seqs: int, max_len: int) -> int:
    """Of the largest step: so many tokens, after which every sequence samples with every sampling step on.

    On a card the layers' and the sampler's tensors are not there at once. Measured there: a feed-forward's two results
    beside four of the residual stream's size; of the logits, fp32, two copies more.
    """
    widest, kept = max(layer.ffn.widest for layer in spec.layers), sampler_bytes(max_num_seqs, max_len)
    if kind == "cpu":
        layers = _FP32_BYTES * num_tokens * (widest + 4 * spec.hidden_size)
        return layers + 3 * 8 * max_num_seqs * spec.vocab_size + kept
    layers = BYTES[dtype] * num_tokens * (widest + widest // 2 + 4 * spec.hidden_size) + _LIBRARIES_BYTES
    sampling = 3 * _FP32_BYTES * max_num_seqs * spec.vocab_size + BYTES[dtype] * num_tokens * spec.hidden_size
    return max(layers, sampling) + kept


def sampler_bytes(max_num_seqs: int, max_len: int) -> int:
    """What `Sampler` keeps: the tokens that penalties look at, int32."""
    return 4 * max_num_seqs * max_len


def most_graph_rows(max_num_seqs: int) -> int:
    """Rows of the largest captured step."""
    return GRAPH_ROWS[min(bisect_left(GRAPH_ROWS, max_num_seqs), len(GRAPH_ROWS) - 1)]


def graphs_bytes(spec: ModelSpec, max_num_seqs: int, itemsize: int) -> int:
    """Of the pool of captured steps: the logits of the largest (in the head's type and fp32), its widest activations
    twice, and what does not grow with it.
    """
    rows = most_graph_rows(max_num_seqs)
    widest = max(layer.ffn.widest for layer in spec.layers) + 4 * spec.hidden_size
    step = rows * (spec.vocab_size * (itemsize + 4) + 2 * widest * itemsize)
    return -(-(step + _GRAPH_LIBRARY_BYTES) // _GRAPH_PIECE_BYTES) * _GRAPH_PIECE_BYTES + GRAPH_SMALL_BYTES
