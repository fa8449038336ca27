"""Runs Triton kernels in Triton's interpreter, on NumPy memory. Import only where TRITON_INTERPRET=1 is set.

The interpreter (3.6 and 3.7) truncates where it should round to bfloat16, multiplies its bits in matrices, knows
nothing of `libdevice`, and takes reductions by a function of the kernel element by element: all put right here. It
also spends most of its time on what is the same each time, or is not looked at: that is done once, or not at all.
"""

from __future__ import annotations

import ast
import math
import re
import tempfile
import types
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import dropwhile, takewhile
from pathlib import Path

import numpy as np
import torch

from dcompile.codegen.emit.target import Kernels, KernelSource
from dcompile.codegen.emit.triton import flex_attention, matmul_epilogue, segment_sum
from dcompile.codegen.emit.triton import kernel as emitter
from dcompile.codegen.emit.triton.horizontal_fusion import fuse_launches
from dcompile.ir.buffers import Buffer
from dcompile.ir.float8 import BYTES
from dcompile.ir.index import as_index, evaluate
from dcompile.ir.interpret import GARBAGE, from_bfloat16, to_bfloat16
from dcompile.ir.nodes import Loop, Program
from dcompile.ir.ops import OPS
from dcompile.ir.symbols import specialise
from tests.codegen.emit.harness import NONE, placed, read
from tests.codegen.emit.interpreting import interpreter, tl

Handle = interpreter.TensorHandle
Builder = interpreter.InterpreterBuilder


# --- bfloat16 ---------------------------------------------------------------------------------------------------------

_cast, _float_to_float = Builder.cast_impl, Builder.create_fp_to_fp


def _cast_impl(self, source, target):
    have, want = source.dtype.scalar, target.scalar
    if want == tl.bfloat16 and have != tl.bfloat16:
        return Handle(to_bfloat16(source.data.astype(np.float32)), tl.bfloat16)
    if have == tl.bfloat16 and want != tl.bfloat16:
        wide = Handle(from_bfloat16(source.data.view(np.uint16)), tl.float32)
        return wide if want == tl.float32 else _cast(self, wide, target)
    return _cast(self, source, target)


def _fp_to_fp(self, source, target, rounding):
    if tl.bfloat16 in (source.dtype.scalar, target.scalar):
        return _cast_impl(self, source, target)
    return _float_to_float(self, source, target, rounding)


Builder.cast_impl, Builder.create_fp_to_fp = _cast_impl, _fp_to_fp


_dot = Builder.create_dot


