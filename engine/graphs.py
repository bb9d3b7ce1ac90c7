"""Decode steps as CUDA graphs: one launch in the place of hundreds, so that the host is no longer what limits a step.

A graph is of a number of rows and a longest context; a step takes the next larger of both and fills it up. Each is
captured when it is first needed, after that step has run without it; the first two at start. All draw on one pool of
memory that is set aside at start, and what a step leaves there (logits, ids) is good until the next step.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from engine.decode_inputs import DecodeInputs
from engine.forecast import GRAPH_ROWS, GRAPH_SMALL_BYTES, most_graph_rows
from engine.forward import on_device
from engine.model.decoder import Decoder
from engine.model.kv_cache import KVCache
from engine.plan import BatchPlan, ScheduledSequence
from engine.sampling.sampler import Sampler

_LENGTHS = (1024, 4096, 16384, 65536)  # and the model's own
_AT_START = (1, 2)


class Decoded(NamedTuple):
    """logits [rows, vocab] fp32; token_ids [rows] int64, chosen; slots [rows] int64, which hold them now."""

    logits: torch.Tensor
    token_ids: torch.Tensor
    slots: torch.Tensor


_Step = Callable[[], Decoded]
Record = Callable[[_Step], _Step]


class DecodeGraphs:
    """`record` makes a captured step of one that was run before: `Capture` on a card; nothing at all in tests."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        sampler: Sampler,
        last_token_ids: torch.Tensor,
        record: Record,
        *,
        max_len: int,
        block_size: int,
    ) -> None:
        """last_token_ids [slots + 1] int64: what each slot sampled last; the last one is nobody's."""
        self._decoder, self._cache, self._record = decoder, cache, record
        self._sampler, self._last_token_ids = sampler, last_token_ids
        max_num_seqs = last_token_ids.shape[0] - 1
        self._max_rows = most_graph_rows(max_num_seqs)
        self._widths = tuple(-(-length // block_size) for length in (*_shorter_than(max_len), max_len))
        self._inputs = DecodeInputs(
            max_rows=self._max_rows,
            max_blocks=self._widths[-1],
            block_size=block_size,
            num_groups=len(cache.windows),
            spare_slot=max_num_seqs,
            device=last_token_ids.device,
        )
        self._recorded: dict[tuple[int, int], _Step] = {}

    @torch.inference_mode()
    def prepare(self) -> None:
        """Run and capture the steps of a few sequences, on none."""
        for rows in _AT_START:
            if rows <= self._max_rows:
                self._run((), rows, self._widths[0])

    def forget_tables(self) -> None:
        """Blocks have moved."""
        self._inputs.forget_tables()

    def takes(self, plan: BatchPlan) -> bool:
        """Whether every sequence has one token to compute and samples after it."""
        return len(plan.sequences) <= self._max_rows and all(map(_decodes, plan.sequences))

    def run(self, plan: BatchPlan) -> Decoded:
        """Start the step; rows are the plan's sequences. The chosen ids are in their slots when it is done."""
        sequences = plan.sequences
        self._place_known_ids(sequences)
        rows = GRAPH_ROWS[bisect_left(GRAPH_ROWS, len(sequences))]
        widest = max([len(sequence.block_tables[0]) for sequence in sequences])
        decoded = self._run(sequences, rows, self._widths[bisect_left(self._widths, widest)])
        return Decoded(*(part[: len(sequences)] for part in decoded))

    def _run(self, sequences: tuple[ScheduledSequence, ...], rows: int, width: int) -> Decoded:
        self._inputs.send(sequences, rows, width)
        recorded = self._recorded.get((rows, width))
        if recorded is not None:
            return recorded()
        batch, slots = self._inputs.views(rows, width)

        def step() -> Decoded:
            token_ids = self._last_token_ids.index_select(0, slots)
            hidden = self._decoder.hidden(replace(batch, token_ids=token_ids), self._cache)
            logits = self._decoder.logits(hidden)
            chosen = self._sampler.choose(logits, slots, batch.seq_lens, self._last_token_ids)
            return Decoded(logits, chosen, slots)

        decoded = step()
        self._recorded[rows, width] = self._record(step)
        return decoded

    def _place_known_ids(self, sequences: tuple[ScheduledSequence, ...]) -> None:
        """Those that the host says: after a preemption, or where the step before was waited for."""
        known = [(sequence.slot, sequence.token_ids[0]) for sequence in sequences if not sequence.feeds_last]
        if known:
            columns = [list(column) for column in zip(*known, strict=True)]
            slots, token_ids = on_device(columns, torch.int64, self._last_token_ids.device)
            self._last_token_ids.index_copy_(0, slots, token_ids)


def _shorter_than(max_len: int) -> tuple[int, ...]:
    return tuple(length for length in _LENGTHS if length < max_len)


def _decodes(sequence: ScheduledSequence) -> bool:
    is_prompt_told = (
        sequence.params.prompt_logprobs is not None and sequence.sample_position <= sequence.num_prompt_tokens
    )
    return len(sequence.token_ids) == 1 and sequence.samples and not is_prompt_told and not sequence.params.embeds


class Capture:
    """Captures steps as CUDA graphs that share `pool_bytes` of memory, set aside here."""

    def __init__(self, pool_bytes: int) -> None:
        self._pool = torch.cuda.MemPool()
        self._pool_id: Any = self._pool.id  # torch's own functions disagree on its type
        self._stream = torch.cuda.Stream()
        # Freed at once, it stays the pool's, for allocations on this stream.
        with torch.cuda.stream(self._stream), torch.cuda.use_mem_pool(self._pool):
            torch.empty(pool_bytes - GRAPH_SMALL_BYTES, dtype=torch.uint8, device="cuda")

    @property
    def num_bytes(self) -> int:
        """That the pool has by now."""
        segments = torch.cuda.memory_snapshot()
        return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) == tuple(self._pool_id))

    def __call__(self, step: _Step) -> _Step:
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool_id, capture_error_mode="thread_local")
            try:
                decoded = Decoded(*map(_borrowed, step()))
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)

        def replay() -> Decoded:
            graph.replay()
            return decoded

        return replay


class _Memory:
    """An address and what lies there, in the words by which libraries hand each other memory on a card."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": {torch.float32: "<f4", torch.int64: "<i8"}[tensor.dtype],
            "strides": None,
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def _borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers without a hold on their memory: the pool may give it to the next graph that is captured.

    Else the logits of every graph would be kept: 600 rows of them, over all.
    """
    assert tensor.is_contiguous()
    return torch.as_tensor(_Memory(tensor), device=tensor.device)
