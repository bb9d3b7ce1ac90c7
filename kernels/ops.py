"""The public face of the kernels: one function an op, and the choice of who computes it.

On a CPU the fp32 forms under `cpu/` run wherever they can take the case, on a card the Triton forms under `gpu/`;
everything else is `reference.py`. Each half is imported when the first of it is asked for: numba compiles then, which
the start on a card need not wait for, and triton is needed nowhere but on a card.
REFERENCE=1 in the environment takes the reference everywhere (read once, at import).
"""

import importlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Protocol

import torch
import torch.nn.functional as F

from kernels import reference
from kernels.choices import Choices
from kernels.device import Device
from kernels.gpu.compiler import missing_for_kernels
from kernels.gpu.planar import PairedWeight as PairedWeight  # callers hold them
from kernels.gpu.planar import PlanarWeight, can_hold, pack_planar, pair_halves, paired, stack_planar
from kernels.gpu.planar import StackedWeights as StackedWeights  # callers hold them
from kernels.paged_kv import PagedKV
from kernels.w4 import W4Weight, pack_w4
from kernels.w8 import W8Weight

PackedWeight = W4Weight | PlanarWeight  # the CPU's form, the card's

_CPU_TILE_K = 16  # inputs that the CPU's kernels take at once

_REFERENCE_ONLY = os.environ.get("REFERENCE") == "1"


class Recording(Protocol):
    """Kernel calls that were made once, on the same tensors each time: `cpu.recording.Recording`."""

    def replay(self) -> torch.Tensor:
        """The result, in the memory of the last one's."""
        ...


@cache
def _cpu() -> ModuleType:
    import kernels.cpu
    from kernels.cpu import activation, attention, dense, gemm, norm, recording, rope  # noqa: F401 (found as its attributes)

    return kernels.cpu


def _compile_for_cpu(on_progress: Callable[[float], None]) -> None:
    """What `_cpu` imports, one by one: numba compiles at import."""
    names = ("norm", "rope", "activation", "attention", "dense", "gemm")
    for done, name in enumerate(names):
        on_progress(done / len(names))
        importlib.import_module(f"kernels.cpu.{name}")
    on_progress(1.0)


@cache
def _gpu() -> ModuleType:
    import kernels.gpu
    from kernels.gpu import (  # noqa: F401 (found as its attributes)
        activation,
        ahead,
        attention,
        embedding,
        moe,
        norm,
        processes,
        rope_kv,
        sample,
        tune,
        w4_experts,
        w4_gemm,
        w8_gemm,
    )

    return kernels.gpu


def prepare(device: Device, on_progress: Callable[[float], None]) -> None:
    """Have the device's kernels ready: on a CPU they are compiled here, once, which takes a minute or two.

    on_progress  is told the share done
    Raises RuntimeError in words for a user if a card's kernels cannot be compiled on this machine.
    """
    if _REFERENCE_ONLY:
        return
    if device.kind == "cpu":
        _compile_for_cpu(on_progress)
        return
    if reason := missing_for_kernels():
        raise RuntimeError(reason)
    threading.Thread(target=_gpu().ahead.open_driver, name="triton", daemon=True).start()


def tune(
    weights: Iterable[PackedWeight], dtype: torch.dtype, folder: Path, on_progress: Callable[[float], None]
) -> None:
    """At the first load on a card: measure, for at most 20 s, what computes these weights' products the fastest.

    Results are kept in a file in `folder`; `on_progress` is told the share done. Nothing to do on a CPU.
    """
    planar = [weight for weight in weights if isinstance(weight, PlanarWeight) and weight.codes.is_cuda]
    if planar and dtype is not torch.float32 and not _REFERENCE_ONLY:
        _gpu().tune.tune(planar, dtype, folder, on_progress)


class CompileProcesses(Protocol):
    """`gpu.processes.CompileProcesses`: what `compile_ahead` takes."""

    def close(self) -> None:
        """They end when what was ordered is done."""
        ...


@contextmanager
def compile_processes(kind: str, count: int) -> Iterator[CompileProcesses | None]:
    """Processes for `compile_ahead`, to be opened before the card is used; None where there can be none, and for a
    `kind` of device that is "cpu".
    """
    if kind == "cpu" or _REFERENCE_ONLY or count < 2 or missing_for_kernels() or not _gpu().processes.can_be_forked():
        yield None
        return
    processes: CompileProcesses = _gpu().processes.CompileProcesses(count)
    try:
        yield processes
    finally:
        processes.close()


