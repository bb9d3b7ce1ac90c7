"""The attention kernels as they are compiled at run time, for `aot.py`."""

from collections.abc import Iterator

import triton

from kernels.gpu.attention import places, prompt_constants, shape_constants, split_constants
from kernels.gpu.attention_prompt import prompt_kernel
from kernels.gpu.attention_split import split_kernel
from kernels.gpu.attention_table import DECODE, LEAST_ROWS, PROMPT, VERIFY, Tile
from kernels.gpu.cases import AotCase
from kernels.paged_kv import SHORT_QUERIES

_TYPES = {2: ("*fp16", "*fp16"), 1: ("*bf16", "*i16"), 4: ("*fp32", "*fp32")}  # of q and of the cache, by its bytes
_INTS = ("num_seqs", "q_stride", "table_stride", "max_chunks", "num_rows_kept")
_KV_HEADS, _GROUP, _PAGE = 8, 4, 16
_ARCHS = ((80, 86, 89), (90,))  # of a row's two tiles


def aot_cases() -> Iterator[AotCase]:
    """Every row of the tables, and a window, a cap and an odd head_dim with the first of each."""
    for table in (DECODE, VERIFY):
        for (block_d, size), tiles in table.items():
            for tile, archs in zip(tiles, _ARCHS, strict=True):
                for a_chunk_each in (False, True):
                    if table is DECODE or tile.rows > LEAST_ROWS:
                        yield _split_case(block_d, size, tile, archs, a_chunk_each)
    for (block_d, size), tiles in PROMPT.items():
        for tile, archs in zip(tiles, _ARCHS, strict=True):
            yield _prompt_case(block_d, size, tile, archs)
    for place, archs in enumerate(_ARCHS):
        yield _split_case(96, 2, DECODE[128, 2][place], archs, window=4096)
        yield _prompt_case(96, 2, PROMPT[128, 2][place], archs, window=4096)
        yield _split_case(256, 2, DECODE[256, 2][place], archs, window=4096, has_cap=True)
        yield _prompt_case(256, 2, PROMPT[256, 2][place], archs, window=4096, has_cap=True)


def _split_case(
    head_dim: int,
    size: int,
    tile: Tile,
    archs: tuple[int, ...],
    a_chunk_each: bool = False,
    window: int = 0,
    has_cap: bool = False,
) -> AotCase:
    few = LEAST_ROWS // _GROUP
    counts = range(1, few + 1) if tile.rows == LEAST_ROWS else range(few + 1, SHORT_QUERIES + 1)
    constants = split_constants(head_dim, _KV_HEADS, _GROUP, tile, counts, a_chunk_each)
    detail = f"rows {tile.rows}" + " a chunk each" * a_chunk_each
    return _case(split_kernel.kernel, detail, head_dim, size, tile, archs, window, has_cap, constants)


def _prompt_case(
    head_dim: int, size: int, tile: Tile, archs: tuple[int, ...], window: int = 0, has_cap: bool = False
) -> AotCase:
    constants = prompt_constants(_GROUP, tile)
    return _case(prompt_kernel.kernel, "", head_dim, size, tile, archs, window, has_cap, constants)


def _case(
    kernel: triton.JITFunction,
    detail: str,
    head_dim: int,
    size: int,
    tile: Tile,
    archs: tuple[int, ...],
    window: int,
    has_cap: bool,
    constants: dict[str, int],
) -> AotCase:
    q_type, kv_type = _TYPES[size]
    no_scales = {} if size == 1 else {"key_scales": None, "value_scales": None}
    shapes = shape_constants(_GROUP, _KV_HEADS, head_dim, _PAGE, window, has_cap, is_int8=size == 1)
    types = dict.fromkeys(("q", "out"), q_type) | dict.fromkeys(("keys", "values"), kv_type)
    types |= dict.fromkeys(("key_scales", "value_scales"), "*fp16") | dict.fromkeys(("partial", "stats"), "*fp32")
    types |= dict.fromkeys(("counters", "block_table", "seq_lens", "cu_seqlens_q"), "*i32")
    types |= dict.fromkeys(("scale_log2", "cap_log2"), "fp32") | dict.fromkeys(_INTS, "i32")
    kind = " ".join(filter(None, ("window" * bool(window), "cap" * has_cap, detail)))
    return AotCase(
        name=f"attention {kernel.__name__} {head_dim} {'i8' if size == 1 else kv_type[1:]} {kind}".strip(),
        kernel=kernel,
        types=types,
        constants=shapes | constants | no_scales | {"S": places(1), "ASM": True, "IS_BIG": False},
        num_warps=tile.warps,
        num_stages=tile.stages,
        options=tile.options,
        multiples_of_16=frozenset({"q_stride"}),
        archs=archs,
    )
