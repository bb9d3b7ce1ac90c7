"""Paged attention by the Triton kernels against the reference in fp32: scattered pages, NaN where no token lies."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest
import torch

from kernels import ops, reference
from kernels.device import usable_cores
from kernels.gpu import attention
from kernels.paged_kv import SHORT_QUERIES, PagedKV, empty_paged_kv
from tests.kernels.gpu.where import DEVICE, DTYPES

# Of the root mean square of what is right. 16 bits round the weights once, and int8's codes are compared with
# themselves: what they lose is the cache's affair.
BOUND = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
on_card = pytest.mark.gpu

# Lengths and numbers of queries: what decodes, verifies and fills up; prompts whole and in part beside such.
SHORT = ([530, 1, 0, 257, 16], [1, 1, 1, 5, 16])
MIXED = ([270, 90, 17, 0], [1, 40, 17, 1])
LONG = ([9000, 3000, 1, 0, 257, 777, 16], [1, 16, 1, 1, 7, 4, 16])
PROMPTS = ([1000, 4000, 17, 700, 0], [1000, 300, 17, 4, 1])


class Batch:
    """Random queries and a cache of them: pages in a random order, NaN wherever no token lies."""

    def __init__(
        self,
        layout: tuple[list[int], list[int]],
        heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        *,
        int8: bool = False,
        page: int = 16,
    ) -> None:
        self.lengths, self.counts = layout
        generator = torch.Generator(DEVICE).manual_seed(len(self.lengths) * head_dim)
        used = [-(-length // page) for length in self.lengths]
        num_pages = sum(used) + 3
        made = {"generator": generator, "device": DEVICE}
        keys, values = (torch.randn(num_pages, kv_heads, page, head_dim, **made) for _ in range(2))
        keys[..., 0] *= 3
        self.table = torch.full((len(used), max(used)), 2**30, dtype=torch.int32)
        is_held = torch.zeros(num_pages, page, dtype=torch.bool)
        order = torch.randperm(num_pages, **made).cpu()
        for s, pages in enumerate(order[: sum(used)].split(used)):
            self.table[s, : used[s]] = pages
            position = torch.arange(self.lengths[s])
            is_held[pages[position // page], position % page] = True
        counters = torch.zeros(len(used) * heads, dtype=torch.int32, device=DEVICE)
        kept = empty_paged_kv(tuple(keys.shape), torch.int8 if int8 else dtype, DEVICE, counters)
        for numbers, codes, scales in ((keys, kept.keys, kept.key_scales), (values, kept.values, kept.value_scales)):
            if scales is None:
                codes.copy_(numbers)
            else:
                codes_of, scales_of = reference.quantize_int8(numbers)
                codes.copy_(codes_of), scales.copy_(scales_of)
            (codes if scales is None else scales).transpose(1, 2)[~is_held.to(DEVICE)] = torch.nan
        self.cache = kept
        self.q = torch.randn(sum(self.counts), heads + 2 * kv_heads, head_dim, **made).to(dtype)[:, :heads]
        self.bounds = torch.tensor([0, *torch.tensor(self.counts).cumsum(0)], dtype=torch.int32, device=DEVICE)
        self.seq_lens = torch.tensor(self.lengths, dtype=torch.int32, device=DEVICE)
        self.table = self.table.to(DEVICE)

    def attend(self, op: Callable[..., torch.Tensor] = attention.paged_attention, **options: Any) -> torch.Tensor:
        shorts = max((count for count in self.counts if count <= SHORT_QUERIES), default=0)
        bounds: dict[str, Any] = {"max_query_len": max(self.counts), "max_short_query_len": shorts}
        bounds |= {"max_seq_len": max(self.lengths), "scale": 0.15}
        return op(self.q, self.cache, self.table, self.seq_lens, self.bounds, **bounds | options)

    def error(self, **options: Any) -> float:
        ours = self.attend(**options)
        assert ours.dtype is self.q.dtype and ours.isfinite().all()
        assert not self.cache.counters.any()
        cache, float_q = self.cache, self.q.float()
        if not cache.is_int8:
            cache = PagedKV(cache.keys.float(), cache.values.float())
        options = {"scale": 0.15} | options
        theirs = reference.paged_attention(float_q, cache, self.table, self.seq_lens, self.bounds, **options)
        return float((ours.float() - theirs).norm() / theirs.norm())

    def forget(self, window: int) -> None:
        """NaN in the pages that no query of a sequence sees anything of, as others may write there."""
        for table, length, count in zip(self.table, self.lengths, self.counts, strict=True):
            pages = table[: max(length - count - window + 1, 0) // self.cache.block_size].long()
            for codes, scales in (
                (self.cache.keys, self.cache.key_scales),
                (self.cache.values, self.cache.value_scales),
            ):
                (codes if scales is None else scales)[pages] = torch.nan

    def alone(self, sequence: int) -> torch.Tensor:
        """Of one sequence as a batch of its own."""
        rows = slice(*self.bounds[sequence : sequence + 2].tolist())
        length, count = self.lengths[sequence], self.counts[sequence]
        bounds = torch.tensor([0, count], dtype=torch.int32, device=DEVICE)
        table, seq_lens = (t[sequence : sequence + 1] for t in (self.table, self.seq_lens))
        options = {"max_query_len": count, "max_seq_len": max(length, 1), "scale": 0.15}
        return attention.paged_attention(self.q[rows], self.cache, table, seq_lens, bounds, **options)


@pytest.mark.parametrize("options", [{}, {"window": 70}, {"softcap": 4.0}], ids=["", "window", "cap"])
@pytest.mark.parametrize("layout", [SHORT, MIXED], ids=["short", "mixed"])
@pytest.mark.parametrize("int8", [False, True], ids=["", "int8"])
def test_attention_is_the_references(layout: tuple[list[int], list[int]], int8: bool, options: dict[str, Any]) -> None:
    assert Batch(layout, 6, 2, 64, torch.float16, int8=int8).error(**options) < BOUND[torch.float16]


@pytest.mark.parametrize("layout", [SHORT, MIXED], ids=["short", "mixed"])
@pytest.mark.parametrize(("int8", "page"), [(False, 16), (True, 32)])
def test_what_a_window_has_passed_by_changes_no_bit(layout: tuple[list[int], list[int]], int8: bool, page: int) -> None:
    batch = Batch(layout, 4, 2, 64, torch.float16, int8=int8, page=page)
    before = batch.attend(window=70)
    batch.forget(70)
    assert torch.equal(batch.attend(window=70), before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page", "int8"),
    [(4, 1, 128, 32, False), (2, 2, 80, 16, True), (7, 1, 96, 16, False), (2, 1, 256, 16, True)],
)
def test_attention_is_the_references_for_every_shape_of_head_and_page(
    heads: int, kv_heads: int, head_dim: int, page: int, int8: bool, dtype: torch.dtype
) -> None:
    layout = ([260, 20], [2, 20])
    assert Batch(layout, heads, kv_heads, head_dim, dtype, int8=int8, page=page).error() < BOUND[dtype]


@pytest.mark.parametrize("layout", [SHORT, MIXED], ids=["short", "mixed"])
def test_a_sequence_has_the_same_bits_alone_and_however_the_work_is_spread(
    layout: tuple[list[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = Batch(layout, 4, 2, 64, torch.float16, int8=True)
    together = batch.attend()
    for sequence in range(len(layout[0])):
        rows = slice(*batch.bounds[sequence : sequence + 2].tolist())
        assert torch.equal(batch.alone(sequence), together[rows])
    assert torch.equal(batch.attend(max_seq_len=100_000), together)
    monkeypatch.setattr(attention, "_num_sms", lambda device: 64)
    assert torch.equal(batch.attend(), together)


def test_pages_may_lie_anywhere() -> None:
    batch = Batch(SHORT, 4, 2, 64, torch.float16)
    before = batch.attend()
    order = torch.randperm(len(batch.cache.keys), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    batch.cache = PagedKV(batch.cache.keys[order], batch.cache.values[order], counters=batch.cache.counters)
    batch.table = torch.argsort(order)[batch.table.clamp(max=len(order) - 1).long()].to(torch.int32)
    assert torch.equal(batch.attend(), before)


def test_a_prompt_has_the_same_bits_whole_and_in_parts() -> None:
    batch = Batch(([150], [150]), 4, 2, 64, torch.float16)
    whole, parts = batch.attend(), []
    for first, last in ((0, 40), (40, 57), (57, 150)):
        lengths = torch.tensor([last], dtype=torch.int32, device=DEVICE)
        bounds = torch.tensor([0, last - first], dtype=torch.int32, device=DEVICE)
        options = {"max_query_len": last - first, "max_seq_len": last, "scale": 0.15}
        part = attention.paged_attention(batch.q[first:last], batch.cache, batch.table, lengths, bounds, **options)
        parts.append(part)
    assert torch.equal(torch.cat(parts), whole)


def test_chunks_grow_so_that_a_long_sequence_has_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "CHUNK_LOG2", 6)
    monkeypatch.setattr(attention, "most_chunks", lambda kv_heads: 4)
    for window in (None, 100):
        batch = Batch(([600, 190, 192, 193, 257], [2, 1, 1, 1, 1]), 2, 1, 64, torch.float16)
        assert batch.error(window=window) < BOUND[torch.float16]


@pytest.mark.parametrize("counters", [None, 7])
def test_too_few_counters_are_told(counters: int | None) -> None:
    batch = Batch(([20, 20], [1, 1]), 4, 2, 64, torch.float16)
    held = None if counters is None else torch.zeros(counters, dtype=torch.int32, device=DEVICE)
    batch.cache = PagedKV(batch.cache.keys, batch.cache.values, counters=held)
    with pytest.raises(ValueError, match="counters"):
        batch.attend()


# -- on a card: real sizes -----------------------------------------------------------------------------------------

HEAD_DIMS = (64, 80, 96, 128, 256)
BOTH = {"window": 300, "softcap": 8.0}
Kind = tuple[int, torch.dtype, bool, dict[str, Any]]  # head_dim, of the queries, whether the cache is int8, options
KINDS: list[Kind] = [
    *((head_dim, dtype, int8, {}) for head_dim in HEAD_DIMS for dtype in DTYPES for int8 in (False, True)),
    (64, torch.float16, False, {"window": 300}),
    (80, torch.bfloat16, True, {"softcap": 8.0}),
    (96, torch.float16, True, {"window": 300}),
    (128, torch.float16, False, {"softcap": 8.0}),
    (128, torch.bfloat16, False, BOTH),
    (256, torch.float16, False, BOTH),
    (256, torch.bfloat16, True, {"window": 300}),
]
EVERY_COUNT = ([*range(700, 716)], [*range(1, 17)])
REAL = (LONG, PROMPTS, EVERY_COUNT)


def named(kind: Kind) -> str:
    head_dim, dtype, int8, options = kind
    return " ".join((str(head_dim), str(dtype).removeprefix("torch."), "int8" * int8, *options))


def compile_kind(kind: Kind) -> None:
    """On sequences as short as their queries, launched as the long ones will be."""
    head_dim, dtype, int8, options = kind
    for lengths, counts in REAL:
        Batch((counts, counts), 8, 2, head_dim, dtype, int8=int8).attend(max_seq_len=max(lengths), **options)


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> None:
    """What the next test launches of the kinds that were chosen, side by side: one after another it takes minutes."""
    kinds = [item.callspec.params["kind"] for item in request.session.items if "compiled" in item.fixturenames]
    with ProcessPoolExecutor(min(usable_cores(), len(kinds)), get_context("spawn")) as processes:
        list(processes.map(compile_kind, kinds))


@on_card
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("kind", KINDS, ids=named)
def test_attention_is_the_references_at_real_sizes(kind: Kind) -> None:
    head_dim, dtype, int8, options = kind
    for layout in REAL:
        assert Batch(layout, 8, 2, head_dim, dtype, int8=int8).error(**options) < BOUND[dtype]


@on_card
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("int8", [False, True], ids=["", "int8"])
def test_a_sequence_has_the_same_bits_alone_at_real_sizes(head_dim: int, int8: bool) -> None:
    for lengths, counts in (LONG, PROMPTS):
        batch = Batch((lengths, counts), 32, 8, head_dim, torch.float16, int8=int8)
        together = batch.attend()
        for sequence in range(len(counts)):
            rows = slice(*batch.bounds[sequence : sequence + 2].tolist())
            assert torch.equal(batch.alone(sequence), together[rows])


@on_card
@pytest.mark.parametrize("layout", [LONG, PROMPTS], ids=["long", "prompts"])
@pytest.mark.parametrize("int8", [False, True], ids=["", "int8"])
def test_100_runs_and_a_graph_give_the_same_bits(layout: tuple[list[int], list[int]], int8: bool) -> None:
    batch = Batch(layout, 32, 8, 128, torch.float16, int8=int8)
    first = batch.attend(ops.paged_attention)
    assert all(torch.equal(batch.attend(ops.paged_attention), first) for _ in range(100))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = batch.attend(ops.paged_attention)
    for _ in range(3):
        captured.fill_(torch.nan)
        graph.replay()
        assert torch.equal(captured, first)


@on_card
def test_a_cache_may_have_more_numbers_than_32_bits_count() -> None:
    batch = Batch(([300, 90], [1, 40]), 8, 8, 128, torch.float16)
    small, far = batch.cache, 2**31 // batch.cache.keys[0].numel()  # pages
    if torch.cuda.mem_get_info()[0] < 10 * 2**30:
        pytest.skip("needs 10 GB of free memory")
    before = batch.attend()
    batch.cache = empty_paged_kv((far + len(small.keys), *small.keys.shape[1:]), torch.float16, DEVICE, small.counters)
    batch.cache.keys[far:], batch.cache.values[far:] = small.keys, small.values
    batch.table += far
    assert torch.equal(batch.attend(), before)
