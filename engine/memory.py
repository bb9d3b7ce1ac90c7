"""How many KV blocks fit and how long a sequence may be: planned from free memory, own allocations, a stated reserve.

On a card the budget is min(total * gpu_memory_utilization, free at start - reserve); on a CPU the KV cache has a
budget of its own (`kv_gb`). A default never refuses to start: the pool shrinks, then the context, and `notes` says so.
The plan is made twice: from a forecast before anything is read, and from what was measured. Free of torch: the app
makes the same plan for a model that is not here yet.
"""

from dataclasses import dataclass, replace
from typing import Protocol

from engine.config import EngineConfig
from engine.errors import BadRequest, OutOfMemory
from engine.layout import CacheLayout
from engine.model.spec import ModelSpec
from engine.types import MemoryReport
from engine.weights.held import BYTES

CUDA_RESERVE_BYTES = 512 * 1024**2  # context, fragmentation, other programs' small changes
CPU_KV_SHARE, CPU_KV_MOST_BYTES = 0.25, 4_000_000_000
_SMALLEST_CONTEXT = 256  # below this a chat is of no use: better an error than a pool of a few words
_GOOD_CONTEXT = 8192  # tokens; a KV cache in 16 bits that holds less gives way to one in int8
_SCALE_BYTES = 2  # of a key or value in int8

# Tokens of the largest step where nobody asks for a number. A card makes 4-bit weights dense once a step, so larger
# ones are quicker; they also take memory (0.4 MB a token at Llama 3.1 8B), of which only a large card has enough.
_CPU_TOKENS, _CARD_TOKENS, _LARGE_CARD_TOKENS = 512, 2048, 8192
_LARGE_CARD_BYTES = 40_000_000_000

_KV_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "int8": "int8"}


class Machine(Protocol):
    """The memory of a device: `kernels.device.Device`, or the app's words of one."""

    @property
    def kind(self) -> str:
        """ "cpu" or "cuda"."""
        ...

    @property
    def name(self) -> str: ...
    def free_bytes(self) -> int: ...
    def total_bytes(self) -> int: ...
    def holders(self) -> list[tuple[str, int]]:
        """Programs that hold its memory and how much."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Bytes that are no KV cache, as forecast or as measured; and what was free when the load began.

    weights    as held, with the table of angles
    workspace  the largest step's, and what the sampler keeps
    graphs     of captured steps
    """

    free_at_start: int
    weights: int
    workspace: int
    graphs: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.workspace + self.graphs

    def in_words(self) -> str:
        graphs = f", CUDA graphs {_gb(self.graphs)}" if self.graphs else ""
        return f"weights {_gb(self.weights)}, workspace {_gb(self.workspace)}{graphs}"


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    report: MemoryReport
    max_model_len: int


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """What sequences take of the KV cache."""

    layout: CacheLayout
    block_bytes: int
    num_empty: int = 0  # places of layers that the model lacks, in each block of some group

    def bytes_for(self, num_tokens: int) -> int:
        """Most that one sequence ever takes."""
        return self.layout.needed(num_tokens) * self.block_bytes

    def per_token(self, num_tokens: int) -> float:
        """On average, of a sequence of so many whose prompt is computed."""
        return self.layout.needed(num_tokens, 1) * self.block_bytes / num_tokens

    @property
    def per_token_more(self) -> float:
        """Of a sequence that has outgrown all windows."""
        return self.layout.windows.count(None) * self.block_bytes / self.layout.block_size


def cache_sizes(spec: ModelSpec, kv_dtype: str, block_size: int, step_tokens: int) -> CacheSizes:
    """kv_dtype: of the KV cache; the scales of int8 are included. step_tokens: of the largest step."""
    groups, scale = spec.layer_groups, _SCALE_BYTES if kv_dtype == "int8" else 0
    of_layers = (spec.layers[groups.places.index((0, place))].cache for place in range(groups.size))
    token_bytes = sum(2 * cache.num_kv_heads * (cache.head_dim * BYTES[kv_dtype] + scale) for cache in of_layers)
    return CacheSizes(CacheLayout(block_size, groups.windows, step_tokens), token_bytes * block_size, groups.num_empty)


