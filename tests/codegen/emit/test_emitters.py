"""Every target spells every op: whoever adds an op or a target is told what is missing. No emitter inherits."""

import importlib
import pkgutil

import pytest

from dcompile.codegen import emit
from dcompile.codegen.emit.select_target import TARGETS
from dcompile.device_traits import DEVICE_TRAITS
from dcompile.ir.ops import OPS

MODULES = [importlib.import_module(found.name) for found in pkgutil.walk_packages(emit.__path__, f"{emit.__name__}.")]


def test_every_device_that_says_so_has_a_target():
    assert TARGETS.keys() == {name for name, row in DEVICE_TRAITS.items() if row.is_compiled}
    assert {target.language for target in TARGETS.values()} == {"c++", "triton"}
    assert all(target.traits is DEVICE_TRAITS[name] for name, target in TARGETS.items())


@pytest.mark.parametrize("device", TARGETS)
def test_every_op_has_a_spelling_with_its_arguments(device):
    spelling = TARGETS[device].spelling
    assert spelling.keys() == OPS.keys()
    for name, op in OPS.items():
        words = [f"<{number}>" for number in range(op.arity)]
        text = spelling[name].format(*words, dtype="DTYPE")
        assert all(word in text for word in words), f"{name}: {text}"


def inheriting(modules):
    """Classes of the package that inherit from another of its classes. Protocols, which hold no state, do not count."""
    classes = {
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__.startswith(emit.__name__)
    }
    real = {found for found in classes if not getattr(found, "_is_protocol", False)}
    return sorted(f"{a.__module__}.{a.__qualname__}" for a in real if any(base in real for base in a.__mro__[1:]))


def test_no_emitter_inherits_from_another():
    """Plans are values, and what prints them holds what it needs: no object has state of seven classes."""
    assert inheriting(MODULES) == []


def test_an_emitter_that_inherits_is_found():
    class Printer:
        __module__ = f"{emit.__name__}.made_up"

    class LoopPrinter(Printer):
        __module__ = f"{emit.__name__}.made_up"

    made = type("Module", (), {"Printer": Printer, "LoopPrinter": LoopPrinter})
    assert [name.rpartition(".")[2] for name in inheriting([made])] == ["LoopPrinter"]
