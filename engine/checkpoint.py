"""What a model's folder says about itself, before any tensor is read: config, spec, format, end ids."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import BadCheckpoint
from engine.model.architectures import read_spec
from engine.model.spec import ModelSpec
from engine.quant.base import Format
from engine.quant.formats import open_format


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """
    format         None for a dense checkpoint
    eos_token_ids  generation_config.json's, which knows all (Llama 3 has three), else config.json's
    """

    folder: Path
    spec: ModelSpec
    format: Format | None
    eos_token_ids: tuple[int, ...]


def open_checkpoint(folder: Path) -> Checkpoint:
    """Raises BadCheckpoint (files missing or broken) or UnsupportedModel (what we do not compute or read)."""
    config = _read_json(folder / "config.json")
    return Checkpoint(folder, read_spec(config), open_format(folder, config), _eos_token_ids(folder, config))


def _eos_token_ids(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    path = folder / "generation_config.json"
    generation = _read_json(path) if path.exists() else {}
    ids = generation.get("eos_token_id", config.get("eos_token_id"))
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (ids,)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise BadCheckpoint(f"{path.parent.name} has no {path.name}. The folder is no model, or incomplete.") from error
    except json.JSONDecodeError as error:
        raise BadCheckpoint(f"{path.name} of {path.parent.name} is not JSON ({error}). Download it again.") from error
    return found
