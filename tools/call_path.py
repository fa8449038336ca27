"""Print the path of one call: the files from `dcompile.compile(ddp_model)` down to a kernel and the all-reduce.

`python -m tools.call_path` runs one training step in a process group of one rank, and prints
`docs/internals/path.md`. `tests/test_docs.py` checks that the page is up to date.

The path is measured. `LANDMARKS` names a function of each stage. When a step enters it for the first time, the files on
the call stack belong to the path. What a landmark merely calls on the way does not, so the page shows what leads from
one stage to the next, and no helpers.
"""

from __future__ import annotations

import ast
import logging
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import dcompile
from tools.one_program import Block

PACKAGE = Path(dcompile.__file__).parent


@dataclass(frozen=True, slots=True)
class Landmark:
    """A function at which a stage is reached."""

    file: str
    function: str
    title: str


LANDMARKS = (
    Landmark("capture/entry.py", "Entry.__init__", "`compile` installs an entry in the module"),
    Landmark("capture/adapters/ddp_sync.py", "DdpSync.__init__", "The first call chooses the adapter for DDP"),
    Landmark("compat/layer_calls/frame.py", "FrameCalls.__init__", "TorchDynamo traces the frame, equal layers once"),
    Landmark("capture/dynamo_backend.py", "Backend.__call__", "TorchDynamo hands over its graph"),
    Landmark("runtime/cache/disk.py", "KernelCache.find_trace", "A trace of an earlier start is looked up"),
    Landmark("capture/passes/run_passes.py", "run_passes", "`DYNAMO_PASSES` rewrite the graph"),
    Landmark("capture/joint_graph.py", "partition_joint", "AOTAutograd traces, and the joint graph is split"),
    Landmark("runtime/cache/disk.py", "KernelCache.find_graph", "A program of an earlier start is looked up"),
    Landmark("codegen/lower/loop_builder.py", "Body.reduce", "A rule lowers an ATen operation to a loop"),
    Landmark("codegen/schedule/fusion/fuse.py", "fuse", "`LOOP_PASSES` rewrite the program: fusion"),
    Landmark("collectives/ddp_all_reduce.py", "insert_ddp_buckets", "`LOOP_PASSES`: gradients get buckets"),
    Landmark("codegen/schedule/memory/plan.py", "plan_memory", "`LOOP_PASSES`: buffers get their places"),
    Landmark("codegen/emit/cpp/vectorize.py", "vectorize", "`NEST_PASSES` plan a kernel"),
    Landmark("codegen/emit/cpp/printer.py", "Printer.bounds", "The kernel is printed"),
    Landmark("codegen/emit/cpp/compile.py", "Compilers.begin", "`g++` starts, in threads"),
    Landmark("codegen/emit/host/program.py", "HostProgramWriter.print", "The host program is printed"),
    Landmark("runtime/program/executable.py", "HostProgram.__init__", "The host program is loaded"),
    Landmark("runtime/program/argument_table.py", "kernel_calls", "The forward runs, up to its first kernel"),
    Landmark("codegen/emit/host/program.py", "CollectiveCalls.start", "The backward is compiled likewise"),
    Landmark("runtime/communication/work.py", "start_sum", "The backward starts its all-reduce"),
    Landmark("capture/adapters/grad_field.py", "MergedGradients.add", "Reduced gradients go to their parameters"),
)
INTRODUCTION = """# The path of one call

This page is printed by `python -m tools.call_path`, which runs one training step of the model of
[one-program.md](one-program.md) in DistributedDataParallel on a CPU, with an empty cache.

Each section is a stage, in the order in which the step reaches them. It ends at the function of the stage, and lists
the files on the call stack there that no earlier section has: for each, the function by which it is entered.
Helpers that return before are left out. So are the other rows of a list of passes ([passes.md](passes.md)).
"""


