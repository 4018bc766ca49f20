"""The few machine operations that threads need to agree on something: atomic words, a pause, a call by address."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from llvmlite.binding import get_process_triple
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import Signature
from numba.extending import intrinsic

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_ORDER = "seq_cst"


def _word(context: Any, b: Any, signature: Signature, args: Any) -> Any:
    """Pointer to element args[1] of the int64 array args[0]."""
    return b.gep(context.make_array(signature.args[0])(context, b, args[0]).data, [args[1]])


@intrinsic
def read(typingctx: Any, words: Any, index: Any) -> Any:
    """words[index], atomically"""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.load_atomic(_word(context, b, signature, args), ordering=_ORDER, align=8)

    return types.int64(words, index), generate


@intrinsic
def write(typingctx: Any, words: Any, index: Any, value: Any) -> Any:
    """words[index] = value, atomically"""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        b.store_atomic(args[2], _word(context, b, signature, args), ordering=_ORDER, align=8)
        return context.get_dummy_value()

    return types.void(words, index, types.int64), generate


@intrinsic
def add(typingctx: Any, words: Any, index: Any, value: Any) -> Any:
    """words[index] += value, atomically"""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        b.atomic_rmw("add", _word(context, b, signature, args), args[2], _ORDER)
        return context.get_dummy_value()

    return types.void(words, index, types.int64), generate


@intrinsic
def replace(typingctx: Any, words: Any, index: Any, old: Any, new: Any) -> Any:
    """If words[index] == old, make it `new`, atomically; whether it was."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        result = b.cmpxchg(_word(context, b, signature, args), args[2], args[3], _ORDER)
        return b.extract_value(result, 1)

    return types.boolean(words, index, types.int64, types.int64), generate


@intrinsic
def pause(typingctx: Any) -> Any:
    """A moment's rest inside a waiting loop (the processor's hint where it has one)."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        if get_process_triple().startswith(("x86_64", "i686")):
            kind = ir.FunctionType(ir.VoidType(), [])
            b.call(cgutils.get_or_insert_function(b.module, kind, "llvm.x86.sse2.pause"), [])
        else:
            b.fence(_ORDER)
        return context.get_dummy_value()

    return types.void(), generate


ENTRY_TYPE = ir.FunctionType(_I32, [_I8.as_pointer().as_pointer(), _I8.as_pointer().as_pointer(), _I64, _I64])
"""f(packed arguments, part) in numba's calling convention: status f(result, error, packed arguments, part)."""


@intrinsic
def call(typingctx: Any, entry: Any, packed: Any, part: Any) -> Any:
    """Call the function at address `entry`, made by `team.share`, with its packed arguments and a part number.

    Returns 0, or what numba returns for an exception.
    """

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        function = b.inttoptr(args[0], ENTRY_TYPE.as_pointer())
        nothing = cgutils.alloca_once(b, _I8.as_pointer())
        return b.call(function, [nothing, nothing, args[1], args[2]])

    return types.int32(types.int64, types.int64, types.int64), generate
