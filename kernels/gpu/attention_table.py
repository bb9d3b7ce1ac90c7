"""Tiles of the attention kernels, by head size, the cache's type and card: measured, or what fits without spilling."""

from dataclasses import dataclass

Key = tuple[int, int]  # head_dim rounded up to a power of 2, bytes of a number in the cache (4 where q has 4)


@dataclass(frozen=True)
class Tile:
    """rows: queries times heads of a KV head; keys: of one step of the loop; blocks: that an SM is meant to hold."""

    rows: int
    keys: int
    warps: int
    stages: int
    blocks: int = 1

    @property
    def max_registers(self) -> int:
        """Of a thread. The compiler is told, as it else spills some for more blocks than there is room for."""
        return min(255, 65536 // (32 * self.warps * self.blocks) // 8 * 8)

    @property
    def options(self) -> dict[str, int | bool]:
        """Of a launch. Products and sums become one operation only where the kernel says so, not by the compiler's
        choice: it chooses differently for kernels that differ in how work is spread, and bits would too."""
        sizes = {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.max_registers}
        return sizes | {"enable_fp_fusion": False}


Table = dict[Key, tuple[Tile, Tile]]  # first for cards with 99 KB of shared memory a block, then for sm_90

DECODE: Table = {  # sequences whose queries times heads of a KV head are LEAST_ROWS at most
    (64, 2): (Tile(16, 64, 4, 3, blocks=2), Tile(16, 128, 4, 3, blocks=2)),
    (128, 2): (Tile(16, 32, 4, 3, blocks=2), Tile(16, 64, 4, 3, blocks=2)),
    (256, 2): (Tile(16, 32, 4, 3), Tile(16, 32, 4, 3, blocks=2)),
    (64, 1): (Tile(16, 64, 4, 3, blocks=2), Tile(16, 128, 4, 3, blocks=2)),
    (128, 1): (Tile(16, 64, 4, 3, blocks=2), Tile(16, 128, 4, 3, blocks=2)),
    (256, 1): (Tile(16, 32, 4, 3, blocks=2), Tile(16, 64, 4, 3, blocks=2)),
    (64, 4): (Tile(16, 16, 4, 3, blocks=2), Tile(16, 16, 4, 3, blocks=2)),
    (128, 4): (Tile(16, 16, 4, 3, blocks=2), Tile(16, 16, 4, 3, blocks=2)),
    (256, 4): (Tile(16, 16, 8, 2), Tile(16, 16, 8, 2)),
}
VERIFY: Table = DECODE | {  # sequences with more rows; where heads are wide, by the same tiles
    (64, 2): (Tile(64, 64, 4, 2, blocks=2), Tile(32, 64, 4, 3, blocks=2)),
    (128, 2): (Tile(64, 32, 8, 3), Tile(32, 64, 4, 3, blocks=2)),
    (64, 1): (Tile(64, 32, 4, 3, blocks=2), Tile(32, 64, 4, 3, blocks=2)),
    (128, 1): (Tile(64, 32, 4, 3, blocks=2), Tile(32, 64, 4, 3, blocks=2)),
}
PROMPT: Table = {
    (64, 2): (Tile(128, 64, 4, 3, blocks=2), Tile(128, 128, 8, 3, blocks=2)),
    (128, 2): (Tile(128, 32, 8, 3), Tile(256, 64, 16, 3)),
    (256, 2): (Tile(64, 32, 8, 2), Tile(128, 32, 8, 3)),
    (64, 1): (Tile(128, 64, 8, 3), Tile(64, 64, 4, 3, blocks=3)),
    (128, 1): (Tile(128, 64, 8, 2), Tile(64, 64, 4, 3, blocks=2)),
    (256, 1): (Tile(64, 64, 8, 2), Tile(64, 32, 8, 2)),
    (64, 4): (Tile(16, 32, 4, 2), Tile(16, 32, 4, 2)),
    (128, 4): (Tile(16, 32, 4, 2), Tile(16, 16, 4, 2)),
    (256, 4): (Tile(16, 16, 4, 2), Tile(16, 16, 4, 2)),
}

LEAST_ROWS = 16  # of a matrix instruction
CHUNK_LOG2 = 6  # of the keys of the shortest chunk
_ITEMS = 256  # chunks of one sequence times KV heads, at most: more would not help a card of 132 SMs


def most_chunks(kv_heads: int) -> int:
    """Of one sequence: a power of 2."""
    return max(8, 1 << (_ITEMS // kv_heads).bit_length() - 1) if kv_heads <= _ITEMS else 8
