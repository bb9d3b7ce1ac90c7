"""Packed weights kept beside the checkpoint: the next load on a card reads them as they will lie in its memory.

A folder `packed-KEY` holds safetensors files and an index, which is written last: without it nothing is read. KEY
changes with the checkpoint's files, the arithmetic and the layout, and the folder of another key is removed. What
cannot be kept is no error, for the checkpoint itself is there: `note` says why.
"""

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kernels.gpu.planar import LAYOUT_VERSION, PlanarWeight

_INDEX = "index.json"
_FILE_BYTES = 512 * 1024**2  # of host memory while they are written
_SPARE_BYTES = 4_000_000_000  # what a disk must have left beside them
_ABANDONED_S = 3600.0
_NUMBERS = ("has_zeros", "group_size", "num_inputs", "num_outputs")


@dataclass(frozen=True)
class PackedModules:
    """One packed weight with what belongs to it: see engine.quant.linear.W4Linear."""

    weight: PlanarWeight
    num_inputs: int
    order: torch.Tensor | None
    bias: torch.Tensor | None


class KeptWeights:
    """Of one checkpoint. `find` and, at the end, `notes` where they are kept; else `add` each and `finish`.

    note  why they will not be kept, "" if they will
    """

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype, needed_bytes: int) -> None:
        """dtype: of the arithmetic, by which a zero counts as whole or not (`kernels.gpu.planar`)."""
        self._device = device
        self._folder = folder / f"packed-{_key(folder, dtype)}"
        self._index = _read_index(self._folder)
        self._files: dict[str, Any] = {}
        self.note = "" if self._index else _refusal(folder, needed_bytes)
        self._writer = None if self._index or self.note else _Writer(self._folder)

    @property
    def notes(self) -> tuple[str, ...]:
        """Those of the load that kept the weights."""
        return tuple(self._index["notes"]) if self._index else ()

    def find(self, modules: Sequence[str]) -> PackedModules | None:
        """The packed weight of `modules`, fused in this order; None where it is not kept."""
        entry = self._index and self._index["modules"].get(_name(modules))
        if not entry:
            return None
        parts = {part: self._tensor(entry["file"], f"{_name(modules)}.{part}") for part in entry["parts"]}
        weight = PlanarWeight.of(parts["codes"], parts["words"], **{name: entry[name] for name in _NUMBERS})
        return PackedModules(weight, entry["width"], parts.get("order"), parts.get("bias"))

    def add(self, modules: Sequence[str], packed: PackedModules) -> None:
        if self._writer is not None:
            try:
                self._writer.add(_name(modules), packed)
            except (OSError, SafetensorError) as error:
                self._give_up(error)

    def finish(self, notes: Iterable[str]) -> None:
        """All were added: from now on they are there for the next load. `notes` are told with them then."""
        self._files.clear()
        if self._writer is not None:
            try:
                self._writer.finish(notes)
            except (OSError, SafetensorError) as error:
                self._give_up(error)

    def close(self) -> None:
        """Without `finish` nothing stays."""
        if self._writer is not None:
            self._writer.drop()

    def _give_up(self, error: Exception) -> None:
        assert self._writer is not None
        self._writer.drop()
        self._writer = None
        self.note = f"Packed weights are not kept for the next load: {error}."

    def _tensor(self, file: str, name: str) -> torch.Tensor:
        if file not in self._files:
            self._files[file] = safe_open(self._folder / file, framework="pt", device=str(self._device))
        return self._files[file].get_tensor(name)


class _Writer:
    """Builds under a name of its own, which nobody reads, and renames at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        _remove_abandoned(folder.parent)
        self._under_way = Path(tempfile.mkdtemp(prefix="packing-", dir=folder.parent))
        self._tensors: dict[str, torch.Tensor] = {}
        self._num_bytes = 0
        self._modules: dict[str, dict[str, Any]] = {}
        self._num_files = 0

    def add(self, name: str, packed: PackedModules) -> None:
        parts = {"codes": packed.weight.codes, "words": packed.weight.words, "order": packed.order, "bias": packed.bias}
        there = {part: tensor.cpu() for part, tensor in parts.items() if tensor is not None}
        numbers = {number: getattr(packed.weight, number) for number in _NUMBERS}
        entry = {"file": self._file, "parts": list(there), "width": packed.num_inputs}
        self._modules[name] = entry | numbers
        self._tensors |= {f"{name}.{part}": tensor for part, tensor in there.items()}
        self._num_bytes += sum(tensor.nbytes for tensor in there.values())
        if self._num_bytes >= _FILE_BYTES:
            self._write()

    def finish(self, notes: Iterable[str]) -> None:
        if self._tensors:
            self._write()
        index = {"modules": self._modules, "notes": list(notes)}
        (self._under_way / _INDEX).write_text(json.dumps(index), encoding="utf-8")
        for other in self._folder.parent.glob("packed-*"):
            shutil.rmtree(other)
        os.rename(self._under_way, self._folder)

    def drop(self) -> None:
        shutil.rmtree(self._under_way, ignore_errors=True)

    @property
    def _file(self) -> str:
        return f"{self._num_files:05}.safetensors"

    def _write(self) -> None:
        save_file(self._tensors, self._under_way / self._file)
        self._num_files += 1
        self._tensors, self._num_bytes = {}, 0


def _remove_abandoned(folder: Path) -> None:
    """What a process that was killed had begun. A load takes minutes, so one of the last hour may be under way."""
    for path in folder.glob("packing-*"):
        if time.time() - path.stat().st_mtime > _ABANDONED_S:
            shutil.rmtree(path, ignore_errors=True)


def _name(modules: Sequence[str]) -> str:
    return "|".join(modules)


def _key(folder: Path, dtype: torch.dtype) -> str:
    """Of the files as they lie there: names, lengths, times of change. Reading gigabytes for a hash would cost more
    than it saves; a file that is replaced has another time.
    """
    parts: list[object] = [LAYOUT_VERSION, str(dtype)]
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.json")]):
        stat = path.stat()
        parts.append((path.name, stat.st_size, stat.st_mtime_ns))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _read_index(folder: Path) -> dict[str, Any] | None:
    """None if there is no whole one."""
    try:
        index: dict[str, Any] = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return index


def _refusal(folder: Path, needed_bytes: int) -> str:
    """Why weights of so many bytes cannot be kept there; "" if they can."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes + _SPARE_BYTES:
        why = f"they take {needed_bytes / 1e9:.1f} GB, and of the disk's {free / 1e9:.1f} GB free, 4 GB stay free"
        return f"Packed weights are not kept for the next load: {why}."
    if not os.access(folder, os.W_OK):
        return f"Packed weights are not kept for the next load: {folder.name} cannot be written to."
    return ""
