"""Does it fit? What a model will take and hold on a machine, by the engine's own forecast and plan."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from app.errors import from_engine_error
from app.models.catalog import CatalogEntry
from app.models.machine import Memory
from app.models.outline import Outline
from engine.config import EngineConfig
from engine.errors import EngineError, OutOfMemory
from engine.forecast import can_be_captured, compute_dtype, forecast
from engine.memory import MemoryPlan, Parts, cache_sizes, plan_cache, reserve_on
from engine.types import MemoryReport

CHAT_TOKENS = 8192
_KV_NAMES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "int8": "int8"}
_GOOD_CONTEXT = 8192
_GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """On one machine. Bytes by part, as `MemoryReport` will have them.

    verdict     fits | tight (in int8, or with less context than asked) | too large
    kv_dtype    of the plan; "" where nothing fits
    max_context tokens of the longest sequence
    chats       of 8,192 tokens at once
    notes       what the engine will say of its choices, or why it does not fit
    advice      what would make it fit, or fit better
    """

    machine: str
    total_bytes: int
    free_bytes: int
    verdict: str
    weights_bytes: int
    workspace_bytes: int
    graphs_bytes: int
    reserve_bytes: int
    kv_bytes: int = 0
    kv_dtype: str = ""
    max_context: int = 0
    chats: int = 0
    notes: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FitReport:
    """A model and how it fits.

    kv_bytes_per_1k  by the type of the KV cache: the average of a conversation of 8,192 tokens, or of the whole context
    kv_bytes_per_1k_more  of one that is longer than the windows; the same where no layer has any
    window_layers    layers that see `window` tokens, and keep no more than those
    """

    model: str
    architecture: str
    format: str
    context_length: int
    num_layers: int
    window_layers: int
    window: int | None
    kv_bytes_per_1k: dict[str, int]
    kv_bytes_per_1k_more: dict[str, int]
    fits: tuple[Fit, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def fit(
    outline: Outline, config: EngineConfig, machines: Iterable[Memory], others: Sequence[CatalogEntry] = ()
) -> FitReport:
    """others: the catalogue, for a smaller model to name. Raises AppError, as for a context beyond the model's."""
    spec = outline.spec
    windows = [layer.attention.window for layer in spec.layers if layer.attention.window is not None]
    try:
        fits = tuple(_fit(outline, config, machine, others) for machine in machines)
        dtypes = {compute_dtype(config, spec, kind): None for kind in ("cuda", "cpu")} | {"int8": None}
    except EngineError as error:
        raise from_engine_error(error) from error
    sizes = {_KV_NAMES[dtype]: cache_sizes(spec, dtype, config.block_size, 1) for dtype in dtypes}
    chat = max(min(CHAT_TOKENS, spec.context_length) // config.block_size, 1) * config.block_size
    return FitReport(
        model=outline.name,
        architecture=spec.architecture,
        format=outline.stated.method if outline.stated else "dense",
        context_length=spec.context_length,
        num_layers=len(spec.layers),
        window_layers=len(windows),
        window=max(windows, default=None),
        kv_bytes_per_1k={name: round(1000 * each.per_token(chat)) for name, each in sizes.items()},
        kv_bytes_per_1k_more={name: round(1000 * each.per_token_more) for name, each in sizes.items()},
        fits=fits,
    )


def _fit(outline: Outline, config: EngineConfig, machine: Memory, others: Sequence[CatalogEntry]) -> Fit:
    dtype = compute_dtype(config, outline.spec, machine.kind)
    parts = _parts(outline, config, machine, dtype)
    found = Fit(
        machine=machine.name,
        total_bytes=machine.total,
        free_bytes=machine.free,
        verdict="too large",
        weights_bytes=parts.weights,
        workspace_bytes=parts.workspace,
        graphs_bytes=parts.graphs,
        reserve_bytes=reserve_on(machine),
    )
    try:
        _check_room(machine, parts)
        plan, kv_dtype = plan_cache(config, outline.spec, machine, parts, dtype)
    except OutOfMemory as error:
        advice = (*_other_plans(outline, config, machine, parts, dtype), *_smaller(machine, others))
        return replace(found, notes=(error.message,), advice=advice)
    report = plan.report
    good = min(config.max_model_len or outline.spec.context_length, _GOOD_CONTEXT)
    is_tight = plan.max_model_len < good or (kv_dtype == "int8" and config.kv_cache_dtype == "auto")
    advice = _other_plans(outline, config, machine, parts, dtype) if _is_short(outline, config, plan) else ()
    return replace(
        found,
        verdict="tight" if is_tight else "fits",
        kv_bytes=report.kv_bytes,
        kv_dtype=_KV_NAMES[kv_dtype],
        max_context=plan.max_model_len,
        chats=_chats(report),
        notes=report.notes,
        advice=(*advice, *(_smaller(machine, others) if is_tight else ())),
    )


def _parts(outline: Outline, config: EngineConfig, machine: Memory, dtype: str) -> Parts:
    uses_graphs = machine.kind == "cuda" and can_be_captured(outline.spec, outline.stated)
    return forecast(config, outline.spec, outline, outline.stated, machine, dtype, uses_graphs=uses_graphs)


def _check_room(machine: Memory, parts: Parts) -> None:
    """A card's plan looks at this itself; a computer's leaves it to the load."""
    if machine.kind == "cpu" and parts.weights > machine.free:
        raise OutOfMemory(
            f"The weights need {parts.weights / _GB:.2f} GB; {machine.free / _GB:.2f} of {machine.total / _GB:.2f} GB "
            f"are available on {machine.name}."
        )


def _chats(report: MemoryReport) -> int:
    return report.layout.num_sequences(report.num_blocks, CHAT_TOKENS)


def _is_short(outline: Outline, config: EngineConfig, plan: MemoryPlan) -> bool:
    """Less than was asked for; without a wish, than the model can."""
    return plan.max_model_len < (config.max_model_len or outline.spec.context_length)


def _other_plans(outline: Outline, config: EngineConfig, machine: Memory, parts: Parts, dtype: str) -> tuple[str, ...]:
    """What int8 and a context of its own choosing would give, where that is more than now."""
    told: list[tuple[EngineConfig, str]] = []
    for name, other in (
        ("A KV cache in int8 (--kv-cache-dtype int8)", replace(config, kv_cache_dtype="int8")),
        ("A smaller context (--max-model-len)", replace(config, max_model_len=None)),
        ("Both", replace(config, kv_cache_dtype="int8", max_model_len=None)),
    ):
        if other in (config, *(known for known, _ in told)):
            continue
        try:
            plan, _ = plan_cache(other, outline.spec, machine, parts, dtype)
        except OutOfMemory:
            continue
        chats = _chats(plan.report)
        told.append((other, f"{name}: a context of {plan.max_model_len:,} tokens, {chats} chats of 8k."))
    return tuple(words for _, words in told)


def _smaller(machine: Memory, others: Sequence[CatalogEntry]) -> tuple[str, ...]:
    """The largest models of the catalogue that leave a third of the memory for context."""
    room = machine.free * 2 / 3
    fitting = sorted((e for e in others if 0 < e.size_bytes < room), key=lambda e: e.size_bytes, reverse=True)
    return (f"A smaller model: {', '.join(entry.id for entry in fitting[:3])}.",) if fitting else ()
