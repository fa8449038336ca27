"""The how-tos, followed: what they say is enough, and touches as few files as they say."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dcompile import device_traits
from dcompile.capture.adapters.gradient_sync import GradientSync
from dcompile.capture.adapters.plain import PlainAdapter
from dcompile.codegen.emit import select_target
from dcompile.codegen.emit.target import EmitRequest, KernelSource, Target
from dcompile.device_traits import CUDA
from dcompile.ir.buffers import Buffer
from dcompile.ir.index import var
from dcompile.ir.nodes import Apply, Load, Loop, Program, Store, View
from dcompile.ir.ops import OPS
from tests.codegen.emit.all_kernels import kernels_of

ROOT = Path(__file__).parents[2]
HOWTO_OP = ROOT / "docs/howto/op.md"


class PackageCopy:
    """dcompile in a folder of its own, and which of its files were touched."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.touched: set[str] = set()
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "dcompile", folder / "dcompile", ignore=ignored)

    def replace(self, path: str, old: str, new: str) -> None:
        """Put `new` in the place of `old`, which is there once."""
        file = self.folder / "dcompile" / path
        text = file.read_text()
        assert text.count(old) == 1, f"{path} has {text.count(old)} times {old!r}"
        file.write_text(text.replace(old, new))
        self.touched.add(path)

    def insert(self, path: str, before: str, text: str) -> None:
        self.replace(path, before, text + before)

    def add(self, path: str, text: str) -> None:
        (self.folder / "dcompile" / path).write_text(text)
        self.touched.add(path)


def add_rule(copy: PackageCopy) -> None:
    """docs/howto/op.md: a loop, by a row that the page shows."""
    (row,) = re.findall(r'^"aten.special_cheb.*?^\),\n', HOWTO_OP.read_text(), re.M | re.S)
    copy.insert("codegen/lower/rules/pointwise.py", '"aten.gcd.default": Pointwise', row)


def add_decomposition(copy: PackageCopy) -> None:
    (row,) = re.findall(r"^aten.special_spherical.*\n", HOWTO_OP.read_text(), re.M)
    copy.insert("codegen/lower/decompositions/aten.py", "aten.bmm.default: bmm,", row)


def add_library_op(copy: PackageCopy) -> None:
    copy.insert("ir/library_ops.py", '"_grouped_mm", "addbmm"', '"_cdist_forward", ')


def add_scalar_op(copy: PackageCopy) -> None:
    """The Bessel function of the first kind and order 0, which ATen computes otherwise."""
    meaning = "lambda x: np.cos(np.multiply.outer(x, np.sin(np.linspace(0, np.pi, 999)))).mean(-1)"
    row = f'        Op("bessel_j0", 1, "same", _FLOAT, {meaning}, 40),\n'
    copy.insert("ir/ops.py", '        Op("asin", 1,', row)
    copy.insert("codegen/emit/cpp/ops.py", '"lgamma": "', '"bessel_j0": "__builtin_j0({0})", ')
    copy.insert("codegen/emit/triton/ops.py", '"lgamma": "', '"bessel_j0": "libdevice.j0({0})", ')
    rule = '"aten.special_bessel_j0.default": Pointwise(scalar_ops.simple("bessel_j0"), 1, heavy=True),\n        '
    copy.insert("codegen/lower/rules/pointwise.py", '"aten.gcd.default": Pointwise', rule)


PASS = '''"""Buffers in the order of their names."""

from dataclasses import replace

from dcompile.ir.nodes import Program


def sort_buffers(program: Program) -> Program:
    """Sort the table of buffers. Guarantees: the same steps."""
    return replace(program, buffers=tuple(sorted(program.buffers, key=lambda buffer: buffer.name)))
'''


def add_pass(copy: PackageCopy) -> None:
    """docs/howto/pass.md."""
    copy.add("codegen/schedule/order/sort_buffers.py", PASS)
    line = "    from dcompile.codegen.schedule.order.sort_buffers import sort_buffers\n"
    copy.insert("pipeline.py", "    from dcompile.collectives.coalesce_small import coalesce_small\n", line)
    copy.insert(
        "pipeline.py", "        LoopPass(fold_average, needs_loops=False),\n", "        LoopPass(sort_buffers),\n"
    )


KINDS, START = "ir/collective_kinds.py", "runtime/communication/model_collectives.py"
NAME, ROW = ', "broadcast"] |', '        CollectiveTraits("broadcast", ("broadcast",), "same", ring_passes=1),\n'
CASE = '        case "broadcast":\n            return start_broadcast(group, sent[0], how[0], limit_s)\n'


