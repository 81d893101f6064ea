"""Loops over short runs of numbers as explicit vector code, independent of the compiler's own
vectorisation.

Documents end anywhere, so most runs that the fill writes are short and of unpredictable length. A
compiler's own vector code handles the last items of a run one by one, which can cost as much as the
rest; here they are one masked store, or, where what comes next is written later (`copy_ahead`), a
whole one. A vector is one cache line of the output; LLVM splits it for processors with shorter
vectors.

Kernels call these functions with one-dimensional contiguous arrays that do not overlap. Nothing
outside the arrays is read or written. `copy_line` and `find_bytes` take addresses, and always
access a whole cache line, which the caller must have room for.
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.base import BaseContext
from numba.core.errors import TypingError
from numba.extending import intrinsic
from numba.np.numpy_support import as_dtype

from penstock.core.compiled import inline_kernel

CACHE_LINE = 64
"""Bytes of a cache line, and of a vector of the output."""


def _require_rows(*arrays: object) -> None:
    for array in arrays:
        if not isinstance(array, types.Array) or array.ndim != 1 or array.layout != "C":
            raise TypingError(f"needs a one-dimensional contiguous array, not {array}")


def _parts(
    context: BaseContext, builder: ir.IRBuilder, kind: types.Array, value: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Pointer to the items of an array, and their number."""
    array = context.make_array(kind)(context, builder, value)
    return array.data, builder.extract_value(array.shape, 0)


def _at(builder: ir.IRBuilder, data: ir.Value, place: ir.Value, vector: ir.VectorType) -> ir.Value:
    """Pointer to the vector that begins at item `place`."""
    return builder.bitcast(builder.gep(data, [place], inbounds=True), vector.as_pointer())


def _item_bytes(kind: types.Array) -> int:
    return int(as_dtype(kind.dtype).itemsize)


def _lanes(kind: types.Array) -> int:
    return CACHE_LINE // _item_bytes(kind)


def _constants(item: ir.Type, values: Iterable[int]) -> ir.Constant:
    values = list(values)
    return ir.Constant(
        ir.VectorType(item, len(values)), [ir.Constant(item, value) for value in values]
    )


def _splat(builder: ir.IRBuilder, value: ir.Value, lanes: int) -> ir.Value:
    vector = ir.VectorType(value.type, lanes)
    undefined = ir.Constant(vector, ir.Undefined)
    single = builder.insert_element(undefined, value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(single, undefined, _constants(ir.IntType(32), [0] * lanes))


def _masked(
    builder: ir.IRBuilder,
    name: str,
    vector: ir.VectorType,
    result: ir.Type,
    arguments: list[ir.Value],
) -> ir.Value:
    """Call llvm.masked.load or llvm.masked.store for `vector`."""
    kinds = [argument.type for argument in arguments]
    function = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(result, kinds),
        f"llvm.masked.{name}.v{vector.count}{vector.element.intrinsic_name}.p0",
    )
    return builder.call(function, arguments)


def _first(builder: ir.IRBuilder, count: ir.Value, lanes: int) -> ir.Value:
    """The mask of the first `count` of `lanes`."""
    place = ir.IntType(32)
    return builder.icmp_unsigned(
        "<", _constants(place, range(lanes)), _splat(builder, builder.trunc(count, place), lanes)
    )


def _keep_short(builder: ir.IRBuilder) -> None:
    """Keep LLVM from unrolling the enclosing loop, with empty inline assembly, which adds no
    instruction.

    Numba optimises twice, and each time eight vectors become one iteration. Documents end anywhere,
    so the remainder is then mispredicted in three loops instead of one (3 % of the fill, 7 % in
    int32, measured).
    """
    builder.call(ir.InlineAsm(ir.FunctionType(ir.VoidType(), []), "", "", side_effect=True), [])


