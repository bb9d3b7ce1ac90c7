"""What a decode step reads, in one buffer: filled on the host, sent in one copy, at the same place for every step.

A step of `rows` sequences and tables of `width` blocks lies in the buffer as

    int64 [2 + groups, held]     positions, slots, slot_mapping of each group of layers
    int32 [held]                 seq_lens
    int32 [groups, rows, width]  block_table of each group, filled up to a multiple of 4 numbers

where `held` is `rows` rounded up to a multiple of 4: each begins at a multiple of 16 bytes, for which the kernels are
compiled.

Rows past the step's sequences fill it up: they have no tokens, are stored nowhere (slot_mapping -1), and feed and
leave their ids in a slot that no sequence has.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from engine.forward import ForwardBatch
from engine.plan import ScheduledSequence

_LONGS = 2  # int64 numbers of a row, beside one for each group
_EVEN = 4  # words of 16 bytes
_TURNS = 2  # buffers on the host: while one fills, the copy of the one before may not have begun

_Array = np.ndarray[Any, Any]


class DecodeInputs:
    def __init__(
        self,
        *,
        max_rows: int,
        max_blocks: int,
        block_size: int,
        spare_slot: int,
        device: torch.device,
        num_groups: int = 1,
    ) -> None:
        """spare_slot: the one that no sequence has."""
        self._block_size, self._spare_slot, self._num_groups = block_size, spare_slot, num_groups
        num_words = self._num_words(max_rows, max_blocks)
        is_card = device.type == "cuda"
        self._on_host = [torch.zeros(num_words, dtype=torch.int32, pin_memory=is_card) for _ in range(_TURNS)]
        self._on_device = torch.zeros(num_words, dtype=torch.int32, device=device)
        self._ones = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._turn = 0
        # Tables grow by a block every 16 tokens, so they are kept from step to step: whose run has a row, how far.
        self._tables = np.zeros((num_groups, max_rows, max_blocks), dtype=np.int32)
        self._kept: list[tuple[int, int]] = [(-1, 0)] * max_rows

    def _num_words(self, rows: int, width: int) -> int:
        """32-bit ones, of a step."""
        return self._head_words(rows) + self._num_groups * _even(rows * width)

    def _head_words(self, rows: int) -> int:
        """Before the tables."""
        return (2 * (_LONGS + self._num_groups) + 1) * _even(rows)

    def views(self, rows: int, width: int) -> tuple[ForwardBatch, torch.Tensor]:
        """The step as the decoder takes it, but for its token ids; and the slots [rows] int64 that have them."""
        held, num_longs, head = _even(rows), _LONGS + self._num_groups, self._head_words(rows)
        longs = self._on_device[: 2 * num_longs * held].view(torch.int64).view(num_longs, held)[:, :rows]
        tables = self._on_device[head : self._num_words(rows, width)].view(self._num_groups, -1)
        batch = ForwardBatch(
            token_ids=longs[1],
            positions=longs[0],
            slot_mappings=longs[_LONGS:].unbind(),
            block_tables=tables[:, : rows * width].unflatten(1, (rows, width)).unbind(),
            seq_lens=self._on_device[head - held :][:rows],
            cu_seqlens_q=self._ones[: rows + 1],
            sample_rows=longs[1],
            max_query_len=1,
            max_short_query_len=1,
            max_seq_len=width * self._block_size,
        )
        return batch, longs[1]

    def send(self, sequences: Sequence[ScheduledSequence], rows: int, width: int) -> None:
        """One token of each sequence, filled up to `rows`. Returns before the copy is done."""
        self._keep_tables(sequences)
        staging = self._on_host[self._turn]
        self._turn = (self._turn + 1) % _TURNS
        num_words = self._num_words(rows, width)
        self._fill(staging.numpy()[:num_words], sequences, rows, width)
        self._on_device[:num_words].copy_(staging[:num_words], non_blocking=True)

    def forget_tables(self) -> None:
        """Blocks have moved: a run's table is no longer what it was, and longer."""
        self._kept = [(-1, 0)] * len(self._kept)

    def _keep_tables(self, sequences: Sequence[ScheduledSequence]) -> None:
        for row, sequence in enumerate(sequences):
            tables, (run_id, length) = sequence.block_tables, self._kept[row]
            if run_id != sequence.run_id:
                length = 0
            if length < len(tables[0]):  # of one run they only grow
                for group, table in enumerate(tables):
                    self._tables[group, row, length : len(table)] = table[length:]
            self._kept[row] = (sequence.run_id, len(tables[0]))

    def _fill(self, words: _Array, sequences: Sequence[ScheduledSequence], rows: int, width: int) -> None:
        size, count, held, head = self._block_size, len(sequences), _even(rows), self._head_words(rows)
        longs = words[: head - held].view(np.int64).reshape(-1, held)
        seq_lens, tables = words[head - held : head], words[head:].reshape(self._num_groups, -1)
        longs[0, :count] = [sequence.start for sequence in sequences]
        longs[1, :count] = [sequence.slot for sequence in sequences]
        longs[0, count:], longs[1, count:], longs[_LONGS:, count:] = 0, self._spare_slot, -1
        seq_lens[:count] = longs[0, :count] + 1
        seq_lens[count:] = 0
        for group in range(self._num_groups):
            longs[_LONGS + group, :count] = [
                s.block_tables[group][s.start // size] * size + s.start % size for s in sequences
            ]
            table = tables[group, : rows * width].reshape(rows, width)
            table[:count] = self._tables[group, :count, :width]


def _even(count: int) -> int:
    return -(-count // _EVEN) * _EVEN
