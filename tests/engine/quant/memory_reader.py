"""A checkpoint whose tensors lie in memory."""

from collections.abc import Mapping

import torch

from engine.errors import BadCheckpoint
from engine.weights.reader import SafetensorsReader


class MemoryReader(SafetensorsReader):
    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = dict(tensors)
        self._asked: set[str] = set()

    @classmethod
    def of_module(cls, prefix: str, parts: Mapping[str, torch.Tensor]) -> "MemoryReader":
        return cls({f"{prefix}.{part}": tensor for part, tensor in parts.items()})

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def has(self, name: str) -> bool:
        return name in self._tensors

    def get(self, name: str) -> torch.Tensor:
        if name not in self._tensors:
            raise BadCheckpoint(f"no tensor {name!r}")
        self._asked.add(name)
        return self._tensors[name]