def _write(
    context: BaseContext,
    builder: ir.IRBuilder,
    kind: types.Array,
    array: ir.Value,
    make: Callable[[ir.Value, ir.Value | None], ir.Value],
    ahead: tuple[ir.Value, ir.Value] | None = None,
) -> ir.Value:
    """Write an array: make(place, mask or None) returns the vector of the items from `place` on.

    All of it, or, with `ahead`, (the items that count, how many may be read): then the last vector
    is whole where the array and what is read have room for it.
    """
    out, room = _parts(context, builder, kind, array)
    lanes, align, place = _lanes(kind), _item_bytes(kind), ir.IntType(32)
    size = room if ahead is None else ahead[0]
    rest = builder.and_(size, size.type(lanes - 1))
    whole = builder.sub(size, rest)
    if ahead is not None:
        beyond = builder.and_(builder.add(size, size.type(lanes - 1)), size.type(-lanes))
        fits = builder.and_(
            builder.icmp_signed("<=", beyond, room), builder.icmp_signed("<=", beyond, ahead[1])
        )
        whole = builder.select(fits, beyond, whole)
        rest = builder.select(fits, size.type(0), rest)
    with cgutils.for_range_slice(builder, size.type(0), whole, size.type(lanes), size.type) as (
        at,
        _,
    ):
        vector = make(at, None)
        builder.store(vector, _at(builder, out, at, vector.type), align=align)
        _keep_short(builder)
    with builder.if_then(builder.icmp_unsigned("!=", rest, size.type(0))):
        mask = _first(builder, rest, lanes)
        vector = make(whole, mask)
        pointer = _at(builder, out, whole, vector.type)
        _masked(builder, "store", vector.type, ir.VoidType(), [vector, pointer, place(align), mask])
    return context.get_dummy_value()


_Typed = tuple[Any, Callable[..., ir.Value]]
"""Signature and code of an intrinsic."""


def _copying(source: Any, out: Any, count: Any) -> _Typed:
    """Code that copies all of `out`, or, where `count` is a type, as `copy_ahead` does."""
    _require_rows(source, out)
    read, written = source.dtype, out.dtype
    if read != written and not (
        isinstance(read, types.Integer) and isinstance(written, types.Integer)
    ):
        raise TypingError(f"cannot copy {read} into {written}")

    def codegen(context, builder, signature, arguments):
        data, readable = _parts(context, builder, source, arguments[0])
        ahead = None if count is None else (arguments[2], readable)
        vector = ir.VectorType(context.get_data_type(read), _lanes(out))
        wide = ir.VectorType(context.get_data_type(written), _lanes(out))
        align = _item_bytes(source)

        def make(at, mask):
            pointer = _at(builder, data, at, vector)
            if mask is None:
                items = builder.load(pointer, align=align)
            else:
                nothing = ir.Constant(vector, None)
                items = _masked(
                    builder, "load", vector, vector, [pointer, ir.IntType(32)(align), mask, nothing]
                )
            if read == written or read.bitwidth == written.bitwidth:
                return items
            if read.bitwidth > written.bitwidth:
                return builder.trunc(items, wide)
            return builder.sext(items, wide) if read.signed else builder.zext(items, wide)

        return _write(context, builder, out, arguments[1], make, ahead)

    return _signed((source, out), count), codegen


def _filling(out: Any, value: Any, count: Any) -> _Typed:
    _require_rows(out)

    def codegen(context, builder, signature, arguments):
        item = context.cast(builder, arguments[1], value, out.dtype)
        item = context.data_model_manager[out.dtype].as_data(builder, item)
        vector = _splat(builder, item, _lanes(out))
        ahead = None if count is None else (arguments[2], arguments[2].type(_ENDLESS))
        return _write(context, builder, out, arguments[0], lambda at, mask: vector, ahead)

    return _signed((out, value), count), codegen


def _counting(out: Any, count: Any) -> _Typed:
    _require_rows(out)

    def codegen(context, builder, signature, arguments):
        ahead = None if count is None else (arguments[1], arguments[1].type(_ENDLESS))
        lanes, item = _lanes(out), context.get_data_type(out.dtype)
        steps = _constants(item, range(lanes))

        def make(at, mask):
            begin = at if item.width == at.type.width else builder.trunc(at, item)
            return builder.add(_splat(builder, begin, lanes), steps)

        return _write(context, builder, out, arguments[0], make, ahead)

    return _signed((out,), count), codegen


