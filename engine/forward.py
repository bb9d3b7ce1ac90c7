"""One plan as tensors on the device."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice

import numpy as np
import torch

from engine.plan import BatchPlan, ScheduledSequence
from kernels.paged_kv import SHORT_QUERIES


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """
    token_ids     [tokens] int64;  positions [tokens] int64
    slot_mappings of each group of layers: [tokens] int64
    block_tables  of each group: [sequences, max_blocks] int32, padded with 0 past a sequence's own blocks
    seq_lens      [sequences] int32, tokens in the cache after this step
    cu_seqlens_q  [sequences + 1] int32
    sample_rows   [samples] int64, rows whose hidden state gives a token
    max_query_len, max_seq_len  of any sequence, as the host knows them
    max_short_query_len  of those that the kernels call short; 0 where there are none
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mappings: tuple[torch.Tensor, ...]
    block_tables: tuple[torch.Tensor, ...]
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    sample_rows: torch.Tensor
    max_query_len: int
    max_short_query_len: int
    max_seq_len: int


def forward_batch(plan: BatchPlan, block_size: int, device: torch.device, last_token_ids: torch.Tensor) -> ForwardBatch:
    """`last_token_ids` [slots] int64 on the device: what sequences feed whose last id the host does not know."""
    sequences = plan.sequences
    bounds = list(accumulate((s.num_tokens for s in sequences), initial=0))
    ends = [s.start + s.num_tokens for s in sequences]
    widest = max(-(-end // block_size) for end in ends)
    groups = range(len(sequences[0].block_tables))
    mapping = [list(chain.from_iterable(_slots(s, group, block_size) for s in sequences)) for group in groups]
    tables = [
        [_padded(s.block_tables[group], -(-end // block_size), widest) for s, end in zip(sequences, ends, strict=True)]
        for group in groups
    ]
    sample_rows = [bound - 1 for s, bound in zip(sequences, bounds[1:], strict=True) if s.samples]

    def moved(values: list[int] | list[list[int]], dtype: torch.dtype) -> torch.Tensor:
        return on_device(values, dtype, device)

    token_ids = moved(list(chain.from_iterable(s.token_ids for s in sequences)), torch.int64)
    if fed := [(bound, s.slot) for s, bound in zip(sequences, bounds, strict=False) if s.feeds_last]:
        rows, slots = moved([list(column) for column in zip(*fed, strict=True)], torch.int64)
        token_ids[rows] = last_token_ids[slots]
    return ForwardBatch(
        token_ids=token_ids,
        positions=moved(list(chain.from_iterable(_positions(s) for s in sequences)), torch.int64),
        slot_mappings=tuple(moved(of_group, torch.int64) for of_group in mapping),
        block_tables=tuple(moved(of_group, torch.int32) for of_group in tables),
        seq_lens=moved(ends, torch.int32),
        cu_seqlens_q=moved(bounds, torch.int32),
        sample_rows=moved(sample_rows, torch.int64),
        max_query_len=max(s.num_tokens for s in sequences),
        max_short_query_len=max((s.num_tokens for s in sequences if s.num_tokens <= SHORT_QUERIES), default=0),
        max_seq_len=max(ends),
    )


def on_device(values: Sequence[float] | list[list[int]], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """As a tensor there. A card gets it through pinned memory: a plain copy would wait for the step under way.

    By numpy, which reads a list ten times as fast as torch: a prompt of 8,192 tokens waits for three.
    """
    there = torch.from_numpy(np.array(values, dtype=str(dtype).removeprefix("torch.")))
    return there if device.type == "cpu" else there.pin_memory().to(device, non_blocking=True)


def _positions(sequence: ScheduledSequence) -> range:
    return range(sequence.start, sequence.start + sequence.num_tokens)


def _slots(sequence: ScheduledSequence, group: int, block_size: int) -> Iterator[int]:
    """Block by block, not token by token."""
    first, skipped = divmod(sequence.start, block_size)
    end = -(-(sequence.start + sequence.num_tokens) // block_size)
    blocks = sequence.block_tables[group][first:end]
    slots = chain.from_iterable(range(block * block_size, (block + 1) * block_size) for block in blocks)
    return islice(slots, skipped, skipped + sequence.num_tokens)


def _padded(table: tuple[int, ...], used: int, width: int) -> list[int]:
    return list(table[:used]) + [0] * (width - used)
