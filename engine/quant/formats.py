"""Which format a checkpoint says it has: its config's `quantization_config`, or the older file beside it."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from engine.errors import UnsupportedModel
from engine.quant.awq import AwqFormat
from engine.quant.base import Format
from engine.quant.gptq import GptqFormat

_FORMATS: dict[str, Callable[[Mapping[str, Any]], Format]] = {"gptq": GptqFormat, "awq": AwqFormat}


def open_format(folder: Path, config: Mapping[str, Any]) -> Format | None:
    """None for a dense checkpoint. Raises UnsupportedModel for a format that we do not read, naming it."""
    quantization = config.get("quantization_config") or _legacy_config(folder)
    if quantization is None:
        return None
    method = quantization.get("quant_method", quantization.get("method", "gptq"))
    if method not in _FORMATS:
        raise UnsupportedModel(f"quant_method={method!r} is not supported; {' and '.join(sorted(_FORMATS))} are.")
    return _FORMATS[method](quantization)


def _legacy_config(folder: Path) -> dict[str, Any] | None:
    for name in ("quantize_config.json", "quant_config.json"):
        if (folder / name).exists():
            return json.loads((folder / name).read_text(encoding="utf-8"))
    return None
