"""Statements that call the library, and see that results are as tracing has said.

Of torch's operators: the function, its out= overload, and its results. Of library matmuls that another algorithm than
ATen's may compute: their geometries in BLAS's terms.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple
from typing import Any

import torch

from dcompile.codegen.emit.host.batch_launches import HostBuffers, LaunchBatch
from dcompile.codegen.emit.host.expressions import HostExpressions
from dcompile.ir.attention import FLEX, FLEX_BACKWARD
from dcompile.ir.buffers import Buffer
from dcompile.ir.gemm import TENSOR_CORE_DTYPES, Chosen, Geometry, gemm_layout, matmul_of
from dcompile.ir.index import Size, as_index, var
from dcompile.ir.library_ops import COPY_EACH
from dcompile.ir.nodes import SCALE, SCALED, Extern, Program, View


class ExternCalls:
    """Writes library calls. `chosen`: algorithms for matrix products that are not to be ATen's.

    `last`: the last step that uses each buffer. `learnt`: sizes that are known before the first call. `in_kernels`:
    buffers that kernels read or write. `views_of`: how library calls and outputs view each buffer.
    """

    def __init__(
        self,
        text: HostExpressions,
        batch: LaunchBatch,
        buffers: HostBuffers,
        chosen: Chosen,
        last: Mapping[str, int],
        learnt: Collection[str],
        in_kernels: Collection[str],
        views_of: Mapping[str, Sequence[View]],
    ) -> None:
        self.text, self.lines, self.batch, self.buffers, self.chosen = text, text.lines, batch, buffers, chosen
        self.table: Mapping[str, Buffer] = buffers.table
        self.last, self.learnt, self.in_kernels, self.views_of = last, {*learnt}, in_kernels, views_of

    def call(self, step: Extern) -> None:
        """One call."""
        if not self._chosen(step):
            self._extern(step)

    def _chosen(self, step: Extern) -> bool:
        """Call a matmul by its chosen algorithm, if there is one; return whether there is."""
        shape = geometry(step, self.table) if self.chosen else None
        if shape is None or shape not in self.chosen:
            return False
        call = matmul_of(step)
        assert call is not None, "it has a geometry"
        self.buffers.ensure(call.out)
        whole = View(call.out, self.table[call.out].shape, self.table[call.out].strides)
        given = [self.text.view(view) for view in (call.left, call.right, whole)]
        given += [SCALE.text] if call.kwargs == SCALED else []
        product = self.text.once(f"run.product({step.op!r}, {astuple(shape)}, {self.chosen[shape]})", "op")
        self.lines += [f"# {', '.join(step.origin)}"] if step.origin else []
        self.lines.append(f"{product}({', '.join(given)})")
        return True

    def _extern(self, step: Extern) -> None:
        if step.mode == "mutate":
            for out in filter(None, step.outs):
                self.buffers.ensure(out)
        written = step.mode == "mutate"
        arguments = [self.text.argument(arg, written) for arg in step.args]
        arguments += [f"{name}={self.text.argument(arg, written)}" for name, arg in step.kwargs]
        if step.origin:
            self.lines.append(f"# {', '.join(step.origin)}")
        if step.op == COPY_EACH:
            copy = self.text.once(f"run.function({step.op!r})", "op")
            self.lines.append(f"{copy}([{', '.join(self._placed(step))}], {arguments[0]})")
            return
        if step.mode == "out":
            op, names = out_overload(step.op)
            arguments += [f"{name}={view}" for name, view in zip(names, self._placed(step), strict=True)]
            called = function(op)
            if op in NARROWED and all(self._is_narrow(name) for name in step.outs if name is not None):
                called = f"run.narrow_product({op!r}, {called})"
            self.lines.append(f"{self.text.once(called, 'op')}({', '.join(arguments)})")
            return
        found = function(step.op) if in_torch(step.op) else f"run.function({step.op!r})"
        call = f"{self.text.once(found, 'op')}({', '.join(arguments)})"
        if step.mode == "mutate" or not any(step.outs):
            self.lines.append(call)
        else:
            self._take_results(step, call)

    def _placed(self, step: Extern) -> list[str]:
        """Return the memory of each result that the compiler has placed."""
        views = list[str]()
        for result in step.outs:
            assert result is not None, f"{step.op} drops a result that it is to write"
            self.buffers.ensure(result)
            views.append(self.text.view(View(result, self.table[result].shape, self.table[result].strides)))
        return views

    def _take_results(self, step: Extern, call: str) -> None:
        """Name the results of a call, and check that they are as traced."""
        targets = [self.text.name(out) if out is not None else "_" for out in step.outs]
        single = len(targets) == 1 and returns_one_tensor(step.op)
        self.lines.append(f"{targets[0] if single else '(' + ', '.join(targets) + ',)'} = {call}")
        if "_" in targets:
            self.lines.append("del _")
        for out in filter(None, step.outs):
            self.batch.allocated.add(out)
            self._learn(out)
            self._check(out, step)
            self._fit(out, copied="_copy." in step.op)  # aten.split_with_sizes_copy.default
            if out not in self.last:
                self.batch.drop([out])

    def call_region(self, step: Extern, dying: Sequence[str]) -> list[str]:
        """Call a region of another compiler, which holds its dying inputs alone and frees them during its run.

        Returns the buffers still to be released after it.
        """
        made, *inputs = step.args
        assert isinstance(made, View), "a region is called by its name among the constants"
        self.lines.append(f"_given = [{', '.join(map(self.text.argument, inputs))}]")
        handed = {name for name in step.reads if name != made.buffer}
        self.batch.drop([name for name in dying if name in handed])
        self.lines += [f"# {', '.join(step.origin)}"] if step.origin else []
        self._take_results(
            step, f"{self.text.once(f'run.function({step.op!r})', 'op')}({self.text.argument(made)}, _given)"
        )
        return [name for name in dying if name not in handed]

    def _is_narrow(self, name: str) -> bool:
        """Return whether a matmul's result has 16 bits and is on a CPU, which may lack instructions for it."""
        return self.table[name].device == "cpu" and self.table[name].dtype in ("bfloat16", "float16")

    def _learn(self, name: str) -> None:
        """Read sizes from a library result that defines them."""
        for dim, size in enumerate(self.table[name].shape):
            found = [symbol for symbol in as_index(size).variables if symbol in self.text.late - self.learnt]
            if len(found) == 1 and as_index(size) == var(found[0]):
                self.learnt.add(found[0])
                self.lines.append(f"{self.text.name(found[0])} = {self.text.name(name)}.shape[{dim}]")

    def _check(self, name: str, step: Extern) -> None:
        """Check a result's shape: kernels would read beyond one that is smaller than a custom operator's fake says."""
        buffer, result = self.table[name], self.text.name(name)
        if is_custom(step.op) and buffer.is_tensor and self._is_defined(buffer.shape):
            wanted = f"({self.text.tuple_of(buffer.shape)}, torch.{buffer.dtype})"
            wanted, origin = self.text.once_if_known(wanted, "wanted", buffer.shape), ", ".join(step.origin) or step.op
            self.lines.append(f"if ({result}.shape, {result}.dtype) != {wanted}:")
            self.lines.append(f"    run.differs({result}, {wanted}, {origin!r})")
        elif not step.tells and has_late_shape(step.op) and buffer.is_tensor and self._is_defined(buffer.shape):
            # torch._check fixes the size, and tracing trusts it
            wanted, origin = self.text.tuple_of(buffer.shape), ", ".join(step.origin) or step.op
            self.lines.append(f"if {result}.shape != {wanted}:")
            self.lines.append(f"    run.unlike({result}, {wanted}, {origin!r})")

    def _is_defined(self, sizes: tuple[Size, ...]) -> bool:
        """Return whether all symbols in `sizes` are defined by now."""
        symbols = {symbol for size in sizes for symbol in as_index(size).variables}
        return not any(symbol.startswith("?") or symbol in self.text.late - self.learnt for symbol in symbols)

    def _fit(self, name: str, copied: bool) -> None:
        """Convert a library result whose strides differ from the traced ones that kernels rely on.

        Kernels of the backward rely on them, too, if the result is returned. A copy (`copied`) in place of the model's
        view has other strides than the view. Other returned results are eager's.
        """
        buffer = self.table[name]
        whole = View(name, buffer.shape, buffer.strides)
        returned = copied and name in self.batch.outputs and bool(buffer.strides) and self._is_defined(buffer.strides)
        if returned or name in self.in_kernels or any(view != whole for view in self.views_of.get(name, ())):
            strides = self.text.tuple_of(buffer.strides)
            if not all(isinstance(stride, int) for stride in buffer.strides):
                strides = self.text.once_if_known(strides, "strides", buffer.strides)
            self.lines.append(f"if {self.text.name(name)}.stride() != {strides}:")
            self.lines.append(f"    {self.text.name(name)} = run.fit({self.text.name(name)}, {strides})")


