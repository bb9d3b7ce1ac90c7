"""What a decode step reads, in one buffer: filled on the host, sent in one copy, at the same place for every step.

A step of `rows` sequences and tables of `width` blocks lies in the buffer as

    int64 [3, held]      positions, slot_mapping, slots
    int32 [held]         seq_lens
    int32 [rows, width]  block_table

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

_LONGS = 3  # int64 numbers of a row
_HEAD = 2 * _LONGS + 1  # 32-bit words of a row before its table
_EVEN = 4  # words of 16 bytes
_TURNS = 2  # buffers on the host: while one fills, the copy of the one before may not have begun

_Array = np.ndarray[Any, Any]


class DecodeInputs:
    def __init__(
        self, *, max_rows: int, max_blocks: int, block_size: int, spare_slot: int, device: torch.device
    ) -> None:
        """spare_slot: the one that no sequence has."""
        self._block_size, self._spare_slot = block_size, spare_slot
        num_words = _num_words(max_rows, max_blocks)
        is_card = device.type == "cuda"
        self._on_host = [torch.zeros(num_words, dtype=torch.int32, pin_memory=is_card) for _ in range(_TURNS)]
        self._on_device = torch.zeros(num_words, dtype=torch.int32, device=device)
        self._ones = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._turn = 0
        # Tables grow by a block every 16 tokens, so they are kept from step to step: whose run has a row, how far.
        self._tables = np.zeros((max_rows, max_blocks), dtype=np.int32)
        self._kept: list[tuple[int, int]] = [(-1, 0)] * max_rows

    @staticmethod
    def bytes_for(max_rows: int, max_blocks: int) -> int:
        """On the device."""
        return 4 * (_num_words(max_rows, max_blocks) + max_rows + 1)

    def views(self, rows: int, width: int) -> tuple[ForwardBatch, torch.Tensor]:
        """The step as the decoder takes it, but for its token ids; and the slots [rows] int64 that have them."""
        held = _held(rows)
        longs = self._on_device[: 2 * _LONGS * held].view(torch.int64).view(_LONGS, held)[:, :rows]
        rest = self._on_device[2 * _LONGS * held :]
        batch = ForwardBatch(
            token_ids=longs[2],
            positions=longs[0],
            slot_mapping=longs[1],
            block_table=rest[held : held + rows * width].view(rows, width),
            seq_lens=rest[:rows],
            cu_seqlens_q=self._ones[: rows + 1],
            sample_rows=longs[2],
            max_query_len=1,
            max_short_query_len=1,
            max_seq_len=width * self._block_size,
        )
        return batch, longs[2]

    def send(self, sequences: Sequence[ScheduledSequence], rows: int, width: int) -> None:
        """One token of each sequence, filled up to `rows`. Returns before the copy is done."""
        self._keep_tables(sequences)
        staging = self._on_host[self._turn]
        self._turn = (self._turn + 1) % _TURNS
        num_words = _num_words(rows, width)
        self._fill(staging.numpy()[:num_words], sequences, rows)
        self._on_device[:num_words].copy_(staging[:num_words], non_blocking=True)

    def forget_tables(self) -> None:
        """Blocks have moved: a run's table is no longer what it was, and longer."""
        self._kept = [(-1, 0)] * len(self._kept)

    def _keep_tables(self, sequences: Sequence[ScheduledSequence]) -> None:
        for row, sequence in enumerate(sequences):
            table, (run_id, length) = sequence.block_table, self._kept[row]
            if run_id != sequence.run_id:
                length = 0
            if length < len(table):  # of one run it only grows
                self._tables[row, length : len(table)] = table[length:]
            self._kept[row] = (sequence.run_id, len(table))

    def _fill(self, words: _Array, sequences: Sequence[ScheduledSequence], rows: int) -> None:
        size, count, held = self._block_size, len(sequences), _held(rows)
        longs = words[: 2 * _LONGS * held].view(np.int64).reshape(_LONGS, held)
        seq_lens, table = words[2 * _LONGS * held : _HEAD * held], words[_HEAD * held :].reshape(rows, -1)
        starts = [sequence.start for sequence in sequences]
        longs[0, :count] = starts
        longs[1, :count] = [s.block_table[s.start // size] * size + s.start % size for s in sequences]
        longs[2, :count] = [sequence.slot for sequence in sequences]
        longs[:, count:] = ((0,), (-1,), (self._spare_slot,))
        seq_lens[:count] = longs[0, :count] + 1
        seq_lens[count:] = 0
        table[:count] = self._tables[:count, : table.shape[1]]


def _held(rows: int) -> int:
    return -(-rows // _EVEN) * _EVEN


def _num_words(rows: int, width: int) -> int:
    return _HEAD * _held(rows) + rows * width
