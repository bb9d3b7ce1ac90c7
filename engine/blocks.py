"""The KV cache as numbered blocks: who holds which, and which full blocks can be shared by prefix.

Knows ids and tokens only; the memory behind an id belongs to the runner. The scheduler is the one caller.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

# Names a whole prefix: every token from the start of a sequence to the end of one full block.
PrefixId = int
NO_PREFIX: PrefixId = 0

# A full block's place in the chain: the prefix before it, and its own tokens. Equal keys are equal histories,
# exactly: the dict that is asked compares the tokens and the parent, and a PrefixId is never given twice.
_Key = tuple[PrefixId, tuple[int, ...]]


class Block:
    """One block: who counts on it, and under which key it can be found (None until its KV is final)."""

    __slots__ = ("block_id", "key", "prefix", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.key: _Key | None = None
        self.prefix = NO_PREFIX


class PrefixMatch(NamedTuple):
    """Blocks that already hold the beginning of some tokens; `num_idle` of them are held by no sequence now."""

    block_ids: tuple[int, ...]
    prefix: PrefixId
    num_idle: int


class BlockPool:
    """Fixed set of KV blocks, shared between sequences by prefix.

    A full block is found by the chain of its tokens and its parent's. A freed block keeps its key until it is
    handed out again, so that a later prompt may revive it. Blocks that can never be found go first, then the
    least recently used; within one sequence the tail goes first, since a block is useless without its parents.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # next to hand out comes first
        self._by_key: dict[_Key, Block] = {}
        self._last_prefix = NO_PREFIX

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

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
                del self._free[block_id]
            block.ref_count += 1

    def allocate(self, num_blocks: int) -> tuple[int, ...] | None:
        """Hold `num_blocks` blocks to write in, or None if fewer are free. What was cached in them is forgotten."""
        if num_blocks > len(self._free):
            return None
        return tuple(self._hand_out() for _ in range(num_blocks))

    def free(self, block_ids: Sequence[int]) -> None:
        """Give up one sequence's blocks, in its order. Blocks that nobody else holds can be handed out at once."""
        for block_id in reversed(block_ids):
            block = self._blocks[block_id]
            assert block.ref_count > 0, f"block {block_id} is freed twice"
            block.ref_count -= 1
            if block.ref_count == 0:
                self._free[block_id] = None
                if block.key is None:
                    self._free.move_to_end(block_id, last=False)

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

    def check(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Assert the pool's invariants, given the tables of every sequence that holds blocks. For tests."""
        holders = Counter(block_id for table in block_tables for block_id in table)
        for block in self._blocks:
            assert block.ref_count == holders[block.block_id], f"block {block.block_id}: references and tables differ"
            assert (block.ref_count == 0) == (block.block_id in self._free), f"block {block.block_id}: free or not?"
            assert block.key is None or self._by_key.get(block.key) is block, f"block {block.block_id}: lost its key"
            assert block.key is None or len(block.key[1]) == self.block_size, f"block {block.block_id}: key not full"
        keyed = [block for block in self._blocks if block.key is not None]
        assert len(keyed) == len(self._by_key), "a key without its block"
        assert len({block.prefix for block in keyed}) == len(keyed), "two blocks with one prefix id"

    def _hand_out(self) -> int:
        block_id, _ = self._free.popitem(last=False)
        block = self._blocks[block_id]
        if block.key is not None:
            del self._by_key[block.key]
            block.key, block.prefix = None, NO_PREFIX
        block.ref_count = 1
        return block_id
