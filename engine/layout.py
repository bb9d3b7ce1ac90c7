"""How the KV cache is shared out: layers in groups, for each of which a sequence has a table of blocks. Numbers only.

A block is the memory of 16 tokens in as many layers as a group has, and all groups draw their blocks from one pool:
layer i of each group lies in the same tensor, in blocks of its own group. A group whose layers see a window holds only
the blocks that the window still covers; a table keeps its places before that, which nobody reads.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

Window = int | None  # tokens that a query sees, itself included; None: all before it

_MOST_GROUPS = 8  # a table each, which the host fills in at every step
_CHAT_TOKENS, _NEXT_TO = 8192, 1.02  # what a group's size is chosen for, and how much more it may take for fewer groups


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """
    windows    of each group, those that see everything first
    places     of each layer: its group, and its place there
    size       layers that a group has place for
    """

    windows: tuple[Window, ...]
    places: tuple[tuple[int, int], ...]
    size: int

    @property
    def num_empty(self) -> int:
        """Places that no layer has."""
        return len(self.windows) * self.size - len(self.places)


def group_layers(windows: Sequence[Window]) -> LayerGroups:
    """Groups of one size for layers of such windows: the largest at which a chat takes next to the least."""
    counts = Counter(windows)
    kinds = sorted(counts, key=lambda window: (window is not None, window or 0))
    most = max(_MOST_GROUPS, len(kinds))

    def num_groups(window: Window, size: int) -> int:
        return -(-counts[window] // size)

    def cost(size: int) -> int:
        return size * sum(num_groups(window, size) * min(window or _CHAT_TOKENS, _CHAT_TOKENS) for window in kinds)

    sizes = range(1, max(counts.values()) + 1)
    costs = {size: cost(size) for size in sizes if sum(num_groups(window, size) for window in kinds) <= most}
    size = max(size for size in costs if costs[size] <= _NEXT_TO * min(costs.values()))
    first, total = {}, 0
    for window in kinds:
        first[window], total = total, total + num_groups(window, size)
    seen: Counter[Window] = Counter()
    places = []
    for window in windows:
        places.append((first[window] + seen[window] // size, seen[window] % size))
        seen[window] += 1
    of_groups = tuple(window for window in kinds for _ in range(num_groups(window, size)))
    return LayerGroups(of_groups, tuple(places), size)


def num_passed(window: Window, num_tokens: int, block_size: int) -> int:
    """Leading blocks of a table that the token at position `num_tokens`, and those after it, see nothing of."""
    return 0 if window is None else max(num_tokens - window + 1, 0) // block_size


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """What sequences hold of a pool of blocks.

    windows      of each group
    step_tokens  of one sequence that a step computes at most
    """

    block_size: int
    windows: tuple[Window, ...] = (None,)
    step_tokens: int = 1

    def needed(self, num_tokens: int, step_tokens: int | None = None) -> int:
        """Most blocks that a sequence of `num_tokens` ever holds, if no step computes more than `step_tokens` of it."""
        step = self.step_tokens if step_tokens is None else step_tokens
        return sum(self.most_held(window, num_tokens, step) for window in self.windows)

    def most_held(self, window: Window, num_tokens: int, step_tokens: int) -> int:
        """As `needed`, of one group. Behind the step that is planned another may be under way, and what its first token
        sees is held until it is done.
        """
        whole = -(-num_tokens // self.block_size)
        if window is None:
            return whole
        span = window - 1 + 2 * min(step_tokens, self.step_tokens)
        return min(whole, (span + self.block_size - 2) // self.block_size + 1)

    def held(self, tables: Sequence[tuple[int, ...]], num_settled: int) -> list[int]:
        """A sequence's blocks that no window has passed by, in the order of their tokens. num_settled: tokens."""
        parts = []
        for window, table in zip(self.windows, tables, strict=True):
            passed = num_passed(window, num_settled, self.block_size)
            parts.append((None,) * passed + table[passed:])
        return [block_id for column in zip(*parts, strict=True) for block_id in column if block_id is not None]

    def to_come(self, num_tokens: int, num_uncomputed: int, num_places: int, num_settled: int) -> int:
        """Blocks that a sequence does not hold yet and needs until it has `num_tokens`.

        num_uncomputed  of the tokens that it has now
        num_places      of each of its tables
        """
        total = 0
        for window in self.windows:
            held = num_places - num_passed(window, num_settled, self.block_size)
            total += max(self.most_held(window, num_tokens, num_uncomputed) - held, 0)
        return total

    def longest(self, num_blocks: int, most_tokens: int) -> int:
        """Tokens of the longest sequence, up to `most_tokens`, that so many blocks hold."""
        lengths = range(-(-most_tokens // self.block_size) + 1)
        fitting = bisect_right(lengths, num_blocks, key=lambda length: self.needed(length * self.block_size)) - 1
        return min(fitting * self.block_size, most_tokens)

    def num_sequences(self, num_blocks: int, num_tokens: int) -> int:
        """Sequences of `num_tokens` that so many blocks hold, one of them still with its prompt to compute."""
        first = self.needed(num_tokens)
        return 0 if num_blocks < first else 1 + (num_blocks - first) // self.needed(num_tokens, 1)

    def useful(self, num_sequences: int, num_tokens: int) -> int:
        """Blocks that so many sequences of `num_tokens` use at most, as `num_sequences` counts them."""
        return self.needed(num_tokens) + (num_sequences - 1) * self.needed(num_tokens, 1)

    def tables_alone(self, num_tokens: int) -> tuple[tuple[int, ...], ...]:
        """Of a sequence that has the cache to itself, in steps one after another: a window's blocks are used again."""
        tables, first = [], 0
        for window in self.windows:
            held = self.most_held(window, num_tokens, self.step_tokens)
            tables.append(tuple(first + index % held for index in range(-(-num_tokens // self.block_size))))
            first += held
        return tuple(tables)
