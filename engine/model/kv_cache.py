"""The paged KV cache: pairs of tensors over one block numbering, a pair for the layers that have one place in their
groups (see `engine.layout`): each writes in blocks of its own group.

On a card the blocks lie at addresses that are reserved once, backed by as much memory as the pool has at the moment: a
captured step finds them where they were, however often the pool was made smaller and larger again.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from engine.model.spec import ModelSpec
from kernels.paged_kv import PagedKV, Shape, empty_paged_kv
from kernels.virtual_memory import CudaDriver, Driver, VirtualBuffer

_COPIED_AT_ONCE = 64  # blocks: 2 MB of each tensor


class LayerCache(NamedTuple):
    """Of one layer: the tensors, and the group whose blocks of them are the layer's."""

    paged: PagedKV
    group: int


class KVCache:
    """All layers' caches, of `num_blocks` blocks at most and at first."""

    def __init__(
        self,
        spec: ModelSpec,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        max_num_seqs: int,
    ) -> None:
        most_heads = max(layer.attention.num_heads for layer in spec.layers)
        counters = torch.zeros(max_num_seqs * most_heads, dtype=torch.int32, device=device)
        groups = spec.layer_groups
        shapes: dict[int, Shape] = {}  # by place; where a place has several layers, they are alike
        for layer, (_, place) in zip(spec.layers, groups.places, strict=True):
            shapes[place] = (num_blocks, layer.cache.num_kv_heads, block_size, layer.cache.head_dim)
        self._memory = _CardMemory(CudaDriver()) if device.type == "cuda" else None
        empty = None if self._memory is None else self._memory.empty
        by_dimension = device.type == "cpu" and dtype is torch.float32
        self._places = tuple(
            empty_paged_kv(shapes[place], dtype, device, counters, empty, by_dimension=by_dimension)
            for place in range(groups.size)
        )
        self.windows = groups.windows
        self.layers = tuple(LayerCache(self._places[place], group) for group, place in groups.places)

    @property
    def can_be_resized(self) -> bool:
        return self._memory is not None

    @property
    def num_bytes(self) -> int:
        """That the cache takes now. The scales of int8 stay whole."""
        if self._memory is None:
            return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors)
        return self._memory.num_bytes + self._scales_bytes

    def blocks_within(self, kv_bytes: int) -> int:
        """Blocks that so much memory holds."""
        assert self._memory is not None, "memory of a CPU's cache is not given back"
        return self._memory.blocks_within(kv_bytes - self._scales_bytes)

    @property
    def _scales_bytes(self) -> int:
        scales = (scale for paged in self._places for scale in (paged.key_scales, paged.value_scales))
        return sum(scale.numel() * scale.element_size() for scale in scales if scale is not None)

    @property
    def _tensors(self) -> list[torch.Tensor]:
        return [
            tensor
            for paged in self._places
            for tensor in (paged.keys, paged.values, paged.key_scales, paged.value_scales)
            if tensor is not None
        ]

    def resize(self, num_blocks: int) -> None:
        """Have the first `num_blocks` exist: what the others held goes back to the system.

        Raises MemoryError, and is as before, if the card has no room for more.
        """
        assert self._memory is not None, "memory of a CPU's cache is not given back"
        torch.cuda.synchronize()
        self._memory.resize(num_blocks)

    def copy_blocks(self, moves: Sequence[tuple[int, int]]) -> None:
        """From block to block; no target is a source. On the device this takes its turn among the steps."""
        tensors = self._tensors
        for first in range(0, len(moves), _COPIED_AT_ONCE):
            columns = list(zip(*moves[first : first + _COPIED_AT_ONCE], strict=True))
            sources, targets = torch.tensor(columns, device=tensors[0].device)
            for tensor in tensors:
                tensor[targets] = tensor[sources]


class _CardMemory:
    """A buffer for each tensor, all cut at the same block."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._buffers: list[tuple[VirtualBuffer, int]] = []  # with the bytes of a block
        self._num_blocks = self._most_blocks = 0

    def empty(self, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        self._num_blocks = self._most_blocks = shape[0]
        block_bytes = torch.Size(shape[1:]).numel() * dtype.itemsize
        buffer = VirtualBuffer(self._driver, shape[0] * block_bytes)
        buffer.resize(shape[0] * block_bytes)
        self._buffers.append((buffer, block_bytes))
        return buffer.tensor(shape, dtype)

    @property
    def num_bytes(self) -> int:
        return sum(buffer.num_backed for buffer, _ in self._buffers)

    def blocks_within(self, kv_bytes: int) -> int:
        """As many as leave no piece of a buffer with a part in use, where all blocks are of a size that divides it."""
        most = self._most_blocks
        blocks = min(kv_bytes * most // sum(buffer.most_bytes for buffer, _ in self._buffers), most)
        sizes = {block_bytes for _, block_bytes in self._buffers}
        a_piece = max(self._driver.granularity // max(sizes), 1)
        return blocks if blocks == most else blocks // a_piece * a_piece

    def resize(self, num_blocks: int) -> None:
        try:
            self._cut(num_blocks)
        except MemoryError:
            self._cut(min(num_blocks, self._num_blocks))
            raise
        self._num_blocks = num_blocks

    def _cut(self, num_blocks: int) -> None:
        for buffer, block_bytes in self._buffers:
            buffer.resize(num_blocks * block_bytes)
