"""Workspaces: memory that the programs of one model use in turn, and the calls that are prepared for it.

A backward checks the layouts of saved tensors that it receives, and copies those that its kernels cannot read. Autograd
passes an input of the forward in its present state. New memory (`p.data = p.data.t()`, `module.double()`) changes its
strides or dtype without a change of its version counter. Hooks for saved tensors may return any layout (`save_on_cpu`
with pinned memory). Eager's operators read each tensor's strides; compiled kernels expect one layout.

Host programs call functions of a workspace besides ATen's, mostly checks of values that are known only at run time.
"""

from __future__ import annotations

import builtins
import math
import operator
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeAlias

import torch

from dcompile.collectives.contract import AnySource, ProgramReport
from dcompile.compat.guards import like_these
from dcompile.compat.storage_holders import is_only_reference
from dcompile.compat.tensors import assert_on_device, copy_all
from dcompile.errors import DcompileError, NotInPartsError
from dcompile.ir.collective_kinds import HostCopyKind
from dcompile.ir.gemm import Geometry
from dcompile.ir.index import element_span
from dcompile.ir.library_ops import COPY_EACH
from dcompile.runtime.program import cuda_launch, half_gemm
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
from dcompile.runtime.program.argument_table import Address, ArgumentTable, kernel_calls, library
from dcompile.runtime.program.cublaslt import GemmCall, GemmDescription
from dcompile.runtime.program.host_copies import HostCopy, HostMemory


