"""The innermost loops of attention: products with keys and values where they lie in the cache, and a row's softmax.

A chunk's keys and values come as four addresses, each of 16 tokens. As views by numba, each of which counts its users,
they took half of the time of one token's attention.
"""

from collections.abc import Callable

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu.exp import exponential
from kernels.cpu.tiles import Tile, add_products, added_to
from kernels.cpu.vectors import F32, FLOATS, I32, INTS, LANES, Code, View, index_of

_Views = list[View]


def products_across(rows: int, vectors: int) -> Tile:
    """(x, places, ahead, row_bytes, out): out[r, c] += sum over k of x[r, k] * w[k, c], as `tiles.products`.

    w is `vectors` parts side by side, each of 16 outputs, from an address on. Meanwhile the same places of the parts
    `ahead` are asked for.
    """

    @intrinsic
    def tile(typing_context, x, places, ahead, row_bytes, out):
        def generate(context, builder, signature, arguments):
            code = Code(context, builder)
            inputs, outputs = code.views((x, out), (arguments[0], arguments[4]))
            parts, later = (_parts(code, arguments[i], arguments[3]) for i in (1, 2))
            with added_to(code, inputs, outputs, rows, vectors) as (row, sums):
                columns = [(part, 0) for part in parts]
                add_products(code, (inputs, row, 0), columns, inputs.num_columns, sums, later)
            return context.get_dummy_value()

        return types.void(x, places, ahead, row_bytes, out), generate

    return tile


def products_along(rows: int, vectors: int) -> Tile:
    """(x, places, ahead, row_bytes, count, column, out): as `products_across`, where w is parts one below the other,
    each of 16 rows, `count` rows in all, and its first output is number `column` of a row.
    """

    @intrinsic
    def tile(typing_context, x, places, ahead, row_bytes, count, column, out):
        def generate(context, builder, signature, arguments):
            code = Code(context, builder)
            inputs, outputs = code.views((x, out), (arguments[0], arguments[6]))
            first = builder.shl(arguments[5], index_of(2))
            parts, later = (_parts(code, arguments[i], arguments[3], first) for i in (1, 2))
            with added_to(code, inputs, outputs, rows, vectors) as (row, sums):
                for i, (part, next_part) in enumerate(zip(parts, later, strict=True)):
                    columns, rest = [(part, v * LANES) for v in range(vectors)], _sixteen_of(code, arguments[4], i)
                    add_products(code, (inputs, row, i * LANES), columns, rest, sums, vectors * [next_part])
            return context.get_dummy_value()

        return types.void(x, places, ahead, row_bytes, count, column, out), generate

    return tile


def _parts(code: Code, addresses: ir.Value, row_bytes: ir.Value, first: ir.Value | int = 0) -> _Views:
    """`first` in bytes."""
    builder = code.builder
    places = (builder.add(address, index_of(first)) for address in cgutils.unpack_tuple(builder, addresses))
    return [code.view_at(place, row_bytes) for place in places]


def _sixteen_of(code: Code, count: ir.Value, part: int) -> ir.Value:
    """How many of `count` rows are in a part: 0 to 16."""
    builder, zero, whole = code.builder, index_of(0), index_of(LANES)
    rest = builder.sub(count, index_of(part * LANES))
    rest = builder.select(builder.icmp_signed("<", rest, zero), zero, rest)
    return builder.select(builder.icmp_signed(">", rest, whole), whole, rest)


def soften(vectors: int) -> Tile:
    """(scores, row, first, last, state, result): a row's scores of one chunk, of 16 * `vectors` keys, to weights.

    Keys before `first` or after `last` (both >= 0) count nothing; there is one between them. state[row] is the row's
    maximum and the sum of its weights so far; they and result[row] are scaled where the maximum grows.
    """

    @intrinsic
    def tile(typing_context, scores, row, first, last, state, result):
        def generate(context, builder, signature, arguments):
            code = Code(context, builder)
            views = code.views((scores, state, result), (arguments[0], *arguments[4:]))
            _soften(code, views, arguments[1], _seen(code, vectors, *arguments[2:4]))
            return context.get_dummy_value()

        return types.void(scores, row, first, last, state, result), generate

    return tile


def _seen(code: Code, vectors: int, first: ir.Value, last: ir.Value) -> list[ir.Value]:
    """Of each key whether it lies in first..last."""
    builder = code.builder
    least, most = (code.splat(builder.trunc(bound, I32)) for bound in (first, last))
    keys = [ir.Constant(INTS, list(range(v * LANES, (v + 1) * LANES))) for v in range(vectors)]
    return [builder.and_(builder.icmp_signed(">=", k, least), builder.icmp_signed("<=", k, most)) for k in keys]


def _soften(code: Code, views: _Views, row: ir.Value, seen: list[ir.Value]) -> None:
    builder, (scores, state, result) = code.builder, views
    hidden = ir.Constant(FLOATS, [-float("inf")] * LANES)
    here = [builder.select(mask, scores.load(row, v * LANES, FLOATS), hidden) for v, mask in enumerate(seen)]

    def larger(a: ir.Value, b: ir.Value) -> ir.Value:
        return builder.select(builder.fcmp_ordered(">", a, b), a, b)

    before = state.load(row, 0, F32)
    top = larger(code.fold(_joined(here, larger), larger), before)
    weights = [exponential(builder, builder.fsub(part, code.splat(top))) for part in here]
    for v, weight in enumerate(weights):
        scores.store(row, v * LANES, weight)
    shrink = exponential(builder, builder.fsub(before, top))
    total = builder.fmul(state.load(row, 1, F32), shrink)
    state.store(row, 0, top)
    state.store(row, 1, builder.fadd(total, code.fold(_joined(weights, builder.fadd), builder.fadd)))
    with builder.if_then(builder.fcmp_ordered(">", top, before)):  # else all that is here is scaled by exactly 1
        _scale(code, result, row, code.splat(shrink))


def _joined(vectors: list[ir.Value], join: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
    whole = vectors[0]
    for vector in vectors[1:]:
        whole = join(whole, vector)
    return whole


def _scale(code: Code, rows: View, row: ir.Value, factor: ir.Value) -> None:
    builder = code.builder
    with code.loop(builder.udiv(rows.num_columns, index_of(LANES))) as vector:
        column = builder.mul(vector, index_of(LANES))
        rows.store(row, column, builder.fmul(rows.load(row, column, FLOATS), factor))
