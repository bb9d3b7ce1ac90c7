"""Search of the hub for models that can be loaded here, each with a word on whether it fits.

The word is an estimate from what a search tells of a repository (numbers by type, architecture, method), which is one
request for all hits. `fit.py` reads headers and knows exactly.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from app.errors import AppError
from app.models.hub.repository import hub_errors, licence_of
from app.models.machine import Memory
from engine.memory import CUDA_RESERVE_BYTES
from engine.model.architectures import SUPPORTED
from engine.quant.stated import FORMATS

_ITEMSIZE = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "F8_E4M3": 1}
_CARD_SHARE = 0.9
_WORKSPACE_BYTES = 700_000_000  # of a step, graphs and angles: as a rule
_ROOM_BYTES, _LEAST_ROOM_BYTES = 2_000_000_000, 500_000_000  # for the KV cache: some chats; one
_MOST_HITS = 100
_LOOKED_AT = 10  # repositories for each hit, where many are too large
_PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """
    format        gptq, awq, compressed-tensors, dense, or what else the repository says
    weights_bytes of its safetensors; None where the hub does not tell
    fit           fits | tight | too large | unknown | unsupported
    why           in words, of the last two
    """

    repo: str
    format: str
    licence: str
    downloads: int
    is_gated: bool
    weights_bytes: int | None
    fit: str
    why: str = ""


def search(
    words: str,
    machine: Memory,
    *,
    fmt: str | None = None,
    max_gb: float | None = None,
    licence: str | None = None,
    limit: int = 20,
    token: str | None = None,
) -> list[Hit]:
    """The most downloaded first. fmt: one of awq, gptq, compressed-tensors. Raises AppError."""
    if fmt is not None and fmt not in FORMATS:
        raise AppError(
            400, "bad_request", f"format is {fmt!r}; it must be one of {', '.join(FORMATS)}.", param="format"
        )
    if not 1 <= limit <= _MOST_HITS:
        raise AppError(400, "bad_request", f"limit is {limit}; it must be 1 to {_MOST_HITS}.", param="limit")
    if max_gb is not None and not max_gb > 0:
        raise AppError(400, "bad_request", f"max_gb is {max_gb:g}; it must be above 0.", param="max_gb")
    tags = ["safetensors", *([fmt] if fmt else []), *([f"license:{licence}"] if licence else [])]
    with hub_errors("api/models"):
        _require_network()
        asked = _ask(words, tags, limit if max_gb is None else limit * _LOOKED_AT, token)
        found = (_hit(info, machine) for info in asked)
        return list(islice((hit for hit in found if max_gb is None or (hit.weights_bytes or 0) <= max_gb * 1e9), limit))


def _require_network() -> None:
    """Raises what huggingface_hub raises, at once: its own search tries again for 24 s before it tells."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        what = "HF_HUB_OFFLINE is set: the hub is not asked."
        raise AppError(503, "offline", what, hint="Unset it to search; `models list` tells what is here.")
    get_session().head(constants.ENDPOINT, timeout=_PATIENCE_S)


def _ask(words: str, tags: list[str], limit: int, token: str | None) -> Iterable[Any]:
    from huggingface_hub import HfApi

    return HfApi(token=token).list_models(
        search=words or None,
        filter=tags,
        sort="downloads",
        limit=limit,
        expand=["config", "downloads", "gated", "safetensors", "tags"],
    )


def _hit(info: Any, machine: Memory) -> Hit:
    config: Mapping[str, Any] = info.config or {}
    numbers = (info.safetensors.parameters if info.safetensors else None) or {}
    size = sum(count * _ITEMSIZE.get(dtype, 2) for dtype, count in numbers.items()) or None
    fmt = str((config.get("quantization_config") or {}).get("quant_method") or "dense")
    fit, why = _fit(config, fmt, size, machine)
    return Hit(
        repo=info.id,
        format=fmt,
        licence=licence_of(info.tags or ()),
        downloads=info.downloads or 0,
        is_gated=bool(info.gated),
        weights_bytes=size,
        fit=fit,
        why=why,
    )


def _fit(config: Mapping[str, Any], fmt: str, size: int | None, machine: Memory) -> tuple[str, str]:
    """The word, and why it is no better one."""
    architectures = config.get("architectures") or []
    if fmt not in (*FORMATS, "dense"):
        return "unsupported", f"{fmt} is not read"
    if architectures and architectures[0] not in SUPPORTED:
        return "unsupported", f"{architectures[0]} is not supported"
    if size is None or not architectures:
        return "unknown", "the hub does not tell its size" if size is None else "the hub does not tell its architecture"
    return fit_word(size, machine), ""


def fit_word(weights_bytes: int, machine: Memory) -> str:
    """fits | tight | too large, for so many bytes of weights: an estimate."""
    if machine.kind == "cpu":
        room = machine.free - weights_bytes
    else:
        room = int(min(machine.total * _CARD_SHARE, machine.free - CUDA_RESERVE_BYTES)) - weights_bytes
    room -= _WORKSPACE_BYTES
    return "fits" if room >= _ROOM_BYTES else "tight" if room >= _LEAST_ROOM_BYTES else "too large"