@dataclass
class CallPath:
    """Files of the path so far."""

    sections: list[tuple[Landmark, list[tuple[str, str]]]] = field(default_factory=list)
    """Landmarks in the order in which they were reached -> new (file, function) of each."""
    _seen: set[str] = field(default_factory=set)
    _reached: set[Landmark] = field(default_factory=set)

    def watch(self, frame: FrameType, event: str, argument: Any) -> None:
        """Profile function for `sys.setprofile`."""
        del argument
        if event != "call" or frame.f_code.co_qualname not in _FUNCTIONS:
            return
        found = _LOOKUP.get((_file_of(frame), frame.f_code.co_qualname))
        if found is None or found in self._reached:
            return
        self._reached.add(found)
        new: dict[str, str] = {}
        for file, function in reversed([*_stack(frame)]):
            if file not in self._seen:
                new.setdefault(file, function)
        self._seen |= set(new)
        self.sections.append((found, [*new.items()]))

    def missed(self) -> list[Landmark]:
        """Return the landmarks that the step did not enter."""
        return [mark for mark in LANDMARKS if mark not in self._reached]

    def files(self) -> list[tuple[str, str]]:
        """Return all (file, function), in order."""
        return [entry for _, new in self.sections for entry in new]


_LOOKUP: dict[tuple[str | None, str], Landmark] = {(mark.file, mark.function): mark for mark in LANDMARKS}
_FUNCTIONS = frozenset(mark.function for mark in LANDMARKS)


def _file_of(frame: FrameType) -> str | None:
    """Return the file of a frame, relative to the package; None if it is not in it."""
    path = Path(frame.f_code.co_filename)
    return str(path.relative_to(PACKAGE)) if path.is_relative_to(PACKAGE) else None


def _stack(frame: FrameType | None) -> Iterator[tuple[str, str]]:
    """Yield (file, function) of dcompile's frames, the innermost first."""
    while frame is not None:
        name = _file_of(frame)
        if name is not None:
            yield name, frame.f_code.co_qualname.split(".<locals>")[0]
        frame = frame.f_back


def walk() -> CallPath:
    """Run one training step and return its path."""
    logging.getLogger("dcompile").setLevel(logging.WARNING)
    for name in [name for name in os.environ if name.startswith("DCOMPILE_")]:
        del os.environ[name]
    found = CallPath()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with tempfile.TemporaryDirectory() as cache:
            torch.manual_seed(0)
            model = DistributedDataParallel(Block())
            x = torch.randn(32, 64)
            threading.setprofile(found.watch)
            sys.setprofile(found.watch)
            dcompile.compile(model, options={"matmul": "aten", "receipt": False, "cache_dir": cache})
            model(x).square().mean().backward()
            sys.setprofile(None)
            threading.setprofile(None)
    finally:
        dist.destroy_process_group()
    if missed := [f"{mark.function} in {mark.file}" for mark in found.missed()]:
        raise LookupError(f"the step does not enter {', '.join(missed)}: correct LANDMARKS in tools/call_path.py")
    return found


def summary(file: str, function: str) -> str:
    """Return the first line of a function's docstring, or of its class's or its module's. Raises LookupError."""
    tree: Any = ast.parse((PACKAGE / file).read_text())
    text = ast.get_docstring(tree)
    for name in function.split("."):
        inside = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        tree = next((node for node in reversed(inside) if node.name == name), None)  # the first ones may be overloads
        if tree is None:
            raise LookupError(f"{file} has no {function}")
        text = ast.get_docstring(tree) or text
    return " ".join((text or "").split("\n\n")[0].split())


def page() -> str:
    """Return the whole page."""
    found = walk()
    parts = [INTRODUCTION]
    number = 0
    for section, (mark, new) in enumerate(found.sections, 1):
        parts.append(f"## {section}. {mark.title}\n")
        for file, function in new:
            number += 1
            parts.append(f"{number}. `dcompile/{file}`, `{function}`: {summary(file, function)}")
        parts.append(f"{chr(10) if new else ''}Reached: `{mark.function}` in `dcompile/{mark.file}`.\n")
    return "\n".join(parts).rstrip() + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
