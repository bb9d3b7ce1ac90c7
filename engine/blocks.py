"""The KV cache as numbered blocks: who holds which, and which full blocks can be shared by prefix.

Knows ids and tokens only; the memory behind an id belongs to the runner. The scheduler is the one caller.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from enum import IntEnum
from hashlib import blake2b
from struct import Struct
from typing import NamedTuple

from engine.layout import Window, num_passed

# Names a whole prefix: every token from the start of a sequence to the end of one full block. A digest of the prefix
# before the block and of its own tokens, so that a block is found by its history though blocks before it are gone, as
# those that a window has passed by. At 16 bytes of BLAKE2b equal names are equal histories.
PrefixId = bytes
NO_PREFIX: PrefixId = b""
_PREFIX_BYTES = 16


class _Worth(IntEnum):
    """What would be lost with a free block; those worth least are handed out first."""

    NOTHING = 0  # it cannot be found
    LITTLE = 1  # found by the prefix cache, and held to its end by nobody so far whose cache is to be kept
    MUCH = 2


class Block:
    """One block: who counts on it, and by which prefix it can be found.

    prefix   and group: None until its KV is final
    is_kept  one of those who held it, since it was handed out, wants its cache kept
    """

    __slots__ = ("block_id", "group", "is_kept", "prefix", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.prefix: PrefixId | None = None
        self.group = 0
        self.is_kept = False

    @property
    def worth(self) -> _Worth:
        if self.prefix is None:
            return _Worth.NOTHING
        return _Worth.MUCH if self.is_kept else _Worth.LITTLE


class PrefixMatch(NamedTuple):
    """Blocks that already hold the beginning of some tokens.

    tables     of each group, as long as each other; before a group's window there is nothing, and a 0 in its place
    block_ids  the blocks that there are; `num_idle` of them are held by no sequence now
    """

    tables: tuple[tuple[int, ...], ...]
    block_ids: tuple[int, ...]
    prefix: PrefixId
    num_idle: int


class BlockPool:
    """KV blocks, shared between sequences by prefix. Those below `num_blocks` exist; `resize` cuts the upper ones off.

    A full block is found by the chain of its tokens and its parent's, each group's by itself. A freed block can be
    found until it is handed out again, so that a later prompt may revive it. Blocks that can never be found go first,
    then those of passing sequences, then the others; among equals the least recently used; within one sequence the tail
    goes first, since a block is useless without its parents.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        windows: tuple[Window, ...] = (None,),
        enable_prefix_caching: bool = True,
    ) -> None:
        """windows: of each group of layers."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.windows = windows
        self.enable_prefix_caching = enable_prefix_caching
        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._free: tuple[OrderedDict[int, None], ...] = tuple(OrderedDict() for _ in _Worth)  # next to go comes first
        self._free[_Worth.NOTHING].update(dict.fromkeys(range(num_blocks)))
        self.num_free = num_blocks
        self._by_prefix: tuple[dict[PrefixId, Block], ...] = tuple({} for _ in windows)
        self._pack = Struct(f"{block_size}i").pack

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
        """The longest cached beginning of `token_ids`, in full blocks within the first `max_tokens`. Takes nothing.

        Of a group with a window it takes the blocks that the next token would see.
        """
        prefixes = self._known(token_ids, max_tokens)
        while (missing := self._missing(prefixes)) is not None:
            del prefixes[missing:]
        found, tables = list[Block](), []
        for by_prefix, window in zip(self._by_prefix, self.windows, strict=True):
            passed = num_passed(window, len(prefixes) * self.block_size, self.block_size)
            blocks = [by_prefix[prefix] for prefix in prefixes[passed:]]
            tables.append((0,) * passed + tuple(block.block_id for block in blocks))
            found += blocks
        num_idle = sum(block.ref_count == 0 for block in found)
        prefix = prefixes[-1] if prefixes else NO_PREFIX
        return PrefixMatch(tuple(tables), tuple(block.block_id for block in found), prefix, num_idle)

    def _known(self, token_ids: Sequence[int], max_tokens: int) -> list[PrefixId]:
        """Prefixes, block by block, as far as all groups that see everything have theirs."""
        whole = [known for known, window in zip(self._by_prefix, self.windows, strict=True) if window is None]
        prefixes: list[PrefixId] = []
        prefix = NO_PREFIX
        for end in range(self.block_size, max_tokens + 1, self.block_size):
            prefix = self._prefix_of(prefix, token_ids[end - self.block_size : end])
            for known in whole:
                if prefix not in known:
                    return prefixes
            prefixes.append(prefix)
        return prefixes

    def _missing(self, prefixes: Sequence[PrefixId]) -> int | None:
        """A block that some window would see after these, and that is not there: the last one of its group."""
        for known, window in zip(self._by_prefix, self.windows, strict=True):
            if window is not None:
                passed = num_passed(window, len(prefixes) * self.block_size, self.block_size)
                for index in range(len(prefixes) - 1, passed - 1, -1):
                    if prefixes[index] not in known:
                        return index
        return None

    def _prefix_of(self, parent: PrefixId, token_ids: Sequence[int]) -> PrefixId:
        return blake2b(parent + self._pack(*token_ids), digest_size=_PREFIX_BYTES).digest()

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

    def publish(self, block_ids: Sequence[int], parent: PrefixId, token_ids: Sequence[int]) -> PrefixId:
        """Let full blocks be found, one of each group for the same tokens, once their KV is final. Returns the prefix
        that ends with them.

        Where another block already holds the same prefix for a group, that one stays the one to be found.
        """
        if not self.enable_prefix_caching:
            return NO_PREFIX
        prefix = self._prefix_of(parent, token_ids)
        for group, block_id in enumerate(block_ids):
            block = self._by_prefix[group].setdefault(prefix, self._blocks[block_id])
            block.prefix, block.group = prefix, group
        return prefix

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
        if block.prefix is not None:
            target.prefix, target.group = block.prefix, block.group
            self._by_prefix[block.group][block.prefix] = target
        return block_id

    def check(self, held: Iterable[Sequence[int]]) -> None:
        """Assert the pool's invariants, given the blocks that every sequence holds. For tests."""
        holders = Counter(block_id for block_ids in held for block_id in block_ids)
        for block in self._blocks:
            assert block.ref_count == holders[block.block_id], f"block {block.block_id}: references and tables differ"
            lists = [worth for worth in _Worth if block.block_id in self._free[worth]]
            expected = [block.worth] if block.ref_count == 0 else []
            assert lists == expected, f"block {block.block_id}: free or not?"
            is_found = block.prefix is not None and self._by_prefix[block.group].get(block.prefix) is block
            assert is_found or block.prefix is None, f"block {block.block_id}: lost its prefix"
        assert [block.block_id for block in self._blocks] == list(range(self.num_blocks)), "blocks that do not exist"
        assert self.num_free == sum(map(len, self._free)), "free blocks were counted wrong"
        num_found = sum(block.prefix is not None for block in self._blocks)
        assert num_found == sum(map(len, self._by_prefix)), "a prefix without its block"

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
        if block.prefix is not None:
            del self._by_prefix[block.group][block.prefix]
            block.prefix = None
