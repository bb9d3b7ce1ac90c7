"""What a checkpoint's config states of its quantisation, in any writer's words: free of torch, for forecasts too.

`formats.py` makes a Format of it; what holds for one module is then seen from its tensors.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import BadCheckpoint, UnsupportedModel

FORMATS = ("gptq", "awq", "compressed-tensors")
FILES_BESIDE = ("quantize_config.json", "quant_config.json")  # of older writers, where config.json says nothing

# What a key was called in older files, or is by another writer.
_OLDER_NAMES = {
    "method": "quant_method",
    "w_bit": "bits",
    "wbits": "bits",
    "q_group_size": "group_size",
    "version": "format",
    "checkpoint_format": "format",
}
_OF_AWQ_ALONE = ("w_bit", "q_group_size", "zero_point", "version")


@dataclass(frozen=True, slots=True)
class Stated:
    """
    method        gptq | awq | compressed-tensors
    config        under the names of today
    bits          of a weight
    group_size    inputs that share a scale; -1 where all do
    is_symmetric  the zero is the middle of the codes
    """

    method: str
    config: Mapping[str, Any]
    bits: int
    group_size: int
    is_symmetric: bool


def read_stated(folder: Path, config: Mapping[str, Any]) -> Stated | None:
    """By config.json, else by the older file beside it; None for a dense checkpoint. Raises as `stated`."""
    found = config_of(config) or _config_beside(folder)
    return stated(found, folder.name) if found else None


def config_of(config: Mapping[str, Any]) -> Any:
    """What config.json itself has; falsy where it is silent."""
    return config.get("quantization_config") or config.get("compression_config")


def stated(found: Any, name: str) -> Stated:
    """Raises UnsupportedModel for a format that we do not read, naming it, and BadCheckpoint for one without sense."""
    if not isinstance(found, dict):
        raise BadCheckpoint(f"quantization_config of {name} is no object but {found!r}.")
    config = _under_current_names(found)
    method = config["quant_method"]
    if method not in FORMATS:
        raise UnsupportedModel(
            f"quant_method={method!r} is not supported. Get the model as {', '.join(FORMATS)} (pack-quantized) "
            "or unquantised."
        )
    try:
        return Stated(method, config, *_numbers(method, config))
    except (TypeError, ValueError, AttributeError) as error:
        raise BadCheckpoint(f"quantization_config of {name} makes no sense as {method}: {error}.") from error


def _numbers(method: str, config: Mapping[str, Any]) -> tuple[int, int, bool]:
    """bits, group_size, is_symmetric"""
    if method == "compressed-tensors":
        groups = list((config.get("config_groups") or {}).values())
        weights = (groups[0].get("weights") if groups else None) or {}
        return int(weights.get("num_bits") or 4), int(weights.get("group_size") or -1), bool(weights.get("symmetric"))
    is_symmetric = config.get("sym", True) if method == "gptq" else not config.get("zero_point", True)
    return int(config.get("bits") or 4), int(config.get("group_size") or 128), bool(is_symmetric)


def _under_current_names(found: Mapping[str, Any]) -> dict[str, Any]:
    """The same config with today's keys; a key that has its name of today wins over older ones."""
    older = {_OLDER_NAMES[key]: value for key, value in found.items() if key in _OLDER_NAMES and value is not None}
    current = {key: value for key, value in found.items() if key not in _OLDER_NAMES and value is not None}
    quantization = {**older, **current}
    if found.get("backend") == "llm-awq":
        quantization["format"] = "llm-awq"
    quantization.setdefault("quant_method", "awq" if any(key in found for key in _OF_AWQ_ALONE) else "gptq")
    return quantization


def _config_beside(folder: Path) -> dict[str, Any] | None:
    for name in FILES_BESIDE:
        if (folder / name).exists():
            return _read_json(folder / name)
    return None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise BadCheckpoint(f"{path.name} of {path.parent.name} is not JSON ({error}). Download it again.") from error
    return found