def _create_dot(self, a, b, d, precision, imprecise):
    a, b = (_cast_impl(self, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
    return _dot(self, a, b, d, precision, imprecise)


Builder.create_dot = _create_dot


# --- numbers ----------------------------------------------------------------------------------------------------------

_patch = interpreter._patch_lang_tensor


def _patch_lang_tensor(tensor, scope):
    _patch(tensor, scope)
    # NumPy makes no number of an array of one dimension from 2.4 on
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_lang_tensor


def _all_ones(self, kind):
    # NumPy makes no unsigned number of -1
    return Handle(np.full(1, -1, np.int64).astype(_number(kind.scalar)), kind.scalar)


Builder.get_all_ones_value = _all_ones


# --- libdevice --------------------------------------------------------------------------------------------------------


def _by_element(function):
    return lambda *arrays: np.vectorize(function, otypes=[np.asarray(arrays[0]).dtype])(*arrays)


LIBDEVICE = {
    "erf": _by_element(math.erf), "erfc": _by_element(math.erfc), "rint": np.rint, "fmod": np.fmod,
    "lgamma": lambda x: OPS["lgamma"].meaning(x),
    "pow": np.power, "atan2": np.arctan2, "asin": np.arcsin, "acos": np.arccos, "asinh": np.arcsinh,
    "acosh": np.arccosh, "atanh": np.arctanh, "rsqrt": lambda x: (1 / np.sqrt(x)).astype(np.asarray(x).dtype),
}  # fmt: skip


class Libdevice:
    """The functions of CUDA's library that kernels call, in NumPy."""

    def __getattr__(self, name):
        function = LIBDEVICE.get(name) or getattr(np, name)

        def call(*args):
            with np.errstate(all="ignore"):
                data = np.asarray(function(*(arg.handle.data for arg in args)))
            return tl.core.tensor(Handle(data.astype(args[0].handle.data.dtype), args[0].dtype.scalar), args[0].type)

        return call


# --- reductions -------------------------------------------------------------------------------------------------------

_apply = interpreter.ReduceOps.apply_impl
REDUCTIONS = {"max_": np.max, "min_": np.min, "mul_": np.prod, "logaddexp_": np.logaddexp.reduce}


def _apply_impl(self, tensors):
    function = REDUCTIONS.get(getattr(getattr(self.combine_fn, "fn", None), "__name__", ""))
    if function is None:
        return _apply(self, tensors)
    (tensor,) = tensors
    data = np.asarray(function(tensor.handle.data, axis=self.axis, keepdims=self.keep_dims))
    return (self.to_tensor(data.astype(tensor.handle.data.dtype), tensor.dtype),)


interpreter.ReduceOps.apply_impl = _apply_impl

_scan = interpreter.ScanOps.apply_impl
SCANS = {"max_": np.maximum, "min_": np.minimum, "mul_": np.multiply, "logaddexp_": np.logaddexp}


def _scan_impl(self, tensors):
    function = SCANS.get(getattr(getattr(self.combine_fn, "fn", None), "__name__", ""))
    if function is None:
        return _scan(self, tensors)
    (tensor,) = tensors
    data = function.accumulate(tensor.handle.data, axis=self.axis)
    return (self.to_tensor(data.astype(tensor.handle.data.dtype), tensor.dtype),)


interpreter.ScanOps.apply_impl = _scan_impl


# --- PTX --------------------------------------------------------------------------------------------------------------


class _Asm:
    """What PTX gives."""

    def __init__(self, handle):
        self.handle = handle

    def get_result(self, place):
        return self.handle


_ARGUMENTS: list[int] = []
"""What the kernel that runs has been given, addresses as numbers."""


def _inline_asm(self, text, constraints, values, types, is_pure, pack):
    found = re.search(r"ld\.param\.b64 \$0, \[p\+(\d+)\]", text)
    assert found, f"the interpreter knows how to read an argument, no other PTX: {text}"
    place = (int(values[0].data.item()) + int(found[1])) // 8
    return _Asm(Handle(np.array([_ARGUMENTS[place]], np.uint64), tl.int64))


Builder.create_inline_asm = _inline_asm


# --- what is done once ------------------------------------------------------------------------------------------------

_number = cache(interpreter._get_np_dtype)
_address = np.dtype(np.uint64)


def _get_np_dtype(kind):
    return _address if isinstance(kind.scalar, tl.pointer_type) else _number(kind.scalar)


interpreter._get_np_dtype = _get_np_dtype


# A fifth of the time went into shapes: each tensor and each type made its own, of as many objects as it has dimensions.
@cache
def _shape_and_numel(shape):
    """A shape as kernels see it, of which each tensor has made one for itself."""
    return tl.core.tuple([tl.core.constexpr(size) for size in shape]), tl.core.constexpr(math.prod(shape))


def _tensor_made(self, handle, kind):
    self.handle, self.type, self.dtype = handle, kind, kind.scalar
    self.shape, self.numel = _shape_and_numel(tuple(kind.shape) if kind.is_block() else ())


tl.core.tensor.__init__ = _tensor_made

_checked_block = tl.core.block_type.__init__
_blocks = {}


def _block_made(self, element, shape):
    known = tuple(getattr(size, "value", size) for size in shape)
    if known not in _blocks:
        _checked_block(self, element, shape)
        _blocks[known] = self.shape, self.numel
    self.element_ty, (self.shape, self.numel) = element, _blocks[known]


tl.core.block_type.__init__ = _block_made
tl.core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>", lambda self, name: None)
# Whether a sum of 32 bits overflows is worked out for an assertion, which is made with `debug` alone.
interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)


Semantic = type(interpreter.interpreter_semantic)
_PLAIN = frozenset(map(id, (tl.float32, tl.float64, tl.int32, tl.int64)))
"""Types of which no operation on two makes another."""
_checked, _broadcast = Semantic.binary_op_type_checking_impl, Semantic.broadcast_impl_value


def _alike(self, left, right, *how, **more):
    """A fifth of the time went into finding out that both sides are of one type and shape already."""
    is_left, is_right = isinstance(left, tl.core.tensor), isinstance(right, tl.core.tensor)
    if is_left and is_right:
        if left.dtype is right.dtype and left.shape is right.shape and id(left.dtype) in _PLAIN:
            return left, right
    elif is_left or is_right:
        return _beside_number(self, left, right, 1 if is_left else 0, *how, **more)
    return _checked(self, left, right, *how, **more)


_numbers = {}
"""Tensors that stand for one number, of each type and shape."""


def _beside_number(self, left, right, place, *how, **more):
    """The same for a tensor and a number, another fifth: what stands for the number is made once."""
    tensor, number = (left, right) if place else (right, left)
    key = place, id(tensor.dtype), id(tensor.shape), type(number), repr(number), how, *more.items()
    if key not in _numbers:
        pair = _checked(self, left, right, *how, **more)
        if pair[1 - place] is not tensor or id(tensor.dtype) not in _PLAIN:
            return pair
        _numbers[key] = pair[place]
    return (tensor, _numbers[key]) if place else (_numbers[key], tensor)


def _of_one_shape(self, left, right):
    return (left, right) if left.shape is right.shape else _broadcast(self, left, right)


Semantic.binary_op_type_checking_impl, Semantic.broadcast_impl_value = _alike, _of_one_shape


class _Kept:
    """The language as kernels see it stands for NumPy from the first kernel on, and until this process ends."""

    def restore(self):
        pass


_patch_language = interpreter._patch_lang


@cache
def _patched(*modules):
    _patch_language(type("F", (), {"__globals__": dict(enumerate(modules))}))
    return _Kept()


def _patch_lang(function):
    return _patched(*(value for value in function.__globals__.values() if value in (tl, tl.core)))


interpreter._patch_lang = _patch_lang

_masked_store, _masked_load = Builder.create_masked_store, Builder.create_masked_load


def _create_masked_store(builder, pointers, value, mask, *how, **more):
    """3.9 takes no masks that NumPy holds as int32, as it does some that are made of single numbers."""
    return _masked_store(builder, pointers, value, Handle(np.asarray(mask.data, bool), tl.int1), *how, **more)


def _create_masked_load(builder, pointers, mask, *how, **more):
    return _masked_load(builder, pointers, Handle(np.asarray(mask.data, bool), tl.int1), *how, **more)


Builder.create_masked_store, Builder.create_masked_load = _create_masked_store, _create_masked_load


ast.expr.lineno = ast.expr.col_offset = ast.stmt.lineno = ast.stmt.col_offset = 1  # of nodes that are added


@cache
def _code(text: str):
    """A function as the interpreter rewrites it; many kernels bring the same ones."""
    return compile(interpreter.ASTTransformer().visit(ast.parse(text)), "<a function of kernels>", "exec")


@cache
def _lines(file: str):
    return Path(file).read_text().splitlines()


_rewrite = interpreter.FunctionRewriter.rewrite_ast


def _rewrite_ast(self):
    code, names = self.fn.__code__, self.fn.__globals__
    if not code.co_filename.startswith(_folder().name):
        return _rewrite(self)
    lines = _lines(code.co_filename)[code.co_firstlineno :]
    first, *rest = dropwhile(lambda line: not line.startswith("def "), lines)
    names.setdefault("interpreter_semantic", interpreter.interpreter_semantic)
    found = dict(self.kwargs)
    exec(_code("\n".join([first, *takewhile(lambda line: not line or line[0] == " ", rest)])), names, found)
    return found[self.fn.__name__]


interpreter.FunctionRewriter.rewrite_ast = _rewrite_ast


# --- kernels ----------------------------------------------------------------------------------------------------------


@cache
def _folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="dcompile-test-")


