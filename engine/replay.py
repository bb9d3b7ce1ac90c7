"""Steps on a CPU: the kernel calls of one that decodes are kept, and made again for the next.

Steps that give one token to each of as many sequences differ in their numbers alone. So these lie in tensors that stay,
a set for each number of sequences. Other steps, and models that need more than kernels, are computed as they come.
"""

from dataclasses import dataclass, replace

import torch

from engine.forward import ForwardBatch
from engine.model.decoder import Decoder
from engine.model.kv_cache import KVCache
from kernels import ops

_MOST_ROWS = 64  # the calls of larger steps cost little beside their kernels


@dataclass(frozen=True, slots=True)
class _Step:
    """A step's inputs, and its kernel calls: None where torch computes a part of it."""

    residual: torch.Tensor
    batch: ForwardBatch
    recording: ops.Recording | None


class Replay:
    def __init__(self, decoder: Decoder, cache: KVCache, block_size: int) -> None:
        self._decoder, self._cache = decoder, cache
        self._blocks_each = -(-decoder.max_len // block_size)
        self._steps: dict[int, _Step] = {}  # by number of sequences

    def hidden(self, batch: ForwardBatch, wanted: torch.Tensor) -> torch.Tensor:
        """See `Decoder.hidden`. The result holds until the next step."""
        rows = batch.token_ids.shape[0]
        residual = self._decoder.embedded(batch)
        if batch.max_query_len > 1 or rows > _MOST_ROWS:
            return self._decoder.stacked(residual, batch, self._cache, wanted)
        return self._decoded(residual, batch)[wanted]

    def _decoded(self, residual: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """[sequences, hidden]: one token of each."""
        rows = residual.shape[0]
        step = self._steps.get(rows)
        if step is None:
            return self._record(residual, batch)
        if step.recording is None:
            return self._decoder.stacked(residual, batch, self._cache)
        _fill(step, residual, batch)
        return step.recording.replay()

    def _record(self, residual: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        rows, used = batch.block_tables[0].shape
        tables = tuple(torch.zeros(rows, max(used, self._blocks_each), dtype=torch.int32) for _ in batch.block_tables)
        lasting = replace(batch, block_tables=tables)
        _fill_tables(lasting, batch)
        hidden, recording = ops.record(lambda: self._decoder.stacked(residual, lasting, self._cache))
        self._steps[rows] = _Step(residual, lasting, recording)
        return hidden


def _fill(step: _Step, residual: torch.Tensor, batch: ForwardBatch) -> None:
    """Give the step this batch's numbers; cu_seqlens_q counts up by one in both."""
    step.residual.copy_(residual)
    step.batch.positions.copy_(batch.positions)
    step.batch.seq_lens.copy_(batch.seq_lens)
    for kept, slots in zip(step.batch.slot_mappings, batch.slot_mappings, strict=True):
        kept.copy_(slots)
    _fill_tables(step.batch, batch)


def _fill_tables(lasting: ForwardBatch, batch: ForwardBatch) -> None:
    for kept, table in zip(lasting.block_tables, batch.block_tables, strict=True):
        kept[:, : table.shape[1]] = table
