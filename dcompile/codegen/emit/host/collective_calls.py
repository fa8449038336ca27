"""Statements that start collectives and wait for them."""

from __future__ import annotations

from collections.abc import Mapping

from dcompile.codegen.emit.host.allocate import HostBuffers
from dcompile.codegen.emit.host.batch_launches import LaunchBatch
from dcompile.codegen.emit.host.expressions import HostExpressions
from dcompile.codegen.emit.target import AllReduceKernel, KernelSource
from dcompile.ir.buffers import Bucket, Buffer
from dcompile.ir.collective_kinds import bucket_traits
from dcompile.ir.nodes import Collective, Extern, Loop, Program, View, Wait, views_of


class CollectiveCalls:
    """Writes them by the table of kinds: dcompile's own go through a source, the model's through `run.collective`."""

    def __init__(
        self, program: Program, text: HostExpressions, buffers: HostBuffers, kernels: Mapping[str, AllReduceKernel]
    ) -> None:
        self.table: Mapping[str, Buffer] = buffers.table
        self.text, self.lines, self.buffers = text, text.lines, buffers
        self.batch: LaunchBatch = buffers.batch
        self.loops = [step for step in program.steps if isinstance(step, Loop)]
        self.exchanged = {bucket.name: bucket for bucket in program.buckets}
        self.kernels = kernels
        """Kernels of collectives that may be one kernel, by bucket."""
        self.started: dict[str, str] = {}
        """Name of one of the model's own collectives -> the object that starts it and waits for it."""

    def start(self, step: Collective) -> None:
        """Print the start of a collective: dcompile's, through `buckets`, or one that the model itself calls."""
        if step.call is not None:
            self._start_own(step, step.call)
        else:
            self._start(step)

    def wait(self, step: Wait) -> None:
        """Wait for one."""
        if step.bucket in self.exchanged:
            self._wait(step.bucket)
        else:
            self.lines.append(f"{self.started[step.bucket]}.wait()")

    def _start(self, step: Collective) -> None:
        """Start one of dcompile's own, by the method that the table of kinds names."""
        traits = bucket_traits(step.kind)
        match traits.carries:
            case "gradients":
                memory = self.text.memory(step.bucket)
                self.lines += ["if sync:", f"    buckets.{traits.start}({step.bucket!r}, {memory})"]
            case "units":
                self._start_units(traits.start, self.exchanged[step.bucket])

    def _start_units(self, method: str, bucket: Bucket) -> None:
        """Start gathering or reducing units, each as one flat tensor."""
        for name in bucket.holders:
            self.buffers.ensure(name)
        whole = [View(name, (size,), (1,)) for name, size in zip(bucket.holders, bucket.sizes, strict=True)]
        tensors = ", ".join(map(self.text.view, whole))
        self.lines.append(f"buckets.{method}({bucket.name!r}, [{tensors}])")

    def _start_own(self, step: Collective, call: Extern) -> None:
        """Start one of the model's own collectives: on tensors that it sends and others that it fills, or in place."""
        for name in step.buffers:
            self.buffers.ensure(name)
        sent = [self.text.view(view) for view in views_of(call.args[0])]
        made = [name for name in step.buffers if name not in call.reads]
        filled = [self.text.view(View(name, self.table[name].shape, self.table[name].strides)) for name in made]
        rest = [self.text.argument(arg) for arg in call.args[1:]]
        kernel, given = self._kernel(step)
        collective = self.text.once(f"run.collective({call.op!r}, {step.bucket!r}{kernel})", "collective")
        self.started[step.bucket] = collective
        if call.origin:
            self.lines.append(f"# {', '.join(call.origin)}")
        self.lines.append(f"{collective}([{', '.join(sent)}], [{', '.join(filled)}], {', '.join(rest)}{given})")

    def _kernel(self, step: Collective) -> tuple[str, str]:
        """Return the arguments that describe the kernel of a collective that may be one, and those of its call."""
        kernel = self.kernels.get(step.bucket)
        if kernel is None:
            return "", ""
        if kernel.loop is not None:
            for name in sorted(self.loops[kernel.loop].writes):
                self.buffers.ensure(name)
        arguments, slots = self.batch.arguments_of(kernel.source)
        launch = kernel.source.launches[0]
        described = (kernel.source.name, launch.function, kernel.words, kernel.loop is not None, len(slots))
        text = ", ".join(map(repr, described))
        return f", ({text}, ({arguments}))", f", given=({', '.join(slots)},)" if slots else ""

    def run_epilogue(self, bucket: str, kernel: KernelSource) -> None:
        """Launch the loop that a collective's kernel may end with, where it did not."""
        launch, values = self.batch.launch_call([(kernel, self.batch.named(kernel))])
        self.lines.append(f"{self.started[bucket]}.run_epilogue({', '.join((launch, *values))})")

    def _wait(self, name: str) -> None:
        traits = self.exchanged[name].traits
        match traits.carries:
            case "gradients":
                self.lines += ["if sync:", f"    buckets.{traits.wait}({name!r}, {self.text.memory(name)})"]
            case "units":
                self.lines.append(f"buckets.{traits.wait}({name!r})")
