"""Kernels are named by what they compute; equal texts have equal names, other texts others."""

from dcompile.codegen.emit.target import describe_loop, kernel_name
from dcompile.ir.index import var
from dcompile.ir.nodes import Apply, Const, Load, Loop, Reduce, Store

AT = var("j0") + var("i0") * 8


def loop(*body, stores=None):
    return Loop("any", (4,), (8,), body, stores or (Store("y", AT, len(body) - 1),))


def test_a_softmax_says_so():
    body = (
        Load("x", AT, "float32"), Reduce("max", 0, "float32"), Apply("sub", (0, 1), "float32"),
        Apply("exp", (2,), "float32"), Reduce("sum", 3, "float32"), Apply("div", (3, 4), "float32"),
    )  # fmt: skip
    assert describe_loop(loop(*body)) == "max_exp_sum_div"


def test_a_loop_that_computes_nothing_is_a_copy():
    body = (Load("x", AT, "bfloat16"), Apply("cast", (0,), "float32"))
    assert describe_loop(loop(*body)) == "copy"


def test_what_says_most_is_kept():
    ops = ("add", "mul", "sub", "neg", "tanh", "exp")
    body = [Load("x", AT, "float32"), Const(2.0, "float32")]
    for op in ops:
        body.append(Apply(op, (len(body) - 1,) if op in ("neg", "tanh", "exp") else (len(body) - 1, 1), "float32"))
    words = describe_loop(loop(*body)).split("_")
    assert len(words) == 4 and {"tanh", "exp"} <= set(words)


def test_a_column_sum_is_named_by_its_store():
    body = (Load("x", AT, "float32"),)
    assert describe_loop(loop(*body, stores=(Store("y", var("j0"), 0, "sum"),))) == "sum"


def test_a_name_is_a_word_with_the_digest():
    assert kernel_name("max_exp", "0123456789abcdef" * 4) == "fused_max_exp_0123456789abcdef"
