"""Tensors of a checkpoint by name. A layer asks for what it needs; `unused()` tells what nobody asked for."""

import json
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import BadCheckpoint

_HOST = torch.device("cpu")

# As safetensors' headers name them.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class CheckpointReader(Protocol):
    """Tensors by name, wherever they come from. `get` raises BadCheckpoint for one that is not there."""

    folder: Path

    @property
    def names(self) -> frozenset[str]: ...

    def has(self, name: str) -> bool: ...

    def get(self, name: str) -> torch.Tensor:
        """The tensor as stored, on whichever device it lies."""
        ...

    def header(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and type as stored; nothing is read."""
        ...

    def skip(self, name: str) -> None:
        """Mark a tensor as known and not needed."""
        ...

    def unused(self) -> list[str]:
        """Names that nobody has asked for."""
        ...

    def total_bytes(self) -> int:
        """Of all that is stored."""
        ...

    def close(self) -> None: ...


class SafetensorsReader:
    """The safetensors files of one folder, sharded or not, read lazily.

    device  where tensors are put, and so where a format unpacks them
    Raises BadCheckpoint for missing files, a broken header, an index that names what is not there, and missing tensors.
    """

    def __init__(self, folder: Path, device: torch.device = _HOST) -> None:
        self.folder = folder
        self._device = device
        self._file_of = _index(folder)
        self._open: dict[Path, Any] = {}
        self._asked: set[str] = set()

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._file_of)

    def has(self, name: str) -> bool:
        return name in self._file_of

    def get(self, name: str) -> torch.Tensor:
        """The tensor as stored, on the reader's device."""
        if name not in self._file_of:
            raise BadCheckpoint(f"{self.folder.name} has no tensor {name!r}. The checkpoint is incomplete.")
        self._asked.add(name)
        path = self._file_of[name]
        try:
            return self._file(path).get_tensor(name).to(self._device)
        except SafetensorError as error:
            raise BadCheckpoint(f"{path.name} does not give {name!r} ({error}). Download it again.") from error

    def header(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        part = self._file(self._file_of[name]).get_slice(name)
        return tuple(part.get_shape()), _DTYPES[part.get_dtype()]

    def skip(self, name: str) -> None:
        """Mark a tensor as known and not needed."""
        self._asked.add(name)

    def unused(self) -> list[str]:
        return sorted(self.names - self._asked)

    def total_bytes(self) -> int:
        """Size of all files on disk."""
        return sum(path.stat().st_size for path in set(self._file_of.values()))

    def close(self) -> None:
        self._open.clear()

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            self._open[path] = _open_safetensors(path)
        return self._open[path]


def _index(folder: Path) -> dict[str, Path]:
    index_file = folder / "model.safetensors.index.json"
    if index_file.exists():
        return _sharded_index(folder, index_file)
    whole = folder / "model.safetensors"  # beside it some writers leave the same weights under other names
    files = [whole] if whole.exists() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise BadCheckpoint(f"No *.safetensors file in {folder.name}. {_what_else_lies_in(folder)}")
    return {name: path for path in files for name in _open_safetensors(path).keys()}  # noqa: SIM118 (not a dict)


def _what_else_lies_in(folder: Path) -> str:
    if any(folder.glob("*.[gG][gG][uU][fF]")):
        return "It has GGUF, which Fireside does not read: get the model as GPTQ, AWQ or plain safetensors."
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
        return "Its weights are pickles (.bin, .pt), which may run code when read: get the model as safetensors."
    return "The download is incomplete, or of another format."


def _sharded_index(folder: Path, index_file: Path) -> dict[str, Path]:
    try:
        weight_map: dict[str, str] = json.loads(index_file.read_text(encoding="utf-8"))["weight_map"]
    except (json.JSONDecodeError, KeyError) as error:
        raise BadCheckpoint(f"{index_file.name} cannot be read ({error}). Download the model again.") from error
    missing = sorted({name for name in weight_map.values() if not (folder / name).exists()})
    if missing:
        raise BadCheckpoint(f"{folder.name} lacks {', '.join(missing)}. The download is incomplete; resume it.")
    return {tensor: folder / file for tensor, file in weight_map.items()}


def _open_safetensors(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise BadCheckpoint(f"{path.name} is not a whole safetensors file ({error}). Download it again.") from error