def batched_tokens(config: EngineConfig, device: Machine) -> int:
    """Of the largest step."""
    if config.max_num_batched_tokens is not None:
        return config.max_num_batched_tokens
    if device.kind == "cpu":
        return _CPU_TOKENS
    return _LARGE_CARD_TOKENS if device.total_bytes() >= _LARGE_CARD_BYTES else _CARD_TOKENS


def plan_cache(
    config: EngineConfig, spec: ModelSpec, device: Machine, parts: Parts, dtype: str
) -> tuple[MemoryPlan, str]:
    """The plan, and the type of the KV cache. Left to us, that is int8 on a card where 16 bits hold too little.

    Raises as `plan_memory`.
    """

    def sizes(kv_dtype: str) -> CacheSizes:
        return cache_sizes(spec, kv_dtype, config.block_size, batched_tokens(config, device))

    def plan(kv_dtype: str) -> tuple[MemoryPlan, str]:
        return plan_memory(config, spec, device, parts, sizes(kv_dtype)), kv_dtype

    if config.kv_cache_dtype != "auto":
        return plan(_KV_DTYPES[config.kv_cache_dtype])
    wanted = config.max_model_len or min(spec.context_length, _GOOD_CONTEXT)
    if device.kind == "cpu" or sizes(dtype).bytes_for(wanted) <= _kv_budget(config, device, parts, CUDA_RESERVE_BYTES):
        return plan(dtype)
    found, kv_dtype = plan("int8")
    note = f"KV cache in int8: in 16 bits it would hold less than {wanted} tokens."
    return replace(found, report=replace(found.report, notes=(note, *found.report.notes))), kv_dtype


