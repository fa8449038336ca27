"""Names that users write: they stay. Removing one breaks somebody's script; `--update-golden` shows what is new."""

from __future__ import annotations

import dataclasses
import inspect

import dcompile
from dcompile.config import describe
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
