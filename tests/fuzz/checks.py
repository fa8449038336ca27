"""What is compared for one random program: the interpreter with every pass, and with every target's kernels.

A check takes programs with their inputs and says of each what differs first, or None. A new target joins by a row in
`targets()`: a function that runs programs of loops and returns their outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from unittest.mock import patch

import numpy as np

from dcompile.codegen.emit.cpp import prefetch
from dcompile.codegen.emit.target import KernelSource
from dcompile.codegen.nest.gpu_tiling import make_plan
from dcompile.codegen.schedule.fusion import split_reductions
from dcompile.codegen.schedule.fusion.fuse import fuse
from dcompile.codegen.schedule.fusion.loop_order import interchange_reductions, use_online_softmax
from dcompile.codegen.schedule.fusion.narrow_buffers import narrow_buffers
from dcompile.codegen.schedule.fusion.rematerialize import rematerialize
from dcompile.codegen.schedule.memory.plan import plan_memory
from dcompile.codegen.schedule.order.dependences import group_updates, remove_dead_steps
from dcompile.device_traits import CUDA
from dcompile.ir.interpret import GARBAGE, interpret
from dcompile.ir.nodes import Apply, Loop, Program, Reduce
from dcompile.ir.ops import DTYPES
from dcompile.ir.symbols import sources, specialise
from dcompile.ir.verify import verify
from tests.codegen.emit import cpp_kernel
from tests.codegen.emit.harness import call, loaded, placed, read
from tests.codegen.emit.loops import on_a_gpu
from tests.fuzz.by_triton import run_triton
from tests.fuzz.host_copies import check_copies
from tests.fuzz.records import Case, Inputs
from tests.fuzz.shrink import Fails, shrink
from tests.ir.fuzz import random_program

Outputs = list[np.ndarray]
Runner = Callable[[Sequence[Case]], list[Outputs]]
"""Runs programs of loops, planned or not, and returns the outputs of each."""

CHOICES = frozenset(("eq", "ne", "lt", "le", "gt", "ge", "sign", "not", "floor", "ceil", "round", "trunc", "mod"))
"""Operations whose result may jump where their arguments differ by a rounding."""


def run_cpp(cases: Sequence[Case]) -> list[Outputs]:
    """All kernels built at once; then each program over memory of its own, with guards behind every buffer."""
    kernels = [cpp_kernel.emit_all(program).calls for program, _ in cases]
    functions = loaded([kernel for calls in kernels for kernel in calls])
    return [_run_one(*case, calls, functions) for case, calls in zip(cases, kernels, strict=True)]


def run_cpp_streamed(cases: Sequence[Case]) -> list[Outputs]:
    """The same with results written past the caches that are large enough for it in models alone."""
    with patch.object(prefetch, "MIN_STREAM_BYTES", 0):
        return run_cpp(cases)


def _run_one(program: Program, inputs: Inputs, calls: Sequence[KernelSource], functions: dict[str, object]) -> Outputs:
    sizes = numbers_of(program, inputs)
    fixed = specialise(program, sizes)
    arena = np.full(fixed.arena_bytes + 64, GARBAGE, np.uint8)
    memory = {b.name: placed(b, inputs.get(b.name)) for b in fixed.buffers if b.storage != "arena"}
    own = dict(memory)
    memory |= {b.name: arena[b.offset : b.offset + max(b.nbytes, 1)] for b in fixed.buffers if b.name not in memory}
    for step, kernel in zip(program.steps, calls, strict=True):
        code = call(kernel, functions, memory, sizes)
        assert code == 0, f"{step.name} returned {code}"
    for name, flat in (*own.items(), ("the arena", arena)):
        assert (flat[-64:].view(np.uint8) == GARBAGE).all(), f"{name}: written past its end"
    return [read(fixed.table[view.buffer], view, memory[view.buffer]) for view in fixed.outputs]


def numbers_of(program: Program, inputs: Inputs) -> dict[str, int]:
    """What the size symbols of a program are for these inputs, whose shapes name them one by one."""
    return {name: inputs[source.input].shape[source.dim] for name, source in sources(program).items()}


def targets() -> dict[str, Runner]:
    """Name -> how programs of loops run on it here."""
    return {"cpp": run_cpp}


# --- checks -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Check:
    """`run` looks at many programs at once, so that their kernels are built together."""

    name: str
    exact: bool
    """Whether it is for programs whose values no correct implementation may change by a bit."""
    size: int
    """Loops of a program."""
    run: Callable[[Sequence[Case]], list[str | None]]
    symbolic: bool = False
    """Whether the sizes of its programs are symbols."""

    def case(self, seed: int, size: int | None = None) -> Case:
        """The program of a seed, of that many loops."""
        return random_program(seed, self.size if size is None else size, self.exact, self.symbolic)

    def shrink(self, case: Case, fails: Fails) -> Case:
        """The smallest case that still fails."""
        return shrink(case, fails)


def checks() -> Iterator[Check]:
    """Every check there is."""
    yield Check("passes", True, 10, lambda cases: [_passes(*case) for case in cases])
    yield Check("passes with symbolic sizes", True, 8, lambda cases: [_passes(*case) for case in cases], True)
    yield Check("fusion", False, 10, lambda cases: [_fusion(*case) for case in cases])
    yield Check("host copies", True, 8, lambda cases: [check_copies(*case) for case in cases])
    for name, runner in targets().items():
        yield Check(f"{name} bit for bit", True, 10, _against_interpreter(runner, planned))
        yield Check(f"{name} with symbolic sizes", True, 6, _against_interpreter(runner, planned), True)
        yield Check(f"{name} alone", True, 6, _against_interpreter(runner, lambda program: program))
        yield Check(f"{name} in shared memory", True, 10, _against_interpreter(runner, plan_memory))
        yield Check(f"{name} fused", False, 5, _fused_or_not(runner))
        yield Check(f"{name} up to rounding", False, 2, _up_to_rounding(runner))
    for name, prepare in (("triton", planned_for_gpu), ("triton shared", shared_on_gpu)):
        run = _against_interpreter(run_triton, prepare, combines_in_memory)
        yield Check(f"{name} bit for bit", True, 8, run)
        yield Check(f"{name} with symbolic sizes", True, 6, run, True)
    yield Check("triton up to rounding", False, 2, _up_to_rounding(run_triton, planned_for_gpu))
    yield Check("cpp streamed bit for bit", True, 10, _against_interpreter(run_cpp_streamed, planned))
    yield Check("cpp streamed up to rounding", False, 2, _up_to_rounding(run_cpp_streamed))


def planned(program: Program) -> Program:
    """What the pipeline makes of a program of loops."""
    return plan_memory(fuse(interchange_reductions(remove_dead_steps(program))))


def planned_for_gpu(program: Program) -> Program:
    """What the pipeline makes of it on a GPU; each buffer has memory of its own."""
    program = narrow_buffers(fuse(interchange_reductions(use_online_softmax(remove_dead_steps(on_a_gpu(program))))))
    return group_updates(
        split_reductions.refuse_after_split(
            split_reductions.split_row_reductions(split_reductions.split_column_reductions(rematerialize(program)))
        )
    )


def shared_on_gpu(program: Program) -> Program:
    """The same with small loops shared among programs (the GPU's), or taken apart, as large ones are."""
    with (
        patch.multiple(split_reductions, PROGRAMS=4, UNKNOWN_ROWS=3, MAX_PERSISTENT_ELEMENTS=8),
        patch.multiple(split_reductions, MIN_SPLIT_ROW_ELEMENTS=8, PART_ELEMENTS=3),
    ):
        return planned_for_gpu(program)


def combines_in_memory(program: Program) -> bool:
    """Do its loops combine nothing in memory but what GPUs can? Lowering asks the library for all else."""
    table = program.table
    loops = [step for step in program.steps if isinstance(step, Loop) and make_plan(step).atomic]
    combining = [store for loop in loops for store in loop.stores if store.mode != "set"]
    return all(CUDA.has_atomic(store.mode, table[store.buffer].dtype) for store in combining)


def _passes(program: Program, inputs: Inputs) -> str | None:
    sizes = numbers_of(program, inputs)
    verify(program, sizes)
    want = _outputs(specialise(program, sizes), inputs)
    for run in (remove_dead_steps, interchange_reductions, fuse, plan_memory):
        program = run(program)
        verify(program, sizes)
        if (found := first_difference(program, want, _outputs(program, inputs))) is not None:
            return f"after {run.__name__}: {found}"
    return None


def _fusion(program: Program, inputs: Inputs) -> str | None:
    fused = fuse(program)
    verify(fused)
    return first_difference(program, _outputs(program, inputs), _outputs(fused, inputs))


def _outputs(program: Program, inputs: Inputs) -> Outputs:
    return [np.asarray(output) for output in interpret(program, {n: np.copy(a) for n, a in inputs.items()})]


def _against_interpreter(
    runner: Runner, prepare: Callable[[Program], Program], suits: Callable[[Program], bool] = lambda program: True
) -> Callable[..., list[str | None]]:
    """Programs that do not suit the runner, once prepared, are left out."""

    def run(cases: Sequence[Case]) -> list[str | None]:
        ready = [prepare(program) for program, _ in cases]
        chosen = [number for number, program in enumerate(ready) if suits(program)]
        found: list[str | None] = [None] * len(cases)
        for number, got in zip(chosen, runner([(ready[n], cases[n][1]) for n in chosen]), strict=True):
            found[number] = first_difference(cases[number][0], _outputs(*cases[number]), got)
        return found

    return run


def _fused_or_not(runner: Runner) -> Callable[..., list[str | None]]:
    """Fusion changes no bit of what kernels compute, but for the order in which floats are summed.

    Column sums go block by block of a loop's rows, which fusion chooses; and g++ sums a row in as many lanes as suit
    all that the loop does. Programs with such sums are left out.
    """

    def run(cases: Sequence[Case]) -> list[str | None]:
        alike = [number for number, (program, _) in enumerate(cases) if not _sums(program)]
        chosen = [cases[number] for number in alike]
        both = runner([*chosen, *((fuse(program), inputs) for program, inputs in chosen)])
        found: list[str | None] = [None] * len(cases)
        for number, one, two in zip(alike, both[: len(alike)], both[len(alike) :], strict=True):
            found[number] = first_difference(cases[number][0], one, two)
        return found

    return run


def _sums(program: Program) -> bool:
    """Are floats summed (or multiplied) in an order that is the kernel's?"""
    table = program.table
    combined = {table[s.buffer].dtype for step in program.steps for s in step.stores if s.mode in ("sum", "prod")}
    values = [value for step in program.steps for value in step.body]
    combined |= {v.dtype for v in values if isinstance(v, Reduce) and v.op in ("sum", "prod")}
    return any(DTYPES[dtype] == "float" for dtype in combined)


def _up_to_rounding(
    runner: Runner, prepare: Callable[[Program], Program] = lambda program: program
) -> Callable[..., list[str | None]]:
    """Only programs without jumps: elsewhere a last bit may decide between two right answers."""

    def run(cases: Sequence[Case]) -> list[str | None]:
        smooth = [number for number, (program, _) in enumerate(cases) if not _jumps(program)]
        found: list[str | None] = [None] * len(cases)
        for number, got in zip(smooth, runner([(prepare(cases[n][0]), cases[n][1]) for n in smooth]), strict=True):
            program, inputs = cases[number]
            found[number] = first_difference(program, _outputs(program, inputs), got, rtol=1e-4, atol=1e-4)
        return found

    return run


def _jumps(program: Program) -> bool:
    for step in program.steps:
        assert isinstance(step, Loop)
        for value in step.body:
            match value:
                case Apply("cast", (arg,), dtype):
                    if DTYPES[dtype] != "float" and DTYPES[step.body[arg].dtype] == "float":
                        return True
                case Apply(op) if op in CHOICES:
                    return True
                case Reduce("argmax" | "argmin" | "any" | "all"):
                    return True
    return False


def first_difference(
    program: Program, want: Sequence[np.ndarray], got: Sequence[np.ndarray], rtol: float = 0.0, atol: float = 0.0
) -> str | None:
    """Where two lists of outputs differ first; 16-bit outputs may differ by a rounding where others may."""
    for view, one, two in zip(program.outputs, map(np.asarray, want), map(np.asarray, got), strict=True):
        assert one.shape == two.shape, f"{view}: {one.shape}, {two.shape}"
        coarse = program.table[view.buffer].dtype in ("bfloat16", "float16")
        wide = np.asarray(one, np.float64), np.asarray(two, np.float64)
        relative = 2e-2 if rtol and coarse else rtol
        same = np.isclose(*wide, rtol=relative, atol=atol, equal_nan=True) if rtol else _equal(one, two)
        if not same.all():
            at = tuple(int(n) for n in np.argwhere(~same)[0]) if same.shape else ()
            wrong = int((~same).sum())
            return f"{view.buffer}{list(at)} is {two[at]!r}, not {one[at]!r} ({wrong} of {same.size} differ)"
    return None


def _equal(one: np.ndarray, two: np.ndarray) -> np.ndarray:
    return (one == two) | ((one != one) & (two != two))