@cache
def _module(name: str, text: str):
    path = Path(_folder().name) / f"{name}.py"
    path.write_text(text)
    module = types.ModuleType(name)
    exec(compile(text, path, "exec"), module.__dict__)  # an import would keep bytecode for a next one
    module.libdevice = Libdevice()
    module.after_others_ = lambda: None  # nothing runs at the same time
    return module


def _tensor(flat: np.ndarray, dtype: str) -> torch.Tensor:
    if dtype in BYTES:  # kernels see no more of them
        return torch.from_numpy(flat)
    signed = flat.view(np.int16) if dtype == "bfloat16" else flat
    return torch.from_numpy(signed).view(getattr(torch, dtype))


def call(
    source: KernelSource, memory: dict[str, np.ndarray], table: dict[str, Buffer], sizes: Mapping[str, int] = NONE
) -> None:
    """Run all launches of one kernel; `sizes` says what the symbols are that it takes."""
    module = _module(source.name, source.text)
    with np.errstate(all="ignore"):
        for launch in source.launches:
            known = [*(_tensor(memory[n], table[n].dtype) for n in source.arguments), *(sizes[n] for n in source.sizes)]
            known += source.numbers
            grid = evaluate(as_index(launch.grid), sizes)
            if grid:
                given = [known[place] for place in launch.arguments]
                _ARGUMENTS[:] = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in given]
                getattr(module, launch.function)[(grid,)](*given, num_warps=launch.warps)


def run(program: Program, inputs: dict[str, np.ndarray], sizes: Mapping[str, int] = NONE) -> list[np.ndarray]:
    """Outputs of a program of kernels, by Triton's interpreter; they are made without knowing `sizes`."""
    symbolic, program = program, specialise(program, sizes)
    table = program.table
    memory = {b.name: placed(b, inputs.get(b.name)) for b in program.buffers}
    loops = [step for step in symbolic.steps if isinstance(step, Loop)]
    made = [(emitter if loop.product is None else matmul_epilogue).emit(loop, symbolic.table) for loop in loops]
    emitted = flex_attention.emit_flex_attention(Kernels(tuple(made)), symbolic)
    emitted = fuse_launches(segment_sum.sum_groups(emitted, symbolic), symbolic)
    products, kernels = emitted.products, iter(emitted.calls)
    assert len(loops) + len(products) == len(program.steps)
    for position in range(len(program.steps)):
        source = products[position].kernel if position in products else next(kernels)
        call(source, memory, table, sizes)
    for name, flat in memory.items():
        assert (flat[-64:].view(np.uint8) == GARBAGE).all(), f"{name}: written past its end"
    return [read(table[view.buffer], view, memory[view.buffer]) for view in program.outputs]