def plan_memory(config: EngineConfig, spec: ModelSpec, device: Machine, parts: Parts, sizes: CacheSizes) -> MemoryPlan:
    """Raises OutOfMemory (with needed and free, by part) or BadRequest (a context beyond the model's)."""
    asked, layout = asked_context(config, spec), sizes.layout
    reserve = reserve_on(device)
    if device.kind == "cuda":
        _check_parts_fit(config, device, parts, reserve, sizes.bytes_for(min(_SMALLEST_CONTEXT, asked)))
    budget = _kv_budget(config, device, parts, reserve)
    num_blocks = min(max(budget, 0) // sizes.block_bytes, layout.useful(config.max_num_seqs, asked))
    fitting = layout.longest(num_blocks, asked)
    max_model_len, notes = _fit_context(config, asked, fitting, sizes.bytes_for(asked), budget, parts)
    report = MemoryReport(
        total_bytes=device.total_bytes(),
        free_bytes_at_start=parts.free_at_start,
        weights_bytes=parts.weights,
        workspace_bytes=parts.workspace,
        graphs_bytes=parts.graphs,
        kv_bytes=num_blocks * sizes.block_bytes,
        reserve_bytes=reserve,
        num_blocks=num_blocks,
        block_size=config.block_size,
        windows=layout.windows,
        step_tokens=layout.step_tokens,
        notes=(*notes, *_empty_note(sizes, spec)),
    )
    return MemoryPlan(report, max_model_len)


def reserve_on(device: Machine) -> int:
    """Bytes that a plan leaves free, whatever else it holds."""
    return CUDA_RESERVE_BYTES if device.kind == "cuda" else 0


def with_pool_of(plan: MemoryPlan, measured: MemoryPlan) -> MemoryPlan:
    """`plan`, whose pool is there already, with the parts of one that was made from what was measured."""
    parts = {name: getattr(measured.report, name) for name in ("weights_bytes", "workspace_bytes", "graphs_bytes")}
    return MemoryPlan(replace(plan.report, **parts), plan.max_model_len)


def asked_context(config: EngineConfig, spec: ModelSpec) -> int:
    """Tokens that a sequence is to hold if memory allows. Raises BadRequest for more than the model was trained for."""
    if config.max_model_len is None:
        return spec.context_length
    if config.max_model_len > spec.context_length:
        raise BadRequest(
            f"max_model_len is {config.max_model_len}; this model was trained for {spec.context_length} tokens. "
            f"Set it to {spec.context_length} or less."
        )
    return config.max_model_len


def check_weights_fit(device: Machine, weights_bytes: int) -> None:
    """On a CPU, before anything is read: raises OutOfMemory for weights that are larger than what is available."""
    free = device.free_bytes()
    if weights_bytes > free:
        raise OutOfMemory(
            f"The weights need {_gb(weights_bytes)}; {_gb(free)} of {_gb(device.total_bytes())} are available on "
            f"{device.name}. Close other programs, or choose a smaller model."
        )


def _check_parts_fit(config: EngineConfig, device: Machine, parts: Parts, reserve: int, least_kv: int) -> None:
    usable = _usable(config, device, parts, reserve)
    needed = parts.total + least_kv
    if needed <= usable:
        return
    held = ", ".join(f"{name} {_gb(num_bytes)}" for name, num_bytes in device.holders())
    raise OutOfMemory(
        f"The model does not fit: {parts.in_words()} and the smallest KV cache {_gb(least_kv)} need {_gb(needed)}; "
        f"{_gb(max(usable, 0))} can be used ({_gb(parts.free_at_start)} free of {_gb(device.total_bytes())} on "
        f"{device.name}, of which {_gb(reserve)} stay in reserve; gpu_memory_utilization is "
        f"{config.gpu_memory_utilization}). {f'Memory is held by {held}. ' if held else ''}"
        "Close other programs, or choose a smaller model."
    )


def _usable(config: EngineConfig, device: Machine, parts: Parts, reserve: int) -> int:
    return int(min(device.total_bytes() * config.gpu_memory_utilization, parts.free_at_start - reserve))


def _kv_budget(config: EngineConfig, device: Machine, parts: Parts, reserve: int) -> int:
    if device.kind == "cuda":
        left = _usable(config, device, parts, reserve) - parts.total
        return left if config.kv_gb is None else min(left, int(config.kv_gb * 1e9))
    if config.kv_gb is not None:
        return int(config.kv_gb * 1e9)
    return min(int(device.free_bytes() * CPU_KV_SHARE), CPU_KV_MOST_BYTES)


def _fit_context(
    config: EngineConfig, asked: int, fitting: int, needed: int, budget: int, parts: Parts
) -> tuple[int, tuple[str, ...]]:
    """The context, of which `fitting` tokens fit and all would need so many bytes; and what to say of it."""
    if fitting >= asked:
        return asked, ()
    why = f"{parts.in_words()}, left for the KV cache {_gb(budget)}; {asked} tokens need {_gb(needed)}"
    if config.max_model_len is not None or fitting < min(_SMALLEST_CONTEXT, asked):
        raise OutOfMemory(
            f"A context of {asked} tokens does not fit: {why}. "
            "Ask for a smaller context, give the engine more memory, or choose a smaller model."
        )
    return fitting, (f"Context set to {fitting} of the model's {asked} tokens: {why}.",)


def _empty_note(sizes: CacheSizes, spec: ModelSpec) -> tuple[str, ...]:
    if not sizes.num_empty:
        return ()
    num_groups = len(sizes.layout.windows)
    return (
        f"The KV cache is shared by {num_groups} groups of layers of one size, by their windows: of "
        f"{len(spec.layers) + sizes.num_empty} places {sizes.num_empty} stay empty.",
    )


def _gb(num_bytes: int | float) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