def check_bounds(positions: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """Raise IndexError, as eager does, unless low <= position < high for every one. Return a copy of `positions`.

    The memory plan takes a library call's result for memory of its own. But `positions` may be stored in an arena
    buffer that is reused from here on, or in an input that a later step writes.
    """
    if positions.numel() and positions.is_cuda:
        inside = ((positions >= low) & (positions < high)).all()
        assert_on_device(inside, f"index out of bounds: positions must be from {low} to {high - 1}")
    elif positions.numel():
        smallest, largest = (int(value) for value in torch.aminmax(positions))
        if smallest < low or largest >= high:
            wrong = smallest if smallest < low else largest
            raise IndexError(f"index {wrong} is out of bounds: positions must be from {low} to {high - 1}")
    if not positions.numel():
        return positions
    if positions.is_contiguous():
        return positions.clone()
    # keep its strides, with the zeros of expanded dimensions, since kernels were made for them
    extent = element_span(positions.shape, positions.stride())
    return positions.as_strided((extent,), (1,)).clone().as_strided(positions.shape, positions.stride())


def call(function: Callable[..., Any], *args: Any) -> Any:
    """Call an op whose arguments have no text (graphs, dictionaries): lowering binds them into `function`."""
    return function(*args)


def region(made: Callable[[list[Any]], Any], values: list[Any]) -> Any:
    """Call another compiler's code for a region of the graph; `values` is emptied."""
    return made(values)


def set_data(tensor: torch.Tensor, source: torch.Tensor, copies: bool) -> None:
    """`tensor.data = source`; with `copies`, of a copy, because `source` is in memory that the program reuses."""
    tensor.set_(source.clone() if copies else source)  # type: ignore[call-overload, unused-ignore]


def differs(tensor: torch.Tensor, wanted: tuple[tuple[int, ...], torch.dtype], origin: str) -> NoReturn:
    """Raise DcompileError: a custom operator's result differs from its fake implementation."""
    shape, dtype = wanted
    raise DcompileError(
        f"dcompile: {origin} returned shape {tuple(tensor.shape)}, {tensor.dtype}, where its fake implementation says "
        f"shape {shape}, {dtype}. Correct the one that is wrong: torch.library.opcheck(op, args) compares them"
    )


def check_number(found: int, wanted: int, origin: str) -> None:
    """Raise RuntimeError unless a tensor's element is the number that `torch._check` states, as kernels assume."""
    if found != wanted:
        raise RuntimeError(
            f"Runtime assertion failed: {origin} gave {found}, where the program says, by torch._check or a guard, "
            f"that it is {wanted}. Correct the check, or the input"
        )


def unlike(tensor: torch.Tensor, wanted: tuple[int, ...], origin: str) -> NoReturn:
    """Raise RuntimeError: a data-dependent size differs from the one that `torch._check` states."""
    raise RuntimeError(
        f"Runtime assertion failed: {origin} returned shape {tuple(tensor.shape)}, where the program says, by "
        f"torch._check or a guard, that it is {wanted}. Correct the check, or the input"
    )


def lay_out(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Copy a tensor to these strides. Raises RuntimeError where two elements would share an address."""
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


_OWN: Mapping[str, Callable[..., Any]] = {
    "dcompile.check_bounds": check_bounds,
    "dcompile.call": call,
    "dcompile.region": region,
    "dcompile.check_number": check_number,
    COPY_EACH: copy_all,
    "dcompile.lay_out": lay_out,
    "dcompile.set_data": set_data,
}
_MODULES: Mapping[str, Any] = {"operator": operator, "math": math, "builtins": builtins, "torch": torch}


def function(op: str) -> Callable[..., Any]:
    """Function for an op outside of `torch.ops`: one of this module's, or a function of Python or torch on numbers."""
    if op in _OWN:
        return _OWN[op]
    module, name = op.split(".", 1)
    return getattr(_MODULES[module], name)  # type: ignore[no-any-return]


if TYPE_CHECKING:
    from dcompile.runtime.communication.model_collectives import ModelCollective
    from dcompile.runtime.communication.peer_memory.one_shot import OneShotLaunch

Call = Callable[[list[Any], AnySource | None, bool], list[Any]]

Layout: TypeAlias = "tuple[torch.dtype, tuple[int, ...], tuple[int, ...], str, bool]"
"""Layout of a tensor: dtype, shape, strides, device type, and whether the program writes to it."""

RELAID = "a backward copied what a hook for saved tensors or a new `.data` has laid out otherwise than in the forward"
SIZES_KEPT = 16
"""Number of sizes for which a dynamic program keeps prepared calls. Preparing one takes about as long as running it."""


class PreparableProgram(Protocol):
    """A program that can be prepared for an arena."""

    libraries: Mapping[str, Path]
    report: ProgramReport

    @property
    def make(self) -> Callable[..., Call]:
        """Function that prepares a call, given a `HostProgramServices` and the sizes."""

    @property
    def needs(self) -> Callable[..., int]:
        """Bytes of the arena, given the sizes."""


class Workspaces:
    """Workspaces of one model. Nothing in an arena outlives a call, so its forwards and backwards share them.

    A call takes an idle workspace and returns it. If there is none (a second thread, or a call within a call), it makes
    another one, which is dropped afterwards.
    """

    def __init__(self) -> None:
        self.idle: defaultdict[int, list[Workspace]] = defaultdict(list)
        """Idle workspaces by GPU number; -1 for the CPU."""
        self._begun: set[int] = set()
        self.host = HostMemory()
        """Memory of what the model's programs offload."""

    def another(self, device: int) -> Workspace:
        """Make a workspace. The first one of a device is kept after its call."""
        lasting = device not in self._begun
        self._begun.add(device)
        return Workspace(device, lasting, self.host)

    def release(self) -> None:
        """Free the idle workspaces; a later call makes one anew."""
        self.idle.clear()
        self._begun.clear()
        self.host = HostMemory()


class _Prepared:
    """Prepared calls of one program: one, or for dynamic sizes one for each of the last sizes."""

    def __init__(self) -> None:
        self.calls: OrderedDict[tuple[int, ...], Call] = OrderedDict()
        self.run: HostProgramServices | None = None
        self.results: dict[str, RecycledResultMemory] = {}
        """Memory of results whose size varies, by name; it outlives the arena."""


class Workspace:
    """Arena as large as the largest program in it needs, and the calls that are prepared for it."""

    def __init__(self, device: int, lasting: bool = False, host: HostMemory | None = None) -> None:
        self.device, self.lasting = device, lasting
        self.host = HostMemory() if host is None else host
        self.arena: Arena | None = None
        """Calls hold only addresses in it, not the arena itself."""
        self.fixed: dict[PreparableProgram, Call] = {}
        """Prepared calls of programs without sizes."""
        self._prepared: dict[PreparableProgram, _Prepared] = {}

    def call(self, program: PreparableProgram, sizes: tuple[int, ...]) -> Call:
        """Prepared call of a program for these sizes."""
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
                prepared.run = HostProgramServices(
                    arena, program.libraries, prepared.results, self.device, notes, self.host
                )
            prepared.run.begin()
            call = program.make(prepared.run, *sizes)
        prepared.calls[sizes] = call
        if not sizes:
            self.fixed[program] = call
        if len(prepared.calls) > SIZES_KEPT:
            prepared.calls.popitem(last=False)
        return call

    def _arena_of(self, nbytes: int) -> Arena:
        if self.arena is None or self.arena.nbytes < nbytes:
            for prepared in self._prepared.values():  # drop them before the arena to which they point
                prepared.run = None
                prepared.calls.clear()
            self.fixed.clear()
            self.arena = None
            self.arena = Arena(nbytes, "cpu" if self.device < 0 else f"cuda:{self.device}")
        return self.arena


class HostProgramServices:
    """Services for a host program: for its preparation, and for rare cases in its calls."""

    def __init__(
        self,
        arena: Arena,
        libraries: Mapping[str, Path],
        results: dict[str, RecycledResultMemory],
        device: int,
        notes: list[str],
        host: HostMemory | None = None,
    ) -> None:
        self.device, self.notes = device, notes
        self.host = HostMemory() if host is None else host
        self.arena = arena
        self.libraries = libraries
        self.results = results
        """Memory of results whose size varies, by name."""
        self._tables: list[cuda_launch.LaunchTable] = []
        """Tables of the call that is being prepared."""

    def begin(self) -> None:
        """Begin to prepare another call."""
        self._tables = []

    def at(self, offset: int) -> Address:
        """Address in the arena, for a launch table."""
        return Address(self.arena.address + offset)

    @staticmethod
    def number(value: int) -> Address:
        """Integer, for a launch table."""
        return Address(value)

    @staticmethod
    def grid(place: int) -> cuda_launch.SymbolicGrid:
        """Grid size that the call passes, for a launch table."""
        return cuda_launch.SymbolicGrid(place)

    def launches(
        self, count: int, kernels: list[tuple[str, str, int | cuda_launch.SymbolicGrid, tuple[int, ...]]]
    ) -> Callable[..., Any]:
        """Sequence of kernel launches. Arguments are known addresses, or positions among `count` values of a call.

        `kernels`: name, function, grid and arguments of each. Kernels with an empty grid are left out.
        """
        found = [(self.libraries[name], function, grid, given) for name, function, grid, given in kernels if grid]
        launcher = library(self.libraries[cuda_launch.LAUNCHER])
        return cuda_launch.launches(launcher, self.device, count, found, self._tables)

    def stream(self) -> int:
        """Stream to launch on. The arena waits for pending work of another stream."""
        now = cuda_launch.stream_of(self.device)
        self.arena.follow(now, self.device)
        return now

    @staticmethod
    def realigned(
        call: Call, args: list[Any], written: tuple[int, ...], buckets: Any, sync: bool, whole: tuple[int, ...] = ()
    ) -> list[Any]:
        """Repeat a call with copies of arguments that are not aligned to 16 bytes, as kernels expect.

        A copy includes the memory between the elements. At the positions `whole` it includes the argument's whole
        storage, which the program addresses by offsets from its beginning. Arguments at the positions `written` are
        written back. Results that are views of a copy become views of the argument. AOTAutograd reads their offsets
        when it returns views of its inputs.
        """
        given = [*args]
        copies = dict[int, torch.Tensor]()  # held until the end: no other tensor may get their addresses
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

    @staticmethod
    def refuse(reason: str) -> None:
        """Refuse to run in parts."""
        raise NotInPartsError(reason)

    def saved(self, *layouts: Layout) -> SavedLayouts:
        """Layouts that the program expects of its saved tensors."""
        return SavedLayouts(layouts, self.notes)

    @property
    def address(self) -> int:
        """Address of the arena."""
        return self.arena.address

    def view(self, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> torch.Tensor:
        """Tensor in the arena."""
        return self.arena.view(dtype, shape, strides, offset)

    @staticmethod
    def inherit(tensor: torch.Tensor) -> torch.Tensor:
        """Memory like `tensor`'s that may be overwritten: its own if only the caller holds it, else a new allocation.

        A retained graph, a hook, or any other holder of the tensor must never see overwritten values.
        """
        return tensor if is_only_reference(tensor) else like(tensor)

    @staticmethod
    def within(
        tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], offset: int
    ) -> torch.Tensor:
        """Tensor in the memory of another one, `offset` bytes after its beginning."""
        return over(tensor, dtype, shape, strides, int(tensor.storage_offset()) * tensor.itemsize + offset)

    def fresh(self, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> ReusedResultMemory:
        """Allocator of one large result."""
        return ReusedResultMemory(dtype, shape, strides)

    def recycled(
        self, name: str, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> Callable[[], torch.Tensor]:
        """Allocator of one result whose size varies from call to call."""
        return self.results.setdefault(name, RecycledResultMemory()).of(dtype, shape, strides)

    def host_memory(
        self, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> Callable[[], torch.Tensor]:
        """Allocator of host memory for one offloaded value."""
        return self.host.allocator((dtype, shape, strides), self.device)

    def host_copy(self, kind: HostCopyKind, name: str) -> HostCopy:
        """One copy to or from host memory."""
        del name
        return HostCopy(kind, self.host, self.device)

    def kernel(self, name: str, count: int) -> Callable[..., Any]:
        """Compiled kernel that takes `count` addresses and sizes. It returns 0, or an error status."""
        return kernel_calls(self.libraries, count, [(name, range(count))])

    def calls(self, count: int, kernels: list[tuple[str, tuple[int, ...]]]) -> Callable[..., Any]:
        """Sequence of compiled kernels, each given by its name and arguments.

        Arguments are known addresses, or positions among `count` values of a call.
        """
        return kernel_calls(self.libraries, count, kernels)

    def product(self, op: str, shape: tuple[Any, ...], algorithm: tuple[int, ...]) -> GemmCall:
        """GEMM of this geometry by a cuBLASLt algorithm, in place of ATen's `op`."""
        return GemmCall(GemmDescription(Geometry(*shape), self.device), algorithm)

    @staticmethod
    def numbers(*values: int) -> ArgumentTable:
        """Integers in memory, for a kernel that takes their address."""
        table = ArgumentTable(len(values))
        table.fill(values)
        return table

    @staticmethod
    def narrow_product(op: str, entry: Callable[..., Any]) -> Callable[..., Any]:
        """Matmul of 16-bit matrices on a CPU: `entry`, or blocked float32 on processors without instructions for it."""
        return half_gemm.product(op, entry)

    def collective(
        self, op: str, name: str, kernel: tuple[str, str, int, bool, int, tuple[int, ...]] | None = None
    ) -> ModelCollective:
        """One of the model's own collectives.

        `kernel`: the one kernel that it may be. It has a name, a function, and words of a program. Then come whether it
        ends with the loop after the collective, the number of values that a call gives, and that loop's arguments.
        """
        from dcompile.runtime.communication.model_collectives import ModelCollective  # late: few programs have any

        return ModelCollective(op, name, None if kernel is None else self._one_shot(*kernel))

    def _one_shot(
        self, kernel: str, function: str, words: int, has_epilogue: bool, count: int, arguments: tuple[int, ...]
    ) -> OneShotLaunch:
        from dcompile.runtime.communication.peer_memory.one_shot import EXCHANGED, OneShotLaunch  # late, likewise

        every = (*arguments, *range(count, count + EXCHANGED))
        launch = self.launches(count + EXCHANGED + 1, [(kernel, function, self.grid(count + EXCHANGED), every)])
        return OneShotLaunch(launch, self.device, self.notes, self._tables, words, has_epilogue)

    @staticmethod
    def function(op: str) -> Callable[..., Any]:
        """Function that is not in `torch.ops`."""
        return function(op)

    @staticmethod
    def bucket_view(
        memory: Any, name: str, shape: tuple[int, ...], strides: tuple[int, ...], offset: int
    ) -> torch.Tensor:
        """Tensor in bucket memory, built once for each memory."""
        key = (name, shape, strides, offset)
        found = memory.tensors.get(key)
        if found is None:
            found = memory.tensors[key] = memory.flat.as_strided(shape, strides, offset)
        return found  # type: ignore[no-any-return]

    @staticmethod
    def fit(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
        """Return a library result with the strides that kernels expect. Strides of single elements are ignored."""
        pairs = zip(tensor.shape, tensor.stride(), strides, strict=True)
        fits = tensor.numel() == 0 or all(size == 1 or actual == planned for size, actual, planned in pairs)
        if fits and not (tensor.is_cuda and tensor.data_ptr() % 16):
            return tensor
        fitting = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
        copy_elements(fitting, tensor)
        return fitting

    differs, unlike = staticmethod(differs), staticmethod(unlike)

    @staticmethod
    def failed(status: int) -> None:
        """Raise eager's error for an integer division by zero (status 1), or for a position out of bounds."""
        if status == 1:
            raise RuntimeError("ZeroDivisionError")
        raise IndexError(f"index {status >> 2} is out of bounds")


class SavedLayouts:
    """Layouts that one program expects."""

    __slots__ = ("_layouts", "_notes", "check")

    def __init__(self, layouts: tuple[Layout, ...], notes: list[str]) -> None:
        self._layouts, self._notes = layouts, notes
        self.check = self._have_layouts
        """Quick check whether tensors have these layouts. If it fails, `fit` compares them in detail."""

    def _have_layouts(self, *tensors: torch.Tensor) -> bool:
        if not all(map(_has_layout, tensors, self._layouts)):
            return False
        self.check = like_these(tensors) or self._have_layouts
        return True

    def fit(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors, with copies of those that have other layouts."""
        if self._have_layouts(*tensors):
            return [*tensors]
        if RELAID not in self._notes:
            self._notes.append(RELAID)
        return [
            x if _has_layout(x, layout) else _relaid(x, layout)
            for x, layout in zip(tensors, self._layouts, strict=True)
        ]


def _has_layout(x: torch.Tensor, layout: Layout) -> bool:
    """Whether a tensor has a layout. Strides of empty tensors and of dimensions with one element are ignored."""
    dtype, shape, strides, device, _ = layout
    if x.dtype != dtype or x.shape != shape or x.device.type != device or x.layout != torch.strided:
        return False
    actual = x.stride()
    if actual == strides or not x.numel():
        return True
    return all(size == 1 or a == b for size, a, b in zip(shape, actual, strides, strict=True))


def _relaid(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    dtype, shape, strides, device, written = layout
    if x.shape != shape or x.device.type != device or written:
        what = f"{x.dtype} {tuple(x.shape)} on {x.device.type}, not {dtype} {shape} on {device}"
        raise RuntimeError(f"dcompile: what a forward has saved is another tensor in the backward: {what}")
    return torch.empty_strided(shape, strides, dtype=dtype, device=x.device).copy_(x)
