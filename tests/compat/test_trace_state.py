"""Names of what a captured graph calls, for the key under which its trace is kept."""

from __future__ import annotations

import subprocess
import types

import pytest
import torch

from dcompile.compat import trace_state
from tests.nursery import python


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


PRECISIONS = """
import os
import traceback

import torch

import dcompile
from dcompile.compat import trace_state

VALUES = {
    "fp32_precision": ("ieee", "tf32", "bf16"),
    "cuda.matmul.fp32_precision": ("ieee", "tf32"),
    "cudnn.fp32_precision": ("ieee", "tf32"),
    "cudnn.conv.fp32_precision": ("ieee", "none"),
    "cudnn.rnn.fp32_precision": ("ieee", "none"),
    "mkldnn.fp32_precision": ("ieee", "tf32", "bf16"),
    "mkldnn.matmul.fp32_precision": ("ieee", "tf32", "bf16"),
    "mkldnn.conv.fp32_precision": ("ieee", "tf32", "bf16"),
    "mkldnn.rnn.fp32_precision": ("ieee", "tf32", "bf16"),
    "cuda.matmul.allow_fp16_reduced_precision_reduction": (False,),
    "cuda.matmul.allow_bf16_reduced_precision_reduction": (False,),
    "cuda.matmul.allow_fp16_accumulation": (True,),
    "cuda.matmul.allow_tf32": (True,),
    "cudnn.allow_tf32": (False,),
    "set_float32_matmul_precision": ("high", "medium"),
}

def set_to(name, value):
    if name in vars(torch):
        vars(torch)[name](value)
    else:
        exec(f"torch.backends.{name} = {value!r}")

def each(name, values):
    seen = [[*trace_state.global_state()]]
    for value in values:
        set_to(name, value)
        seen.append([*trace_state.global_state()])
    assert all(one != other for one, other in zip(seen, seen[1:])), (name, seen)

def mixed():
    for name, value in (("set_float32_matmul_precision", "highest"), ("fp32_precision", "bf16"),
                        ("cudnn.allow_tf32", False), ("cuda.matmul.fp32_precision", "tf32")):
        set_to(name, value)
    try:
        print("torch reads", torch.get_float32_matmul_precision())
    except RuntimeError:
        model, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
        torch.testing.assert_close(dcompile.compile(model, options={"receipt": False})(x), model.forward(x))
    trace_state._PRECISION = ("cuda.matmul.allow_tf32", "of another torch")
    settings = trace_state.precision_settings()
    assert settings == "cuda.matmul.allow_tf32=RuntimeError of another torch=AttributeError", settings

def in_a_fork(function, *args):
    if pid := os.fork():
        assert os.waitpid(pid, 0)[1] == 0
        return
    try:
        function(*args)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)

for item in VALUES.items():
    in_a_fork(each, *item)
in_a_fork(mixed)
"""


def test_each_precision_of_library_calls_is_in_a_traces_settings_and_none_stops_compiling():
    """torch refuses to read old names while new ones are set. Forks, since some settings cannot be taken back."""
    done = subprocess.run([python(), "-c", PRECISIONS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and not done.stdout, done.stdout + done.stderr


def test_a_trace_depends_on_the_implementation_of_flash_attention(monkeypatch):
    before = [*trace_state.global_state()]
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA4", raising=False)
    assert {*trace_state.global_state()} - {*before} == {"flash attention FA4"}
