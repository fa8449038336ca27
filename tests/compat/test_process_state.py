"""What of a process's state is part of a trace's key."""

from __future__ import annotations

import subprocess

import torch

from dcompile.compat import process_state
from tests.nursery import python

PRECISIONS = """
import os
import traceback

import torch

import dcompile
from dcompile.compat import process_state

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
    seen = [[*process_state.global_state()]]
    for value in values:
        set_to(name, value)
        seen.append([*process_state.global_state()])
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
    process_state._PRECISION = ("cuda.matmul.allow_tf32", "of another torch")
    settings = process_state.precision_settings()
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
    before = [*process_state.global_state()]
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA4", raising=False)
    assert {*process_state.global_state()} - {*before} == {"flash attention FA4"}
