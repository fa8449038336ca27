"""FlexAttention as steps of a program: the functions that they have, and what is left to TorchInductor."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dcompile.codegen.lower.lower import lower
from dcompile.compat.aot import traced_again
from dcompile.compat.flex import chosen_options
from dcompile.ir.attention import FLEX, flex_arguments
from dcompile.ir.nodes import CALL, Apply, Extern
from tests.codegen.emit import flex


def arguments(case: flex.Case):
    lowered, _ = case.lowered()
    return lowered.declined, [flex_arguments(step) for step in lowered.program.steps]


def test_scores_are_computed_in_float32_as_eager_math_has_them():
    declined, (forward, backward) = arguments(flex.CASES["capped with slopes"])
    assert not declined
    for function in (forward.score, backward.score, backward.joint):
        assert all(value.dtype not in ("float16", "bfloat16") for value in function.body)
        assert any(isinstance(value, Apply) and value.op == "tanh" for value in function.body)


def in_short(score, b, h, q, k):
    return torch.tanh(score.to(torch.bfloat16)).float()


def test_conversions_of_the_user_are_kept_and_those_of_gradients_are_not():
    _, (forward, backward) = arguments(flex.Case(score=in_short))
    assert any(value.dtype == "bfloat16" for value in forward.score.body)
    assert any(value.dtype == "bfloat16" for value in backward.score.body)
    assert not any(value.dtype in ("float16", "bfloat16") for value in backward.joint.body)


def test_what_a_function_makes_has_no_elements_while_it_is_traced():
    with FakeTensorMode():
        score = torch.empty(())
    graph = traced_again(lambda score: torch.where(score > 0, score, -torch.inf), [score], {})
    assert graph(torch.tensor(-2.0)) == -torch.inf and graph(torch.tensor(2.0)) == 2


def test_functions_that_do_nothing_are_known():
    _, (forward, backward) = arguments(replace(flex.CASES["no table"], mask=lambda b, h, q, k: q.new_ones(()) > 0))
    assert forward.score.is_argument("score") and backward.joint.is_argument("grad")
    _, (forward, backward) = arguments(flex.CASES["causal"])
    assert forward.mask.reads == {"q", "k"} and not forward.mask.is_true
    assert (forward.group, backward.key_block, backward.whole is not None) == (1, 32, True)


def summed(score, b, h, q, k, table):
    return score + table.sum()


def by_library(score, b, h, q, k):
    return torch.special.i0(score)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (flex.Case(dtype=torch.float32), "its inputs are float32"),
        (flex.Case(width=320, value_width=320), "heads of 320 elements"),
        (flex.Case(queries=96, keys=96, block=24), r"blocks of \(24, 24\)"),
        (flex.Case(score=summed, reads=((4,),)), "its function combines elements of a tensor"),
        (flex.Case(only_logarithm=True), "its result has no gradient"),
        (flex.Case(score=by_library), "its function calls aten.i0.default"),
    ],
)
def test_what_is_left_has_a_reason(case, reason):
    lowered, _ = case.lowered()
    assert len(lowered.declined) >= 1
    assert all(line.startswith("flex_attention") for line in lowered.declined)
    assert re.search(reason, lowered.declined[0])
    kernels = [FLEX] if case.only_logarithm else [CALL]
    assert [step.op for step in lowered.program.steps if isinstance(step, Extern)] == [*kernels, CALL]
    written = {name for step in lowered.program.steps for name in step.writes}
    assert {*lowered.program.table} <= written | {*lowered.program.inputs}


def test_a_tensor_of_the_cpu_is_not_read_by_kernels():
    graph, _ = flex.Case(score=flex.capped, reads=((2,),)).graph()
    given = graph.graph.find_nodes(op="placeholder")[5]
    with given.meta["val"].fake_mode:
        given.meta["val"] = torch.empty(2)
    assert "a tensor of the CPU" in lower(graph, "flex").declined[0]


def test_a_user_who_asks_for_a_kernel_gets_it():
    assert chosen_options({"BACKEND": "AUTO", "PRESCALE_QK": False, "WRITE_DQ": True}) == ()
    assert chosen_options({"BACKEND": "FLASH"}) == ("BACKEND",)
    assert chosen_options({"BLOCK_M": 64, "PRESCALE_QK": True, "OUTPUT_MAX": True}) == ("BLOCK_M", "PRESCALE_QK")
    case = flex.CASES["causal"]
    before = dict(flex.OPTIONS)
    flex.OPTIONS["BLOCK_M"] = 64
    try:
        lowered, _ = case.lowered()
    finally:
        flex.OPTIONS.clear()
        flex.OPTIONS.update(before)
    assert "asks for options" in lowered.declined[0]