_ENDLESS = 2**62
"""Items that may be read where nothing is read."""


def _signed(arguments: tuple[Any, ...], count: Any) -> Any:
    """The signature of a call with these arguments and, where it is one, a count."""
    return types.void(*arguments, *(() if count is None else (types.int64,)))


@intrinsic
def _copy(typing_context, source, out):
    return _copying(source, out, None)


@intrinsic
def _copy_ahead(typing_context, source, out, count):
    return _copying(source, out, count)


@intrinsic
def _fill(typing_context, out, value):
    return _filling(out, value, None)


@intrinsic
def _fill_ahead(typing_context, out, value, count):
    return _filling(out, value, count)


@intrinsic
def _count(typing_context, out):
    return _counting(out, None)


@intrinsic
def _count_ahead(typing_context, out, count):
    return _counting(out, count)


def _over_words(
    builder: ir.IRBuilder,
    words: ir.Value,
    size: ir.Value,
    begun: ir.Value,
    step: Callable[[ir.Value, ir.Value, ir.Value, ir.Value | None], ir.Value],
) -> ir.Value:
    """Go over words (a pointer to `size` of 32 bits) a cache line at a time: step(state, words,
    place, mask or None) returns the state after these; masked words are 0.
    """
    lanes, place = CACHE_LINE // 4, ir.IntType(32)
    vector = ir.VectorType(place, lanes)
    state = cgutils.alloca_once_value(builder, begun)
    rest = builder.and_(size, size.type(lanes - 1))
    whole = builder.sub(size, rest)
    with cgutils.for_range_slice(builder, size.type(0), whole, size.type(lanes), size.type) as (
        at,
        _,
    ):
        found = builder.load(_at(builder, words, at, vector), align=1)
        builder.store(step(builder.load(state), found, at, None), state)
    with builder.if_then(builder.icmp_unsigned("!=", rest, size.type(0))):
        mask = _first(builder, rest, lanes)
        pointer, nothing = _at(builder, words, whole, vector), ir.Constant(vector, None)
        found = _masked(builder, "load", vector, vector, [pointer, place(1), mask, nothing])
        builder.store(step(builder.load(state), found, whole, mask), state)
    return builder.load(state)


def _reduced(builder: ir.IRBuilder, how: str, vector: ir.Value) -> ir.Value:
    """Call llvm.vector.reduce.* for a vector of integers."""
    kind = vector.type
    function = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(kind.element, [kind]),
        f"llvm.vector.reduce.{how}.v{kind.count}{kind.element.intrinsic_name}",
    )
    return builder.call(function, [vector])