NARROWED = {f"aten.{name}.out": f"torch.{name}" for name in ("mm", "addmm", "bmm", "baddbmm")}
"""Matmuls, which use another algorithm for 16 bits on some processors (`runtime/program/half_gemm.py`)."""
_PYTHON = NARROWED | {"aten.convolution.default": "torch.convolution"}
"""Functions whose arguments torch parses in half the time of an operator's: 0.8 us for 1.5."""


def resolve(op: str) -> Any:
    """Return the overload of a name such as `aten.mm.default`."""
    return functools.reduce(getattr, op.split("."), torch.ops)


def function(op: str) -> str:
    """Return the expression to call for an overload."""
    return _PYTHON.get(op, f"entry(torch.ops.{op})")


def in_torch(op: str) -> bool:
    """Return whether an op is in `torch.ops`.

    Others are dcompile's checks, Python functions on numbers, and calls that stand for a kernel of dcompile's.
    """
    return op not in (FLEX, FLEX_BACKWARD) and op.split(".", 1)[0] not in (
        "dcompile", "operator", "math", "builtins", "torch",
    )  # fmt: skip


def is_custom(op: str) -> bool:
    """Return whether an op is registered outside torch, with a fake implementation that describes its results."""
    return in_torch(op) and op.split(".", 1)[0] not in ("aten", "prims", "_c10d_functional")


