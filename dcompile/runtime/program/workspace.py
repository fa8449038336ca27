"""The memory that programs of one model take turns in, and the calls that are prepared for it."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from dcompile.collectives.contract import AnySource, ProgramReport
from dcompile.compat.tensors import is_only_reference
from dcompile.ir.gemm import Geometry
from dcompile.runtime.program import cuda_launch, half_gemm, host_checks
from dcompile.runtime.program.arena import (
    Arena,
    RecycledResultMemory,
    ReusedResultMemory,
    copy_elements,
    like,
    like_span,
    like_storage,
    over,
    seen_in,
)
from dcompile.runtime.program.argument_table import Address, ArgumentTable
from dcompile.runtime.program.cpu_launch import calls
from dcompile.runtime.program.cublaslt import GemmCall, GemmDescription
from dcompile.runtime.program.kernel_library import library
from dcompile.runtime.program.saved_tensors import Layout, SavedLayouts

if TYPE_CHECKING:
    from dcompile.runtime.communication.model_collectives import ModelCollective

Call = Callable[[list[Any], AnySource | None, bool], list[Any]]

SIZES_KEPT = 16
"""Sizes for which a dynamic program keeps its prepared calls; preparing one takes about as long as running it once."""


class PreparableProgram(Protocol):
    """A program that can be prepared for an arena."""

    libraries: Mapping[str, Path]
    report: ProgramReport

    @property
    def make(self) -> Callable[..., Call]:
        """Prepares a call, given a `HostProgramServices` and the sizes."""

    @property
    def needs(self) -> Callable[..., int]:
        """Bytes of the arena, given the sizes."""


class Workspaces:
    """The workspaces of one model; nothing in an arena outlives a call, so its forwards and backwards share them.

    A call takes one of the idle ones and puts it back; if there is none (a second thread, or a call within a call), it
    gets another, which is dropped afterwards.
    """

    def __init__(self) -> None:
        self.idle: defaultdict[int, list[Workspace]] = defaultdict(list)
        """For each GPU; -1 is none."""
        self._begun: set[int] = set()

    def another(self, device: int) -> Workspace:
        """A new one. The first of a device lasts."""
        lasting = device not in self._begun
        self._begun.add(device)
        return Workspace(device, lasting)

    def release(self) -> None:
        """Let go of the idle ones; a later call makes one anew."""
        self.idle.clear()
        self._begun.clear()


class _Prepared:
    """The calls of one program: one, or where sizes vary, one for each of the sizes met last."""

    def __init__(self) -> None:
        self.calls: OrderedDict[tuple[int, ...], Call] = OrderedDict()
        self.run: HostProgramServices | None = None
        self.results: dict[str, RecycledResultMemory] = {}
        """Memory of results whose size varies, by name; it outlives the arena."""


class Workspace:
    """An arena as large as the largest of the programs that ran in it needs, and what they have prepared for it."""

    def __init__(self, device: int, lasting: bool = False) -> None:
        self.device, self.lasting = device, lasting
        self.arena: Arena | None = None
        """Calls know only addresses in it."""
        self.fixed: dict[PreparableProgram, Call] = {}
        """Calls that are prepared for it, of programs without sizes."""
        self._prepared: dict[PreparableProgram, _Prepared] = {}

    def call(self, program: PreparableProgram, sizes: tuple[int, ...]) -> Call:
        """The program's call for these sizes."""
        prepared = self._prepared.get(program)
        found = None if prepared is None else prepared.calls.get(sizes)
        if prepared is None or found is None:
            return self._prepare(program, sizes)
        if len(prepared.calls) > 1:
            prepared.calls.move_to_end(sizes)
        return found

    def _prepare(self, program: PreparableProgram, sizes: tuple[int, ...]) -> Call:
        with torch.inference_mode(False):  # views of the arena outlive the mode of the call that made them
            arena = self._arena_of(program.needs(*sizes))
            prepared = self._prepared.setdefault(program, _Prepared())
            if prepared.run is None:
                notes = program.report.notes
                prepared.run = HostProgramServices(arena, program.libraries, prepared.results, self.device, notes)
            call = program.make(prepared.run, *sizes)
        prepared.calls[sizes] = call
        if not sizes:
            self.fixed[program] = call
        if len(prepared.calls) > SIZES_KEPT:
            prepared.calls.popitem(last=False)
        return call

    def _arena_of(self, nbytes: int) -> Arena:
        if self.arena is None or self.arena.nbytes < nbytes:
            for prepared in self._prepared.values():  # before the arena goes to which they point
                prepared.run = None
                prepared.calls.clear()
            self.fixed.clear()
            self.arena = None
            self.arena = Arena(nbytes, "cpu" if self.device < 0 else f"cuda:{self.device}")
        return self.arena


