"""Names of what a captured graph calls, for the key under which its trace is kept."""

from __future__ import annotations

import types

import pytest
import torch

from dcompile.compat import trace_state


def of_torch(function):
    """Let a function look like torch's own, as those that its decorators make."""
    code = function.__code__.replace(co_filename=torch.__file__)
    found = types.FunctionType(code, function.__globals__, function.__name__, closure=function.__closure__)
    found.__module__ = "torch.somewhere"
    return found


def test_a_function_that_its_closure_holds_is_entered_once():
    """As `torch._sym_sqrt` of torch 2.11."""

    def call():
        return held

    held = call = of_torch(call)
    text = trace_state.callable_text(call)
    assert text.count("call") == 2 and text.startswith("torch.somewhere")


def test_a_closure_may_hold_a_name_without_a_value():
    def call():
        return later

    text = trace_state.callable_text(of_torch(call))
    later = 1
    assert text.endswith("unset") and later


def test_what_a_closure_holds_tells_functions_apart():
    def made(held):
        return of_torch(lambda: held)

    assert trace_state.callable_text(made(1)) != trace_state.callable_text(made(2))
    with pytest.raises(trace_state.NotKeepable):
        trace_state.callable_text(made(object()))