def compile_ahead(
    now: Callable[[], object],
    later: Callable[[], object],
    num_threads: int,
    processes: CompileProcesses | None = None,
) -> Callable[[], int]:
    """On a card: have the kernels compiled that the two would launch, without launching them.

    The result waits for those of `now` and tells how many of them are new; those of `later` follow. What the two
    compute is garbage, so they must index nothing by it and wait for nothing.
    """
    if _REFERENCE_ONLY:
        return lambda: 0
    ready: Callable[[], int] = _gpu().ahead.compile_ahead(now, later, num_threads, processes)
    return ready


def waits_for_nothing() -> bool:
    """Whether no op on a card makes the host wait for it: then a step can be captured in a CUDA graph."""
    return not _REFERENCE_ONLY  # which asks for lengths and slots


def record(run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Recording | None]:
    """The result of `run`, fp32 on a CPU, and its kernel calls to be made again; None if it is not kernels alone."""
    return (run(), None) if _REFERENCE_ONLY else _cpu().recording.record(run)


def _on_cpu(x: torch.Tensor) -> bool:
    """Whether the fp32 CPU kernels can take it."""
    return x.is_cpu and x.dtype is torch.float32 and not _REFERENCE_ONLY


def _on_card(x: torch.Tensor) -> bool:
    return x.is_cuda and not _REFERENCE_ONLY


