"""Which format reads a checkpoint, by what its config states."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from engine.errors import BadCheckpoint
from engine.quant.awq import AwqFormat
from engine.quant.base import Format
from engine.quant.compressed_tensors import CompressedTensorsFormat
from engine.quant.gptq import GptqFormat
from engine.quant.stated import Stated, read_stated

_FORMATS: dict[str, Callable[[Mapping[str, Any]], Format]] = {
    "gptq": GptqFormat,
    "awq": AwqFormat,
    "compressed-tensors": CompressedTensorsFormat,
}


def open_format(folder: Path, config: Mapping[str, Any]) -> Format | None:
    """None for a dense checkpoint.

    Raises UnsupportedModel for a format that we do not read, naming it, and BadCheckpoint for a config without sense.
    """
    found = read_stated(folder, config)
    return None if found is None else format_of(found, folder.name)


def format_of(found: Stated, name: str) -> Format:
    """Raises as `open_format`."""
    try:
        return _FORMATS[found.method](found.config)
    except (TypeError, ValueError, AttributeError) as error:
        raise BadCheckpoint(f"quantization_config of {name} makes no sense as {found.method}: {error}.") from error
