"""Plan small models with the dcompile that is first on the path, and write the text of every program to a folder.

    python -m tools.collect_programs OUT [--only PATTERN] [--source DIR] [--all]

`tools/compare_programs.py` runs this file once for each revision, so it belongs to neither. It calls dcompile through
`dcompile.explain`, the `dump` option and the few internal names of `DcompileRevision`. If a name has moved, the old and
the new place are both tried. Nothing is built, and no kernel runs.

One capture is planned twice: for the CPU, where the model is, and for a GPU, with devices of the captured graph
replaced. Passes that run on a graph before it is lowered therefore see only the CPU.

    OUT/CASE/DEVICE/GRAPH/graph.py       the captured graph
    OUT/CASE/DEVICE/GRAPH/passes/*.txt   the program after each pass; order.txt lists them
    OUT/CASE/DEVICE/GRAPH/kernels.txt    source and launch of each kernel
    OUT/CASE/DEVICE/GRAPH/library.cpp    functions that C++ kernels call
    OUT/CASE/DEVICE/GRAPH/host.py        the host program
    OUT/CASE/error.txt                   the error that ended planning a case
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fnmatch
import importlib
import logging
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from tools.compare_programs import ERROR, GRAPH, HOST, KERNEL, KERNELS, LIBRARY, ORDER

CAPABILITY = (9, 0)
"""Compute capability of the GPU that programs are planned for."""


class DcompileRevision:
    """Internal names of dcompile that are needed to plan without building."""

    def __init__(self, source: Path | None = None) -> None:
        import dcompile

        self.root = Path(dcompile.__file__).resolve().parent
        if source is not None and self.root.parent != source.resolve():
            raise ImportError(f"dcompile was imported from {self.root.parent}, not from {source}")
        dcompile.explain(torch.neg, torch.ones(2))  # loads the modules for a plan
        self.pipeline = _find("Pipeline", "dcompile.pipeline", "dcompile.compiler.driver", "dcompile.driver")
        self.emit_host = _find("emit", "dcompile.codegen.emit.host.program", "dcompile.codegen.emit.host")
        self.cpp_text = _find("text_of", "dcompile.codegen.emit.cpp.compile", "dcompile.codegen.emit.build")

    def planning_without_data(self) -> list[Any]:
        """Return patches under which `explain` plans graphs of tensors without memory, too."""
        plan_only = importlib.import_module("dcompile.explain.plan_only")
        if hasattr(plan_only, "PLANNED"):
            return [mock.patch.object(plan_only, "PLANNED", dataclasses.replace(plan_only.PLANNED, needs_data=False))]
        return [mock.patch.object(graph, "needs_data", False) for graph in _classes_with("needs_data")]  # older

    @property
    def modules(self) -> tuple[str, ...]:
        """Return the dotted names of all modules of the package."""
        paths = (path.relative_to(self.root.parent).with_suffix("") for path in self.root.rglob("*.py"))
        return tuple(".".join(path.parts).removesuffix(".__init__") for path in paths)


def _find(name: str, *modules: str) -> Any:
    """Return attribute `name` of the first of `modules` that has it. Raises LookupError."""
    for module in modules:
        with contextlib.suppress(ModuleNotFoundError, AttributeError):
            return getattr(importlib.import_module(module), name)
    raise LookupError(f"no {name} in {' or '.join(modules)}: tell tools/collect_programs.py where it is now")


def _classes_with(attribute: str) -> list[Any]:
    """Return dcompile's classes in loaded modules that define `attribute`. Raises LookupError if none does."""
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "dcompile"]
    values = {id(value): value for module in modules for value in vars(module).values() if isinstance(value, type)}
    found = [value for value in values.values() if attribute in vars(value)]
    if not found:
        raise LookupError(f"no class has {attribute!r}: tell tools/collect_programs.py what replaced it")
    return found


# --- planning ---------------------------------------------------------------------------------------------------------


