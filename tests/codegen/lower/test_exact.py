"""Memory for library calls, laid out as torch lays it out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from dcompile.codegen.lower.lower import lower
from dcompile.codegen.lower.symbolic.strides import is_distinct
from dcompile.ir.index import modulo, var
from dcompile.ir.nodes import Extern, Loop, Program, View

aten = torch.ops.aten
S = var("s0")
PADDED = S + 8 - modulo(S, 8, {})


@pytest.mark.parametrize(
    ("shape", "strides", "distinct"),
    [
        ((4, S, S), (S * PADDED, PADDED, 1), True),
        ((S, 4, S, S), (4 * S * PADDED, S * PADDED, PADDED, 1), True),
        ((S, S), (S, 2), False),
        ((S, 4), (2, 1), False),
        ((3, 4), (8, 2), True),
        ((3, 4), (2, 1), False),
    ],
)
def test_strides_that_tell_elements_apart(shape: Any, strides: Any, distinct: bool) -> None:
    assert is_distinct(shape, strides) is distinct


def attention(program: Program) -> Extern:
    (found,) = [s for s in program.steps if isinstance(s, Extern) and "attention" in s.op]
    return found


def test_what_is_repeated_is_stored_once_with_torchs_strides() -> None:
    """A bias that attention wants with rows of whole vectors, the same for all of a batch."""

    def attend(q: torch.Tensor, bias: torch.Tensor) -> Any:
        rows = aten.slice(aten.constant_pad_nd(bias, [0, 3]), -1, 0, 5)
        seen = aten.expand(rows * 2, [3, 4, 5, 5])
        return aten._scaled_dot_product_efficient_attention(q, q, q, seen, True)[0]

    with FakeTensorMode() as mode:
        gm = make_fx(attend)(torch.empty(3, 4, 5, 8, device="cuda"), torch.empty(1, 4, 5, 5, device="cuda"))
        wanted = next(node for node in gm.graph.nodes if node.target == aten.expand.default).meta["val"].stride()
    with mode:
        program = lower(gm, "graph").program
    bias = attention(program).args[3]
    assert isinstance(bias, View) and bias.shape == (3, 4, 5, 5) and bias.strides == wanted and bias.strides[0] == 0
    assert program.table[bias.buffer].shape[0] == 1


def test_a_bias_for_a_single_key_has_torchs_strides() -> None:
    """It is cut from rows of whole vectors and repeated: single elements keep the stride that attention looks at."""

    def attend(q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor) -> Any:
        rows = aten.slice(aten.constant_pad_nd(bias, [0, 7]), -1, 0, 1)
        return aten._scaled_dot_product_efficient_attention(q, k, k, aten.expand(rows, [3, 4, 1, 1]), True)[0]

    with FakeTensorMode() as mode:
        q, bias = torch.empty(3, 4, 1, 8, device="cuda"), torch.empty(3, 1, 1, 1, device="cuda")
        gm = make_fx(attend)(q, q, bias)
        wanted = next(node for node in gm.graph.nodes if node.target == aten.expand.default).meta["val"].stride()
    with mode:
        seen = attention(lower(gm, "graph").program).args[3]
    assert isinstance(seen, View) and seen.strides == wanted == (8, 0, 8, 1)


@pytest.mark.parametrize(("stride", "kept"), [(4, True), (2, False)])
def test_what_is_saved_lies_as_traced_or_the_graph_is_the_librarys(stride: int, kept: bool) -> None:
    """A backward's kernels read it with the strides of tracing. Windows that overlap cannot be stored so."""

    def windows(x: torch.Tensor) -> Any:
        return (aten.copy(aten.as_strided(x, [3, 4], [stride, 1]), aten.sin(aten.as_strided(x, [3, 4], [4, 1]))),)

    with FakeTensorMode() as mode:
        gm = make_fx(windows)(torch.empty(12))
        (result,) = gm.graph.output_node().args[0]
        result.meta["val"] = torch.empty_strided((3, 4), (stride, 1))
    with mode:
        shown, saved = lower(gm, "graph").program, lower(gm, "graph", saved_from=0).program
    assert any(isinstance(step, Loop) for step in shown.steps)
    assert any(isinstance(step, Loop) for step in saved.steps) is kept
    assert all(isinstance(step, Loop) or step.fallback for step in saved.steps)
