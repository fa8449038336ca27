"""What becomes of small graphs, as text: the program from lowering, the scheduled one, and every kernel.

A change of lowering, schedule or emitter shows here as a diff to be read. Rewrite the texts with
`pytest tests/codegen/test_golden.py --update-golden`, and review what `git diff tests/golden` says.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from dcompile.codegen.lower.decompositions.table import table
from dcompile.codegen.lower.lower import lower
from dcompile.collectives.contract import Request
from dcompile.config import Config
from dcompile.ir.nodes import Loop
from dcompile.ir.text import show
from dcompile.pipeline import loop_passes
from tests.codegen.emit import cpp_kernel

R, C = 16, 48
X, W, S, G = (R, C), (C,), (R, 1), (R, C)


def pointwise(x, g):
    return torch.sigmoid(x) * g + 1


def reduction(x):
    return x.amax(1), (x * x).sum(1, keepdim=True)


def rms_norm(x, w):
    scale = torch.rsqrt((x * x).mean(1, keepdim=True) + 1e-6)
    return x * scale * w, scale


def rms_norm_backward(g, x, w, scale):
    """Gradients of rms_norm to x and w."""
    normal, gw = x * scale, g * w
    return scale * (gw - normal * (gw * normal).mean(1, keepdim=True)), (g * normal).sum(0)


def softmax(x):
    return torch.ops.aten._softmax(x, 1, False)


def cross_entropy(logits, target):
    picked = torch.ops.aten._log_softmax(logits, 1, False).gather(1, target[:, None])
    return -picked.mean()


def transpose(x):
    return x.t().contiguous()


def as_stored(x):
    """bfloat16 is rounded at every op."""
    return x * 2 + x


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "pointwise": (pointwise, (X, G)),
    "reduction": (reduction, (X,)),
    "rms_norm": (rms_norm, (X, W)),
    "rms_norm_backward": (rms_norm_backward, (G, X, W, S)),
    "softmax": (softmax, (X,)),
    "cross_entropy": (cross_entropy, (X, torch.zeros(R, dtype=torch.int64))),
    "transpose": (transpose, (X,)),
    "bfloat16": (as_stored, (torch.zeros(X, dtype=torch.bfloat16),)),
}


def compiled(function: Callable[..., Any], shapes: tuple[Any, ...]) -> str:
    """The three texts under headings; names that are hashes become numbers."""
    inputs = [torch.zeros(shape) if isinstance(shape, tuple) else shape for shape in shapes]
    graph = make_fx(function, decomposition_table=table(), tracing_mode="fake")(*inputs)
    graph.graph.eliminate_dead_code()
    program = lower(graph, function.__name__).program
    lowered = show(program)
    for row in (row for row in loop_passes() if row.when(Config())):
        program = row.run(program, *row.given(Request(program.name, "inference")))
    texts = []
    for number, kernel in enumerate(cpp_kernel.emit_all(program).sources):
        texts.append(kernel.text.replace(kernel.name, f"kernel{number}").strip())
    assert len(texts) == sum(isinstance(step, Loop) for step in program.steps)
    sections = {"lowered": lowered, "scheduled": show(program), "kernels": "\n\n".join(texts)}
    text = "\n\n".join(f"--- {name} ---\n{section}" for name, section in sections.items())
    return re.sub(r" \(\w+\.py:\d+\)", "", text) + "\n"


@pytest.mark.parametrize("name", CASES)
def test_text(name, golden):
    golden(compiled(*CASES[name]))