class ProgramCollector:
    """Plans cases one after another, and writes them to folders in `out`."""

    def __init__(self, out: Path, revision: DcompileRevision) -> None:
        self.out, self.revision = out, revision
        self._folder = out
        self._clean = TextNormaliser(revision.modules)
        self._plan = revision.pipeline.plan

    def collect(self, name: str, run: Callable[[Callable[..., Any]], Any]) -> None:
        """Write all programs of one case: `run` calls its argument in place of compiling."""
        import dcompile

        self._folder = self.out / name
        self._folder.mkdir(parents=True)
        torch._dynamo.reset()
        torch.manual_seed(0)
        try:
            with self._planning_for_both(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                run(dcompile.explain)
        except Exception as error:  # other cases are still compared
            lines = str(error).strip().splitlines() or [""]
            (self._folder / ERROR).write_text(self._clean(f"{type(error).__name__}: {lines[0]}\n"))

    @contextlib.contextmanager
    def _planning_for_both(self) -> Iterator[None]:
        """Plan every graph, while the context lasts, for both devices, and write its programs."""

        def plan(pipeline: Any, gm: Any, request: Any, *measures: Any) -> Any:
            planned = self._plan_and_write(pipeline, gm, request, "cpu", *measures)
            gpu = mock.patch.object(torch.cuda, "get_device_capability", lambda device=None: CAPABILITY)
            with relabel_devices(gm, torch.device("cuda:0")), gpu:
                self._plan_and_write(pipeline, gm, request, "gpu", *measures)
            return planned

        with contextlib.ExitStack() as patches:
            patches.enter_context(mock.patch.object(self.revision.pipeline, "plan", plan))
            for patch in self.revision.planning_without_data():
                patches.enter_context(patch)
            yield

    def _plan_and_write(self, pipeline: Any, gm: Any, request: Any, device: str, *measures: Any) -> Any:
        folder = _free_folder(self._folder / device / request.name)
        dumps = folder / "dump"
        config = dataclasses.replace(pipeline.config, dump=str(dumps))
        plan = self._plan(self.revision.pipeline(config), gm, request, *measures)
        names = [source.name for source in plan.kernels.sources]
        saved = frozenset(plan.lowered.program.inputs[position] for position in request.saved)
        recycle = request.kind == "inference"
        host = self.revision.emit_host(plan.program, plan.kernels, recycle=recycle, saved=saved)
        texts = {
            GRAPH: gm.print_readable(print_output=False),
            HOST: host,
            KERNELS: "".join(map(_kernel_text, plan.kernels.sources)),
            LIBRARY: self._library(plan.kernels.sources),
            **_pass_texts(dumps),
        }
        shutil.rmtree(dumps)
        for file, text in texts.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(self._clean(text, names))
        return plan

    def _library(self, sources: Sequence[Any]) -> str:
        """Return the library functions that a program's C++ kernels call; they precede kernels in a file."""
        kernels = [source for source in sources if not source.launches]
        if not kernels:
            return ""
        text: str = self.revision.cpp_text(kernels)
        return text[: min(text.index(source.text) for source in kernels)]


def _free_folder(folder: Path) -> Path:
    """Return `folder`, or a numbered one: a case may compile several functions, whose graphs have equal names."""
    number, found = 1, folder
    while found.exists():
        number += 1
        found = folder.with_name(f"{folder.name}-{number}")
    return found


def _kernel_text(source: Any) -> str:
    """Return a kernel's source, after the values of its record's other fields; names of fields may change.

    The kernel's name is left out, since another kernel before it would change its number.
    """
    name, text, *values = dataclasses.astuple(source)
    return f"{KERNEL}// {values!r}\n{text.rstrip()}\n".replace(name, "kernel")


def _pass_texts(dumps: Path) -> dict[str, str]:
    """Return programs after each pass, by file name without the pass's number, which depends on earlier passes."""
    files = sorted(dumps.rglob("*.txt"))
    names = [re.sub(r"^\d+_", "", file.name) for file in files]
    order = "".join(f"{name.removesuffix('.txt')}\n" for name in names)
    return {f"passes/{name}": file.read_text() for name, file in zip(names, files, strict=True)} | {ORDER: order}


@contextlib.contextmanager
def relabel_devices(gm: torch.fx.GraphModule, device: torch.device) -> Iterator[None]:
    """Replace the device of all fake tensors of a graph captured on the CPU by `device`, while the context lasts."""
    nodes = list(gm.graph.nodes)
    values = pytree.tree_leaves([node.meta.get("val") for node in nodes])
    fakes = {id(value): value for value in values if isinstance(value, FakeTensor)}.values()
    devices = [(fake, fake.fake_device) for fake in fakes]
    arguments = [(node, node.args, node.kwargs) for node in nodes]

    def moved(value: Any) -> Any:
        return device if value == torch.device("cpu") and isinstance(value, torch.device) else value

    try:
        for fake, _ in devices:
            fake.fake_device = device
        for node, args, kwargs in arguments:
            node.args, node.kwargs = torch.fx.node.map_aggregate((args, kwargs), moved)
        yield
    finally:
        for fake, before in devices:
            fake.fake_device = before
        for node, args, kwargs in arguments:
            node.args, node.kwargs = args, kwargs


# --- normalising ------------------------------------------------------------------------------------------------------


class TextNormaliser:
    """Replaces paths of dcompile's source and names of its modules in texts."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = frozenset(modules)

    def __call__(self, text: str, kernels: Sequence[str] = ()) -> str:
        """Replace positions in dcompile's source, addresses and serial numbers; number the kernels.

        Names of kernels are digests of their text, so one changed line would change many lines of the host program.
        """
        for number, kernel in enumerate(kernels):
            text = text.replace(kernel, f"kernel{number}")
        text = re.sub(r"([\w./-]*/\w+\.py)(?::\d+|(\", line )\d+)?", self._hide_file, text)
        text = re.sub(r"(?<![\w.])dcompile(\.\w+)+", self._hide_module, text)
        text = re.sub(r"\b(dcompile_[a-z]+)_\w*?[0-9a-f]{8}\b", r"\1", text)  # functions in Triton
        text = re.sub(r"\b(\w+_)?dcompile_entry_\d+", "dcompile_entry", text)
        return re.sub(r"\bat 0x[0-9a-f]{6,}", "at 0x*", text)

    def _hide_file(self, found: re.Match[str]) -> str:
        """Return `dcompile/*.py`, without a line number, for an absolute or relative path of a file of dcompile."""
        path = found[1].rpartition("dcompile/")[2].removesuffix(".py")
        if f"dcompile.{path.replace('/', '.')}" not in self._modules:
            return found[0]
        return f"dcompile/*.py{found[2] or ''}"

    def _hide_module(self, found: re.Match[str]) -> str:
        """Replace the longest module name that a dotted name starts with by `dcompile.*`."""
        parts = found[0].split(".")
        for length in range(len(parts), 1, -1):
            if ".".join(parts[:length]) in self._modules:
                return ".".join(["dcompile.*", *parts[length:]])
        return found[0]


def main() -> int:
    from tools.program_cases import cases

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="*", help="names of cases, with * and ?")
    parser.add_argument("--source", type=Path, help="the folder that dcompile is to come from")
    parser.add_argument("--all", action="store_true", help="all models of tests/models, not a sample")
    arguments = parser.parse_args()
    torch._logging.set_logs(all=logging.ERROR)  # no warnings of known graph breaks
    collector = ProgramCollector(arguments.out.resolve(), DcompileRevision(arguments.source))
    for name, run in cases(everything=arguments.all).items():
        if fnmatch.fnmatch(name, arguments.only):
            collector.collect(name, run)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
