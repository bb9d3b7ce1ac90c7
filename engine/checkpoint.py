"""What a model's folder says about itself, before any tensor is read: config, spec, format, end ids."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.errors import BadCheckpoint, UnsupportedModel
from engine.model.architectures import read_spec
from engine.model.spec import ModelSpec
from engine.quant.base import Format
from engine.quant.formats import format_of
from engine.quant.stated import Stated, read_stated
from engine.weights.reader import CheckpointReader, SafetensorsReader


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """
    stated, format what its config states of its quantisation, and what reads it; None for a dense checkpoint
    eos_token_ids  generation_config.json's, which knows all (Llama 3 has three), else config.json's
    open_reader    opens its tensors for a device
    """

    folder: Path
    spec: ModelSpec
    stated: Stated | None
    format: Format | None
    eos_token_ids: tuple[int, ...]
    open_reader: Callable[[torch.device], CheckpointReader]


def open_checkpoint(folder: Path) -> Checkpoint:
    """Raises BadCheckpoint (files missing or broken) or UnsupportedModel (what we do not compute or read)."""
    config = _read_json(folder / "config.json")
    _check_pooling(folder)
    spec, stated = read_spec(config), read_stated(folder, config)
    return Checkpoint(
        folder,
        spec,
        stated,
        format_of(stated, folder.name) if stated else None,
        _eos_token_ids(folder, config),
        lambda device: SafetensorsReader(folder, device),
    )


def _check_pooling(folder: Path) -> None:
    """An embedding model must pool as `ModelRunner` does: the last token, then length 1.

    `modules.json` is sentence-transformers': what follows the decoder, each module with a folder of its own.
    """
    for module in _read_json_if_any(folder / "modules.json", default=[]):
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind not in ("Transformer", "Pooling", "Normalize"):
            raise UnsupportedModel(f"modules.json has a module {kind!r} after the decoder; only Pooling is supported.")
        if kind == "Pooling":
            pooling = _read_json_if_any(folder / str(module.get("path", "")) / "config.json", default={})
            modes = [key for key, value in pooling.items() if key.startswith("pooling_mode_") and value]
            if modes not in ([], ["pooling_mode_lasttoken"]):
                raise UnsupportedModel(f"{', '.join(modes)} is not supported; pooling_mode_lasttoken is.")


def _read_json_if_any(path: Path, default: Any) -> Any:
    return _read_json(path) if path.exists() else default


def _eos_token_ids(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    generation = _read_json_if_any(folder / "generation_config.json", default={})
    ids = generation.get("eos_token_id", config.get("eos_token_id"))
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (ids,)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise BadCheckpoint(f"{path.parent.name} has no {path.name}. The folder is no model, or incomplete.") from error
    except json.JSONDecodeError as error:
        raise BadCheckpoint(f"{path.name} of {path.parent.name} is not JSON ({error}). Download it again.") from error
