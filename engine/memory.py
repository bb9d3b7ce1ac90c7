"""How many KV blocks fit and how long a sequence may be: planned from free memory, own allocations, a stated reserve.

On a card the budget is min(total * gpu_memory_utilization, free at start - reserve); on a CPU the KV cache has a
budget of its own (`kv_gb`). A default never refuses to start: the pool shrinks, then the context, and `notes` says so.
"""

from dataclasses import dataclass

from engine.config import EngineConfig
from engine.errors import BadRequest, OutOfMemory
from engine.model.spec import ModelSpec
from engine.types import MemoryReport
from kernels.device import Device

CUDA_RESERVE_BYTES = 512 * 1024**2  # context, fragmentation, other programs' small changes
CPU_KV_SHARE, CPU_KV_MOST_BYTES = 0.25, 4_000_000_000
_SMALLEST_CONTEXT = 256  # below this a chat is of no use: better an error than a pool of a few words


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Bytes known before the pool is sized: free when the load began, the weights as held, the peak of one step, the
    memory of captured steps.
    """

    free_at_start: int
    weights: int
    workspace: int
    graphs: int = 0


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    report: MemoryReport
    max_model_len: int


def plan_memory(
    config: EngineConfig, spec: ModelSpec, device: Device, measured: Measured, token_bytes: int
) -> MemoryPlan:
    """token_bytes: of KV cache, over all layers.

    Raises OutOfMemory (with needed and free, by part) or BadRequest (a context beyond the model's).
    """
    asked = asked_context(config, spec)
    block_bytes = token_bytes * config.block_size
    reserve = CUDA_RESERVE_BYTES if device.kind == "cuda" else 0
    budget = _kv_budget(config, device, measured, reserve)
    most_useful = config.max_num_seqs * -(-asked // config.block_size)
    num_blocks = min(max(budget, 0) // block_bytes, most_useful)
    max_model_len, notes = _fit_context(config, asked, num_blocks * config.block_size, block_bytes, budget, measured)
    report = MemoryReport(
        total_bytes=device.total_bytes(),
        free_bytes_at_start=measured.free_at_start,
        weights_bytes=measured.weights,
        workspace_bytes=measured.workspace,
        graphs_bytes=measured.graphs,
        kv_bytes=num_blocks * block_bytes,
        reserve_bytes=reserve,
        num_blocks=num_blocks,
        block_size=config.block_size,
        notes=notes,
    )
    return MemoryPlan(report, max_model_len)


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


def check_weights_fit(config: EngineConfig, device: Device, weights_bytes: int) -> None:
    """Before anything is read: raises OutOfMemory if the checkpoint alone is larger than what this engine may use."""
    free = device.free_bytes()
    allowed = free
    if device.kind == "cuda":
        allowed = int(min(device.total_bytes() * config.gpu_memory_utilization, free - CUDA_RESERVE_BYTES))
    if weights_bytes > allowed:
        raise OutOfMemory(
            f"The weights need {_gb(weights_bytes)}; {_gb(allowed)} can be used ({_gb(free)} free of "
            f"{_gb(device.total_bytes())} on {device.name}). Close other programs, or choose a smaller model."
        )


def _kv_budget(config: EngineConfig, device: Device, measured: Measured, reserve: int) -> int:
    if device.kind == "cuda":
        usable = min(device.total_bytes() * config.gpu_memory_utilization, measured.free_at_start - reserve)
        left = int(usable) - measured.weights - measured.workspace - measured.graphs
        return left if config.kv_gb is None else min(left, int(config.kv_gb * 1e9))
    if config.kv_gb is not None:
        return int(config.kv_gb * 1e9)
    return min(int(device.free_bytes() * CPU_KV_SHARE), CPU_KV_MOST_BYTES)


def _fit_context(
    config: EngineConfig, asked: int, pool_tokens: int, block_bytes: int, budget: int, measured: Measured
) -> tuple[int, tuple[str, ...]]:
    """The context that the pool can hold for one sequence, and what to say about it."""
    if pool_tokens >= asked:
        return asked, ()
    needed = -(-asked // config.block_size) * block_bytes
    parts = (
        f"weights {_gb(measured.weights)}, workspace {_gb(measured.workspace)}, left for the KV cache {_gb(budget)}; "
        f"{asked} tokens need {_gb(needed)}"
    )
    if config.max_model_len is not None or pool_tokens < min(_SMALLEST_CONTEXT, asked):
        raise OutOfMemory(
            f"A context of {asked} tokens does not fit: {parts}. "
            "Ask for a smaller context, give the engine more memory, or choose a smaller model."
        )
    return pool_tokens, (f"Context set to {pool_tokens} of the model's {asked} tokens: {parts}.",)


def _gb(num_bytes: int | float) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
