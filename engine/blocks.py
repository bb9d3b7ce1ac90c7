"""The KV cache as numbered blocks: who holds which, and which full blocks can be shared by prefix.

Knows ids and tokens only; the memory behind an id belongs to the runner. The scheduler is the one caller.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

# Names a whole prefix: every token from the start of a sequence to the end of one full block.
PrefixId = int
NO_PREFIX: PrefixId = 0

# A full block's place in the chain: the prefix before it, and its own tokens. Equal keys are equal histories,
# exactly: the dict that is asked compares the tokens and the parent, and a PrefixId is never given twice.
_Key = tuple[PrefixId, tuple[int, ...]]


class _Worth(IntEnum):
    """What would be lost with a free block; those worth least are handed out first."""

    NOTHING = 0  # it cannot be found
    LITTLE = 1  # found by the prefix cache, and held by nobody so far whose cache is to be kept
    MUCH = 2


class Block:
    """One block: who counts on it, and under which key it can be found (None until its KV is final).

    is_kept  one of those who held it, since it was handed out, wants its cache kept
    """

    __slots__ = ("block_id", "is_kept", "key", "prefix", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.key: _Key | None = None
        self.prefix = NO_PREFIX
        self.is_kept = False

    @property
    def worth(self) -> _Worth:
        if self.key is None:
            return _Worth.NOTHING
        return _Worth.MUCH if self.is_kept else _Worth.LITTLE


class PrefixMatch(NamedTuple):
    """Blocks that already hold the beginning of some tokens; `num_idle` of them are held by no sequence now."""

    block_ids: tuple[int, ...]
    prefix: PrefixId
    num_idle: int


class BlockPool:
    """KV blocks, shared between sequences by prefix. Those below `num_blocks` exist; `resize` cuts the upper ones off.

    A full block is found by the chain of its tokens and its parent's. A freed block keeps its key until it is
    handed out again, so that a later prompt may revive it. Blocks that can never be found go first, then those of
    passing sequences, then the others; among equals the least recently used; within one sequence the tail goes first,
    since a block is useless without its parents.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._free: tuple[OrderedDict[int, None], ...] = tuple(OrderedDict() for _ in _Worth)  # next to go comes first
        self._free[_Worth.NOTHING].update(dict.fromkeys(range(num_blocks)))
        self.num_free = num_blocks
        self._by_key: dict[_Key, Block] = {}
        self._last_prefix = NO_PREFIX

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """Held by nobody, but found by the prefix cache."""
        return self.num_free - len(self._free[_Worth.NOTHING])

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` positions take."""
        return -(-num_tokens // self.block_size)

    def match(self, token_ids: Sequence[int], max_tokens: int) -> PrefixMatch:
        """The longest cached beginning of `token_ids`, in full blocks within the first `max_tokens`. Takes nothing."""
        block_ids: list[int] = []
        prefix, num_idle = NO_PREFIX, 0
        for end in range(self.block_size, max_tokens + 1, self.block_size):
            block = self._by_key.get((prefix, tuple(token_ids[end - self.block_size : end])))
            if block is None:
                break
            block_ids.append(block.block_id)
            prefix = block.prefix
            num_idle += block.ref_count == 0
        return PrefixMatch(tuple(block_ids), prefix, num_idle)

    def share(self, block_ids: Iterable[int]) -> None:
        """Hold blocks that `match` found; idle ones leave the free list and keep what is in them."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.ref_count == 0:
                self._take_from_free(block)
            block.ref_count += 1

    def allocate(self, num_blocks: int) -> tuple[int, ...] | None:
        """Hold `num_blocks` blocks to write in, or None if fewer are free. What was cached in them is forgotten."""
        if num_blocks > self.num_free:
            return None
        return tuple(self._hand_out() for _ in range(num_blocks))

    def free(self, block_ids: Sequence[int], *, keep: bool = True) -> None:
        """Give up one sequence's blocks, in its order. Blocks that nobody else holds can be handed out at once.

        `keep` False is for a passing sequence: what only such held goes before what is cached of others.
        """
        for block_id in reversed(block_ids):
            block = self._blocks[block_id]
            assert block.ref_count > 0, f"block {block_id} is freed twice"
            block.ref_count -= 1
            block.is_kept = block.is_kept or keep
            if block.ref_count == 0:
                self._set_free(block)

    def publish(self, block_id: int, parent: PrefixId, token_ids: tuple[int, ...]) -> PrefixId:
        """Let a full block be found, once its KV is final. Returns the prefix that ends with it.

        Where another block already holds the same prefix, that one stays the one to be found.
        """
        if not self.enable_prefix_caching:
            return NO_PREFIX
        key = (parent, token_ids)
        known = self._by_key.get(key)
        if known is not None:
            return known.prefix
        self._last_prefix += 1
        block = self._blocks[block_id]
        block.key, block.prefix = key, self._last_prefix
        self._by_key[key] = block
        return block.prefix

    def missing_below(self, num_blocks: int) -> int:
        """Blocks above a cut that sequences hold, less those below it that nobody does; 0 if all fit."""
        upper = sum(block.ref_count > 0 for block in self._blocks[num_blocks : self.num_blocks])
        return max(0, upper - sum(block.ref_count == 0 for block in self._blocks[:num_blocks]))

    def resize(self, num_blocks: int) -> dict[int, int]:
        """Cut the upper blocks off, or add some. Returns where held blocks go, from id to id: their content, and the
        tables of those who hold them, must follow. What is cached and held by nobody stays only below the cut.
        """
        assert not self.missing_below(num_blocks), "the blocks that are held do not fit"
        for block_id in range(self.num_blocks, num_blocks):
            self._blocks.append(Block(block_id))
            self._set_free(self._blocks[block_id])
        cut, self._blocks = self._blocks[num_blocks:], self._blocks[:num_blocks]
        self.num_blocks = num_blocks
        for block in cut:
            if block.ref_count == 0:
                self._take_from_free(block)
                self._forget(block)
        return {block.block_id: self._move(block) for block in cut if block.ref_count}

    def _move(self, block: Block) -> int:
        """Another block takes this one's place, with all that is known of it."""
        block_id = self._hand_out()
        target = self._blocks[block_id]
        target.ref_count, target.is_kept = block.ref_count, block.is_kept
        if block.key is not None:
            target.key, target.prefix = block.key, block.prefix
            self._by_key[block.key] = target
        return block_id

    def check(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Assert the pool's invariants, given the tables of every sequence that holds blocks. For tests."""
        holders = Counter(block_id for table in block_tables for block_id in table)
        for block in self._blocks:
            assert block.ref_count == holders[block.block_id], f"block {block.block_id}: references and tables differ"
            lists = [worth for worth in _Worth if block.block_id in self._free[worth]]
            expected = [block.worth] if block.ref_count == 0 else []
            assert lists == expected, f"block {block.block_id}: free or not?"
            assert block.key is None or self._by_key.get(block.key) is block, f"block {block.block_id}: lost its key"
            assert block.key is None or len(block.key[1]) == self.block_size, f"block {block.block_id}: key not full"
        assert [block.block_id for block in self._blocks] == list(range(self.num_blocks)), "blocks that do not exist"
        assert self.num_free == sum(map(len, self._free)), "free blocks were counted wrong"
        keyed = [block for block in self._blocks if block.key is not None]
        assert len(keyed) == len(self._by_key), "a key without its block"
        assert len({block.prefix for block in keyed}) == len(keyed), "two blocks with one prefix id"

    def _set_free(self, block: Block) -> None:
        free = self._free[block.worth]
        free[block.block_id] = None
        if block.worth is _Worth.NOTHING:
            free.move_to_end(block.block_id, last=False)
        self.num_free += 1

    def _hand_out(self) -> int:
        block = self._blocks[next(iter(next(free for free in self._free if free)))]
        self._take_from_free(block)
        self._forget(block)
        block.ref_count, block.is_kept = 1, False
        return block.block_id

    def _take_from_free(self, block: Block) -> None:
        del self._free[block.worth][block.block_id]
        self.num_free -= 1

    def _forget(self, block: Block) -> None:
        """What was cached in it."""
        if block.key is not None:
            del self._by_key[block.key]
            block.key, block.prefix = None, NO_PREFIX
