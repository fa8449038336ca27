"""Imports point down, ir/ knows no torch, the run time loads no compiler, private torch names live in compat/, and
what makes a tensor says on which device."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

LEVELS = (
    ("errors",),  # imports nothing, so that the verifier in ir/ can raise one
    ("ir",),
    (
        "config",
        "compat",
        "device_traits",
        "kernel_backends",
        "logs",
        "machine_model",
        "operators",
        "passes",
        "results",
        "toolchain",
        "verify",
    ),
    ("capture", "collectives", "codegen", "runtime"),
    ("pipeline",),
    ("compiler",),
    ("aot",),
    ("api", "backend", "bisect", "calibrate", "doctor", "explain", "precompile", "training", "__init__", "__main__"),
    ("integrations",),
)
"""Top-level parts of dcompile, lowest first."""

LEVEL = {part: level for level, parts in enumerate(LEVELS) for part in parts}
SUB_LEVELS = {
    "dcompile.codegen": (("nest",), ("lower",), ("schedule",), ("emit",)),
    "dcompile.codegen.emit": (
        ("target", "float8", "kernel_name"), ("host",), ("cpp",), ("triton",), ("select_target", "build"),
    ),
    "dcompile.compiler": (("autotune", "compute_regions", "numerics"), ("driver",), ("caching",), ("dry_run",)),
    "dcompile.capture": (
        ("services",), ("capture_digest", "aliasing"), ("passes",), ("warm_start",), ("call_state",), ("adapters",),
        ("memory_budget", "train_step"),
        ("callables", "compiled_model", "joint_graph"),
        ("captured_graph",),
        ("graph_programs",),
        ("dynamo_backend",),
        ("entry",),
    ),
}  # fmt: skip
"""Parts of some packages, lowest first."""
MIDDLE = ("capture", "collectives", "codegen", "runtime")
MEETING_POINT = "dcompile.collectives.contract"
"""The one module of a middle package that the other middle packages may import."""


@functools.cache
def nodes_of(source: str) -> tuple[ast.AST, ...]:
    """All of a module's nodes. Kept: each rule below looks through the same files."""
    return tuple(ast.walk(ast.parse(source)))


def path_of(node: ast.AST) -> str:
    """`a.b.c` as it is written; nothing for other expressions. `ast.unparse` took most of this file's time."""
    pieces = []
    while isinstance(node, ast.Attribute):
        pieces.append(node.attr)
        node = node.value
    return ".".join((node.id, *reversed(pieces))) if isinstance(node, ast.Name) else ""


