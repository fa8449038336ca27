"""dcompile.compile's arguments and errors, and what `import dcompile` costs."""

import subprocess
import sys

import pytest
import torch

import dcompile
from dcompile.compat import check_torch
from dcompile.errors import NotCompiledError, UnsupportedTorchError


def test_mode_and_options_together_raise_as_in_torch():
    with pytest.raises(RuntimeError) as theirs:
        torch.compile(torch.nn.Linear(2, 2), mode="default", options={"a": 1})
    with pytest.raises(RuntimeError) as ours:
        dcompile.compile(torch.nn.Linear(2, 2), mode="default", options={"kernels": "aten"})
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"options": {"colour": 1}}, ["colour", "kernels", "distributed"]),
        ({"options": {"kernels": "fast"}}, ["kernels", "auto", "aten"]),
        ({"options": {"verify": 3}}, ["verify", "bool"]),
        ({"mode": "fastest"}, ["fastest", "default", "reduce-overhead"]),
    ],
)
def test_bad_settings_name_the_valid_ones_at_the_call(arguments, names):
    with pytest.raises(ValueError) as error:
        dcompile.compile(torch.nn.Linear(2, 2), **arguments)
    assert all(name in str(error.value) for name in names)


def test_bad_settings_raise_from_a_decorator_at_once():
    with pytest.raises(ValueError, match="colour"):
        dcompile.compile(options={"colour": 1})


def test_disable_returns_the_argument():
    module = torch.nn.Linear(2, 2)
    assert dcompile.compile(module, disable=True) is module and module._compiled_call_impl is None

    def function():
        pass

    assert dcompile.compile(function, disable=True) is function
    assert dcompile.compile(disable=True)(function) is function


@pytest.mark.parametrize("thing", [3, "model", [torch.nn.Linear(2, 2)]])
def test_what_cannot_be_called_cannot_be_compiled(thing):
    with pytest.raises(TypeError, match=type(thing).__name__):
        dcompile.compile(thing)


def test_receipt_before_the_first_step():
    module = dcompile.compile(torch.nn.Linear(2, 2))
    with pytest.raises(NotCompiledError, match="no compiled step has run yet"):
        dcompile.receipt(module)


@pytest.mark.parametrize("thing", [torch.nn.Linear(2, 2), print, 3])
def test_receipt_of_what_was_never_compiled(thing):
    with pytest.raises(NotCompiledError, match="was not compiled by dcompile"):
        dcompile.receipt(thing)


def test_lists():
    assert set(dcompile.list_mode_options()) == {
        "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs",
    }  # fmt: skip
    assert dcompile.list_mode_options("default") == {}
    assert {"mode", "kernels", "distributed"} <= set(dcompile.list_options())
    with pytest.raises(ValueError, match="valid modes"):
        dcompile.list_mode_options("fastest")


@pytest.mark.parametrize("version", ["2.11.0", "2.13.1+cpu", "2.15.0a0+git123"])
def test_supported_torch(version):
    check_torch(version)


@pytest.mark.parametrize("version", ["2.10.1", "2.16.0", "1.13.0", "3.0", "unknown"])
def test_unsupported_torch_names_version_and_range(version):
    with pytest.raises(UnsupportedTorchError) as error:
        check_torch(version)
    assert version in str(error.value) and ">=2.11,<2.16" in str(error.value)


def test_the_package_alone_does_not_load_torch():
    code = "import dcompile, dcompile.ir.nodes, sys; assert 'torch' not in sys.modules; dcompile.Config"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