def embed(token_ids: torch.Tensor, table: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """Rows of the embedding: token_ids [tokens] int64, table [vocab, hidden] -> [tokens, hidden] in dtype.

    Rounded to dtype, then times scale and rounded again, as models with a scale (Gemma) were trained.
    """
    if _on_card(table):
        return _gpu().embedding.embed(token_ids, table, scale, dtype)
    return reference.embed(token_ids, table, scale, dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last axis. x [..., hidden], weight [hidden] -> x's shape and dtype.

    Rounds to the weight's dtype before the product: a weight in x's dtype is Llama's form, one in fp32 Gemma's.
    """
    if _on_card(x):
        return _gpu().norm.rms_norm(x, weight, eps)
    if _on_cpu(x) and x.dim() == 2 and x.is_contiguous():
        return _cpu().norm.rms_norm(x, weight, eps)
    return reference.rms_norm(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor | None,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    order: torch.Tensor | None = None,
    x_norm: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add x to the residual stream in place and normalise the sum.

    x         [tokens, hidden]; None where there is nothing to add yet
    residual  [tokens, hidden], contiguous; weight [hidden], rounding as `rms_norm`
    order     [hidden] int64: column i of the result is column order[i] of the norm (act-order weights); None leaves it
    x_norm    [hidden]: x is normalised by this weight before it is added (Gemma); None adds it as it is
    Returns   [tokens, hidden]
    """
    if _on_card(residual):
        return _gpu().norm.add_rms_norm(x, residual, weight, eps, order, x_norm)
    if not _on_cpu(residual):
        return reference.add_rms_norm(x, residual, weight, eps, order, x_norm)
    if x is None:
        normed = _cpu().norm.rms_norm(residual, weight, eps)
    else:
        normed = _cpu().norm.add_rms_norm(x if x_norm is None else rms_norm(x, x_norm, eps), residual, weight, eps)
    return normed if order is None else normed[:, order]


def rope_write_kv(
    heads: torch.Tensor,
    num_heads: int,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    cache: PagedKV,
    slot_mapping: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None = None,
) -> None:
    """Rotate queries and keys in place (half-split form of Su et al. 2021), then store keys and values in their slots.

    An int8 cache gets codes and scales of the rotated keys and the values, as `reference.quantize_int8` defines them.

    heads         [tokens, num_heads + 2 * kv_heads, head_dim]: queries, keys, values
    positions     [tokens] int64
    cos_sin       [max_len, 2, rotary_dim / 2] fp32; the first rotary_dim numbers of a head are rotated, the rest stay
    slot_mapping  [tokens] int64, block * block_size + offset in the block; -1 for a token that is not stored
    norms         weights [head_dim] of queries and of keys, and eps: each head goes through `rms_norm` before; or None
    """
    if _on_card(heads):
        _gpu().rope_kv.rope_write_kv(heads, num_heads, positions, cos_sin, cache, slot_mapping, norms)
    elif _on_cpu(heads) and _on_cpu(cache.keys) and cache.is_by_dimension:
        reference.norm_heads(heads, num_heads, cache.num_kv_heads, norms)
        _cpu().rope.rope_write_kv(heads, num_heads, positions, cos_sin, cache, slot_mapping)
    else:
        reference.rope_write_kv(heads, num_heads, positions, cos_sin, cache, slot_mapping, norms)


def paged_attention(
    q: torch.Tensor,
    cache: PagedKV,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    *,
    max_query_len: int,
    max_seq_len: int,
    max_short_query_len: int | None = None,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attend each query token to the keys that its sequence has in the paged cache, itself included (causal).

    q            [tokens, heads, head_dim]; the last tokens of each sequence, sequences one after another
    cache        already holds these tokens' KV
    block_table  [sequences, max_blocks] int32; entries past a sequence's length are never read
    seq_lens     [sequences] int32, tokens in the cache for each, these included; 0 fills up a batch: its rows become 0
    cu_seqlens_q [sequences + 1] int32, where each sequence's queries begin; the last is the number of rows of q
    max_query_len, max_seq_len  no sequence of the batch has more: what sizes the launch, as the tensors stay unread
    max_short_query_len  no sequence of SHORT_QUERIES or fewer queries has more of them; None: as many as they may have
    window       tokens that a query sees, itself included; None sees all before it
    softcap      scores become tanh(score / softcap) * softcap; None leaves them
    Returns      [tokens, heads, head_dim] in q's dtype; softmax in fp32
    Raises       ValueError if heads is not a multiple of kv_heads
    Source       Kwon et al. 2023, PagedAttention; softcap: Gemma 2 report, logit soft-capping
    """
    if q.shape[1] % cache.num_kv_heads:
        raise ValueError(f"{q.shape[1]} query heads over {cache.num_kv_heads} KV heads")
    if _on_cpu(q) and _on_cpu(cache.keys) and softcap is None and _cpu().attention.fits(cache):
        return _cpu().attention.paged_attention(q, cache, block_table, seq_lens, cu_seqlens_q, scale, window)
    if _on_card(q):
        return _gpu().attention.paged_attention(
            q,
            cache,
            block_table,
            seq_lens,
            cu_seqlens_q,
            max_query_len=max_query_len,
            max_short_query_len=max_short_query_len,
            max_seq_len=max_seq_len,
            scale=scale,
            window=window,
            softcap=softcap,
        )
    return reference.paged_attention(
        q, cache, block_table, seq_lens, cu_seqlens_q, scale=scale, window=window, softcap=softcap
    )


def route_experts(logits: torch.Tensor, num_chosen: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """A mixture's experts for each token: logits [tokens, experts] -> their weights fp32 and ids int32, [tokens,
    num_chosen] each, in the order of the ids.

    The softmax runs over all experts, and the likeliest are taken, of equally likely ones the first. With `renormalise`
    (after the choice) a token's weights sum to 1.
    """
    if _on_card(logits):
        return _gpu().moe.route_experts(logits, num_chosen, renormalise)
    return reference.route_experts(logits, num_chosen, renormalise)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """SwiGLU's middle: [tokens, 2 * n], gate first -> silu(gate) * up, [tokens, n]."""
    if _on_cpu(gate_up):
        return _cpu().activation.silu_mul(gate_up.contiguous())
    if _on_card(gate_up):
        return _gpu().activation.silu_mul(gate_up)
    return reference.silu_mul(gate_up)


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """GeGLU's middle: [tokens, 2 * n], gate first -> gelu(gate) * up, [tokens, n], by the tanh form of GELU."""
    if _on_card(gate_up):
        return _gpu().activation.gelu_tanh_mul(gate_up)
    return reference.gelu_tanh_mul(gate_up)


def pack_weight(
    codes: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor, group_size: int, dtype: torch.dtype
) -> PackedWeight | None:
    """A 4-bit weight in the form that the kernels of its tensors' device take for activations in `dtype`; None if they
    take no such numbers.

    codes    uint8 [K, N] of 0..15
    scales   [ceil(K / group_size), N], sign kept
    offsets  fp32, the same shape: y[n] = sum over k of x[k] * (code * scale + offset)
    A lone group may be shorter than group_size. Raises ValueError when the shapes do not belong together.
    """
    if codes.is_cuda:
        is_held = can_hold(group_size, scales, offsets, dtype)
        return pack_planar(codes, scales, offsets, group_size, dtype) if is_held else None
    # One group grows to the tile; of several all keep their size, and the last is filled up to it.
    num_groups = scales.shape[0]
    whole = group_size * num_groups if num_groups > 1 else group_size + -group_size % _CPU_TILE_K
    return pack_w4(F.pad(codes, (0, 0, 0, whole - codes.shape[0])), scales, offsets)


def w4_linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [tokens, K] times a packed 4-bit weight, plus bias [N] -> [tokens, N] in x's dtype; sums in fp32.

    On a card a row's bits depend on the bucket of the number of rows (8, 16, 32 ...) and on no other row.
    Raises ValueError if K is not the weight's.
    """
    if x.shape[-1] != weight.num_inputs:
        raise ValueError(f"x has {x.shape[-1]} columns, the weight takes {weight.num_inputs}")
    if isinstance(weight, PlanarWeight) and _on_card(x):
        return _gpu().w4_gemm.w4_linear(x, weight, bias)
    if isinstance(weight, W4Weight) and _on_cpu(x) and _cpu().gemm.fits(weight):
        y = _cpu().gemm.w4_linear(x.contiguous(), weight)
        return y if bias is None else y + bias
    return reference.w4_linear(x, weight, bias)


def pair_weight(weight: PackedWeight, order: torch.Tensor | None) -> PairedWeight | None:
    """A gate and an up projection in one weight, gates first, in the form for `w4_gated`; None where there is no such
    form: not on a card, or halves that are no multiple of 8. Number i of the result will be number order[i] of a half.
    """
    if not isinstance(weight, PlanarWeight) or not _on_card(weight.codes):
        return None
    return pair_halves(weight, order)


def pair_bias(bias: torch.Tensor | None, order: torch.Tensor | None) -> torch.Tensor | None:
    """The bias [N] that goes with `pair_weight`."""
    return None if bias is None else paired(bias, order)


def w4_gated(x: torch.Tensor, weight: PairedWeight, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
    """x [tokens, K] times gate and up, and what the activation makes of them: act(gate) * up [tokens, N / 2].

    In one launch up to 64 rows, always with the bits of `w4_linear` and the activation one after the other.
    bias  [N] in the weight's order, or None; activation  silu | gelu_tanh
    """
    return _gpu().w4_gemm.w4_gated(x, weight, bias, activation)


def stack_weights(weights: Sequence[PackedWeight]) -> tuple[StackedWeights, list[PlanarWeight]] | None:
    """The experts' weights of one projection in one tensor, and each again as a view of it, for `w4_mixture`.

    None where they are not on a card, or not alike in shape and groups.
    """
    planar = [weight for weight in weights if isinstance(weight, PlanarWeight)]
    if len(planar) < len(weights) or not planar or _REFERENCE_ONLY:
        return None
    return stack_planar(planar)


def w4_mixture(
    x: torch.Tensor,
    chosen: torch.Tensor,
    shares: torch.Tensor,
    gate_up: StackedWeights,
    down: StackedWeights,
    activation: str,
) -> torch.Tensor:
    """Each token's weighted sum of what its experts say, on a card, without waiting for it.

    x       [tokens, hidden]
    chosen  int32 [tokens, experts a token], shares fp32 likewise, as `route_experts` gives them
    gate_up, down  of `stack_weights`; gate first
    activation  silu | gelu_tanh
    Returns [tokens, hidden]; sums of a token in fp32, in the order of its experts
    """
    gated = {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul}[activation]
    return _gpu().w4_experts.mixture(x, chosen, shares, gate_up, down, gated)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [tokens, K], weight [N, K], bias [N] -> [tokens, N] in x's dtype.

    A weight in 16 bits under fp32 activations is widened as it is read; it loses nothing by that.
    """
    if _on_cpu(x):
        y = _cpu().dense.linear(x.contiguous(), weight)
        return y if bias is None else y + bias
    return reference.linear(x, weight, bias)


def w8_linear(x: torch.Tensor, weight: W8Weight) -> torch.Tensor:
    """x [tokens, K] times an int8 weight -> [tokens, N] fp32, as the head's logits are wanted; sums in fp32."""
    if _on_card(x):
        return _gpu().w8_gemm.w8_linear(x, weight)
    return reference.w8_linear(x, weight)


def chooses_tokens(device: torch.device) -> bool:
    """Whether `choose_tokens` works there."""
    return device.type == "cuda" and not _REFERENCE_ONLY


def choose_tokens(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    choices: Choices,
    last_token_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """A token for each row by its slot's parameters, on a card; `engine/sampling/` defines it, and does it elsewhere.

    logits          [rows, vocab] fp32, contiguous; they stay as they are
    slots           [rows] int32 or int64; -1 is a row that nobody asked for: its token is 0
    positions       [rows] int32 or int64: of the tokens that are chosen
    last_token_ids  [slots] int64, where each slot's token is written too; None writes it nowhere else
    Returns         [rows] int64
    """
    return _gpu().sample.choose_tokens(logits, slots, positions, choices, last_token_ids)
