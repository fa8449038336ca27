"""Statements that call the library, and see that results are as tracing has said."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple

from dcompile.codegen.emit.host.allocate import HostBuffers
from dcompile.codegen.emit.host.aten_calls import (
    NARROWED,
    function,
    has_late_shape,
    in_torch,
    is_custom,
    out_overload,
    returns_one_tensor,
)
from dcompile.codegen.emit.host.batch_launches import LaunchBatch
from dcompile.codegen.emit.host.expressions import HostExpressions
from dcompile.codegen.emit.host.gemm_geometry import factors_of, geometry
from dcompile.ir.buffers import Buffer
from dcompile.ir.gemm import Chosen
from dcompile.ir.index import Size, as_index, var
from dcompile.ir.nodes import SCALE, SCALED, Extern, View


class ExternCalls:
    """Writes library calls. `chosen`: algorithms for matrix products that are not to be ATen's.

    `last`: the last step that uses each buffer. `learnt`: sizes that are known before the first call. `in_kernels`:
    buffers that kernels read or write. `looks`: how library calls and outputs view each buffer.
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
        looks: Mapping[str, Sequence[View]],
    ) -> None:
        self.text, self.lines, self.batch, self.buffers, self.chosen = text, text.lines, batch, buffers, chosen
        self.table: Mapping[str, Buffer] = buffers.table
        self.last, self.learnt, self.in_kernels, self.looks = last, {*learnt}, in_kernels, looks

    def call(self, step: Extern) -> None:
        """One call."""
        if not self._chosen(step):
            self._extern(step)

    def _chosen(self, step: Extern) -> bool:
        """Call a matmul by its chosen algorithm, if there is one; return whether there is."""
        shape = geometry(step, self.table) if self.chosen else None
        if shape is None or shape not in self.chosen:
            return False
        factors, (out,) = factors_of(step), step.outs
        assert factors is not None and out is not None, "what has a geometry multiplies two, and is written somewhere"
        self.buffers.ensure(out)
        whole = View(out, self.table[out].shape, self.table[out].strides)
        given = [self.text.view(view) for view in (*factors, whole)] + ([SCALE.text] if step.kwargs == SCALED else [])
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
        if step.mode == "out":
            op, names = out_overload(step.op)
            for result, keyword_ in zip(step.outs, names, strict=True):
                assert result is not None, f"{step.op} drops a result that it is to write"
                self.buffers.ensure(result)
                whole = View(result, self.table[result].shape, self.table[result].strides)
                arguments.append(f"{keyword_}={self.text.view(whole)}")
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
        if returned or name in self.in_kernels or any(view != whole for view in self.looks.get(name, ())):
            strides = self.text.tuple_of(buffer.strides)
            if not all(isinstance(stride, int) for stride in buffer.strides):
                strides = self.text.once_if_known(strides, "strides", buffer.strides)
            self.lines.append(f"if {self.text.name(name)}.stride() != {strides}:")
            self.lines.append(f"    {self.text.name(name)} = run.fit({self.text.name(name)}, {strides})")