def take_collective_out(copy: PackageCopy) -> None:
    """A dcompile that does not know broadcasts."""
    copy.replace(KINDS, NAME, "] |")
    copy.replace(KINDS, ROW, "")
    copy.replace(START, CASE, "")
    copy.touched.clear()


def add_collective_row(copy: PackageCopy) -> None:
    """docs/howto/collective.md, its first step."""
    copy.replace(KINDS, '"all_to_all"] |', f'"all_to_all"{NAME}')
    copy.insert(KINDS, "    )\n}\n\n\ndef bucket_traits", ROW)


def add_collective_code(copy: PackageCopy) -> None:
    """Its second step: what mypy names."""
    copy.insert(START, '        case "all_gather":\n', CASE)


def test_op_pass_and_collective_by_their_howtos(tmp_path: Path) -> None:
    copy = PackageCopy(tmp_path)
    take_collective_out(copy)
    touched = []
    ops = (add_rule, add_decomposition, add_library_op, add_scalar_op)
    for follow in (*ops, add_pass, lambda copy: (add_collective_row(copy), add_collective_code(copy))):
        copy.touched.clear()
        follow(copy)
        touched.append(len(copy.touched))
    assert touched == [1, 1, 1, 4, 2, 2]
    command = (sys.executable, str(Path(__file__).with_name("probe.py")), str(tmp_path / "dump"))
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "DCOMPILE_LOG": ""}
    made = subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment)
    assert made.returncode == 0, made.stderr
    found = json.loads(made.stdout)
    assert found["difference"] < 1e-6 and found["spelled"] == [True, True]
    assert (found["kernels"], found["fallbacks"]) == (1, {}), "one loop that reads a library call's result"
    assert "sort_buffers" in found["passes"]
    assert found["steps"][-2:] == ["Collective", "Wait"] and "Extern" not in found["steps"]


def test_mypy_names_what_a_new_collective_kind_lacks(tmp_path: Path) -> None:
    """Of the files that know the kinds: other modules count as untyped, which leaves torch out."""
    copy = PackageCopy(tmp_path)
    take_collective_out(copy)
    add_collective_row(copy)
    assert copy.touched == {KINDS}
    files = [path for path in sorted((tmp_path / "dcompile").rglob("*.py")) if "collective_kinds" in path.read_text()]
    files.append(tmp_path / "dcompile" / KINDS)
    command = (sys.executable, "-m", "mypy", "--follow-imports=skip", *map(str, files))
    found = subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=tmp_path)
    assert set(re.findall(r"^dcompile/(\S+?\.py):\d+: error", found.stdout, re.M)) == {START}, found.stdout


def test_a_target_is_a_row_of_traits_and_an_emitter(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/howto/target.md: nothing else has to know its name."""

    def emit(loop: Loop, table: object, request: EmitRequest) -> KernelSource:
        return KernelSource("k", f"{loop.body[1].op} on made-up", ("x", "y"), 1, False)  # type: ignore[union-attr]

    traits = replace(CUDA, name="made-up")
    monkeypatch.setitem(device_traits.DEVICE_TRAITS, "made-up", traits)  # type: ignore[attr-defined]
    target = Target("text", {name: name for name in OPS}, traits, emit)
    monkeypatch.setitem(select_target.TARGETS, "made-up", target)  # type: ignore[attr-defined]
    x, y = (Buffer(name, "float32", (4,), (1,), "made-up") for name in "xy")
    index = var("i0")
    body = (Load("x", index, "float32"), Apply("exp", (0,), "float32"))
    loop = Loop("exp", (4,), (), body, (Store("y", index, 1),))
    program = Program("graph", ("x",), (View("y", (4,), (1,)),), (x, y), (loop,))
    kernels = kernels_of(program, "forward")
    assert [source.text for source in kernels.sources] == ["exp on made-up"]


def test_the_howto_of_adapters_names_what_there_is() -> None:
    """docs/howto/adapter.md: each member of its table is one of the interface, and so are the points of a strategy."""
    text = (ROOT / "docs/howto/adapter.md").read_text()
    members = [name for row in re.findall(r"^\| (`.*?) \|", text, re.M) for name in re.findall(r"`(\w+)`", row)]
    assert len(members) >= 8 and not [name for name in members if not hasattr(PlainAdapter, name)]
    points = ("begin_call", "before_backward", "run_backward", "after_call")
    assert not [name for name in points if not callable(getattr(GradientSync, name, None))]
