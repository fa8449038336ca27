"""What was found, and a script that shows it: operations as a function of saved inputs, compiled and not."""

from __future__ import annotations

import contextlib
import io
import runpy
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch.fx import Node

from dcompile.bisect.recording import WrongCall
from dcompile.bisect.stages import Place, ProgramSearch
from dcompile.config import Config

MAX_LINES = 60
"""Lines of a script that a person takes in at a glance."""
INPUTS = "bisect_inputs.pt"
NONE = "no difference"
_TEXT = '''"""{what}. Run it as it is, beside {inputs}."""

from math import inf, nan
from pathlib import Path

import torch
from torch import device

import dcompile
from dcompile.verify.compare import compare
from dcompile.verify.reference import copied, in_float64


{graph}

inputs = torch.load(Path(__file__).with_name("{inputs}"))
with torch.no_grad():
    given = copied(inputs)  # before float64, which would be the copies'
    got = dcompile.compile(graph, options={options})(*copied(inputs))
    same = graph(*copied(inputs))
    with in_float64():
        exact = graph(*given)
for place, results in enumerate(zip(got, same, exact)):
    if isinstance(results[0], torch.Tensor):
        print(f"result {{place}}: {{compare(*results) or '{none}'}}")
'''


@dataclass(frozen=True, slots=True)
class Repro:
    """A script and its inputs."""

    script: str
    inputs: list[Any]

    def save(self, directory: str | Path = ".") -> Path:
        """Write `repro.py` and its inputs into a directory, which is made; return the script's path."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(self.inputs, folder / INPUTS)
        (folder / "repro.py").write_text(self.script)
        return folder / "repro.py"

    def run(self) -> str:
        """Run the script in this process, and return what it prints."""
        out = io.StringIO()
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(out):
            runpy.run_path(str(self.save(folder)), run_name="dcompile_repro")
        return out.getvalue()

    @property
    def differs(self) -> bool:
        """Whether the script shows a difference."""
        return any(NONE not in line for line in self.run().splitlines())


@dataclass(frozen=True, slots=True)
class Finding:
    """What makes a result wrong. `print` shows it as lines."""

    program: str
    """"forward0", "backward0", ...: as in the receipt and in dumps. Empty if it is none."""
    place: Place
    repro: Repro | None = None
    """A script that shows the difference; None where it takes the whole model, or its other ranks."""

    def __str__(self) -> str:
        place = self.place
        lines = [f"{place.kind} {place.name}" + (f", in {self.program}" if self.program else "")]
        lines += [f"  {place.result}: {place.miss}" if place.result else f"  {place.miss}"]
        lines += [f"  {note}" for note in place.notes]
        return "\n".join((*lines, *(f"  from {origin}" for origin in place.origin)))


def find_in_call(call: WrongCall, *, runs: bool = True) -> Finding:
    """What makes a program wrong in a call. Without `runs`, its script is not tried: see `make_repro`."""
    search = ProgramSearch(call)
    place = search.find()
    return Finding(search.request.name, place, make_repro(search, place, runs=runs))


def make_repro(search: ProgramSearch, place: Place, *, runs: bool = True) -> Repro | None:
    """The smallest of a few graphs that shows the difference in a script of `MAX_LINES`; None if none does.

    Without `runs`, none is tried, and the first is returned: a backward that is running must not compile.

    The first is of the operations that the wrong kernel computes; the last is the whole graph.
    """
    config, usual = search.pipeline.config, Config()
    named = [f for f in fields(Config) if f.metadata.get("in_key") and f.name != "kernels"]
    options = {f.name: getattr(config, f.name) for f in named if getattr(config, f.name) != getattr(usual, f.name)}
    options["receipt"] = False
    what = f"{place.kind} {place.name}, in {search.request.name}"
    for nodes in (_computed_by(search, place.nodes), [n for n in search.gm.graph.nodes if n.op == "call_function"]):
        if not nodes or len(nodes) > MAX_LINES:
            continue
        outputs = None if nodes[-1].name in place.nodes else search.gm.graph.output_node().args[0]
        single, names = search.part(nodes, outputs)
        code = single.code.strip().replace("def forward(self, ", "def graph(")
        text = _TEXT.format(what=what, inputs=INPUTS, graph=code, options=options, none=NONE)
        repro = Repro(text, [search.given[name] for name in names])
        if text.count("\n") <= MAX_LINES and (not runs or repro.differs):
            return repro
    return None


def _computed_by(search: ProgramSearch, names: Sequence[str]) -> list[Node]:
    """The operations of one step: from its last result back to values that other steps leave in memory."""
    *_, program = search.stages.values()
    last = [node for node in search.gm.graph.nodes if node.name in names]
    if not last:
        return []
    found, todo = {last[-1]}, [last[-1]]
    while todo:
        for node in todo.pop().all_input_nodes:
            if node.op == "call_function" and node.name not in program.table and node not in found:
                found.add(node)
                todo.append(node)
    return [node for node in search.gm.graph.nodes if node in found]