def imports(nodes: tuple[ast.AST, ...], module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of all that a module imports, wherever in the file: inside functions too."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: len(module.split(".")) - node.level + is_package]
                base = ".".join((*parents, base) if base else parents)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def part_of(dotted: str, parts: frozenset[str]) -> str:
    """The part of dcompile that a dotted name belongs to; what the package itself offers is `__init__`."""
    name = (*dotted.split("."), "__init__")[1]
    return name if name in parts else "__init__"


def upward_arrows(source: str, module: str, is_package: bool = False) -> list[str]:
    """What is wrong with the imports of one module."""
    wrong: list[str] = []
    mine = part_of(module, frozenset(LEVEL))
    for line, name in imports(nodes_of(source), module, is_package):
        where = f"{module}:{line} imports {name}"
        if mine == "ir" and name.split(".")[0] == "torch":
            wrong.append(f"{where}: ir/ must not need torch")
        if name.split(".")[0] != "dcompile":
            continue
        other = part_of(name, frozenset(LEVEL))
        if LEVEL[other] > LEVEL[mine]:
            wrong.append(f"{where}: {other} lies above {mine}")
        elif mine != other and mine in MIDDLE and other in MIDDLE and f"{name}.".find(f"{MEETING_POINT}.") != 0:
            wrong.append(f"{where}: {mine} and {other} meet only in ir/ and {MEETING_POINT}")
    return wrong


def upward_arrows_inside(source: str, module: str, is_package: bool = False) -> list[str]:
    """The same for the parts of one package."""
    wrong: list[str] = []
    for package, levels in SUB_LEVELS.items():
        level = {f"{package}.{part}": number for number, parts in enumerate(levels) for part in parts}
        depth = package.count(".") + 2
        mine = ".".join(module.split(".")[:depth])
        if mine == package or not mine.startswith(f"{package}."):
            continue
        if mine not in level:
            return [f"{module}: SUB_LEVELS does not say where {mine} stands in {package}"]
        for line, name in imports(nodes_of(source), module, is_package):
            other = ".".join(name.split(".")[:depth])
            if level.get(other, -1) > level[mine]:
                wrong.append(f"{module}:{line} imports {name}: {other} stands above {mine}")
    return wrong


def circles(found: Mapping[str, tuple[str, bool]]) -> list[list[str]]:
    """Modules that import each other, for whatever purpose: {name: (source, whether it is a package)}."""
    arrows = {name: _imported(name, source, is_package, found) for name, (source, is_package) in found.items()}
    reached = {name: _reached_from(name, arrows) for name in arrows}
    together = {name: frozenset(other for other in reached[name] if name in reached[other]) for name in arrows}
    return sorted(sorted(group) for group in {*together.values()} if len(group) > 1)


def _imported(name: str, source: str, is_package: bool, known: Mapping[str, object]) -> set[str]:
    result = set()
    for _, dotted in imports(nodes_of(source), name, is_package):
        while dotted and dotted not in known:
            dotted = dotted.rpartition(".")[0]
        result.add(dotted)
    return result - {"", name}


def _reached_from(start: str, arrows: Mapping[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        new = arrows[waiting.pop()] - reached
        reached |= new
        waiting += new
    return reached


def private_torch_names(source: str, module: str) -> list[str]:
    """Uses of `torch._x`, at any depth, however imported."""
    nodes = nodes_of(source)
    found = {(line, name) for line, name in imports(nodes, module, False) if _is_private(name)}
    names: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                names |= (
                    {alias.asname: alias.name} if alias.asname else {alias.name.split(".")[0]: alias.name.split(".")[0]}
                )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.Attribute):
            path = path_of(node)
            head, _, rest = path.partition(".")
            if path and _is_private(f"{names.get(head, '')}.{rest}"):
                found.add((node.lineno, path))
    return [f"{module}:{line} uses {name}: private torch names belong in compat/" for line, name in sorted(found)]


FACTORIES = frozenset(f"torch.{name}" for name in (
    "arange", "as_tensor", "empty", "empty_permuted", "empty_strided", "eye", "frombuffer", "full", "linspace", "ones",
    "rand", "randint", "randn", "tensor", "zeros",
))  # fmt: skip


def factories_without_device(source: str, module: str) -> list[str]:
    """Tensors that would be made on the user's default device (`torch.set_default_device`), whatever they are for."""
    calls = [node for node in nodes_of(source) if isinstance(node, ast.Call)]
    return [
        f"{module}:{call.lineno} makes a tensor by {path_of(call.func)} and does not say on which device"
        for call in calls
        if path_of(call.func) in FACTORIES and not any(keyword.arg == "device" for keyword in call.keywords)
    ]


def _is_private(dotted: str) -> bool:
    first, *rest = dotted.split(".")
    return first == "torch" and any(piece.startswith("_") and not piece.startswith("__") for piece in rest)


def modules() -> list[tuple[Path, str]]:
    """All files of dcompile, with their dotted names."""
    paths = sorted((ROOT / "dcompile").rglob("*.py"))
    dotted = (".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths)
    return list(zip(paths, dotted, strict=True))


@pytest.fixture(scope="module", autouse=True)
def forgotten() -> Iterator[None]:
    """Half a million nodes would be in the way of the tests behind these, whenever garbage is looked for."""
    yield
    nodes_of.cache_clear()


def test_imports_point_down() -> None:
    wrong = [w for path, name in modules() for w in upward_arrows(path.read_text(), name, path.stem == "__init__")]
    assert not wrong, "\n".join(wrong)


def test_imports_inside_a_package_point_down() -> None:
    wrong = [
        w for path, name in modules() for w in upward_arrows_inside(path.read_text(), name, path.stem == "__init__")
    ]
    assert not wrong, "\n".join(wrong)
    assert upward_arrows_inside("from dcompile.codegen.emit import target", "dcompile.codegen.lower.rules.views")
    assert upward_arrows_inside("from dcompile.capture.entry import Entry", "dcompile.capture.services")
    assert not upward_arrows_inside("from dcompile.codegen.nest import loop_nest", "dcompile.codegen.emit.target")


def adapter_checks(source: str, module: str) -> list[str]:
    """Places that ask which kind of adapter they have, outside the package that knows."""
    return [
        f"{module}:{getattr(node, 'lineno', 0)} asks for an adapter's kind; adapters/gradient_sync.py has strategies"
        for node in nodes_of(source)
        if _asks_for_adapter(node)
    ]


def _asks_for_adapter(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, kinds]):
            asked = [kinds]
        case ast.Compare():
            sides = [path_of(side) for side in (node.left, *node.comparators)]
            return any(side.endswith(("adapter.name", "Adapter", "Sync")) for side in sides)
        case ast.MatchClass():
            asked = [node.cls]
        case _:
            return False
    return any(path_of(leaf).endswith(("Adapter", "Sync")) for part in asked for leaf in ast.walk(part))


def test_only_adapters_know_their_kinds() -> None:
    wrong = [
        w
        for path, name in modules()
        if not name.startswith("dcompile.capture.adapters")
        for w in adapter_checks(path.read_text(), name)
    ]
    assert not wrong, "\n".join(wrong)
    assert adapter_checks("isinstance(adapter, DdpAdapter | ShardedAdapter)", "dcompile.api")
    assert adapter_checks("assert isinstance(model.adapter, (fsdp2.Fsdp2Adapter,))", "dcompile.api")
    assert adapter_checks("found = type(adapter) is DdpAdapter", "dcompile.api")
    assert adapter_checks("if model.adapter.name == 'fsdp1': pass", "dcompile.api")
    assert adapter_checks("match sync:\n  case ShardedSync(): pass", "dcompile.api")
    assert not adapter_checks("sync = ShardedSync(Fsdp2Adapter(states)) if states == found else None", "dcompile.api")


def inherited_emitters(found: Mapping[str, tuple[str, bool]]) -> list[str]:
    """Classes of emitters that have a class of the code generator as a base: {module: (source, is a package)}."""
    inside = {name: source for name, (source, _) in found.items() if name.startswith("dcompile.codegen")}
    classes = [(name, node) for name, source in inside.items() for node in nodes_of(source)]
    made = {node.name: (name, node) for name, node in classes if isinstance(node, ast.ClassDef)}
    return [
        f"{module}:{node.lineno} {node.name} inherits from {path_of(base)}: emitters share functions and values"
        for module, node in made.values()
        for base in node.bases
        if module.startswith("dcompile.codegen.emit") and path_of(base).rpartition(".")[2] in made
    ]


def test_no_emitter_inherits_from_another() -> None:
    found = {name: (path.read_text(), path.stem == "__init__") for path, name in modules()}
    assert inherited_emitters(found) == []
    chain = "class Printer: pass\nclass Vectors(Printer): pass"
    assert len(inherited_emitters({"dcompile.codegen.emit.cpp.printer": (chain, False)})) == 1


def private_overrides(found: Mapping[str, tuple[str, bool]]) -> list[str]:
    """Private methods (one underscore) that a class overrides of a class in another file: a hook has a public name."""
    classes: dict[str, ast.ClassDef] = {}
    names: dict[str, dict[str, str]] = {}
    for module, (source, is_package) in found.items():
        inside = {node.name: node for node in nodes_of(source) if isinstance(node, ast.ClassDef)}
        classes |= {f"{module}.{name}": node for name, node in inside.items()}
        nodes = nodes_of(source)
        aliases = [alias for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names]
        known = {
            alias.asname or dotted.rpartition(".")[2]: dotted
            for alias, (_, dotted) in zip(aliases, imports(nodes, module, is_package), strict=True)
        }
        names[module] = {**known, **{name: f"{module}.{name}" for name in inside}}
    wrong = []
    for dotted, node in classes.items():
        mine = _private_methods(node)
        for base in _bases(dotted, classes, names):
            hit = mine & _private_methods(classes[base])
            if hit and base.rpartition(".")[0] != dotted.rpartition(".")[0]:
                wrong.append(f"{dotted} overrides {sorted(hit)} of {base}: make a public hook, or give a function")
    return wrong


def _bases(dotted: str, classes: Mapping[str, ast.ClassDef], names: Mapping[str, Mapping[str, str]]) -> set[str]:
    """Classes of dcompile from which a class inherits, at any depth."""
    reached: set[str] = set()
    waiting = [dotted]
    while waiting:
        one = waiting.pop()
        known = names[one.rpartition(".")[0]]
        for base in classes[one].bases:
            head, _, rest = path_of(base.value if isinstance(base, ast.Subscript) else base).partition(".")
            named = ".".join(filter(None, (known.get(head, head), rest)))
            if named in classes and named not in reached:
                reached.add(named)
                waiting.append(named)
    return reached


def _private_methods(node: ast.ClassDef) -> set[str]:
    """Methods of a class with one underscore, also those that are assigned."""
    found = {item.name for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)}
    found |= {
        target.id
        for item in node.body
        if isinstance(item, ast.Assign) and isinstance(item.value, ast.Name | ast.Attribute | ast.Lambda)
        for target in item.targets
        if isinstance(target, ast.Name)
    }
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def test_no_private_method_is_overridden_in_another_file() -> None:
    found = {name: (path.read_text(), path.stem == "__init__") for path, name in modules()}
    assert private_overrides(found) == []


@pytest.mark.parametrize(
    "source",
    [
        "from dcompile.api import Base\nclass Mine(Base):\n  def _hook(self): pass",
        "from dcompile import api\nclass Mine(api.Base):\n  _hook = print",
        "from dcompile.api import Base\nclass Between(Base): pass\nclass Mine(Between):\n  async def _hook(self): pass",
        "from dcompile.api import Base as Other\nclass Mine(Other):\n  def _hook(self): pass",
        "from dcompile.api import Base\nclass Mine(Base[int]):\n  _hook = lambda self: 1",
    ],
)
def test_finds_an_overridden_private_method(source: str) -> None:
    base = "class Base:\n  def _hook(self): pass\n  def hook(self): pass\n  def __len__(self): pass"
    assert len(private_overrides({"dcompile.api": (base, False), "dcompile.doctor": (source, False)})) == 1


def test_accepts_an_override_of_a_public_method_and_one_in_the_same_file() -> None:
    base = "class Base:\n  def _hook(self): pass\n  def hook(self): pass\nclass Near(Base):\n  def _hook(self): pass"
    source = "from dcompile.api import Base\nclass Mine(Base):\n  def hook(self): pass\n  def _other(self): pass"
    assert not private_overrides({"dcompile.api": (base, False), "dcompile.doctor": (source, False)})


def replaced_methods(source: str, module: str) -> list[str]:
    """Assignments to methods of an object or a class, by which mypy is silenced."""
    return [
        f"{module}:{line} assigns to a method: give the class a field or a hook, or make a subclass"
        for line, text in enumerate(source.splitlines(), 1)
        if "method-assign" in text.partition("# type: ignore")[2]
    ]


def test_no_method_is_assigned() -> None:
    wrong = [w for path, name in modules() for w in replaced_methods(path.read_text(), name)]
    assert not wrong, "\n".join(wrong)
    assert replaced_methods("model.compiling = own  # type: ignore[assignment, method-assign]", "dcompile.api")
    assert not replaced_methods("found = made()  # type: ignore[assignment]", "dcompile.api")


KNOW_DEVICES = (
    "dcompile.capture.adapters.", "dcompile.capture.memory_budget", "dcompile.capture.services",
    "dcompile.capture.warm_start.",
)  # fmt: skip
"""Modules of the packages below that may compare types of devices: they are about memory and machines, not code."""


def target_checks(source: str, module: str) -> list[str]:
    """Places that ask which device something is on, where they should ask for a trait of it."""
    wrong = []
    for node in nodes_of(source):
        asked: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            asked = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and path_of(node.func).endswith(".startswith"):
            asked = list(node.args)
        elif isinstance(node, ast.MatchValue):
            asked = [node.value]
        names = {leaf.value for part in asked for leaf in ast.walk(part) if isinstance(leaf, ast.Constant)}
        if names & {"cpu", "cuda"}:
            wrong.append(f"{module}:{getattr(node, 'lineno', 0)} asks for a device: device_traits.py has what differs")
    return wrong


def target_imports(source: str, module: str) -> list[str]:
    """Imports of a single target outside `emit/`, which chooses among them."""
    targets = ("dcompile.codegen.emit.cpp", "dcompile.codegen.emit.triton")
    found = imports(nodes_of(source), module, False)
    return [
        f"{module}:{line} imports {name}: only emit/ knows targets" for line, name in found if name.startswith(targets)
    ]


def test_only_emitters_know_targets() -> None:
    """But for rows of NEST_PASSES, which plan C++ kernels."""
    stages = ("dcompile.codegen.lower", "dcompile.codegen.schedule", "dcompile.codegen.nest", "dcompile.capture")
    stages = (*stages, "dcompile.collectives", "dcompile.compiler.driver", "dcompile.pipeline")
    wrong = []
    for path, name in modules():
        if name.startswith(stages) and not name.startswith(KNOW_DEVICES):
            wrong += target_checks(path.read_text(), name)
        if not name.startswith("dcompile.codegen.emit") and name != "dcompile.pipeline":
            wrong += target_imports(path.read_text(), name)
    assert not wrong, "\n".join(wrong)
    assert target_checks('low.device not in (*DEVICES, "cpu")', "a") and target_checks('x.startswith("cuda")', "a")
    assert not target_checks('torch.empty((), device="cpu")', "a")
    assert target_imports("from dcompile.codegen.emit.triton import kernel", "dcompile.compiler.driver")


def test_no_modules_import_each_other() -> None:
    found = {name: (path.read_text(), path.stem == "__init__") for path, name in modules()}
    assert circles(found) == []
    assert circles({"a": ("import b", False), "b": ("def f(): from a import x", False), "c": ("import a", False)}) == [
        ["a", "b"]
    ]


def test_private_torch_names_are_in_compat() -> None:
    wrong = [
        w
        for path, name in modules()
        if not name.startswith("dcompile.compat")
        for w in private_torch_names(path.read_text(), name)
    ]
    assert not wrong, "\n".join(wrong)


def test_factories_name_their_device() -> None:
    wrong = [w for path, name in modules() for w in factories_without_device(path.read_text(), name)]
    assert not wrong, "\n".join(wrong)
    assert factories_without_device("x = torch.empty(3, dtype=torch.int64)", "dcompile.api")
    assert not factories_without_device("x = torch.empty(3, device=y.device), torch.empty_like(y)", "dcompile.api")


def test_every_part_has_a_level() -> None:
    present = {p.stem for p in (ROOT / "dcompile").iterdir() if p.suffix == ".py" or list(p.glob("*.py"))}
    assert present <= set(LEVEL), f"say where these lie: {sorted(present - set(LEVEL))}"


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("dcompile.ir.nodes", "import torch.fx"),
        ("dcompile.ir.nodes", "def f():\n    from dcompile.config import Config"),
        ("dcompile.config", "from dcompile import pipeline"),
        ("dcompile.capture.entry", "from dcompile.codegen.lower import lower"),
        ("dcompile.capture.entry", "from ..codegen import lower"),
        ("dcompile.runtime.program.executable", "import dcompile.codegen.emit.cpp.kernel"),
        ("dcompile.codegen.lower.table", "from dcompile.collectives import insert"),
        ("dcompile.pipeline", "from dcompile import compile"),
        ("dcompile.api", "from dcompile.integrations.accelerate import DcompilePlugin"),
    ],
)
def test_finds_an_arrow_that_points_up(module: str, source: str) -> None:
    assert upward_arrows(source, module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "dcompile.capture.entry",
            "from dcompile.collectives.contract import Request\nfrom dcompile.ir.nodes import Bucket",
        ),
        ("dcompile.capture.entry", "from dcompile.capture.adapters import ddp\nfrom .joint import trace"),
        ("dcompile.api", "from dcompile import pipeline\nfrom dcompile.errors import DcompileError\nimport torch"),
    ],
)
def test_accepts_an_arrow_that_points_down(module: str, source: str) -> None:
    assert not upward_arrows(source, module)


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "from torch._inductor import config",
        "from torch import _C",
        "import torch\ntorch._C._jit()",
        "import torch\ntorch.distributed._functional_collectives.wait_tensor",
        "import torch.distributed as dist\ndist._coalescing_manager",
        "from torch.distributed import distributed_c10d as c10d\nc10d._get_default_group()",
    ],
)
def test_finds_a_private_torch_name(source: str) -> None:
    assert private_torch_names(source, "dcompile.api")


def test_accepts_public_torch_names() -> None:
    source = "import torch\ntorch.__version__\ntorch.nn.Linear(1, 1)._parameters\nself._torch._x\nx._base"
    assert not private_torch_names(source, "dcompile.api")
