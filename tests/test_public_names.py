"""Names that users write: they stay. Removing one breaks somebody's script; `--update-golden` shows what is new."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pydoc

import torch

import dcompile
from dcompile.config import describe
from dcompile.explain.plan_only import explain
from dcompile.explain.receipt import Receipt, VariantReceipt
from dcompile.integrations.accelerate import DcompilePlugin
from dcompile.precompile.job import precompile


def parameters(function: object) -> list[str]:
    return [str(found.replace(annotation=found.empty)) for found in inspect.signature(function).parameters.values()]


def fields(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def test_names_of_the_package(golden):
    functions = {"compile": dcompile.compile, "precompile": precompile}
    lines = [line for name, f in functions.items() for line in ("", name, *(f"  {given}" for given in parameters(f)))]
    golden("\n".join([*dcompile.__all__, *lines]) + "\n")


def test_names_of_options_and_environment_variables(golden):
    modes = {mode: sorted(dcompile.list_mode_options(mode)) for mode in ("default", "reduce-overhead", "max-autotune")}
    lines = [f"{option} {variable}" for option, variable, *_ in describe()]
    golden("\n".join([*lines, "", *(f"{mode}: {', '.join(options)}" for mode, options in modes.items())]) + "\n")


def test_names_of_the_receipt(golden):
    golden("\n".join([*fields(Receipt), "", *fields(VariantReceipt)]) + "\n")


def test_names_of_integrations(golden):
    golden("\n".join(fields(DcompilePlugin)) + "\n")


def test_dir_lists_public_names_and_each_is_there():
    assert dir(dcompile) == sorted([*dcompile.__all__, "__version__"])
    assert all(getattr(dcompile, name) is not None for name in dir(dcompile))
    assert issubclass(dcompile.PlanMismatchError, dcompile.DcompileError)


def test_packages_that_are_functions_have_their_signature_and_text():
    for package, function in ((dcompile.explain, explain), (dcompile.precompile, precompile)):
        assert inspect.signature(package) == inspect.signature(function)
        text = pydoc.render_doc(package, renderer=pydoc.plaintext)
        assert f"{function.__name__}(" in text and inspect.getdoc(function).splitlines()[0] in text


def test_what_is_compiled_says_so_and_copies_are_not():
    module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    assert not dcompile.is_compiled(module)
    assert dcompile.is_compiled(dcompile.compile(module))
    assert not dcompile.is_compiled(copy.deepcopy(module)), "a copy is the plain module"
    assert dcompile.is_compiled(torch.compile(torch.nn.Linear(2, 2), backend="dcompile"))
    assert dcompile.is_compiled(dcompile.compile(torch.sin))
    assert not dcompile.is_compiled(torch.compile(torch.nn.Linear(2, 2), backend="eager"))
    assert not dcompile.is_compiled(torch.sin) and not dcompile.is_compiled(3)
