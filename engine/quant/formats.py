"""Which format a checkpoint says it has: its config's `quantization_config`, or the older file beside it."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from engine.errors import BadCheckpoint, UnsupportedModel
from engine.quant.awq import AwqFormat
from engine.quant.base import Format
from engine.quant.compressed_tensors import CompressedTensorsFormat
from engine.quant.gptq import GptqFormat

_FORMATS: dict[str, Callable[[Mapping[str, Any]], Format]] = {
    "gptq": GptqFormat,
    "awq": AwqFormat,
    "compressed-tensors": CompressedTensorsFormat,
}

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


def open_format(folder: Path, config: Mapping[str, Any]) -> Format | None:
    """None for a dense checkpoint.

    Raises UnsupportedModel for a format that we do not read, naming it, and BadCheckpoint for a config without sense.
    """
    found = config.get("quantization_config") or config.get("compression_config") or _config_beside(folder)
    if not found:
        return None
    if not isinstance(found, dict):
        raise BadCheckpoint(f"quantization_config of {folder.name} is no object but {found!r}.")
    quantization = _under_current_names(found)
    method = quantization["quant_method"]
    if method not in _FORMATS:
        raise UnsupportedModel(
            f"quant_method={method!r} is not supported. Get the model as {', '.join(_FORMATS)} (pack-quantized) "
            "or unquantised."
        )
    try:
        return _FORMATS[method](quantization)
    except (TypeError, ValueError, AttributeError) as error:
        raise BadCheckpoint(f"quantization_config of {folder.name} makes no sense as {method}: {error}.") from error


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
    for name in ("quantize_config.json", "quant_config.json"):
        if (folder / name).exists():
            return _read_json(folder / name)
    return None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise BadCheckpoint(f"{path.name} of {path.parent.name} is not JSON ({error}). Download it again.") from error
    return found