@functools.cache
def has_late_shape(op: str) -> bool:
    """Return whether the shape of an op's results depends on its arguments' elements."""
    return in_torch(op) and torch.Tag.dynamic_output_shape in getattr(resolve(op), "tags", ())


@functools.cache
def returns_one_tensor(op: str) -> bool:
    """Return whether a call returns a tensor (or a number, as aten.sym_numel does) and not a tuple or list."""
    schema = getattr(resolve(op), "_schema", None) if in_torch(op) else None
    return schema is None or (len(schema.returns) == 1 and not str(schema.returns[0].type).startswith("List["))


@functools.cache
def out_overload(op: str) -> tuple[str, tuple[str, ...]]:
    """Return the out= overload of an op, and the names of its out arguments."""
    function = resolve(op)
    outs = tuple(a.name for a in function._schema.arguments if a.is_out)
    if outs:
        return op, outs
    wanted = [(a.name, str(a.type)) for a in function._schema.arguments]
    packet, _ = op.rsplit(".", 1)
    for overload in resolve(packet).overloads():
        arguments = getattr(resolve(packet), overload)._schema.arguments
        outs = tuple(a.name for a in arguments if a.is_out)
        if outs and [(a.name, str(a.type)) for a in arguments if not a.is_out] == wanted:
            return f"{packet}.{overload}", outs
    raise AssertionError(f"{op} has no out= overload: lowering must not choose mode out for it")


MIN_FLOP_SHARE = 0.02
"""Fraction of a program's matmul FLOPs below which a geometry is not worth measuring."""


def geometry(step: Extern, table: Mapping[str, Buffer]) -> Geometry | None:
    """Return the geometry of a GPU matmul that the library supports: static sizes, rows or columns contiguous."""
    call = matmul_of(step)
    if call is None or call.op.batched or call.op.wide or not call.is_product:
        return None
    left, right, out = call.left, call.right, table[call.out]
    whole = View(out.name, out.shape, out.strides)
    if out.dtype not in TENSOR_CORE_DTYPES or not out.device.startswith("cuda"):
        return None
    a, b, c = (gemm_layout(view, out.dtype) for view in (right, left, whole))
    if a is None or b is None or c is None or c[0]:
        return None
    (rows, inner), columns = left.shape, right.shape[1]
    assert isinstance(rows, int) and isinstance(inner, int) and isinstance(columns, int), "seen by gemm_layout"
    return Geometry(out.dtype, columns, rows, inner, a[0], b[0], a[1], b[1], c[1])


def measurable_geometries(program: Program) -> dict[Geometry, int]:
    """Return the geometries with a large share of a program's matmul FLOPs, and their counts."""
    table = program.table
    found = (geometry(step, table) for step in program.steps if isinstance(step, Extern))
    counts = Counter(g for g in found if g is not None)
    total = sum(g.flops * count for g, count in counts.items())
    return {g: count for g, count in counts.items() if g.flops * count >= MIN_FLOP_SHARE * total}


def read_by_chosen(program: Program, chosen: Chosen) -> set[str]:
    """Return inputs of matmuls with a chosen algorithm, which needs known strides and 16-byte alignment."""
    if not chosen:
        return set()
    table = program.table
    found = (step for step in program.steps if isinstance(step, Extern) and geometry(step, table) in chosen)
    return {view.buffer for step in found for view in step.views[-2:]}