class HostProgramServices:
    """What a host program asks for while it prepares itself, and for rare cases while it runs."""

    def __init__(
        self,
        arena: Arena,
        libraries: Mapping[str, Path],
        results: dict[str, RecycledResultMemory],
        device: int,
        notes: list[str],
    ) -> None:
        self.device, self.notes = device, notes
        self.arena = arena
        self.libraries = libraries
        self.results = results
        """Memory of results whose size varies, by name."""

    def at(self, offset: int) -> Address:
        """An address in the arena, for a launch table."""
        return Address(self.arena.address + offset)

    @staticmethod
    def number(value: int) -> Address:
        """An integer, for a launch table."""
        return Address(value)

    @staticmethod
    def grid(place: int) -> cuda_launch.SymbolicGrid:
        """A number of programs that the call tells, for a launch table."""
        return cuda_launch.SymbolicGrid(place)

    def launches(
        self, count: int, kernels: list[tuple[str, str, int | cuda_launch.SymbolicGrid, tuple[int, ...]]]
    ) -> Callable[..., Any]:
        """A run of kernels: each its name, function, grid and arguments, which are known or one of `count` given ones.

        Kernels for which these sizes leave nothing to do are left out.
        """
        found = [(self.libraries[name], function, grid, given) for name, function, grid, given in kernels if grid]
        return cuda_launch.launches(library(self.libraries[cuda_launch.LAUNCHER]), self.device, count, found)

    def stream(self) -> int:
        """The stream to launch on. The arena follows: what another stream still does with it is waited for."""
        now = cuda_launch.stream_of(self.device)
        self.arena.follow(now, self.device)
        return now

    @staticmethod
    def realigned(
        call: Call, args: list[Any], written: tuple[int, ...], buckets: Any, sync: bool, whole: tuple[int, ...] = ()
    ) -> list[Any]:
        """Call again with copies of those arguments that do not start at whole 16 bytes, as kernels expect.

        A copy holds what lies between the elements, too, and at the positions `whole` all of the argument's storage:
        the program looks at it by offsets from where that begins.

        Arguments at the positions `written` get what the program wrote back. Results that look at a copy are looks at
        the argument: AOTAutograd, which hands out views of what it was given, reads off where they begin.
        """
        given = [*args]
        copies = dict[int, torch.Tensor]()  # held until the end: their addresses must be nobody else's in the call
        for place, arg in enumerate(given):
            has_memory = isinstance(arg, torch.Tensor) and arg.is_cuda and arg.untyped_storage().nbytes()
            if has_memory and arg.data_ptr() % 16:
                args[place] = copies[place] = like_storage(arg, 16) if place in whole else like_span(arg)
        results = call(args, buckets, sync)
        for place in copies.keys() & {*written}:
            given[place].copy_(copies[place])
        moved = {
            copy.untyped_storage().data_ptr(): (given[place], int(copy.storage_offset()))
            for place, copy in copies.items()
        }
        return [seen_in(moved, result) for result in results]

    def saved(self, *layouts: Layout) -> SavedLayouts:
        """How the program's saved tensors have to lie."""
        return SavedLayouts(layouts, self.notes)

    @property
    def address(self) -> int:
        """Where the arena begins."""
        return self.arena.address

    def view(self, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> torch.Tensor:
        """A tensor in the arena."""
        return self.arena.view(dtype, shape, strides, offset)

    @staticmethod
    def inherit(tensor: torch.Tensor) -> torch.Tensor:
        """Memory like `tensor`'s that may be overwritten: its own, if only the caller has it, or as much anew.

        A graph that is retained, a hook, or whoever else refers to the tensor must never see another one's values.
        """
        return tensor if is_only_reference(tensor) else like(tensor)

    @staticmethod
    def within(
        tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], offset: int
    ) -> torch.Tensor:
        """A tensor in the memory of another one, `offset` bytes behind its beginning."""
        return over(tensor, dtype, shape, strides, int(tensor.storage_offset()) * tensor.itemsize + offset)

    def fresh(self, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> ReusedResultMemory:
        """An allocator of one large result."""
        return ReusedResultMemory(dtype, shape, strides)

    def recycled(
        self, name: str, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> Callable[[], torch.Tensor]:
        """An allocator of one result whose size varies from call to call."""
        return self.results.setdefault(name, RecycledResultMemory()).of(dtype, shape, strides)

    def kernel(self, name: str, count: int) -> Callable[..., Any]:
        """A compiled kernel that takes this many addresses and sizes. It returns 0, or how it has failed."""
        return calls(self.libraries, count, [(name, range(count))])

    def calls(self, count: int, kernels: list[tuple[str, tuple[int, ...]]]) -> Callable[..., Any]:
        """A run of compiled kernels: each its name and arguments, which are known or one of `count` given ones."""
        return calls(self.libraries, count, kernels)

    def product(self, op: str, shape: tuple[Any, ...], algorithm: tuple[int, ...]) -> GemmCall:
        """A matrix product of this geometry by this algorithm of cuBLASLt's, in place of ATen's `op`."""
        del op
        return GemmCall(GemmDescription(Geometry(*shape), self.device), algorithm)

    @staticmethod
    def numbers(*values: int) -> ArgumentTable:
        """Integers in memory, for a kernel that takes their address."""
        table = ArgumentTable(len(values))
        table.fill(values)
        return table

    @staticmethod
    def narrow_product(op: str, entry: Callable[..., Any]) -> Callable[..., Any]:
        """A product of 16-bit matrices on a CPU: `entry`, or ours where the processor has no instructions for it."""
        return half_gemm.product(op, entry)

    @staticmethod
    def collective(op: str, name: str) -> ModelCollective:
        """One of the model's own collectives."""
        from dcompile.runtime.communication.model_collectives import ModelCollective  # late: few programs have any

        return ModelCollective(op, name)

    @staticmethod
    def function(op: str) -> Callable[..., Any]:
        """A function that is not in `torch.ops`."""
        return host_checks.function(op)

    @staticmethod
    def bucket_view(
        memory: Any, name: str, shape: tuple[int, ...], strides: tuple[int, ...], offset: int
    ) -> torch.Tensor:
        """A tensor in bucket memory, built once for each memory."""
        key = (name, shape, strides, offset)
        found = memory.tensors.get(key)
        if found is None:
            found = memory.tensors[key] = memory.flat.as_strided(shape, strides, offset)
        return found  # type: ignore[no-any-return]

    @staticmethod
    def fit(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
        """A library result with the strides that kernels were made for; strides of single elements do not matter."""
        pairs = zip(tensor.shape, tensor.stride(), strides, strict=True)
        fits = tensor.numel() == 0 or all(size == 1 or actual == planned for size, actual, planned in pairs)
        if fits and not (tensor.is_cuda and tensor.data_ptr() % 16):
            return tensor
        fitting = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
        copy_elements(fitting, tensor)
        return fitting

    differs, unlike = staticmethod(host_checks.differs), staticmethod(host_checks.unlike)

    @staticmethod
    def failed(status: int) -> None:
        """What eager says after an integer division by zero, or where a position lies outside."""
        if status == 1:
            raise RuntimeError("ZeroDivisionError")
        raise IndexError(f"index {status >> 2} is out of bounds")