@intrinsic
def _dot(typing_context, words, factors):
    _require_rows(words, factors)

    def codegen(context, builder, signature, arguments):
        data, size = _parts(context, builder, words, arguments[0])
        others, _ = _parts(context, builder, factors, arguments[1])
        narrow = ir.VectorType(ir.IntType(32), CACHE_LINE // 4)
        wide = ir.VectorType(ir.IntType(64), CACHE_LINE // 8)
        low = ir.Constant(wide, [2**32 - 1] * wide.count)
        half = ir.Constant(wide, [32] * wide.count)

        def step(total, found, at, mask):
            # Masked words are 0, whatever they are multiplied by; the factors are long enough.
            pointer = _at(builder, others, at, narrow)
            if mask is None:
                times = builder.load(pointer, align=4)
            else:
                nothing = ir.Constant(narrow, None)
                times = _masked(
                    builder, "load", narrow, narrow, [pointer, ir.IntType(32)(4), mask, nothing]
                )
            # Two words in each number, where they lie: x86 multiplies the lower halves in one
            # instruction, and to widen all words would take longer than to multiply them.
            found, times = builder.bitcast(found, wide), builder.bitcast(times, wide)
            lower = builder.mul(builder.and_(found, low), builder.and_(times, low))
            upper = builder.mul(builder.lshr(found, half), builder.lshr(times, half))
            return builder.add(total, builder.add(lower, upper))

        total = _over_words(builder, data, size, ir.Constant(wide, None), step)
        return _reduced(builder, "add", total)

    return types.uint64(words, factors), codegen


@intrinsic
def _largest(typing_context, words, item):
    _require_rows(words)

    def codegen(context, builder, signature, arguments):
        data, size = _parts(context, builder, words, arguments[0])
        kind = context.get_data_type(item.dtype)
        items = ir.VectorType(kind, CACHE_LINE * 8 // kind.width)

        def step(most, found, at, mask):
            found = builder.bitcast(found, items)
            return builder.select(builder.icmp_unsigned(">", found, most), found, most)

        most = _over_words(builder, data, size, ir.Constant(items, None), step)
        return _reduced(builder, "umax", most)

    return item.dtype(words, item), codegen


def _bytes_at(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Pointer to the vector of bytes that begins at an address."""
    return builder.inttoptr(address, ir.VectorType(ir.IntType(8), CACHE_LINE).as_pointer())


@intrinsic
def copy_line(typing_context, source, out):
    """Copy `CACHE_LINE` bytes from one address (uint64) to another; all are read before any is
    written.
    """

    def codegen(context, builder, signature, arguments):
        read, written = (_bytes_at(builder, address) for address in arguments)
        builder.store(builder.load(read, align=1), written, align=1)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64), codegen


@intrinsic
def find_bytes(typing_context, source, below, one, other):
    """Which of the `CACHE_LINE` bytes at an address (uint64) are less than `below`, or equal `one`
    or `other`.

    Returns:
        uint64, bit k for byte k.
    """

    def codegen(context, builder, signature, arguments):
        found, sought = builder.load(_bytes_at(builder, arguments[0]), align=1), []
        for value, kind in zip(arguments[1:], signature.args[1:], strict=True):
            item = context.cast(builder, value, kind, types.uint8)
            sought.append(_splat(builder, item, CACHE_LINE))
        wanted = builder.icmp_unsigned("<", found, sought[0])
        for value in sought[1:]:
            wanted = builder.or_(wanted, builder.icmp_unsigned("==", found, value))
        return builder.bitcast(wanted, ir.IntType(CACHE_LINE))

    return types.uint64(types.uint64, below, one, other), codegen


@inline_kernel
def copy_into(source, out):
    """Copy the first len(out) items of `source`, which has at least as many; integers are converted
    as in C.
    """
    _copy(source, out)


@inline_kernel
def fill_with(out, value):
    """Set every item to `value`."""
    _fill(out, value)


@inline_kernel
def copy_ahead(source, out, count):
    """Copy the first `count` items, as `copy_into`, and perhaps up to a vector more.

    For arrays that are written from their beginning on, piece by piece: what comes next overwrites
    what was too much, and no masked store is needed, which takes long on processors without
    AVX-512. Only items of `source` are read, and only items of `out` written.
    """
    _copy_ahead(source, out, np.int64(count))


@inline_kernel
def fill_ahead(out, value, count):
    """Set the first `count` items to `value`, and perhaps up to a vector more, as `copy_ahead`."""
    _fill_ahead(out, value, np.int64(count))


@inline_kernel
def count_ahead(out, count):
    """Write 0, 1, 2, … to the first `count` items, and perhaps up to a vector more, as
    `copy_ahead`.
    """
    _count_ahead(out, np.int64(count))


@inline_kernel
def dot_words(words, factors):
    """Sum of words (uint32) times factors (uint32, at least as many), modulo 2^64 → uint64."""
    return _dot(words, factors)


@inline_kernel
def largest_u16(words):
    """The largest of the 16-bit numbers of which words (uint32) consist, two each → uint16; 0 if
    there are none.
    """
    return _largest(words, np.uint16)


@inline_kernel
def largest_u32(words):
    """The largest of some words (uint32) → uint32; 0 if there are none."""
    return _largest(words, np.uint32)


@inline_kernel
def count_up(out):
    """Write 0, 1, 2, …"""
    _count(out)
